"""The outermost layer: request ids, limits on headers and URL, when a request came and went."""

import asyncio
import time

import structlog
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manylora.engine.lifecycle import Stage, StageName
from manylora.platform.api.body import JsonAnswer
from manylora.platform.ids import new_id, now_us
from manylora.platform.life import Life
from manylora.platform.services import Services

log = structlog.get_logger(__name__)

MAX_HEADER_BYTES = 32 << 10
MAX_HEADERS = 100
MAX_URL_BYTES = 16 << 10
OTHER_ROUTE = "other"  # in metrics: no route of ours, or a file of the pages


class Edge:
    """ASGI middleware. The request id is ours: a client's own is neither used nor echoed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = new_id("req")
        status = 500  # of an error that is answered further out
        state = scope.setdefault("state", {})
        state |= {
            "request_id": request_id,
            "received_at": now_us(),
            "received": Stage(StageName.RECEIVED, time.monotonic(), __name__),
        }

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["x-content-type-options"] = "nosniff"
            await send(message)
            life: Life | None = state.get("life")
            if life and message["type"] == "http.response.body" and not message.get("more_body"):
                life.sent(__name__)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await (_refusal(scope) or self._app)(scope, receive, send_with_id)
            except asyncio.CancelledError:  # by a server that stops; it would log a traceback
                log.warning("request_cut_off")
                if "life" in state:
                    state["life"].end("server_stop")
            finally:
                services: Services = scope["app"].state.services
                services.metrics.count_http(_route(scope), status)
                if "life" in state:
                    await services.lives.close(state["life"], by_a_bug=status == 500)


def _route(scope: Scope) -> str:
    """The template of the route that answered: never the path, which is whatever a client likes."""
    # FastAPI keeps the template of an included router's route, with the prefix, beside the route.
    context = scope.get("fastapi", {}).get("effective_route_context")
    template: str = getattr(context or scope.get("route"), "path_format", OTHER_ROUTE)
    return template


def _refusal(scope: Scope) -> ASGIApp | None:
    """The answer to a request that its head alone condemns."""
    headers = scope["headers"]
    if len(headers) > MAX_HEADERS or sum(len(k) + len(v) for k, v in headers) > MAX_HEADER_BYTES:
        return _answer(431, "the request's headers are too large")
    if len(scope["raw_path"]) + len(scope["query_string"]) > MAX_URL_BYTES:
        return _answer(414, "the URL is too long")
    if ".." in scope["path"].split("/"):  # nobody's path; some would read another one from it
        return _answer(404, "Not Found", "not_found")
    return None


def _answer(status: int, message: str, code: str | None = None) -> ASGIApp:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JsonAnswer({"error": error}, status)
