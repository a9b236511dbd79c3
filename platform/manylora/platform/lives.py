"""Lives that are kept: those of running requests in memory, of ended ones in the database.

An answered request's life is written twice: in the transaction that commits its usage row, before
the last bytes, so that a crash costs it nothing but its end; and once more, cheaply, when the last
byte is sent. All others have no usage row and are written at their end alone.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import structlog
from anyio.to_thread import run_sync
from sqlalchemy import ColumnElement, delete, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from manylora.platform.db import Database
from manylora.platform.life import REFUSED, Life
from manylora.platform.models import RequestLife

log = structlog.get_logger(__name__)

_REQUEST_ID = re.compile(r"req_[0-9a-f]{32}")
PRUNE_EVERY = 100  # ended requests
PRUNE_BITE = 500  # most rows deleted in one transaction; more than come in meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Whose lives somebody may see; None: anybody's."""

    tenant_id: str | None = None
    key_id: str | None = None

    def covers(self, life: Life) -> bool:
        return self.tenant_id in (None, life.tenant_id) and self.key_id in (None, life.key_id)


@dataclass(frozen=True, slots=True)
class LivesPage:
    """Some lives as `Life.as_json` gives them, newest first, and where the next page begins."""

    lives: tuple[dict[str, Any], ...]
    next_page: str | None


@dataclass(slots=True, kw_only=True)
class Lives:
    """All that this server knows of its requests' lives."""

    db: Database
    kept: int  # the most rows in the database
    export: Callable[[Life], None] | None = None  # of each ended life; must not block
    _running: dict[str, Life] = field(default_factory=dict)
    _ended: int = 0

    def begin(self, life: Life) -> None:
        """From now on it can be found, until `close` also in memory."""
        self._running[life.request_id] = life

    async def close(self, life: Life, *, by_a_bug: bool = False) -> None:
        """Nothing more will happen to it: keep all of it. A failure is told to the log alone.

        Args:
            by_a_bug: it ended with an exception that nobody foresaw, unless it had ended before.
        """
        life.end("engine_error" if by_a_bug else REFUSED)  # unless it ended otherwise
        self._ended += 1
        prunes = self._ended % PRUNE_EVERY == 1
        try:
            with anyio.CancelScope(shield=True):
                await run_sync(self._finish, life, prunes)
        finally:
            self._running.pop(life.request_id, None)

    def find(self, request_id: str, sight: Sight) -> dict[str, Any] | None:
        """The life of one request, as far as it is known; None: absent, or out of sight."""
        running = self._running.get(request_id)
        if running is not None:
            return running.as_json() if sight.covers(running) else None
        if not is_request_id(request_id):
            return None
        with self.db.read() as session:
            query = select(RequestLife.body).where(RequestLife.request_id == request_id)
            return session.scalar(query.where(*_in_sight(sight)))

    def page(
        self,
        sight: Sight,
        *,
        adapter: str | None = None,
        status: str | None = None,
        limit: int = 100,
        before: str | None = None,
    ) -> LivesPage:
        """The newest lives first, `limit` at a time.

        Args:
            before: `next_page` of the page before.
        """
        found = {
            request_id: life.as_json()
            for request_id, life in list(self._running.items())
            if sight.covers(life)
            and adapter in (None, life.route.adapter)
            and status in (None, life.status)
            and (before is None or request_id < before)
        }
        where = _in_sight(sight)
        if adapter is not None:
            where.append(RequestLife.adapter == adapter)
        if status is not None:
            where.append(RequestLife.status == status)
        if before is not None:
            where.append(RequestLife.request_id < before)
        newest = select(RequestLife.request_id, RequestLife.body).where(*where)
        newest = newest.order_by(RequestLife.request_id.desc()).limit(limit + 1)
        with self.db.read() as session:
            found = dict(session.execute(newest).all()) | found
        ids = sorted(found, reverse=True)
        shown = tuple(found[request_id] for request_id in ids[:limit])
        return LivesPage(shown, ids[limit - 1] if len(ids) > limit else None)

    def _finish(self, life: Life, prunes: bool) -> None:
        try:
            with self.db.write() as session:
                keep(session, life)
            if prunes:
                prune(self.db, self.kept)
        except SQLAlchemyError as error:
            log.warning("life_not_written", error=type(error).__name__)
        if self.export is None:
            return
        try:
            self.export(life)
        except Exception:  # whatever another library raises costs the request nothing
            log.exception("life_not_exported")


def is_request_id(text: str) -> bool:
    return _REQUEST_ID.fullmatch(text) is not None


def keep(session: Session, life: Life) -> None:
    """Write what is known of a life, over what was known before."""
    session.merge(
        RequestLife(
            request_id=life.request_id,
            tenant_id=life.tenant_id,
            key_id=life.key_id,
            adapter=life.route.adapter,
            status=life.status,
            received_at=life.received_at,
            body=life.as_json(),
        )
    )


def prune(db: Database, kept: int) -> None:
    """Delete the oldest rows beyond the newest `kept`, at most `PRUNE_BITE` of them."""
    # Request ids sort by time, so that the primary key finds both ends. The search is as long as
    # `kept`, and so no part of the transaction that holds the write lock.
    newest_first = select(RequestLife.request_id).order_by(RequestLife.request_id.desc())
    with db.read() as session:
        first_beyond = session.scalar(newest_first.offset(kept).limit(1))
    if first_beyond is None:
        return
    oldest_first = select(RequestLife.request_id).order_by(RequestLife.request_id)
    beyond = oldest_first.where(RequestLife.request_id <= first_beyond).limit(PRUNE_BITE)
    with db.write() as session:
        session.execute(delete(RequestLife).where(RequestLife.request_id.in_(beyond)))


def _in_sight(sight: Sight) -> list[ColumnElement[bool]]:
    where: list[ColumnElement[bool]] = []
    if sight.tenant_id is not None:
        where.append(RequestLife.tenant_id == sight.tenant_id)
    if sight.key_id is not None:
        where.append(RequestLife.key_id == sight.key_id)
    return where
