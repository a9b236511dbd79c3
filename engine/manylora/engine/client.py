"""The protocol that every way to reach an engine meets; see `local.py` and `remote.py`."""

from collections.abc import AsyncIterator
from typing import Protocol

from manylora.engine.api import AdapterInfo, EngineInfo, EngineStats, Request, RequestOutput


class EngineClient(Protocol):
    """An engine, near or far. Every method may raise `EngineUnavailableError`."""

    async def info(self) -> EngineInfo:
        """What this engine serves."""
        ...

    def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Yield deltas until one has a finish reason. Closing the iterator aborts the request.

        Where its adapter does not load, or the engine gave it up, the reason is `ERROR` and
        `error` says why.

        Raises:
            InvalidRequestError: it can never be served (too long, unknown token id).
            AdapterNotFoundError: its adapter is not in the store.
            EngineOverloadedError: the queue is full.
            RequestFailedError: the engine failed at it in a way that it did not foresee.
        """
        ...

    async def load_adapter(self, digest: str) -> AdapterInfo:
        """Bring an adapter of the store into host memory ahead of need.

        Raises:
            AdapterNotFoundError, AdapterError
        """
        ...

    async def unload_adapter(self, digest: str) -> None:
        """Drop it from host memory and, once no sequence holds it, from its slot; may repeat."""
        ...

    async def stats(self) -> EngineStats:
        """A snapshot between two steps."""
        ...

    async def close(self) -> None:
        """Abort what runs and let go of the engine."""
        ...
