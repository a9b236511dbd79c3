"""The engine process: one engine behind a Unix socket. `python -m manylora.engine.server`."""

import asyncio
import os
import sys
from collections.abc import Coroutine
from pathlib import Path

import msgspec
import structlog

from manylora.engine.build import build_engine
from manylora.engine.config import EngineConfig
from manylora.engine.core import EngineCore
from manylora.engine.errors import EngineError, RequestFailedError, WireError
from manylora.engine.local import LocalEngine
from manylora.engine.logs import configure_logs
from manylora.engine.supervisor import CANNOT_START, REASON_SUFFIX
from manylora.engine.wire import (
    Abort,
    Add,
    Failed,
    Fault,
    GetStats,
    Heartbeat,
    Hello,
    LoadAdapter,
    Message,
    Output,
    Reply,
    ToEngine,
    UnloadAdapter,
    read_message,
    to_engine,
    write_message,
)

logger = structlog.get_logger(__name__)

HEARTBEAT_SECONDS = 1.0
LAST_STEP_SECONDS = 10.0  # how long a step may go on after the parent is gone


def main(socket: Path, config: EngineConfig, log_level: str) -> None:
    """Load the model, serve until standard input ends (the parent is gone) or a step fails."""
    configure_logs(log_level)
    try:
        core = build_engine(config)
    except (EngineError, ValueError) as error:
        logger.error("engine_cannot_start", reason=str(error))  # noqa: TRY400 -- one line
        socket.with_suffix(REASON_SUFFIX).write_text(str(error))
        sys.exit(CANNOT_START)
    is_dead = asyncio.run(_serve(socket, core))
    sys.exit(1 if is_dead else 0)


async def _serve(socket: Path, core: EngineCore) -> bool:
    """Serve connections; True when a step failed."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[bool] = loop.create_future()

    def end(is_dead: bool) -> None:
        if not ended.done():
            ended.set_result(is_dead)

    engine = LocalEngine(core, on_death=lambda: end(True))

    def read_stdin() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            loop.remove_reader(sys.stdin.fileno())
            end(False)

    loop.add_reader(sys.stdin.fileno(), read_stdin)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _Connection(engine, reader, writer).run()

    mask = os.umask(0o177)  # only this user may connect
    await asyncio.start_unix_server(serve, socket)
    os.umask(mask)
    is_dead = await ended
    if not is_dead:
        loop.call_later(LAST_STEP_SECONDS, os._exit, 1)
        await engine.close()
    return is_dead


class _Connection:
    """One client: a task for each request it has added."""

    def __init__(
        self, engine: LocalEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._writer = writer
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until the client goes; what it left running is aborted."""
        self._start(self._beat())
        try:
            await self._send(Hello(await self._engine.info()))
            while True:
                self._take(await read_message(self._reader, to_engine))
        except (asyncio.IncompleteReadError, ConnectionError):
            logger.info("engine_client_gone", requests=len(self._requests))
        except WireError as error:
            logger.warning("engine_client_refused", reason=str(error))
        finally:
            for task in [*self._requests.values(), *self._others]:
                task.cancel()
            self._writer.close()

    def _take(self, message: ToEngine) -> None:
        match message:
            case Add(request) if request.request_id in self._requests:
                self._start(self._generate(message))  # the engine refuses it
            case Add(request):
                task = asyncio.create_task(self._generate(message))
                self._requests[request.request_id] = task
                task.add_done_callback(lambda _: self._requests.pop(request.request_id, None))
            case Abort(request_id):
                if (task := self._requests.get(request_id)) is not None:  # type: ignore[assignment]
                    task.cancel()
            case _:
                self._start(self._answer(message))

    async def _generate(self, message: Add) -> None:
        request_id = message.request.request_id
        try:
            async for output in self._engine.generate(message.request):
                await self._send(Output(output))
        except Exception as error:  # noqa: BLE001 -- the client must be told of any
            await self._send(Failed(request_id, _fault(error)))

    async def _answer(self, message: LoadAdapter | UnloadAdapter | GetStats) -> None:
        try:
            match message:
                case LoadAdapter(call_id, digest):
                    reply = Reply(call_id, info=await self._engine.load_adapter(digest))
                case UnloadAdapter(call_id, digest):
                    await self._engine.unload_adapter(digest)
                    reply = Reply(call_id)
                case GetStats(call_id):
                    reply = Reply(call_id, stats=await self._engine.stats())
        except Exception as error:  # noqa: BLE001 -- the client must be told of any
            reply = Reply(message.call_id, fault=_fault(error))
        await self._send(reply)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            await self._send(Heartbeat(self._engine.step_age_seconds))

    async def _send(self, message: Message) -> None:
        try:
            await write_message(self._writer, message)
        except ConnectionError:
            self._reader.feed_eof()  # ends `run`, which aborts the rest

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)


def _fault(error: Exception) -> Fault:
    """What the client is told: our own errors as they are, of others only that there was one."""
    if isinstance(error, EngineError):
        return Fault.of(error)
    logger.error("engine_call_failed", exc_info=error)
    return Fault.of(RequestFailedError("the engine failed at this request"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=EngineConfig), sys.argv[3])
