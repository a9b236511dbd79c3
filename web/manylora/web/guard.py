"""What stands before every `/admin` page: origin check, session, security headers.

One middleware, so that a page added later is behind it without having to ask.
"""

from urllib.parse import SplitResult, quote, urlsplit

from fastapi import Request
from fastapi.responses import RedirectResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manylora.platform.app import DATABASE_ERRORS, database_unavailable
from manylora.platform.models import User
from manylora.platform.operators import signed_in_user
from manylora.web.page_route import problem
from manylora.web.sessions import LOGIN_PATH, is_local, session_token
from manylora.web.templating import STATIC_PATH, is_fragment, render

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Vary": "HX-Request",
}
STATIC_CACHE = "public, max-age=31536000, immutable"  # the URL carries the content's hash


class Guard:
    """ASGI middleware for the paths under `/admin`; all others pass untouched."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_admin(scope):
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        refusal = _refuse_cross_site(request) or await _require_operator(request)
        await (refusal or self.app)(scope, receive, _with_headers(request, send))


def _route_path(scope: Scope) -> str:
    """The path that routes are matched against: behind `--root-path`, it is the rest."""
    root, path = scope.get("root_path", ""), str(scope["path"])
    return path[len(root) :] if path.startswith(f"{root}/") else path


def is_admin(scope: Scope) -> bool:
    """Whether a request is for one of our pages, or would be if there were such a page."""
    return f"{_route_path(scope)}/".startswith("/admin/")


def _is_static(path: str) -> bool:
    return path.startswith(f"{STATIC_PATH}/")


def _refuse_cross_site(request: Request) -> Response | None:
    """Refuse an unsafe request that another site made a browser send.

    Every browser says where a POST comes from, in `Sec-Fetch-Site` or `Origin`; a request with
    neither comes from no browser and so carries no cookie that it was not given on purpose. The
    algorithm is that of Go's net/http CrossOriginProtection.
    """
    if request.method in SAFE_METHODS:
        return None
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        same = site in ("same-origin", "none")
    else:
        same = origin is None or _parts(origin).netloc == request.headers.get("host")
    if same:
        return None
    return render(
        request,
        "problem.html",
        {
            "title": "This request came from another site",
            "message": "Nothing was changed. Open the page here and send the form again.",
        },
        status=403,
    )


async def _require_operator(request: Request) -> Response | None:
    path = _route_path(request.scope)
    if path == LOGIN_PATH or _is_static(path):
        return None
    try:
        user = await run_in_threadpool(_operator_of, request)
    except DATABASE_ERRORS as error:
        return problem(request, database_unavailable(error))
    if user is not None:
        request.state.operator = user
        return None
    return _to_login(request)


def _operator_of(request: Request) -> User | None:
    token = session_token(request)
    if token is None:
        return None
    database = request.app.state.services.db
    with database.read() as session:
        user = signed_in_user(session, token)
        slides = bool(session.dirty)  # its idle expiry is due to be written
    # A page that refreshes itself must not keep a session alive.
    polls = request.method == "GET" and is_fragment(request)
    if slides and not polls:
        with database.write() as session:
            return signed_in_user(session, token)
    return user


def _to_login(request: Request) -> Response:
    if is_fragment(request):
        shown = _parts(request.headers.get("hx-current-url", ""))
        back = f"{shown.path}?{shown.query}" if shown.query else shown.path
        return Response(status_code=204, headers={"HX-Redirect": _login_url(back)})
    asked = request.url
    back = f"{asked.path}?{asked.query}" if asked.query else asked.path
    return RedirectResponse(
        _login_url(back if request.method in SAFE_METHODS else "/admin"), status_code=303
    )


def _login_url(back: str) -> str:
    return f"{LOGIN_PATH}?next={quote(back if is_local(back) else '/admin', safe='/')}"


def _parts(url: str) -> SplitResult:
    """The parts of what claims to be a URL; all of them are empty if it cannot be one."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _with_headers(request: Request, send: Send) -> Send:
    cached = _is_static(_route_path(request.scope)) and "v" in request.query_params

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            if cached and message["status"] in (200, 206, 304):
                headers["Cache-Control"] = STATIC_CACHE
        await send(message)

    return send_with_headers
