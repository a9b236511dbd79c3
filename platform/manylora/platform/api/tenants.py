"""`/api/v1/tenants`: for operators."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response

from manylora.platform import tenants
from manylora.platform.api.auth import ManagedTenant, operator, services_of
from manylora.platform.api.bodies import Body
from manylora.platform.api.body import JsonAnswer, json_body
from manylora.platform.api.times import to_seconds
from manylora.platform.models import Tenant

router = APIRouter(prefix="/tenants", dependencies=[Depends(operator)])


class NewTenant(Body):
    """`POST /api/v1/tenants`."""

    slug: str
    name: str | None = None


class TenantChange(Body):
    """`PATCH /api/v1/tenants/{tenant}`."""

    status: Literal["active", "suspended"]


@router.post("")
def create_tenant(
    request: Request, body: Annotated[NewTenant, Depends(json_body(NewTenant))]
) -> Response:
    """Make a tenant."""
    with services_of(request).db.write() as session:
        tenant = tenants.create_tenant(session, slug=body.slug, name=body.name)
    return JsonAnswer(tenant_json(tenant), 201)


@router.get("")
def list_tenants(request: Request) -> Response:
    """All tenants."""
    with services_of(request).db.read() as session:
        found = tenants.list_tenants(session)
    return JsonAnswer({"object": "list", "data": [tenant_json(tenant) for tenant in found]})


@router.get("/{tenant}")
def retrieve_tenant(tenant: ManagedTenant) -> Response:
    """One tenant."""
    return JsonAnswer(tenant_json(tenant))


@router.patch("/{tenant}")
def change_tenant(
    request: Request,
    tenant: ManagedTenant,
    body: Annotated[TenantChange, Depends(json_body(TenantChange))],
) -> Response:
    """Suspend a tenant, or let it work again."""
    change = tenants.suspend if body.status == "suspended" else tenants.activate
    with services_of(request).db.write() as session:
        changed = change(session, tenant)
    return JsonAnswer(tenant_json(changed))


def tenant_json(tenant: Tenant) -> dict[str, Any]:
    """A tenant as the API shows it."""
    return {
        "id": tenant.id,
        "object": "tenant",
        "slug": tenant.slug,
        "name": tenant.name,
        "status": tenant.status,
        "created_at": to_seconds(tenant.created_at),
    }
