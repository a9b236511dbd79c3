"""Usage: one row for each answered request, written once, read by page."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Row, Select, and_, or_, select
from sqlalchemy.orm import Session

from manylora.platform.db import insert_if_new
from manylora.platform.ids import new_id, now_us
from manylora.platform.models import ApiKey, Tenant, UsageRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one request used. Times are microseconds."""

    tenant_id: str
    key_id: str
    request_id: str
    base_model: str
    route: str  # "chat" or "completions"
    status: str  # "ok", "client_abort", "server_stop" or "engine_error"
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    delivered_tokens: int
    queued_us: int
    ttft_us: int
    total_us: int
    adapter: str | None = None
    adapter_version_id: str | None = None
    adapter_version: int | None = None
    adapter_digest: str | None = None


@dataclass(frozen=True, slots=True)
class UsageLine:
    """A row with what people call its tenant and key."""

    record: UsageRecord
    tenant: str  # slug
    key: str  # name


@dataclass(frozen=True, slots=True)
class UsagePage:
    """Some rows, oldest first, and where the next page begins."""

    lines: tuple[UsageLine, ...]
    next_page: str | None


def record(session: Session, usage: Usage) -> None:
    """Add the row of one request; a second call for the same request changes nothing."""
    values = {name: getattr(usage, name) for name in Usage.__slots__}
    # Begin first: rows then happen in the order in which they can be seen, also after a long wait
    # for SQLite's write lock, and an export up to now misses none.
    session.connection()
    insert_if_new(session, UsageRecord, id=new_id("use"), occurred_at=now_us(), **values)


def recent(
    session: Session,
    *,
    tenant_id: str | None = None,
    adapter: str | None = None,
    limit: int = 50,
) -> list[UsageLine]:
    """The newest rows first, for display."""
    query = _lines().where(*rows_of(tenant_id, adapter))
    newest = query.order_by(UsageRecord.occurred_at.desc(), UsageRecord.id.desc()).limit(limit)
    return _as_lines(session.execute(newest).all())


def rows_of(tenant_id: str | None, adapter: str | None = None) -> list[ColumnElement[bool]]:
    """The condition that rows are a tenant's, and an adapter's; None: anybody's."""
    where: list[ColumnElement[bool]] = []
    if tenant_id is not None:
        where.append(UsageRecord.tenant_id == tenant_id)
    if adapter is not None:
        where.append(UsageRecord.adapter == adapter)
    return where


def page(
    session: Session,
    *,
    tenant_id: str | None = None,
    start_us: int | None = None,
    end_us: int | None = None,
    limit: int = 1000,
    after: str | None = None,
) -> UsagePage:
    """Rows of [start, end) in the order they happened, `limit` at a time.

    Args:
        after: `next_page` of the page before.
    """
    where = rows_of(tenant_id)
    if start_us is not None:
        where.append(UsageRecord.occurred_at >= start_us)
    if end_us is not None:
        where.append(UsageRecord.occurred_at < end_us)
    if after is not None:
        where.append(_beyond(after))
    order = (UsageRecord.occurred_at, UsageRecord.id)
    rows = session.execute(_lines().where(*where).order_by(*order).limit(limit + 1)).all()
    lines = tuple(_as_lines(rows[:limit]))
    more = len(rows) > limit
    last = lines[-1].record if more else None
    return UsagePage(lines, f"{last.occurred_at}-{last.id}" if last else None)


def _beyond(cursor: str) -> ColumnElement[bool]:
    occurred, _, record_id = cursor.partition("-")
    moment = int(occurred)
    return or_(
        UsageRecord.occurred_at > moment,
        and_(UsageRecord.occurred_at == moment, UsageRecord.id > record_id),
    )


def _lines() -> Select[UsageRecord, str, str]:
    return (
        select(UsageRecord, Tenant.slug, ApiKey.name)
        .join(Tenant, Tenant.id == UsageRecord.tenant_id)
        .join(ApiKey, ApiKey.id == UsageRecord.key_id)
    )


def _as_lines(rows: Sequence[Row[UsageRecord, str, str]]) -> list[UsageLine]:
    return [UsageLine(record, tenant, key) for record, tenant, key in rows]
