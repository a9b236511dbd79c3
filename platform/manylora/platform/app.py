"""Builds the ASGI application from services. It starts and closes none of them."""

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException

from manylora.engine.errors import EngineError
from manylora.platform.api import (
    adapters,
    chat,
    completions,
    engine,
    health,
    keys,
    metrics,
    models,
    requests,
    tenants,
    usage,
)
from manylora.platform.api.body import JsonAnswer
from manylora.platform.api.edge import Edge
from manylora.platform.api.streaming import ClientGoneError
from manylora.platform.errors import (
    DatabaseUnavailableError,
    InvalidInputError,
    PlatformError,
    envelope,
    meaning_of,
    retry_headers,
)
from manylora.platform.services import Services

log = structlog.get_logger(__name__)

DATABASE_ERRORS = (OperationalError, InterfaceError, PoolTimeoutError)


def create_app(services: Services) -> FastAPI:
    """The application: `/v1`, `/adapters/{name}/v1`, `/api/v1`, `/health`, `/ready`, `/metrics`."""
    app = FastAPI(title="manylora", openapi_url=None, redirect_slashes=False)
    app.state.services = services
    app.add_middleware(Edge)
    app.include_router(health.router)
    app.include_router(metrics.router)
    for part in (models, chat, completions):
        app.include_router(part.router, prefix="/v1")
        app.include_router(part.router, prefix="/adapters/{name}/v1")
    app.include_router(tenants.router, prefix="/api/v1")
    app.include_router(engine.router, prefix="/api/v1")
    app.include_router(requests.router, prefix="/api/v1")
    for part in (adapters, keys, usage):
        app.include_router(part.router, prefix="/api/v1")
        app.include_router(part.router, prefix="/api/v1/tenants/{tenant}")
    _add_error_answers(app)
    return app


def create_metrics_app(services: Services) -> FastAPI:
    """`/metrics` alone and for anybody: for a port that only the operator's machines reach."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.state.services = services
    app.add_middleware(Edge)
    app.get("/metrics")(metrics.metrics)
    _add_error_answers(app)
    return app


def database_unavailable(error: Exception) -> DatabaseUnavailableError:
    """What a failure of the database is to whoever asked; its cause is for the log alone."""
    log.error("database_error", error=type(error).__name__, detail=str(error.__cause__))
    return DatabaseUnavailableError("the database does not answer")


def _add_error_answers(app: FastAPI) -> None:
    app.add_exception_handler(PlatformError, _answer_error)
    app.add_exception_handler(EngineError, _answer_error)
    for kind in DATABASE_ERRORS:
        app.add_exception_handler(kind, _answer_database_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(ClientGoneError, _answer_nobody)
    app.add_exception_handler(Exception, answer_bug)


async def _answer_error(_request: Request, error: Exception) -> Response:
    status = meaning_of(error).status
    if status >= 500:
        log.warning("request_failed", error=type(error).__name__, detail=str(error))
    return JsonAnswer(envelope(error), status, headers=retry_headers(error))


async def _answer_database_error(request: Request, error: Exception) -> Response:
    return await _answer_error(request, database_unavailable(error))


async def _answer_http_error(_request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, wrong method."""
    assert isinstance(error, HTTPException)
    body = {
        "message": error.detail,
        "type": "invalid_request_error",
        "param": None,
        "code": {404: "not_found", 405: "method_not_allowed"}.get(error.status_code),
    }
    return JsonAnswer({"error": body}, error.status_code, headers=dict(error.headers or {}))


async def _answer_validation_error(request: Request, error: Exception) -> Response:
    """A path or query parameter of the wrong type; bodies are read by `api/body.py`."""
    assert isinstance(error, RequestValidationError)
    fault = error.errors()[0]
    name = str(fault["loc"][-1])
    return await _answer_error(request, InvalidInputError(f"{name}: {fault['msg']}", param=name))


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # nginx's code for a client that went away


async def answer_bug(request: Request, error: Exception) -> Response:
    """Starlette calls this outside `Edge`, so that the id is added here."""
    request_id = request.state.request_id
    log.error("unhandled_error", exc_info=error, request_id=request_id)
    return JsonAnswer(envelope(error), 500, headers={"x-request-id": request_id})
