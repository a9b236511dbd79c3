"""Tenants: made, found, suspended."""

import re

from sqlalchemy import or_, select, update
from sqlalchemy.orm import Session

from manylora.platform.db import insert_if_new
from manylora.platform.errors import ConflictError, InvalidInputError
from manylora.platform.ids import new_id, now_us
from manylora.platform.models import Tenant

MAX_NAME_LENGTH = 200
_SLUG = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")


def create_tenant(session: Session, *, slug: str, name: str | None = None) -> Tenant:
    """Make a tenant; its name is the slug unless one is given.

    Raises:
        InvalidInputError: the slug or the name cannot be used; `param` says which.
        ConflictError: the slug is taken.
    """
    if not _SLUG.fullmatch(slug):
        raise InvalidInputError(
            "slug must be 1 to 64 lower-case letters, digits or hyphens, "
            "and begin and end with a letter or digit",
            param="slug",
        )
    name = checked_name(slug if name is None else name, param="name")
    made = new_id("ten")
    insert_if_new(
        session, Tenant, id=made, slug=slug, name=name, status="active", created_at=now_us()
    )
    tenant = session.get(Tenant, made)
    if tenant is None:
        raise ConflictError("a tenant with this slug is there already", param="slug")
    return tenant


def checked_name(name: str, *, param: str) -> str:
    """A name for people: trimmed, printable, 1 to 200 characters.

    Raises:
        InvalidInputError: it is not.
    """
    name = name.strip()
    if not 1 <= len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise InvalidInputError(
            f"{param} must be 1 to {MAX_NAME_LENGTH} printable characters", param=param
        )
    return name


def list_tenants(session: Session) -> list[Tenant]:
    """All tenants by slug."""
    return list(session.scalars(select(Tenant).order_by(Tenant.slug)))


def find_tenant(session: Session, id_or_slug: str) -> Tenant | None:
    """The tenant of this id or slug."""
    if "\0" in id_or_slug:  # PostgreSQL refuses the statement
        return None
    match = or_(Tenant.id == id_or_slug, Tenant.slug == id_or_slug)
    return session.scalars(select(Tenant).where(match)).one_or_none()


def suspend(session: Session, tenant: Tenant) -> Tenant:
    """Refuse the tenant's keys from now on; its data stays."""
    return _set_status(session, tenant, "suspended")


def activate(session: Session, tenant: Tenant) -> Tenant:
    """Let a suspended tenant work again."""
    return _set_status(session, tenant, "active")


def _set_status(session: Session, tenant: Tenant, status: str) -> Tenant:
    session.execute(update(Tenant).where(Tenant.id == tenant.id).values(status=status))
    return session.get_one(Tenant, tenant.id, populate_existing=True)
