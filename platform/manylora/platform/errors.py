"""The control plane's errors, and the one table from any error to its HTTP meaning."""

from dataclasses import dataclass
from typing import Any

from manylora.engine import errors as engine_errors

_SHOWN_CHARS = 64  # of what a client sent, in a message


class PlatformError(Exception):
    """A request that is answered with an error. `param` names the field, never its value."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


def legible(name: str) -> str:
    """A name that a client sent, safe to show: of printable characters, and not long."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in name)
    return shown if len(shown) <= _SHOWN_CHARS else shown[:_SHOWN_CHARS] + "..."


class InvalidInputError(PlatformError):
    """What was sent cannot be accepted as it stands."""


class UnauthenticatedError(PlatformError):
    """No valid key. Always the same words: which of its reasons holds is nobody's business."""

    def __init__(self) -> None:
        super().__init__(
            "Incorrect API key provided, or none. Send it as: Authorization: Bearer YOUR_KEY"
        )


class PermissionDeniedError(PlatformError):
    """A valid credential that may not do this."""


class NotFoundError(PlatformError):
    """There is no such thing, or it is another tenant's: the two are never told apart."""


class ModelNotFoundError(NotFoundError):
    """`model` names nothing that this tenant may call."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"The model {legible(model)} does not exist or you do not have access to it; "
            "GET /v1/models lists what this key may call.",
            param="model",
        )


class RequestTimeoutError(PlatformError):
    """The client was too slow in sending its body."""


class ConflictError(PlatformError):
    """It moved, or it is there already."""


class TooLargeError(PlatformError):
    """The body is larger than the limit, which the message states."""


class UnsupportedMediaTypeError(PlatformError):
    """The body is of a type that this route does not read."""


class AdapterRefusedError(PlatformError):
    """An uploaded adapter did not pass its check; every reason is told."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("The adapter was refused: " + "; ".join(reasons), param="files")
        self.reasons = reasons


class StorageFullError(PlatformError):
    """The disk has no room for the upload."""


class UploadsBusyError(PlatformError):
    """As many uploads as may run at once are running."""

    def __init__(self, *, retry_after: float) -> None:
        super().__init__("Too many uploads at this moment; try again later.")
        self.retry_after = retry_after


class CheckFailedError(PlatformError):
    """The check of an adapter could not be carried out, which says nothing of the adapter."""

    def __init__(self) -> None:
        super().__init__("The adapter could not be checked; that is the server's fault.")


class ServerStoppingError(PlatformError):
    """The server was told to stop, and did not wait any longer for this request."""

    def __init__(self) -> None:
        super().__init__("The server is stopping; try again in a moment.")


class DatabaseUnavailableError(PlatformError):
    """What must be known before an answer cannot be read."""


class DatabaseError(Exception):
    """The database cannot be used at all; the message says why. No request meets it."""


class DemoError(Exception):
    """The demo cannot be set up; the message says why. No request meets it."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What an error is over HTTP."""

    status: int
    type: str
    code: str | None = None


_REQUEST = "invalid_request_error"
_SERVER = "server_error"

MEANINGS: dict[type[Exception], Meaning] = {
    InvalidInputError: Meaning(400, _REQUEST),
    UnauthenticatedError: Meaning(401, _REQUEST, "invalid_api_key"),
    PermissionDeniedError: Meaning(403, "permission_error"),
    NotFoundError: Meaning(404, _REQUEST, "not_found"),
    ModelNotFoundError: Meaning(404, _REQUEST, "model_not_found"),
    RequestTimeoutError: Meaning(408, _REQUEST, "request_timeout"),
    ConflictError: Meaning(409, "conflict_error"),
    TooLargeError: Meaning(413, _REQUEST, "too_large"),
    UnsupportedMediaTypeError: Meaning(415, _REQUEST, "unsupported_media_type"),
    AdapterRefusedError: Meaning(422, _REQUEST, "adapter_refused"),
    StorageFullError: Meaning(507, _SERVER, "storage_full"),
    UploadsBusyError: Meaning(503, _SERVER, "overloaded"),
    CheckFailedError: Meaning(503, _SERVER, "check_failed"),
    ServerStoppingError: Meaning(503, _SERVER, "shutting_down"),
    DatabaseUnavailableError: Meaning(503, _SERVER, "database_unavailable"),
    engine_errors.InvalidRequestError: Meaning(400, _REQUEST),
    engine_errors.AdapterError: Meaning(503, _SERVER, "adapter_failed"),
    engine_errors.AdapterNotFoundError: Meaning(503, _SERVER, "adapter_failed"),
    engine_errors.EngineOverloadedError: Meaning(503, _SERVER, "overloaded"),
    engine_errors.EngineUnavailableError: Meaning(503, _SERVER, "engine_unavailable"),
    engine_errors.RequestFailedError: Meaning(503, _SERVER, "request_failed"),
}
INTERNAL = Meaning(500, _SERVER, "internal_error")

# What the engine says of these may hold a digest, a path or a tensor: ours to log, not to tell.
_PUBLIC_MESSAGES: dict[type[Exception], str] = {
    engine_errors.AdapterError: "This adapter could not be loaded.",
    engine_errors.AdapterNotFoundError: "This adapter could not be loaded.",
    engine_errors.EngineOverloadedError: "The server is overloaded; try again later.",
    engine_errors.EngineUnavailableError: "The engine is not available; try again in a moment.",
    engine_errors.RequestFailedError: "The engine could not finish this request.",
}


def meaning_of(error: Exception) -> Meaning:
    """The nearest entry of the table along the error's ancestry."""
    for ancestor in type(error).__mro__:
        if ancestor in MEANINGS:
            return MEANINGS[ancestor]
    return INTERNAL


def envelope(error: Exception) -> dict[str, Any]:
    """The body of an error answer, in the OpenAI API's shape. Never paths, SQL or tracebacks."""
    meaning = meaning_of(error)
    if meaning is INTERNAL:
        message = "The server had an error while processing your request."
    else:
        message = _PUBLIC_MESSAGES.get(type(error), str(error))
    body: dict[str, Any] = {
        "message": message,
        "type": meaning.type,
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None) or meaning.code,
    }
    if isinstance(error, AdapterRefusedError):
        body["reasons"] = error.reasons
    return {"error": body}


def retry_headers(error: Exception) -> dict[str, str]:
    """When to come back, for errors that pass; the SDKs read both headers."""
    seconds = getattr(error, "retry_after", None)
    if seconds is None:
        return {}
    return {"retry-after": str(max(1, round(seconds))), "retry-after-ms": str(int(seconds * 1000))}
