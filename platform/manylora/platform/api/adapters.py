"""`…/adapters`: a tenant's adapters, their versions and aliases."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field
from sqlalchemy.orm import Session
from starlette.datastructures import FormData, UploadFile

from manylora.engine.api import EngineStats
from manylora.engine.errors import EngineUnavailableError
from manylora.platform import adapters
from manylora.platform.adapters import AdapterView, Upload
from manylora.platform.api.auth import ManagedTenant, services_of
from manylora.platform.api.bodies import Body
from manylora.platform.api.body import JsonAnswer, json_body, read_form
from manylora.platform.api.times import to_seconds
from manylora.platform.db import Database
from manylora.platform.errors import InvalidInputError, NotFoundError
from manylora.platform.models import AdapterVersion
from manylora.platform.services import Services
from manylora.platform.storage import full_disk_told

router = APIRouter(prefix="/adapters")

_FORM_OVERHEAD_BYTES = 1 << 20  # boundaries, part headers and the small fields
_FIELDS = ("name", "promote", "files")


class AliasMove(Body):
    """`PUT …/adapters/{name}/aliases/{alias}`."""

    version: int = Field(ge=1)
    expected_version: int | None = Field(None, ge=1)


@router.post("")
async def upload_adapter(request: Request, tenant: ManagedTenant) -> Response:
    """Check an adapter and keep it as the next version of its name."""
    async with upload_form(request) as form:
        name, promote, files = _upload_fields(form)
        upload = await services_of(request).adapters.upload(tenant.id, name, files, promote=promote)
    return JsonAnswer(_upload_json(upload), 201 if upload.created else 200)


@asynccontextmanager
async def upload_form(request: Request) -> AsyncIterator[FormData]:
    """A form with an adapter's files, when it is this upload's turn; closed afterwards.

    Raises:
        UploadsBusyError, StorageFullError
        PlatformError: what `read_form` raises.
    """
    services = services_of(request)
    limit = services.settings.max_upload_bytes + _FORM_OVERHEAD_BYTES
    async with services.adapters.turn():
        with full_disk_told():
            form = await read_form(request, max_bytes=limit)
        try:
            yield form
        finally:
            await form.close()


@router.get("")
async def list_adapters(request: Request, tenant: ManagedTenant) -> Response:
    """The tenant's adapters, with where the engine holds each version."""
    services = services_of(request)
    views = await run_sync(_list, services.db, tenant.id)
    stats = await _stats(services)
    return JsonAnswer({"object": "list", "data": [adapter_json(view, stats) for view in views]})


@router.get("/{adapter}")
async def retrieve_adapter(request: Request, adapter: str, tenant: ManagedTenant) -> Response:
    """One adapter, by name or id."""
    services = services_of(request)
    view = await run_sync(_find, services.db, tenant.id, adapter)
    return JsonAnswer(adapter_json(view, await _stats(services)))


@router.put("/{adapter}/aliases/{alias}")
def move_alias(
    request: Request,
    adapter: str,
    alias: str,
    tenant: ManagedTenant,
    body: Annotated[AliasMove, Depends(json_body(AliasMove))],
) -> Response:
    """Point an alias at a version; 409 when it is not where the caller thought."""
    with services_of(request).db.write() as session:
        view = _existing(session, tenant.id, adapter)
        entry = adapters.move_alias(
            session, view, alias, body.version, expected=body.expected_version
        )
    answer = {"alias": entry.alias, "version": body.version, "generation": entry.generation}
    return JsonAnswer(answer)


@router.delete("/{adapter}")
async def delete_adapter(request: Request, adapter: str, tenant: ManagedTenant) -> Response:
    """Retire an adapter with all its versions."""
    services = services_of(request)
    view = await run_sync(_find, services.db, tenant.id, adapter)
    await services.adapters.delete(view.adapter.id)
    return JsonAnswer({"id": view.adapter.id, "object": "adapter.deleted", "deleted": True})


def adapter_json(view: AdapterView, stats: EngineStats | None) -> dict[str, Any]:
    """An adapter as the API shows it."""
    numbers = {version.id: version.number for version in view.versions}
    return {
        "id": view.adapter.id,
        "object": "adapter",
        "name": view.adapter.name,
        "created_at": to_seconds(view.adapter.created_at),
        "aliases": {
            entry.alias: {
                "version": numbers[entry.version_id],
                "generation": entry.generation,
            }
            for entry in view.aliases
        },
        "versions": [_version_json(version, stats) for version in view.versions],
    }


def residency(digest: str, stats: EngineStats | None) -> str:
    """Where the engine holds a version: `slot`, `host`, `disk`, or `unknown` without the engine."""
    if stats is None:
        return "unknown"
    if any(slot.digest == digest for slot in stats.slots):
        return "slot"
    return "host" if digest in stats.host_digests else "disk"


def _version_json(version: AdapterVersion, stats: EngineStats | None) -> dict[str, Any]:
    return {
        "version": version.number,
        "digest": version.digest,
        "state": version.state,
        "size_bytes": version.size_bytes,
        "created_at": to_seconds(version.created_at),
        "residency": residency(version.digest, stats),
        "report": version.report,
    }


def _upload_json(upload: Upload) -> dict[str, Any]:
    version = upload.version
    return {
        "id": upload.adapter.id,
        "name": upload.adapter.name,
        "version": version.number,
        "digest": version.digest,
        "state": version.state,
        "report": version.report | {"ignored_files": upload.ignored_files},
    }


def _upload_fields(form: FormData) -> tuple[str, bool, list[UploadFile]]:
    for field in form:
        if field not in _FIELDS:
            raise InvalidInputError(f"unknown field; these are read: {', '.join(_FIELDS)}")
    files = [file for file in form.getlist("files") if isinstance(file, UploadFile)]
    if not files or len(files) < len(form.getlist("files")):
        raise InvalidInputError("files must be files", param="files")
    return _text(form, "name"), _flag(form, "promote"), files


def _text(form: FormData, field: str) -> str:
    values = form.getlist(field)
    if len(values) != 1 or not isinstance(values[0], str):
        raise InvalidInputError(f"{field} must be given once, as text", param=field)
    return values[0]


def _flag(form: FormData, field: str) -> bool:
    if field not in form:
        return False
    value = _text(form, field)
    if value not in ("true", "false"):
        raise InvalidInputError(f"{field} must be true or false", param=field)
    return value == "true"


def _list(db: Database, tenant_id: str) -> list[AdapterView]:
    with db.read() as session:
        return adapters.list_adapters(session, tenant_id)


def _find(db: Database, tenant_id: str, adapter: str) -> AdapterView:
    with db.read() as session:
        return _existing(session, tenant_id, adapter)


def _existing(session: Session, tenant_id: str, adapter: str) -> AdapterView:
    """The tenant's adapter of this id or name.

    Raises:
        NotFoundError
    """
    view = adapters.find_adapter(session, adapter, tenant_id=tenant_id)
    view = view or adapters.find_adapter_named(session, tenant_id, adapter)
    if view is None:
        raise NotFoundError("there is no such adapter", param="adapter")
    return view


async def _stats(services: Services) -> EngineStats | None:
    try:
        return await services.engine.stats()
    except EngineUnavailableError:
        return None
