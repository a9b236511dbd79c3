"""The adapter registry: takes uploads in and adapters out, files and rows together."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from anyio.to_thread import run_sync
from sqlalchemy import exists, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from manylora.engine.client import EngineClient
from manylora.engine.errors import EngineUnavailableError
from manylora.platform.adapter_check import AdapterChecker, CheckResult
from manylora.platform.adapters import (
    LIVE,
    AdapterView,
    Upload,
    add_alias,
    find_adapter_named,
    is_name,
    move_alias,
)
from manylora.platform.db import Database
from manylora.platform.errors import AdapterRefusedError, ConflictError, InvalidInputError
from manylora.platform.ids import new_id, now_us
from manylora.platform.models import Adapter, AdapterVersion, BaseModel
from manylora.platform.storage import AdapterStore, UploadedFile, write_files


@dataclass(frozen=True, slots=True)
class AdapterRegistry:
    """Takes uploads in and adapters out: the one writer of store and adapter tables."""

    db: Database
    engine: EngineClient
    store: AdapterStore
    check: AdapterChecker
    base_model: BaseModel
    max_upload_bytes: int
    # Files and rows change together: publish with insert, delete with unlink.
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def upload(
        self, tenant_id: str, name: str, files: Sequence[UploadedFile], *, promote: bool = False
    ) -> Upload:
        """Check an adapter and keep it as the next version of its name.

        The first version becomes `live`; later ones only with `promote`.

        Raises:
            InvalidInputError: the name or a file name cannot be used.
            TooLargeError, StorageFullError
            AdapterRefusedError: with every reason.
        """
        self.check_name(name)
        staged = await run_sync(self.store.new_staging)
        try:
            await write_files(staged, list(files), max_bytes=self.max_upload_bytes)
            result = await self.check(staged)
            if not result.accepted or result.digest is None:
                raise AdapterRefusedError(list(result.reasons))
            async with self._lock:
                size = await run_sync(self.store.publish, staged, result.digest)
                return await run_sync(self._keep, tenant_id, name, result, size, promote)
        finally:
            await run_sync(self.store.discard, staged)

    async def delete(self, view: AdapterView) -> None:
        """Retire an adapter; its rows stay for usage, its files go unless others share them."""
        async with self._lock:
            unused = await run_sync(self._retire, view)
            for digest in unused:
                await run_sync(self.store.delete, digest)
        for digest in unused:
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
        self, tenant_id: str, name: str, result: CheckResult, size: int, promote: bool
    ) -> Upload:
        try:
            with self.db.write() as session:
                return self._add_version(session, tenant_id, name, result, size, promote)
        except IntegrityError as error:  # another process added the same at this moment
            raise ConflictError("the adapter is being changed; try again", param="name") from error

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

    def _retire(self, view: AdapterView) -> list[str]:
        """Mark it deleted; the digests that no adapter uses any more."""
        with self.db.write() as session:
            session.execute(
                update(Adapter).where(Adapter.id == view.adapter.id).values(deleted_at=now_us())
            )
            return [v.digest for v in view.versions if not _is_used(session, v.digest)]


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
