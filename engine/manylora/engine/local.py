"""An engine in this process, for asyncio callers: `EngineClient` over the engine thread."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from manylora.engine.api import (
    AdapterInfo,
    EngineInfo,
    EngineStats,
    Request,
    RequestOutput,
)
from manylora.engine.core import EngineCore
from manylora.engine.errors import EngineUnavailableError
from manylora.engine.loop import EngineThread
from manylora.engine.streams import OutputStream, check_new

T = TypeVar("T")


class LocalEngine:
    """Meets `EngineClient`. Made and used on one event loop."""

    def __init__(self, core: EngineCore, *, on_death: Callable[[], None] = lambda: None) -> None:
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, OutputStream] = {}
        self._on_death = on_death
        self._thread = EngineThread(core, on_outputs=self._post_outputs, on_death=self._post_death)

    async def info(self) -> EngineInfo:
        return self._core.info

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        check_new(request.request_id, self._streams)
        stream = self._streams[request.request_id] = OutputStream()
        try:
            arrived = time.monotonic()
            await self._call(lambda core: core.add(request, arrived=arrived))
            async for output in stream:
                yield output
        finally:
            del self._streams[request.request_id]
            self._thread.call(lambda core: core.abort(request.request_id))

    async def load_adapter(self, digest: str) -> AdapterInfo:
        loading = await self._call(lambda core: core.begin_load(digest))
        # Others may wait for the same load: who leaves must not cancel it.
        return (await asyncio.shield(asyncio.wrap_future(loading))).info

    async def unload_adapter(self, digest: str) -> None:
        await self._call(lambda core: core.unload_adapter(digest))

    async def stats(self) -> EngineStats:
        return await self._call(lambda core: core.stats())

    @property
    def step_age_seconds(self) -> float:
        """How long the step that runs now has run; 0 between steps."""
        return self._core.step_age_seconds

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.stop)
        self._end_streams()

    async def _call(self, function: Callable[[EngineCore], T]) -> T:
        return await asyncio.wrap_future(self._thread.call(function))

    def _post_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        self._loop.call_soon_threadsafe(self._take_outputs, outputs)

    def _take_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put(output)

    def _post_death(self) -> None:
        self._loop.call_soon_threadsafe(self._take_death)

    def _take_death(self) -> None:
        self._end_streams()
        self._on_death()

    def _end_streams(self) -> None:
        for stream in self._streams.values():
            stream.fail(EngineUnavailableError("the engine stopped while it served this request"))
