"""`/admin/adapters` and each adapter's page."""

from collections.abc import Mapping

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from manylora.platform.adapters import AdapterView, find_adapter, list_adapters, move_alias
from manylora.platform.api.auth import services_of
from manylora.platform.db import Database
from manylora.platform.errors import InvalidInputError, NotFoundError
from manylora.platform.models import AdapterVersion
from manylora.platform.usage import recent
from manylora.web.engine_view import look_at
from manylora.web.figures import tokens_by_hour, totals
from manylora.web.forms import Form, Posted
from manylora.web.notices import to_page
from manylora.web.page_route import PageRoute
from manylora.web.templating import render

router = APIRouter(route_class=PageRoute)

RECENT_REQUESTS = 10
MAX_VERSION_DIGITS = 9


@router.get("/admin/adapters")
async def list_all(request: Request) -> Response:
    services = services_of(request)
    engine = await look_at(services.engine)
    adapters = await run_in_threadpool(_all, services.db)
    return render(request, "adapters.html", {"adapters": adapters, "engine": engine})


@router.get("/admin/adapters/{adapter_id}")
async def show(request: Request, adapter_id: str) -> Response:
    """An adapter; `?version=2` shows that version instead of the live one."""
    return await adapter_page(request, adapter_id, version=request.query_params.get("version", ""))


@router.post("/admin/adapters/{adapter_id}/alias")
def point_alias(request: Request, adapter_id: str, form: Posted) -> RedirectResponse:
    """Move an alias to a version; `expected_version` refuses when it moved meanwhile."""
    with services_of(request).db.write() as session:
        view = _existing_adapter(session, adapter_id)
        move_alias(
            session,
            view,
            form.text("alias"),
            _version_number(form, "version"),
            expected=_version_number(form, "expected_version"),
        )
    return to_page(f"/admin/adapters/{view.adapter.id}", "alias-moved")


@router.post("/admin/adapters/{adapter_id}/delete")
async def delete(request: Request, adapter_id: str, form: Posted) -> Response:
    """Delete an adapter whose name was typed in."""
    view = await run_in_threadpool(read_adapter, request, adapter_id)
    if form.text("confirm") != view.adapter.name:
        form.errors["confirm"] = f"Type {view.adapter.name} to delete it."
        return await adapter_page(request, adapter_id, {"delete_form": form}, status=422)
    await services_of(request).adapters.delete(view.adapter.id)
    return to_page("/admin/adapters", "adapter-deleted")


async def adapter_page(
    request: Request,
    adapter_id: str,
    values: Mapping[str, object] | None = None,
    *,
    version: str = "",
    status: int = 200,
) -> Response:
    """The page of one adapter at a version, with what a form on it came to."""
    services = services_of(request)
    shown = await run_in_threadpool(_adapter_values, services.db, adapter_id, version)
    engine = await look_at(services.engine)
    defaults = {
        "engine": engine,
        "base_model": services.base_model.name,
        "url": f"{request.url.scheme}://{request.url.netloc}",
        "trial": None,
        "trial_form": Form(),
        "delete_form": Form(),
    }
    return render(request, "adapter.html", defaults | shown | dict(values or {}), status=status)


def read_adapter(request: Request, adapter_id: str) -> AdapterView:
    """The adapter of this id.

    Raises:
        NotFoundError
    """
    with services_of(request).db.read() as session:
        return _existing_adapter(session, adapter_id)


def version_of(view: AdapterView, number: str) -> AdapterVersion:
    """The version that a page's reader chose; the live one when the text is empty.

    Raises:
        NotFoundError
    """
    if not number:
        return view.live or view.versions[0]
    for version in view.versions:
        if str(version.number) == number:
            return version
    raise NotFoundError("There is no such version of this adapter.")


def _existing_adapter(session: Session, adapter_id: str) -> AdapterView:
    view = find_adapter(session, adapter_id)
    if view is None:
        raise NotFoundError("There is no such adapter.")
    return view


def _all(database: Database) -> list[AdapterView]:
    with database.read() as session:
        return list_adapters(session)


def _adapter_values(database: Database, adapter_id: str, version: str) -> dict[str, object]:
    with database.read() as session:
        view = _existing_adapter(session, adapter_id)
        tenant_id, name = view.tenant.id, view.adapter.name
        return {
            "view": view,
            "shown": version_of(view, version),
            "totals": totals(session, tenant_id=tenant_id, adapter=name),
            "hours": tokens_by_hour(session, tenant_id=tenant_id, adapter=name),
            "lines": recent(session, tenant_id=tenant_id, adapter=name, limit=RECENT_REQUESTS),
        }


def _version_number(form: Form, name: str) -> int:
    text = form.text(name)
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_VERSION_DIGITS):
        raise InvalidInputError(f"{name} must be a version number", param=name)
    return int(text)
