"""Puts the pages on the application that `manylora.platform.app` made."""

from fastapi import FastAPI, Request, Response
from fastapi.staticfiles import StaticFiles
from starlette.middleware import Middleware

from manylora.platform.app import answer_bug
from manylora.web.guard import HEADERS, Guard, is_admin
from manylora.web.page_route import problem
from manylora.web.pages import (
    adapters,
    engine,
    keys,
    overview,
    requests,
    sign_in,
    tenants,
    trial,
    unknown,
    upload,
    usage,
)
from manylora.web.templating import STATIC, STATIC_PATH
from manylora.web.throttle import SignInThrottle

PAGES = (
    sign_in,
    overview,
    engine,
    tenants,
    upload,
    adapters,
    trial,
    keys,
    requests,
    usage,
    unknown,
)


def mount(app: FastAPI) -> None:
    """Add `/admin` and its files; everything there is behind the guard."""
    app.state.sign_in_throttle = SignInThrottle()
    app.mount(STATIC_PATH, StaticFiles(directory=STATIC), name="admin-static")
    for pages in PAGES:
        app.include_router(pages.router, include_in_schema=False)
    # Innermost, so that the platform's edge gives refusals a request id too.
    app.user_middleware.append(Middleware(Guard))
    _answer_bugs_with_a_page(app)


def _answer_bugs_with_a_page(app: FastAPI) -> None:
    """Starlette answers an unforeseen error outside all middleware, the guard too."""

    async def answer(request: Request, error: Exception) -> Response:
        answered = await answer_bug(request, error)  # it writes to the log, too
        if not is_admin(request.scope):
            return answered
        page = problem(request, error)
        page.headers.update(HEADERS | {"x-request-id": answered.headers["x-request-id"]})
        return page

    app.add_exception_handler(Exception, answer)
