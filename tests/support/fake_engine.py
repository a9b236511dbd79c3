"""An engine in memory: it says set words, and stalls, fails or dies where a test wants it to."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from manylora.engine.api import (
    AdapterInfo,
    EngineInfo,
    EngineStats,
    FinishReason,
    Request,
    RequestMetrics,
    RequestOutput,
)
from manylora.engine.errors import EngineError, EngineUnavailableError
from manylora.engine.lifecycle import Stage, StageName, WaitCause

INFO = EngineInfo(
    model="tiny",
    model_digest="0" * 64,
    dtype="float32",
    device="cpu",
    kernels="ref",
    max_model_len=512,
    block_size=16,
    num_kv_blocks=64,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_loras=4,
    max_lora_rank=64,
)

WAITS = dict.fromkeys((WaitCause.STEP, WaitCause.KV_BLOCKS, WaitCause.FAIRNESS), 0.001 / 3)


@dataclass
class FakeEngine:
    """Meets `EngineClient`. One word is one token; the adapter's digest is the first word.

    Set `fails_at` to raise `error`, or `stalls_at` to wait for ever, before that word (from 0).
    """

    words: Sequence[str] = (" one", " two", " three")
    fails_at: int | None = None
    stalls_at: int | None = None
    error: EngineError = field(default_factory=lambda: EngineUnavailableError("it died"))
    alive: bool = True
    requests: list[Request] = field(default_factory=list)
    stalled: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    unloaded: list[str] = field(default_factory=list)
    snapshot: EngineStats = field(default_factory=EngineStats)
    added: dict[str, float] = field(default_factory=dict)  # when, by request id

    async def info(self) -> EngineInfo:
        self._check_alive()
        return INFO

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        self._check_alive()
        self.requests.append(request)
        self.added[request.request_id] = time.monotonic()
        said = [request.adapter.digest[:8] if request.adapter else "base", *self.words]
        said = said[: request.params.max_tokens]
        ended = FinishReason.STOP if len(said) > len(self.words) else FinishReason.LENGTH
        finished = False
        try:
            for number, word in enumerate(said):
                await self._trouble(request, number)
                last = number == len(said) - 1
                finished = last
                yield self._output(request, word, number + 1, ended if last else None)
        finally:
            if not finished:
                self.aborted.append(request.request_id)

    async def load_adapter(self, digest: str) -> AdapterInfo:
        return AdapterInfo(digest=digest, report={})

    async def unload_adapter(self, digest: str) -> None:
        self._check_alive()
        self.unloaded.append(digest)

    async def stats(self) -> EngineStats:
        self._check_alive()
        return self.snapshot

    async def close(self) -> None:
        self.alive = False

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineUnavailableError("the engine is not there")

    async def _trouble(self, request: Request, number: int) -> None:
        await asyncio.sleep(0)
        if number == self.fails_at:
            raise self.error
        if number == self.stalls_at:
            self.stalled.append(request.request_id)
            await asyncio.Event().wait()

    def _output(
        self, request: Request, text: str, number: int, finish: FinishReason | None
    ) -> RequestOutput:
        return RequestOutput(
            request_id=request.request_id,
            text=text,
            token_ids=(number,),
            finish_reason=finish,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=len(request.prompt_token_ids) // 2,
            num_output_tokens=number,
            metrics=RequestMetrics(
                queued_seconds=0.001,
                first_token_seconds=0.002,
                total_seconds=0.003,
                queued_by_cause=WAITS,
                stages=self._stages(request) if finish else (),
            ),
        )

    def _stages(self, request: Request) -> tuple[Stage, ...]:
        """What a real engine would tell, evenly spread over the time that the request took."""
        told = [
            (StageName.QUEUED, "core", 0),
            (StageName.SCHEDULED, "scheduler", 0),
            (StageName.PREFILL_CHUNK, "runner", len(request.prompt_token_ids)),
            (StageName.FIRST_TOKEN, "sampler", 0),
            (StageName.LAST_TOKEN, "sampler", 0),
            (StageName.DETOKENISED, "outputs", 0),
        ]
        first = self.added[request.request_id]
        step = (time.monotonic() - first) / len(told)
        return tuple(
            Stage(name, first + number * step, f"manylora.engine.{module}", tokens)
            for number, (name, module, tokens) in enumerate(told)
        )
