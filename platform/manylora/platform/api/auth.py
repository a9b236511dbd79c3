"""Who is calling. Every route depends on one of `CREDENTIAL_CHECKS`; a test walks the routes."""

import secrets
from dataclasses import dataclass
from typing import Annotated

import structlog
from anyio.to_thread import run_sync
from fastapi import Depends, Request

from manylora.platform import keys
from manylora.platform.db import Database
from manylora.platform.errors import (
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from manylora.platform.lives import Sight
from manylora.platform.models import ApiKey, Tenant
from manylora.platform.services import Services
from manylora.platform.settings import Settings
from manylora.platform.tenants import find_tenant


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant, by one of its keys."""

    key: ApiKey
    tenant: Tenant


def services_of(request: Request) -> Services:
    """The application's services."""
    services: Services = request.app.state.services
    return services


async def infer_caller(request: Request) -> Caller:
    """The caller of `/v1`: a tenant's key with scope `infer`."""
    return await _caller_with_scope(request, "infer")


async def operator(request: Request) -> None:
    """An operator token; a tenant's key, though valid, may not."""
    token = _bearer(request)
    if not is_operator_token(services_of(request).settings, token):
        await _authenticate(request, token)
        raise PermissionDeniedError("this needs an operator token")


async def managed_tenant(request: Request) -> Tenant:
    """The tenant whose things are managed.

    Under `/tenants/{tenant}` it is the named one, by an operator or by its own key; elsewhere
    the key decides.
    """
    named = request.path_params.get("tenant")
    token = _bearer(request)
    services = services_of(request)
    if is_operator_token(services.settings, token):
        if named is None:
            raise InvalidInputError(
                "an operator names the tenant: /api/v1/tenants/{tenant}/...", param="tenant"
            )
        return await run_sync(_named_tenant, services.db, named)
    caller = await _caller_with_scope(request, "manage")
    if named not in (None, caller.tenant.id, caller.tenant.slug):
        raise NotFoundError("there is no such tenant", param="tenant")
    return caller.tenant


async def usage_scope(request: Request) -> Tenant | None:
    """Whose usage is read: one tenant's, or everybody's when an operator names none."""
    token = _bearer(request)
    by_operator = is_operator_token(services_of(request).settings, token)
    if by_operator and "tenant" not in request.path_params:
        return None
    return await managed_tenant(request)


async def life_reader(request: Request) -> Sight:
    """Whose requests are looked at: everybody's, a tenant's, or those of one key."""
    token = _bearer(request)
    if is_operator_token(services_of(request).settings, token):
        return Sight()
    caller = await _authenticate(request, token)
    by_manager = "manage" in caller.key.scopes
    return Sight(tenant_id=caller.tenant.id, key_id=None if by_manager else caller.key.id)


InferCaller = Annotated[Caller, Depends(infer_caller)]
ManagedTenant = Annotated[Tenant, Depends(managed_tenant)]
UsageScope = Annotated[Tenant | None, Depends(usage_scope)]
LifeReader = Annotated[Sight, Depends(life_reader)]
CREDENTIAL_CHECKS = (infer_caller, operator, managed_tenant, usage_scope, life_reader)


def is_operator_token(settings: Settings, token: str) -> bool:
    """Whether this is the server's operator token, in constant time."""
    if settings.admin_token is None:
        return False
    expected = settings.admin_token.get_secret_value().encode()
    return bool(expected) and secrets.compare_digest(token.encode(), expected)


async def _caller_with_scope(request: Request, scope: str) -> Caller:
    caller = await _authenticate(request, _bearer(request))
    if scope not in caller.key.scopes:
        raise PermissionDeniedError(f"this key lacks the scope {scope}")
    return caller


async def _authenticate(request: Request, token: str) -> Caller:
    caller = await run_sync(_find_caller, services_of(request).db, token)
    if caller is None:
        raise UnauthenticatedError
    structlog.contextvars.bind_contextvars(tenant=caller.tenant.slug, key=caller.key.prefix)
    return caller


def _find_caller(db: Database, token: str) -> Caller | None:
    if not keys.is_well_formed(token):
        return None
    with db.read() as session:
        found = keys.find_in_force(session, token)
    if found is None:
        return None
    if found[1].status != "active":
        raise PermissionDeniedError("this key's tenant is suspended")
    if keys.is_stale(found[0]):
        with db.write() as session:
            keys.touch_key(session, found[0])
    return Caller(*found)


def _named_tenant(db: Database, name: str) -> Tenant:
    with db.read() as session:
        tenant = find_tenant(session, name)
    if tenant is None:
        raise NotFoundError("there is no such tenant", param="tenant")
    return tenant


def _bearer(request: Request) -> str:
    """The bearer token. Two Authorization lines are refused: which one counts is ambiguous."""
    lines = request.headers.getlist("authorization")
    scheme, _, token = lines[0].partition(" ") if len(lines) == 1 else ("", "", "")
    if scheme.lower() != "bearer":
        raise UnauthenticatedError
    return token.strip(" ")
