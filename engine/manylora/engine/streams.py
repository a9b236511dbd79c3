"""One request's outputs on their way to its reader. What a slow reader has not taken is merged."""

import asyncio
from collections.abc import AsyncIterator, Container

from manylora.engine.api import RequestOutput
from manylora.engine.errors import EngineError, InvalidRequestError


class OutputStream:
    """At most one pending delta; ends after the one with a finish reason, or with an error."""

    def __init__(self) -> None:
        self._pending: RequestOutput | None = None
        self._error: EngineError | None = None
        self._changed = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        pending = self._pending
        self._pending = output if pending is None else pending.merged_with(output)
        self._changed.set()

    def fail(self, error: EngineError) -> None:
        """Raise `error` at the reader, after what is pending."""
        self._error = error
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            output, self._pending = self._pending, None
            if output is not None:
                yield output
                if output.finish_reason is not None:
                    return
            if self._error is not None:
                raise self._error


def check_new(request_id: str, running: Container[str]) -> None:
    """
    Raises:
        InvalidRequestError: a request of this id is running, whose outputs must not be mixed up.
    """
    if request_id in running:
        raise InvalidRequestError("a request of this id is running", param="request_id")
