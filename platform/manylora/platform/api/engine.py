"""`GET /api/v1/engine`: what the engine serves and what it is doing."""

from fastapi import APIRouter, Depends, Request, Response

from manylora.platform.api.auth import operator, services_of
from manylora.platform.api.body import JsonAnswer

router = APIRouter(prefix="/engine", dependencies=[Depends(operator)])


@router.get("")
async def engine(request: Request) -> Response:
    """The engine's fixed facts and a snapshot of its load."""
    client = services_of(request).engine
    return JsonAnswer({"info": await client.info(), "stats": await client.stats()})
