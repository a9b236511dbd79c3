"""Sums and counts for the pages, over the platform's tables."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from manylora.platform.ids import now_us
from manylora.platform.models import Adapter, AdapterVersion, ApiKey, Tenant, UsageRecord
from manylora.platform.usage import rows_of

HOUR_US = 3_600_000_000
HOURS = 24


@dataclass(frozen=True, slots=True)
class Counts:
    """How many there are of each, deleted and revoked ones left out."""

    tenants: int
    adapters: int
    keys: int


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """What one tenant has and has used."""

    adapters: int
    keys: int
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over usage rows; tokens as in the API's `usage` blocks."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Hour:
    """The tokens of one hour, named by its beginning in UTC."""

    label: str
    tokens: int


def counts(session: Session) -> Counts:
    def count(table: type[Tenant | Adapter | ApiKey], *where: ColumnElement[bool]) -> int:
        return session.scalar(select(func.count()).select_from(table).where(*where)) or 0

    return Counts(
        tenants=count(Tenant),
        adapters=count(Adapter, Adapter.deleted_at.is_(None)),
        keys=count(ApiKey, ApiKey.revoked_at.is_(None)),
    )


def by_tenant(session: Session) -> Mapping[str, TenantFigures]:
    """The figures of every tenant by its id, in four statements."""

    def grouped(column: InstrumentedAttribute[str], *where: ColumnElement[bool]) -> dict[str, int]:
        query = select(column, func.count()).where(*where).group_by(column)
        return dict(session.execute(query).all())

    adapters = grouped(Adapter.tenant_id, Adapter.deleted_at.is_(None))
    keys = grouped(ApiKey.tenant_id, ApiKey.revoked_at.is_(None))
    tokens = func.sum(UsageRecord.prompt_tokens + UsageRecord.completion_tokens)
    query = select(UsageRecord.tenant_id, func.count(), tokens).group_by(UsageRecord.tenant_id)
    used = {
        tenant_id: (requests, int(sum_)) for tenant_id, requests, sum_ in session.execute(query)
    }
    return {
        tenant_id: TenantFigures(
            adapters.get(tenant_id, 0), keys.get(tenant_id, 0), *used.get(tenant_id, (0, 0))
        )
        for tenant_id in session.scalars(select(Tenant.id))
    }


def totals(session: Session, *, tenant_id: str | None = None, adapter: str | None = None) -> Totals:
    """Sums over all rows, or over a tenant's, or an adapter's."""
    sums = (
        func.coalesce(func.sum(column), 0)
        for column in (
            UsageRecord.prompt_tokens,
            UsageRecord.cached_tokens,
            UsageRecord.completion_tokens,
        )
    )
    query = select(func.count(), *sums).where(*rows_of(tenant_id, adapter))
    return Totals(*(int(value) for value in session.execute(query).one()))


def tokens_by_hour(
    session: Session, *, tenant_id: str | None = None, adapter: str | None = None
) -> list[Hour]:
    """The last 24 hours, the running one last."""
    hour = (UsageRecord.occurred_at // HOUR_US).label("hour")
    last = now_us() // HOUR_US
    first = last - HOURS + 1
    tokens = func.sum(UsageRecord.prompt_tokens + UsageRecord.completion_tokens)
    query = (
        select(hour, tokens)
        .where(UsageRecord.occurred_at >= first * HOUR_US, *rows_of(tenant_id, adapter))
        .group_by(hour)
    )
    found = {int(at): int(sum_) for at, sum_ in session.execute(query)}
    return [
        Hour(datetime.fromtimestamp(at * 3600, UTC).strftime("%H:00"), found.get(at, 0))
        for at in range(first, last + 1)
    ]


def names_of(session: Session, digests: Iterable[str]) -> Mapping[str, list[str]]:
    """What people call each digest: `tenant/adapter@v3`, several where tenants share weights."""
    names: dict[str, list[str]] = defaultdict(list)
    query = (
        select(AdapterVersion.digest, Tenant.slug, Adapter.name, AdapterVersion.number)
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .join(Tenant, Tenant.id == Adapter.tenant_id)
        .where(AdapterVersion.digest.in_(set(digests)), Adapter.deleted_at.is_(None))
        .order_by(Tenant.slug, Adapter.name)
    )
    for digest, slug, name, number in session.execute(query):
        names[digest].append(f"{slug}/{name}@v{number}")
    return names
