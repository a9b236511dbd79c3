"""`/api/v1/requests`: the life of each request, stage by stage."""

from typing import Any

from fastapi import APIRouter, Request, Response

from manylora.platform.api.auth import LifeReader, services_of
from manylora.platform.api.body import JsonAnswer
from manylora.platform.api.query import read_limit, read_query
from manylora.platform.api.times import to_iso
from manylora.platform.errors import InvalidInputError, NotFoundError
from manylora.platform.life import STATUSES
from manylora.platform.lives import is_request_id

router = APIRouter(prefix="/requests")

MAX_LIMIT = 1000
_DEFAULT_LIMIT = 50
_PARAMETERS = ("limit", "adapter", "status", "page")


@router.get("")
def list_lives(request: Request, sight: LifeReader) -> Response:
    """Lives, newest first; `x-next-page`, if there, is the `page` of the next ones."""
    query = read_query(request, _PARAMETERS)
    page = services_of(request).lives.page(
        sight,
        adapter=query.get("adapter"),
        status=_status(query.get("status")),
        limit=read_limit(query.get("limit"), default=_DEFAULT_LIMIT, most=MAX_LIMIT),
        before=_page(query.get("page")),
    )
    headers = {"x-next-page": page.next_page} if page.next_page else {}
    answer = {"object": "list", "data": [life_json(life) for life in page.lives]}
    return JsonAnswer(answer, headers=headers)


@router.get("/{request_id}")
def life(request: Request, request_id: str, sight: LifeReader) -> Response:
    """One life; of a request that still runs, what is known so far."""
    found = services_of(request).lives.find(request_id, sight)
    if found is None:
        raise NotFoundError("there is no such request", param="request_id")
    return JsonAnswer(life_json(found))


def life_json(life: dict[str, Any]) -> dict[str, Any]:
    """A life as the API shows it."""
    return life | {"object": "request", "received_at": to_iso(life["received_at"])}


def _status(name: str | None) -> str | None:
    if name not in (None, *STATUSES):
        raise InvalidInputError(f"status must be one of {', '.join(STATUSES)}", param="status")
    return name


def _page(text: str | None) -> str | None:
    if text is not None and not is_request_id(text):
        raise InvalidInputError("page must be the x-next-page of another answer", param="page")
    return text
