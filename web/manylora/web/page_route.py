"""The route class of all pages: an error becomes a page that says what to do."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from manylora.engine.errors import EngineError
from manylora.platform.app import DATABASE_ERRORS, database_unavailable
from manylora.platform.errors import PlatformError, envelope, meaning_of, retry_headers
from manylora.web.templating import is_fragment, render


class PageRoute(APIRoute):
    """A route whose domain errors are rendered for people; statuses as in the platform's table."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_for_people(request: Request) -> Response:
            try:
                return await handle(request)
            except (PlatformError, EngineError) as error:
                return problem(request, error)
            except DATABASE_ERRORS as error:
                return problem(request, database_unavailable(error))

        return handle_for_people


def problem(request: Request, error: Exception) -> Response:
    """The page of an error; for htmx only what it says."""
    return render(
        request,
        "_problem.html" if is_fragment(request) else "problem.html",
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
    500: "Something went wrong here",
    503: "This is not available at the moment",
}
