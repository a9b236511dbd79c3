"""Adapters as the database knows them: names over versions, and aliases that move."""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, select, update
from sqlalchemy.orm import Session

from manylora.platform.db import insert_if_new
from manylora.platform.errors import ConflictError, InvalidInputError
from manylora.platform.models import Adapter, AdapterAlias, AdapterVersion, Tenant

LIVE = "live"  # the alias that a bare adapter name means
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_VERSION_LIKE = re.compile(r"v\d+")


@dataclass(frozen=True, slots=True)
class AdapterView:
    """One adapter with all that hangs on it, versions newest first."""

    adapter: Adapter
    tenant: Tenant
    versions: tuple[AdapterVersion, ...]
    aliases: tuple[AdapterAlias, ...]

    @property
    def live(self) -> AdapterVersion | None:
        """The version that the bare name means."""
        return self.at(LIVE)

    def at(self, alias: str) -> AdapterVersion | None:
        """The version that an alias points to."""
        for entry in self.aliases:
            if entry.alias == alias:
                return next(v for v in self.versions if v.id == entry.version_id)
        return None


@dataclass(frozen=True, slots=True)
class Upload:
    """What came of an upload. `created` is false when this very version was there already."""

    adapter: Adapter
    version: AdapterVersion
    created: bool
    ignored_files: tuple[str, ...] = ()  # taken and not kept: nothing reads them


def list_adapters(session: Session, tenant_id: str | None = None) -> list[AdapterView]:
    """The adapters of one tenant, or of all, by tenant and name. Three statements, however many."""
    query = _adapters()
    if tenant_id is not None:
        query = query.where(Adapter.tenant_id == tenant_id)
    return _views(session, query)


def find_adapter(
    session: Session, adapter_id: str, *, tenant_id: str | None = None
) -> AdapterView | None:
    """The adapter of this id, within one tenant if given."""
    if "\0" in adapter_id:  # PostgreSQL refuses the statement
        return None
    query = _adapters().where(Adapter.id == adapter_id)
    if tenant_id is not None:
        query = query.where(Adapter.tenant_id == tenant_id)
    return next(iter(_views(session, query)), None)


def find_adapter_named(session: Session, tenant_id: str, name: str) -> AdapterView | None:
    """The tenant's adapter of this name."""
    if not is_name(name):
        return None
    query = _adapters().where(Adapter.tenant_id == tenant_id, Adapter.name == name)
    return next(iter(_views(session, query)), None)


def move_alias(
    session: Session, view: AdapterView, alias: str, number: int, *, expected: int | None = None
) -> AdapterAlias:
    """Point an alias at a version, by compare-and-set on its generation.

    Args:
        expected: the version number it must point to now; None: any.

    Raises:
        InvalidInputError: the alias cannot be a name, or there is no such version.
        ConflictError: it points elsewhere by now.
    """
    check_alias(alias)
    version = next((v for v in view.versions if v.number == number), None)
    if version is None or version.state != "ready":
        raise InvalidInputError("version: there is no such ready version", param="version")
    now_at = view.at(alias)
    if expected is not None and (now_at is None or now_at.number != expected):
        raise ConflictError("the alias points to another version by now", param="expected_version")
    entry = next((a for a in view.aliases if a.alias == alias), None)
    if entry is None:
        return add_alias(session, version, alias)
    return _advance(session, entry, version)


def is_name(text: str) -> bool:
    """Whether this may name an adapter or an alias."""
    return _NAME.fullmatch(text) is not None


def check_alias(alias: str) -> None:
    """Refuse what could not be told from a version.

    Raises:
        InvalidInputError
    """
    if not is_name(alias) or _VERSION_LIKE.fullmatch(alias):
        raise InvalidInputError(
            "alias must be 1 to 64 of a-z 0-9 . _ - and not look like a version", param="alias"
        )


def add_alias(session: Session, version: AdapterVersion, alias: str) -> AdapterAlias:
    """Point a new alias at a version.

    Raises:
        ConflictError: somebody else made it, pointing elsewhere.
    """
    insert_if_new(
        session,
        AdapterAlias,
        adapter_id=version.adapter_id,
        alias=alias,
        tenant_id=version.tenant_id,
        version_id=version.id,
        generation=1,
    )
    entry = session.get_one(AdapterAlias, (version.adapter_id, alias))
    if entry.version_id != version.id:
        raise ConflictError("the alias was made in this moment", param="expected_version")
    return entry


def _advance(session: Session, entry: AdapterAlias, version: AdapterVersion) -> AdapterAlias:
    moved = session.execute(
        update(AdapterAlias)
        .where(
            AdapterAlias.adapter_id == entry.adapter_id,
            AdapterAlias.alias == entry.alias,
            AdapterAlias.generation == entry.generation,
        )
        .values(version_id=version.id, generation=entry.generation + 1)
        .returning(AdapterAlias)
        .execution_options(populate_existing=True)
    ).scalar_one_or_none()
    if moved is None:
        raise ConflictError("the alias moved in this moment", param="expected_version")
    return moved


def _adapters() -> Select[Adapter, Tenant]:
    return (
        select(Adapter, Tenant)
        .join(Tenant, Tenant.id == Adapter.tenant_id)
        .where(Adapter.deleted_at.is_(None))
        .order_by(Tenant.slug, Adapter.name)
    )


def _views(session: Session, query: Select[Adapter, Tenant]) -> list[AdapterView]:
    """The adapters that a query finds.

    On PostgreSQL each statement sees what was committed before it. So aliases are read first:
    the versions that they point to are there ever after, but in an adapter that was deleted in
    this moment, which then has no versions.
    """
    rows = session.execute(query).all()
    if not rows:
        return []
    ids = query.with_only_columns(Adapter.id).order_by(None)
    aliases = _by_adapter(session, AdapterAlias, ids, AdapterAlias.alias)
    versions = _by_adapter(session, AdapterVersion, ids, AdapterVersion.number.desc())
    return [
        AdapterView(adapter, tenant, tuple(versions[adapter.id]), tuple(aliases[adapter.id]))
        for adapter, tenant in rows
        if adapter.id in versions
    ]


def _by_adapter(session: Session, table: Any, ids: Select[str], order: Any) -> dict[str, list[Any]]:
    grouped: dict[str, list[Any]] = defaultdict(list)
    for row in session.scalars(select(table).where(table.adapter_id.in_(ids)).order_by(order)):
        grouped[row.adapter_id].append(row)
    return grouped
