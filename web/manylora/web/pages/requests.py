"""`/admin/requests`: the newest requests, and the life of each as a waterfall."""

from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import Response

from manylora.platform.api.auth import services_of
from manylora.platform.errors import NotFoundError
from manylora.platform.life import STATUSES
from manylora.platform.lives import Sight, is_request_id
from manylora.web.page_route import PageRoute
from manylora.web.templating import render
from manylora.web.waterfall import stage_rows, wait_rows

router = APIRouter(route_class=PageRoute)

SHOWN_ROWS = 100


@router.get("/admin/requests")
def requests(request: Request) -> Response:
    asked = request.query_params
    status = asked.get("status") if asked.get("status") in STATUSES else None
    before = asked.get("page", "") if is_request_id(asked.get("page", "")) else None
    page = services_of(request).lives.page(Sight(), status=status, limit=SHOWN_ROWS, before=before)
    older = {"page": page.next_page} | ({"status": status} if status else {})
    values = {
        "lives": page.lives,
        "status": status,
        "statuses": STATUSES,
        "older": f"?{urlencode(older)}" if page.next_page else None,
    }
    return render(request, "requests.html", values)


@router.get("/admin/requests/{request_id}")
def life(request: Request, request_id: str) -> Response:
    lives = services_of(request).lives
    found = lives.find(request_id, Sight())
    if found is None:
        raise NotFoundError(
            f"There is no such request, or it is older than the {lives.kept:,} that are kept."
        )
    values = {"life": found, "stages": stage_rows(found), "waits": list(wait_rows(found))}
    return render(request, "request.html", values)
