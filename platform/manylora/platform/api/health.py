"""Alive and ready: the two questions of a load balancer. No credential: nothing is told."""

from fastapi import APIRouter, Request, Response

from manylora.engine.errors import EngineUnavailableError
from manylora.platform.api.auth import services_of
from manylora.platform.api.body import JsonAnswer

router = APIRouter()


@router.get("/health")
async def health() -> Response:
    """The process answers."""
    return JsonAnswer({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """The engine takes requests."""
    try:
        await services_of(request).engine.info()
    except EngineUnavailableError:
        return JsonAnswer({"status": "starting"}, 503)
    return JsonAnswer({"status": "ready"})
