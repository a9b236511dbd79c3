"""`/admin/adapters/upload`: an adapter's files from the browser."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile

from manylora.platform.adapters import AdapterView, Upload
from manylora.platform.api.adapters import upload_form
from manylora.platform.api.auth import services_of
from manylora.platform.db import Database
from manylora.platform.errors import (
    AdapterRefusedError,
    InvalidInputError,
    PlatformError,
    UnsupportedMediaTypeError,
    meaning_of,
    retry_headers,
)
from manylora.platform.models import Tenant
from manylora.platform.storage import IGNORED_FILES, REQUIRED_FILES
from manylora.platform.tenants import find_tenant, list_tenants
from manylora.web.forms import Form
from manylora.web.notices import to_page
from manylora.web.page_route import PageRoute
from manylora.web.pages.adapters import read_adapter
from manylora.web.templating import is_fragment, render

router = APIRouter(route_class=PageRoute)

UPLOAD_PATH = "/admin/adapters/upload"


@dataclass(frozen=True, slots=True)
class Posting:
    """What the upload form brought."""

    form: Form
    files: Sequence[UploadFile]


@router.get(UPLOAD_PATH)
async def show(request: Request) -> Response:
    """The form, filled in as far as the link that led here knew."""
    asked = request.query_params
    form = Form({name: [asked.get(name, "")] for name in ("tenant", "name")})
    return await _page(request, form)


@router.post(UPLOAD_PATH)
async def receive(request: Request) -> Response:
    """Check and keep the files; a refusal comes back with every reason."""
    form = Form()
    try:
        async with upload_form(request) as posted:
            posting = _posting(posted)
            form = posting.form
            upload = await _keep(request, posting)
    except UnsupportedMediaTypeError:
        raise
    except PlatformError as error:
        reasons = error.reasons if isinstance(error, AdapterRefusedError) else []
        # A field at fault is 422 in a form, whatever the API calls it.
        status = 422 if isinstance(error, InvalidInputError) else meaning_of(error).status
        return await _page(
            request,
            form.refused(error),
            reasons=reasons,
            status=status,
            headers=retry_headers(error),
        )
    view = await run_in_threadpool(read_adapter, request, upload.adapter.id)
    response = to_page(
        f"/admin/adapters/{upload.adapter.id}",
        _notice(upload, view),
        version=upload.version.number,
    )
    if is_fragment(request):
        return Response(status_code=204, headers={"HX-Redirect": response.headers["location"]})
    return response


def _notice(upload: Upload, view: AdapterView) -> str:
    if not upload.created:
        return "adapter-known"
    is_live = view.live is not None and view.live.id == upload.version.id
    return "adapter-uploaded" if is_live else "version-kept"


async def _keep(request: Request, posting: Posting) -> Upload:
    services = services_of(request)
    form = posting.form
    tenant = await run_in_threadpool(_tenant_of, services.db, form)
    return await services.adapters.upload(
        tenant.id,
        form.text("name").strip(),
        posting.files,
        promote=form.text("promote") == "true",
    )


def _tenant_of(database: Database, form: Form) -> Tenant:
    if not form.text("tenant"):
        raise InvalidInputError("Choose the tenant that the adapter belongs to.", param="tenant")
    with database.read() as session:
        tenant = find_tenant(session, form.text("tenant"))
    if tenant is None:
        raise InvalidInputError("There is no such tenant.", param="tenant")
    return tenant


def _posting(posted: FormData) -> Posting:
    values: dict[str, list[str]] = {}
    files = []
    for name, value in posted.multi_items():
        if isinstance(value, str):
            values.setdefault(name, []).append(value)
        elif name == "files" and value.filename:  # an empty picker sends a file without a name
            files.append(value)
    return Posting(Form(values), files)


async def _page(
    request: Request,
    form: Form,
    *,
    reasons: Sequence[str] = (),
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response:
    services = services_of(request)
    values = {
        "form": form,
        "reasons": reasons,
        "tenants": await run_in_threadpool(_tenants, services.db),
        "base_model": services.base_model.name,
        "max_bytes": services.settings.max_upload_bytes,
        "max_rank": services.settings.engine_config().max_lora_rank,
        "required": REQUIRED_FILES,
        "ignored": IGNORED_FILES,
    }
    template = "_upload_form.html" if is_fragment(request) else "upload.html"
    return render(request, template, values, status=status, headers=headers)


def _tenants(database: Database) -> list[Tenant]:
    with database.read() as session:
        return list_tenants(session)
