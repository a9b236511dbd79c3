"""Any address under `/admin` that is none of our pages; to be included last."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from manylora.platform.errors import NotFoundError
from manylora.web.page_route import PageRoute

router = APIRouter(route_class=PageRoute)


@router.api_route(
    "/admin/{path:path}", methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
)
def unknown(request: Request) -> Response:
    raise NotFoundError(f"{request.method} {request.url.path} is not a page of this server.")
