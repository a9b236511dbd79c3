"""An engine in another process: `EngineClient` over its Unix socket. Loads no torch."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Self

import structlog

from manylora.engine.api import AdapterInfo, EngineInfo, EngineStats, Request, RequestOutput
from manylora.engine.errors import EngineUnavailableError, InvalidRequestError, WireError
from manylora.engine.streams import OutputStream, check_new
from manylora.engine.wire import (
    Abort,
    Add,
    Failed,
    FromEngine,
    GetStats,
    Heartbeat,
    Hello,
    LoadAdapter,
    Message,
    Output,
    Reply,
    UnloadAdapter,
    from_engine,
    read_message,
    write_message,
)

logger = structlog.get_logger(__name__)


class RemoteEngine:
    """Meets `EngineClient`. One connection carries all requests."""

    def __init__(
        self, info: EngineInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._info = info
        self._reader = reader
        self._writer = writer
        self._streams: dict[str, OutputStream] = {}
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._call_ids = itertools.count()
        self._heard = time.monotonic()
        self._step_age = 0.0
        self._is_lost = False
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, socket: Path) -> Self:
        """Connect to an engine process.

        Raises:
            EngineUnavailableError: nobody listens there.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(socket)
            hello = await read_message(reader, from_engine)
        except (OSError, asyncio.IncompleteReadError, WireError) as error:
            raise EngineUnavailableError("the engine is not there") from error
        assert isinstance(hello, Hello)
        return cls(hello.info, reader, writer)

    @property
    def silent_seconds(self) -> float:
        """How long the engine process has not been heard, or its step has run: the longer."""
        return max(time.monotonic() - self._heard, self._step_age)

    async def info(self) -> EngineInfo:
        if self._is_lost:
            raise _lost()
        return self._info

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        check_new(request.request_id, self._streams)
        stream = self._streams[request.request_id] = OutputStream()
        ended = False
        try:
            await self._send(Add(request))
            async for output in stream:
                ended = output.finish_reason is not None
                yield output
        finally:
            del self._streams[request.request_id]
            if not ended:
                with suppress(EngineUnavailableError):  # then it is aborted already
                    await self._send(Abort(request.request_id))

    async def load_adapter(self, digest: str) -> AdapterInfo:
        call_id = next(self._call_ids)
        reply = await self._call(LoadAdapter(call_id, digest), call_id)
        assert reply.info is not None
        return reply.info

    async def unload_adapter(self, digest: str) -> None:
        call_id = next(self._call_ids)
        await self._call(UnloadAdapter(call_id, digest), call_id)

    async def stats(self) -> EngineStats:
        call_id = next(self._call_ids)
        reply = await self._call(GetStats(call_id), call_id)
        assert reply.stats is not None
        return reply.stats

    async def close(self) -> None:
        self._reading.cancel()
        self._lose()
        self._writer.close()

    async def _call(self, message: Message, call_id: int) -> Reply:
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            await self._send(message)
            reply: Reply = await answer
        finally:
            del self._calls[call_id]
        if reply.fault is not None:
            raise reply.fault.error()
        return reply

    async def _send(self, message: Message) -> None:
        if self._is_lost:
            raise _lost()
        try:
            await write_message(self._writer, message)
        except OSError as error:
            raise _lost() from error
        except WireError as error:
            raise InvalidRequestError(f"the request is too large: {error}") from error

    async def _read(self) -> None:
        try:
            while True:
                self._take(await read_message(self._reader, from_engine))
        except (OSError, asyncio.IncompleteReadError):
            pass  # the process is gone
        except WireError:
            logger.exception("engine_unintelligible")
        finally:
            self._lose()

    def _take(self, message: FromEngine) -> None:
        self._heard = time.monotonic()
        match message:
            case Output(output):
                if (stream := self._streams.get(output.request_id)) is not None:
                    stream.put(output)
            case Failed(request_id, fault):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.fail(fault.error())
            case Reply(call_id):
                if (answer := self._calls.get(call_id)) is not None and not answer.done():
                    answer.set_result(message)
            case Heartbeat(step_age_seconds):
                self._step_age = step_age_seconds

    def _lose(self) -> None:
        self._is_lost = True
        for stream in self._streams.values():
            stream.fail(_lost())
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(_lost())

    async def wait_lost(self) -> None:
        """Return when the connection is gone."""
        await asyncio.wait([self._reading])


def _lost() -> EngineUnavailableError:
    return EngineUnavailableError("the engine stopped while it served this request")
