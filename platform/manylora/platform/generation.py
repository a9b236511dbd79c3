"""One admitted request on its way through the engine: counted once, written down once."""

import asyncio
import dataclasses
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, cast

import anyio
import structlog
from anyio.to_thread import run_sync
from sqlalchemy.exc import SQLAlchemyError

from manylora.engine.api import FinishReason, Request, RequestOutput
from manylora.engine.client import EngineClient
from manylora.engine.errors import EngineError, RequestFailedError
from manylora.platform import lives, usage
from manylora.platform.db import Database
from manylora.platform.errors import ServerStoppingError
from manylora.platform.life import Life
from manylora.platform.metrics import RequestMeter

log = structlog.get_logger(__name__)

Status = Literal["ok", "client_abort", "server_stop", "engine_error"]
_ABORT_SECONDS = 5.0
_RETRY_SECONDS = (0.2, 1.0, 3.0)  # pauses before a usage row is written again

_settlements: set[asyncio.Task[bool]] = set()
_running: weakref.WeakSet["Generation"] = weakref.WeakSet()


async def all_settled() -> None:
    """Return when every settlement that was begun in this event loop has ended."""
    loop = asyncio.get_running_loop()
    while pending := {task for task in _settlements if task.get_loop() is loop}:
        await asyncio.wait(pending)


def count_running() -> int:
    """How many requests the engine works on, or will."""
    return len(_running)


def digests_without_output() -> set[str]:
    """The adapters of running requests that have no token yet."""
    waiting = [generation for generation in _running if not generation.meter.has_output]
    digests = (generation.life.route.digest for generation in waiting)
    return {digest for digest in digests if digest}


def stop_running() -> None:
    """End every running request with an error, because the server stops.

    For the event loop that runs them. A request whose client does not read what was written goes
    on until it is cancelled; it too is settled as `server_stop`.
    """
    for generation in list(_running):
        generation.stop()


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Generation:
    """A request at work: it writes down in its life what the engine makes of it."""

    engine: EngineClient
    db: Database
    request: Request
    life: Life
    meter: RequestMeter
    _outputs: AsyncIterator[RequestOutput] = field(init=False)
    _settlement: asyncio.Task[bool] | None = None
    _patience: asyncio.Timeout | None = None  # of whoever waits for an output
    _stopped: bool = False

    def __post_init__(self) -> None:
        self._outputs = self.engine.generate(self.request)
        _running.add(self)

    @property
    def cut_off_status(self) -> Status:
        """Who cut it off, if it did not end by itself."""
        return "server_stop" if self._stopped else "client_abort"

    def stop(self) -> None:
        """Let `next` raise `ServerStoppingError`, also where somebody waits in it already."""
        self._stopped = True
        if self._patience is not None:
            self._patience.reschedule(asyncio.get_running_loop().time())

    async def next(self) -> RequestOutput:
        """The next delta; the one with a finish reason is the last.

        Raises:
            EngineError: as `EngineClient.generate` does.
            ServerStoppingError: `stop` was called.
        """
        output = await self._next_output()
        if output is None:
            raise RequestFailedError("the engine ended the request without a finish reason")
        self.life.hear(output)
        self.meter.output(output)
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise RequestFailedError(output.error or "the engine gave the request up")
        return output

    async def _next_output(self) -> RequestOutput | None:
        if self._stopped:
            raise ServerStoppingError
        try:
            async with asyncio.timeout(None) as self._patience:
                return await anext(self._outputs, None)
        except TimeoutError as error:
            if self._stopped:
                raise ServerStoppingError from error
            raise
        finally:
            self._patience = None

    def count_delivered(self) -> None:
        """All tokens so far go to the client's socket: call it before the write."""
        self.life.delivered_tokens = self.life.totals.num_output_tokens

    async def settle(self, status: Status) -> bool:
        """Stop the engine's work on it and commit its usage row; whether the row is there.

        May repeat: the first status counts. It is a task of its own, so that it is finished even
        while the caller is being cancelled.
        """
        if self._settlement is None:
            self._settlement = asyncio.create_task(self._settle(status))
            _settlements.add(self._settlement)
            self._settlement.add_done_callback(_settlements.discard)
        return await asyncio.shield(self._settlement)

    async def _settle(self, status: Status) -> bool:
        self.life.end(status)
        await self.close()
        row = self._usage(status)
        self.meter.end(row)
        for pause in (*_RETRY_SECONDS, None):
            try:
                await run_sync(self._write, row)
            except SQLAlchemyError as error:
                kind = type(error).__name__
                log.warning("usage_not_written", request_id=row.request_id, error=kind)
            else:
                return True
            if pause is not None:
                await asyncio.sleep(pause)
        # The row can be made from this line.
        log.error("usage_lost", **dataclasses.asdict(row))
        self.meter.lose_usage()
        return False

    async def close(self) -> None:
        """Let go of the engine, which aborts the request if it still runs. Writes no usage."""
        _running.discard(self)
        # A generator that is running already is being cancelled by whoever runs it, and an engine
        # that is away has nothing to abort.
        gone = suppress(RuntimeError, EngineError)
        with anyio.CancelScope(shield=True), anyio.move_on_after(_ABORT_SECONDS), gone:
            await cast(AsyncGenerator[RequestOutput, None], self._outputs).aclose()

    def _write(self, row: usage.Usage) -> None:
        with self.db.write() as session:
            usage.record(session, row)
            lives.keep(session, self.life)
        log.info(
            "request_settled",
            status=row.status,
            adapter_digest=row.adapter_digest,
            prompt_tokens=row.prompt_tokens,
            completion_tokens=row.completion_tokens,
            total_us=row.total_us,
        )

    def _usage(self, status: Status) -> usage.Usage:
        life, last = self.life, self.life.totals
        return usage.Usage(
            tenant_id=life.tenant_id,
            key_id=life.key_id,
            request_id=life.request_id,
            base_model=life.route.base_model,
            adapter=life.route.adapter,
            adapter_version_id=life.route.version_id,
            adapter_version=life.route.version,
            adapter_digest=life.route.digest,
            route=life.endpoint,
            status=status,
            finish_reason=last.finish_reason if status == "ok" else None,
            prompt_tokens=last.num_prompt_tokens,
            cached_tokens=last.num_cached_tokens,
            completion_tokens=last.num_output_tokens,
            delivered_tokens=min(life.delivered_tokens, last.num_output_tokens),
            queued_us=_microseconds(last.metrics.queued_seconds),
            ttft_us=_microseconds(last.metrics.first_token_seconds),
            total_us=_microseconds(last.metrics.total_seconds),
        )


def _microseconds(seconds: float) -> int:
    return round(seconds * 1_000_000)
