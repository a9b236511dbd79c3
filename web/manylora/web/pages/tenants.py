"""`/admin/tenants` and each tenant's page."""

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from manylora.platform.adapters import list_adapters
from manylora.platform.api.auth import services_of
from manylora.platform.errors import ConflictError, InvalidInputError, NotFoundError
from manylora.platform.keys import list_keys
from manylora.platform.models import Tenant
from manylora.platform.tenants import (
    activate,
    create_tenant,
    find_tenant,
    list_tenants,
    suspend,
)
from manylora.platform.usage import recent
from manylora.web.engine_view import look_at
from manylora.web.figures import by_tenant, tokens_by_hour, totals
from manylora.web.forms import Form, Posted
from manylora.web.notices import to_page
from manylora.web.page_route import PageRoute
from manylora.web.templating import render

router = APIRouter(route_class=PageRoute)

RECENT_REQUESTS = 20


@router.get("/admin/tenants")
def list_all(request: Request) -> Response:
    return _list(request, Form())


@router.post("/admin/tenants")
def create(request: Request, form: Posted) -> Response:
    try:
        with services_of(request).db.write() as session:
            tenant = create_tenant(
                session, slug=form.text("slug").strip(), name=form.text("name") or None
            )
    except (InvalidInputError, ConflictError) as error:
        return _list(request, form.refused(error), status=422)
    return to_page(f"/admin/tenants/{tenant.slug}", "tenant-created")


@router.get("/admin/tenants/{slug}")
async def show(request: Request, slug: str) -> Response:
    services = services_of(request)
    engine = await look_at(services.engine)
    values = await run_in_threadpool(_tenant_values, request, slug)
    return render(request, "tenant.html", values | {"engine": engine})


@router.get("/admin/tenants/{slug}/suspend")
def confirm_suspend(request: Request, slug: str) -> Response:
    """Ask first; the answer is a POST to the same address."""
    with services_of(request).db.read() as session:
        tenant = _existing(session, slug)
    values = {
        "question": f"Suspend {tenant.slug}?",
        "consequence": "All its keys are refused at once, until you activate it again. Its "
        "adapters and usage are kept.",
        "verb": "Suspend",
        "back": f"/admin/tenants/{tenant.slug}",
    }
    return render(request, "confirm.html", values)


@router.post("/admin/tenants/{slug}/suspend")
def suspend_one(request: Request, slug: str) -> RedirectResponse:
    with services_of(request).db.write() as session:
        tenant = suspend(session, _existing(session, slug))
    return to_page(f"/admin/tenants/{tenant.slug}", "tenant-suspended")


@router.post("/admin/tenants/{slug}/activate")
def activate_one(request: Request, slug: str) -> RedirectResponse:
    with services_of(request).db.write() as session:
        tenant = activate(session, _existing(session, slug))
    return to_page(f"/admin/tenants/{tenant.slug}", "tenant-activated")


def _existing(session: Session, slug: str) -> Tenant:
    """The tenant of this slug or id.

    Raises:
        NotFoundError
    """
    tenant = find_tenant(session, slug)
    if tenant is None:
        raise NotFoundError("There is no such tenant.")
    return tenant


def _list(request: Request, form: Form, *, status: int = 200) -> Response:
    with services_of(request).db.read() as session:
        figures = by_tenant(session)
        rows = [(tenant, figures[tenant.id]) for tenant in list_tenants(session)]
    return render(request, "tenants.html", {"rows": rows, "form": form}, status=status)


def _tenant_values(request: Request, slug: str) -> dict[str, object]:
    with services_of(request).db.read() as session:
        tenant = _existing(session, slug)
        return {
            "tenant": tenant,
            "adapters": list_adapters(session, tenant.id),
            "keys": [(key, tenant.slug) for key in list_keys(session, tenant.id)],
            "totals": totals(session, tenant_id=tenant.id),
            "hours": tokens_by_hour(session, tenant_id=tenant.id),
            "lines": recent(session, tenant_id=tenant.id, limit=RECENT_REQUESTS),
        }
