"""What callers of the engine may catch. The HTTP meaning of each is in `platform/errors.py`."""


class EngineError(Exception):
    """Anything the engine refuses or fails at."""


class InvalidRequestError(EngineError):
    """The request can never be served as it stands; `param` names the field at fault."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


MAX_REASONS = 20
MAX_REASON_CHARACTERS = 300


class AdapterError(EngineError):
    """An adapter is refused; each reason names the tensor or config field at fault."""

    def __init__(self, reasons: tuple[str, ...] | list[str]) -> None:
        """Keep the first reasons, cut short: names in a hostile file may be of any length."""
        most = len(reasons) if len(reasons) <= MAX_REASONS + 1 else MAX_REASONS
        kept = [_shortened(reason) for reason in reasons[:most]]
        if len(reasons) > most:
            kept.append(f"and {len(reasons) - most} more")
        super().__init__("; ".join(kept))
        self.reasons = tuple(kept)


def _shortened(text: str) -> str:
    excess = len(text) - MAX_REASON_CHARACTERS
    if excess <= 0:
        return text
    half = MAX_REASON_CHARACTERS // 2
    return f"{text[:half]} … {text[-half:]}"


class AdapterNotFoundError(EngineError):
    """No adapter of this digest lies in the engine's adapter store."""

    def __init__(self, digest: str) -> None:
        super().__init__(f"adapter {digest} is not in the adapter store")
        self.digest = digest


class ModelError(EngineError):
    """A base model cannot be found or loaded; the message says what to try instead."""


class RecordingError(EngineError):
    """A recorded step trace cannot be read; the message names the line."""


class EngineOverloadedError(EngineError):
    """The waiting queue is full; try again after `retry_after` seconds."""

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"the engine's queue is full; retry after {retry_after:.0f} s")
        self.retry_after = retry_after


class EngineUnavailableError(EngineError):
    """The engine process is not there: starting, restarting, or died under this request."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestFailedError(EngineError):
    """The engine gave this one request up; the others go on."""

    retry_after = 1.0


class WireError(EngineError):
    """A frame between API and engine process is too long or cannot be read."""
