"""`/admin/keys`: made, shown once, revoked."""

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from sqlalchemy.orm import Session

from manylora.platform.adapters import list_adapters
from manylora.platform.api.auth import services_of
from manylora.platform.errors import InvalidInputError, NotFoundError, PlatformError
from manylora.platform.ids import now_us
from manylora.platform.keys import SCOPES, find_key, issue_key, list_keys, revoke_key
from manylora.platform.models import ApiKey, Tenant
from manylora.platform.tenants import find_tenant, list_tenants
from manylora.web.forms import Form, Posted
from manylora.web.notices import to_page
from manylora.web.page_route import PageRoute
from manylora.web.templating import render

router = APIRouter(route_class=PageRoute)

DAY_US = 86_400 * 1_000_000
DEFAULT_SCOPES = ("infer",)
LIFETIMES = {"": "never", "30": "in 30 days", "90": "in 90 days", "365": "in a year"}


@router.get("/admin/keys")
def list_all(request: Request) -> Response:
    tenant = request.query_params.get("tenant", "")
    return _list(request, Form({"tenant": [tenant], "scopes": ["infer"]}))


@router.post("/admin/keys")
def create(request: Request, form: Posted) -> Response:
    """Make a key and show it, this once: only its hash is kept, so it cannot be shown again."""
    services = services_of(request)
    try:
        with services.db.write() as session:
            tenant = _tenant_of(session, form)
            key, secret = issue_key(
                session,
                tenant.id,
                name=form.text("name"),
                scopes=form.chosen("scopes") or DEFAULT_SCOPES,
                expires_at=_expiry(form),
            )
            adapters = list_adapters(session, tenant.id)
    except PlatformError as error:
        return _list(request, form.refused(error), status=422)
    values = {
        "tenant": tenant,
        "key": key,
        "secret": secret,
        "model": adapters[0].adapter.name if adapters else services.base_model.name,
        "url": f"{request.url.scheme}://{request.url.netloc}",
    }
    return render(request, "key_created.html", values)


@router.get("/admin/keys/{key_id}/revoke")
def confirm_revoke(request: Request, key_id: str) -> Response:
    """Ask first; the answer is a POST to the same address."""
    with services_of(request).db.read() as session:
        key = _existing(session, key_id)
        tenant = session.get_one(Tenant, key.tenant_id)
    values = {
        "question": f"Revoke the key {key.name} of {tenant.slug}?",
        "consequence": f"{key.prefix}…{key.last4} is refused at once, wherever it is in use. "
        "It cannot be taken back.",
        "verb": "Revoke",
        "back": "/admin/keys",
    }
    return render(request, "confirm.html", values)


@router.post("/admin/keys/{key_id}/revoke")
def revoke(request: Request, key_id: str) -> RedirectResponse:
    with services_of(request).db.write() as session:
        revoke_key(session, _existing(session, key_id))
    return to_page("/admin/keys", "key-revoked")


def _existing(session: Session, key_id: str) -> ApiKey:
    key = find_key(session, key_id)
    if key is None:
        raise NotFoundError("There is no such key.")
    return key


def _tenant_of(session: Session, form: Form) -> Tenant:
    if not form.text("tenant"):
        raise InvalidInputError("Choose the tenant that the key is for.", param="tenant")
    tenant = find_tenant(session, form.text("tenant"))
    if tenant is None:
        raise InvalidInputError("There is no such tenant.", param="tenant")
    return tenant


def _expiry(form: Form) -> int | None:
    days = form.text("expires")
    if days not in LIFETIMES:
        raise InvalidInputError("Choose one of the lifetimes.", param="expires")
    return now_us() + int(days) * DAY_US if days else None


def _list(request: Request, form: Form, *, status: int = 200) -> Response:
    with services_of(request).db.read() as session:
        tenants = list_tenants(session)
        slugs = {tenant.id: tenant.slug for tenant in tenants}
        keys = [(key, slugs[key.tenant_id]) for key in list_keys(session)]
    values = {
        "keys": keys,
        "tenants": tenants,
        "scopes": SCOPES,
        "lifetimes": LIFETIMES,
        "form": form,
    }
    return render(request, "keys.html", values, status=status)
