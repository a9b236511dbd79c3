"""One admitted request on its way through the engine: counted once, written down once."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, cast

import anyio
import structlog
from anyio.to_thread import run_sync

from manylora.engine.api import FinishReason, Request, RequestOutput
from manylora.engine.client import EngineClient
from manylora.engine.errors import RequestFailedError
from manylora.platform import usage
from manylora.platform.db import Database
from manylora.platform.routing import Route

log = structlog.get_logger(__name__)

Status = Literal["ok", "client_abort", "engine_error"]
_ABORT_SECONDS = 5.0


@dataclass(slots=True, kw_only=True)
class Generation:
    """A request, what the engine has made of it so far, and its usage row."""

    engine: EngineClient
    db: Database
    request: Request
    route: Route
    tenant_id: str
    key_id: str
    endpoint: str
    last: RequestOutput | None = None  # the engine's totals so far
    delivered_tokens: int = 0
    _outputs: AsyncIterator[RequestOutput] = field(init=False)
    _settled: bool = False

    def __post_init__(self) -> None:
        self._outputs = self.engine.generate(self.request)

    async def next(self) -> RequestOutput:
        """The next delta; the one with a finish reason is the last.

        Raises:
            EngineError: as `EngineClient.generate` does.
        """
        output = await anext(self._outputs, None)
        if output is None:
            raise RequestFailedError("the engine ended the request without a finish reason")
        self.last = output
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise RequestFailedError(output.error or "the engine gave the request up")
        return output

    def count_delivered(self) -> None:
        """All tokens so far go to the client's socket: call it before the write."""
        self.delivered_tokens = self.last.num_output_tokens if self.last else 0

    async def settle(self, status: Status) -> None:
        """Stop the engine's work on it and commit its usage row; may repeat, the first counts.

        It is finished even while the caller is being cancelled.
        """
        if self._settled:
            return
        self._settled = True
        with anyio.CancelScope(shield=True):
            await self.close()
            await run_sync(self._write, status)

    async def close(self) -> None:
        """Let go of the engine, which aborts the request if it still runs. Writes no usage."""
        # A generator that is running already is being cancelled by whoever runs it.
        running = suppress(RuntimeError)
        with anyio.CancelScope(shield=True), anyio.move_on_after(_ABORT_SECONDS), running:
            await cast(AsyncGenerator[RequestOutput, None], self._outputs).aclose()

    def _write(self, status: Status) -> None:
        row = self._usage(status)
        with self.db.write() as session:
            usage.record(session, row)
        log.info(
            "request_settled",
            status=status,
            adapter_digest=row.adapter_digest,
            prompt_tokens=row.prompt_tokens,
            completion_tokens=row.completion_tokens,
            total_us=row.total_us,
        )

    def _usage(self, status: Status) -> usage.Usage:
        last = self.last or RequestOutput(
            request_id=self.request.request_id,
            num_prompt_tokens=len(self.request.prompt_token_ids),
        )
        return usage.Usage(
            tenant_id=self.tenant_id,
            key_id=self.key_id,
            request_id=self.request.request_id,
            base_model=self.route.base_model,
            adapter=self.route.adapter,
            adapter_version_id=self.route.version_id,
            adapter_version=self.route.version,
            adapter_digest=self.route.digest,
            route=self.endpoint,
            status=status,
            finish_reason=last.finish_reason if status == "ok" else None,
            prompt_tokens=last.num_prompt_tokens,
            cached_tokens=last.num_cached_tokens,
            completion_tokens=last.num_output_tokens,
            delivered_tokens=min(self.delivered_tokens, last.num_output_tokens),
            queued_us=_microseconds(last.metrics.queued_seconds),
            ttft_us=_microseconds(last.metrics.first_token_seconds),
            total_us=_microseconds(last.metrics.total_seconds),
        )


def _microseconds(seconds: float) -> int:
    return round(seconds * 1_000_000)
