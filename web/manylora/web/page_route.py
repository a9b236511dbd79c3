"""The route class of all pages: an error becomes a page that says what to do."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from manylora.engine.errors import EngineError
from manylora.platform.errors import PlatformError, envelope, meaning_of, retry_headers
from manylora.web.templating import render


class PageRoute(APIRoute):
    """A route whose domain errors are rendered for people; statuses as in the platform's table."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_for_people(request: Request) -> Response:
            try:
                return await handle(request)
            except (PlatformError, EngineError) as error:
                return problem(request, error)

        return handle_for_people


def problem(request: Request, error: PlatformError | EngineError) -> Response:
    """The page of an error."""
    return render(
        request,
        "problem.html",
        {
            "title": _TITLES.get(meaning_of(error).status, "That did not work"),
            "message": envelope(error)["error"]["message"],
        },
        status=meaning_of(error).status,
        headers=retry_headers(error),
    )


_TITLES = {
    404: "There is nothing here",
    413: "That is too large",
    503: "The engine is not there",
}
