"""The adapter registry: takes uploads in and adapters out, files and rows together."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from anyio.to_thread import run_sync
from sqlalchemy import exists, func, select, update
from sqlalchemy.orm import Session

from manylora.engine.client import EngineClient
from manylora.engine.errors import EngineUnavailableError
from manylora.platform.adapter_check import AdapterChecker, CheckResult
from manylora.platform.adapters import (
    LIVE,
    Upload,
    add_alias,
    find_adapter_named,
    is_name,
    move_alias,
)
from manylora.platform.db import Database
from manylora.platform.errors import (
    AdapterRefusedError,
    ConflictError,
    InvalidInputError,
    NotFoundError,
    UploadsBusyError,
)
from manylora.platform.ids import new_id, now_us
from manylora.platform.models import Adapter, AdapterVersion, BaseModel
from manylora.platform.storage import AdapterStore, UploadedFile, full_disk_told, write_files

MAX_UPLOADS = 4  # at once; each may spool as much as an upload may have
UPLOAD_PATIENCE_SECONDS = 10.0
_POSTGRES_LOCK = 0x6D616E796C6F7261  # "manylora"


@dataclass(frozen=True, slots=True)
class AdapterRegistry:
    """Takes uploads in and adapters out: the one writer of store and adapter tables."""

    db: Database
    engine: EngineClient
    store: AdapterStore
    check: AdapterChecker
    base_model: BaseModel
    max_upload_bytes: int
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_UPLOADS))

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn to receive an upload.

        Raises:
            UploadsBusyError: the wait was too long.
        """
        try:
            async with asyncio.timeout(UPLOAD_PATIENCE_SECONDS):
                await self._turns.acquire()
        except TimeoutError as error:
            raise UploadsBusyError(retry_after=UPLOAD_PATIENCE_SECONDS) from error
        try:
            yield
        finally:
            self._turns.release()

    async def upload(
        self, tenant_id: str, name: str, files: Sequence[UploadedFile], *, promote: bool = False
    ) -> Upload:
        """Check an adapter and keep it as the next version of its name.

        The first version becomes `live`; later ones only with `promote`.

        Raises:
            InvalidInputError: the name or a file name cannot be used.
            TooLargeError, StorageFullError, CheckFailedError
            AdapterRefusedError: with every reason.
        """
        self.check_name(name)
        with full_disk_told():
            staged = await run_sync(self.store.new_staging)
            try:
                ignored = await write_files(staged, files, max_bytes=self.max_upload_bytes)
                result = await self.check(staged)
                if not result.accepted or result.digest is None:
                    raise AdapterRefusedError(list(result.reasons))
                upload = await run_sync(self._keep, tenant_id, name, staged, result, promote)
            finally:
                await run_sync(self.store.discard, staged)
        return replace(upload, ignored_files=ignored)

    async def delete(self, adapter_id: str) -> None:
        """Retire an adapter; its rows stay for usage, its files go unless others share them.

        Raises:
            NotFoundError: it is not there, or deleted already.
        """
        digests = await run_sync(self._retire, adapter_id)
        for digest in await run_sync(self._delete_unused, digests):
            try:
                await self.engine.unload_adapter(digest)
            except EngineUnavailableError:
                return  # it comes back with nothing loaded

    def check_name(self, name: str) -> None:
        """Refuse what cannot name an adapter.

        Raises:
            InvalidInputError
        """
        if not is_name(name):
            raise InvalidInputError(
                "name must be 1 to 64 of a-z 0-9 . _ - and begin with a letter or digit",
                param="name",
            )
        if name == self.base_model.name.lower():
            raise InvalidInputError("name is that of the base model", param="name")

    def _keep(
        self, tenant_id: str, name: str, staged: Path, result: CheckResult, promote: bool
    ) -> Upload:
        assert result.digest is not None, "only accepted adapters are kept"
        with self._alone() as session:
            size = self.store.publish(staged, result.digest)
            return self._add_version(session, tenant_id, name, result, size, promote)

    def _add_version(
        self,
        session: Session,
        tenant_id: str,
        name: str,
        result: CheckResult,
        size: int,
        promote: bool,
    ) -> Upload:
        view = find_adapter_named(session, tenant_id, name)
        if view is None:
            adapter = self._add_adapter(session, tenant_id, name)
            version = _new_version(session, adapter, 1, result, size)
            add_alias(session, version, LIVE)
            return Upload(adapter, version, created=True)
        if view.adapter.base_model_id != self.base_model.id:
            raise ConflictError("name is that of an adapter of another base model", param="name")
        known = next((v for v in view.versions if v.digest == result.digest), None)
        number = 1 + max(v.number for v in view.versions)
        version = known or _new_version(session, view.adapter, number, result, size)
        if promote:
            grown = replace(view, versions=(version, *view.versions))
            move_alias(session, grown, LIVE, version.number)
        return Upload(view.adapter, version, created=known is None)

    def _add_adapter(self, session: Session, tenant_id: str, name: str) -> Adapter:
        adapter = Adapter(
            id=new_id("adp"),
            tenant_id=tenant_id,
            name=name,
            base_model_id=self.base_model.id,
            created_at=now_us(),
            deleted_at=None,
        )
        session.add(adapter)
        session.flush()
        return adapter

    def _retire(self, adapter_id: str) -> list[str]:
        """Mark it deleted; the digests that it had."""
        with self._alone() as session:
            retired = session.execute(
                update(Adapter)
                .where(Adapter.id == adapter_id, Adapter.deleted_at.is_(None))
                .values(deleted_at=now_us())
                .returning(Adapter.id)
            ).scalar_one_or_none()
            if retired is None:
                raise NotFoundError("there is no such adapter", param="adapter")
            of_it = select(AdapterVersion.digest).where(AdapterVersion.adapter_id == adapter_id)
            return list(session.scalars(of_it))

    def _delete_unused(self, digests: list[str]) -> list[str]:
        """Delete the files of those that no adapter has; which they were.

        In a transaction after the retirement's: files without rows are only in the way, rows
        without files are broken.
        """
        with self._alone() as session:
            unused = [digest for digest in digests if not _is_used(session, digest)]
            withdrawn = [self.store.withdraw(digest) for digest in unused]
        for folder in withdrawn:
            if folder is not None:
                self.store.discard(folder)
        return unused

    @contextmanager
    def _alone(self) -> Iterator[Session]:
        """A write transaction in which no process moves files but this one.

        Files and rows change together: publish with insert, delete with the look whether anybody
        uses them. SQLite has one writer at a time anyway.
        """
        with self.db.write() as session:
            connection = session.connection()  # begins; a session by itself waits for a statement
            if connection.dialect.name == "postgresql":
                connection.execute(select(func.pg_advisory_xact_lock(_POSTGRES_LOCK)))
            yield session


def _new_version(
    session: Session, adapter: Adapter, number: int, result: CheckResult, size: int
) -> AdapterVersion:
    assert result.digest is not None, "only accepted adapters are kept"
    version = AdapterVersion(
        id=new_id("ver"),
        tenant_id=adapter.tenant_id,
        adapter_id=adapter.id,
        number=number,
        digest=result.digest,
        state="ready",
        size_bytes=size,
        report=result.report,
        created_at=now_us(),
    )
    session.add(version)
    session.flush()
    return version


def _is_used(session: Session, digest: str) -> bool:
    used = exists().where(
        AdapterVersion.digest == digest,
        Adapter.id == AdapterVersion.adapter_id,
        Adapter.deleted_at.is_(None),
    )
    return bool(session.scalar(select(used)))
