"""`GET /v1/models`: exactly what this key may call."""

from typing import Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request, Response

from manylora.platform import routing
from manylora.platform.api.admission import route_of
from manylora.platform.api.auth import Caller, InferCaller, services_of
from manylora.platform.api.body import JsonAnswer
from manylora.platform.api.times import to_seconds
from manylora.platform.services import Services

router = APIRouter()


@router.get("/models")
async def list_models(http: Request, caller: InferCaller) -> Response:
    """The base model, each adapter and each alias; on an adapter's own URL, that adapter's."""
    name = http.path_params.get("name")
    data = await run_sync(_list, services_of(http), caller, name)
    return JsonAnswer({"object": "list", "data": data})


@router.get("/models/{model_id:path}")
async def retrieve_model(http: Request, model_id: str, caller: InferCaller) -> Response:
    """One model; versions (`name@v3`) answer here too."""
    name = http.path_params.get("name")
    route = await run_sync(route_of, services_of(http), caller, name, model_id)
    parent = route.base_model if route.adapter else None
    return JsonAnswer(_model(model_id, route.created_us, parent), headers=route.headers)


def _list(services: Services, caller: Caller, name: str | None) -> list[dict[str, Any]]:
    with services.db.read() as session:
        if name is not None:
            routing.resolve_adapter(session, caller.tenant.id, services.base_model, name)
        models = routing.callable_models(session, caller.tenant.id, services.base_model)
    return [
        _model(model.id, model.created_us, model.parent)
        for model in models
        if name is None or (model.parent and model.id.partition("@")[0] == name)
    ]


def _model(model_id: str, created_us: int, parent: str | None) -> dict[str, Any]:
    return {
        "id": model_id,
        "object": "model",
        "created": to_seconds(created_us),
        "owned_by": "manylora",
        "root": model_id.partition("@")[0],
        "parent": parent,
    }
