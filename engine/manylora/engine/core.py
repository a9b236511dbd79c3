"""The engine without threads or processes: add requests, take steps, get outputs.

A step finishes adapter loads, schedules, fills slots, runs the model, samples, and advances.
`EngineCore` belongs to one thread.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import structlog
from torch import Tensor

from manylora.engine.adapters import AdapterCache
from manylora.engine.api import (
    EngineInfo,
    EngineStats,
    FinishReason,
    Request,
    RequestMetrics,
    RequestOutput,
    SlotStats,
)
from manylora.engine.errors import EngineOverloadedError, InvalidRequestError
from manylora.engine.outputs import accept_token, final_output
from manylora.engine.runner import ModelRunner
from manylora.engine.sampler import draw_seed, sample
from manylora.engine.scheduler import ScheduledBatch, Scheduler
from manylora.engine.sequence import Sequence
from manylora.engine.text.processor import TextProcessor
from manylora.engine.text.stops import StopMatcher
from manylora.engine.trace import StepTrace

logger = structlog.get_logger(__name__)

RETRY_AFTER_SECONDS = 1.0


class EngineCore:
    """One base model, its KV cache and adapters, and the requests on them. See `build.py`."""

    def __init__(
        self,
        *,
        info: EngineInfo,
        text: TextProcessor,
        runner: ModelRunner,
        adapters: AdapterCache,
        scheduler: Scheduler,
        max_num_waiting: int,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self.text = text
        self.runner = runner
        self.adapters = adapters
        self.scheduler = scheduler
        self.trace = StepTrace()
        self._max_num_waiting = max_num_waiting
        self._seed = seed
        self._clock = clock
        self._started = clock()
        self._step_began: float | None = None
        self._sequences: dict[str, Sequence] = {}
        self._num_preemptions = 0
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._num_drawn_seeds = 0
        self._dropping: set[str] = set()  # adapters that leave with their last sequence

    @property
    def has_work(self) -> bool:
        return bool(self._sequences) or self.adapters.has_loads

    @property
    def step_age_seconds(self) -> float:
        """How long the step that runs now has run; 0 between steps. Safe from any thread."""
        began = self._step_began
        return 0.0 if began is None else self._clock() - began

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never be served.
            EngineOverloadedError: the queue is full.
            AdapterNotFoundError: its adapter is not in the store.
        """
        self._check(request)
        if request.adapter is not None:
            self.adapters.check_known(request.adapter.digest)
            self._dropping.discard(request.adapter.digest)
        stop = request.params.stop
        sequence = Sequence(
            request=request,
            token_ids=list(request.prompt_token_ids),
            arrival_time=self._clock(),
            detokenizer=(
                self.text.detokenizer(request.prompt_token_ids) if self.text.has_tokenizer else None
            ),
            stops=StopMatcher(stop) if stop else None,
            seed=self._seed_of(request),
        )
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Forget a request and free what it holds; unknown ids are no error."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, FinishReason.ABORT)

    def step(self) -> list[RequestOutput]:
        """Take one step; the deltas of every sequence that got a token or ended."""
        self._step_began = self._clock()
        outputs = self._finish_loads()
        batch = self.scheduler.schedule()
        self._count(batch)
        for slot, digest in batch.fills:
            self.runner.fill_slot(slot, self.adapters.get(digest))
        if batch.entries:
            self.trace.add(batch)
            outputs += self._sample(batch, self.runner.run(batch))
        self.adapters.make_ready(self.scheduler.adapters_by_need())
        self._drop_unneeded()
        self._step_began = None
        return outputs

    def unload_adapter(self, digest: str) -> None:
        """Drop an adapter from its slot and from host memory once no sequence needs it."""
        self._dropping.add(digest)
        self._drop_unneeded()

    def stats(self) -> EngineStats:
        blocks, slots = self.scheduler.blocks, self.scheduler.slots
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            kv_blocks_used=blocks.num_used,
            kv_blocks_total=blocks.num_blocks,
            num_steps=self.trace.num_steps,
            num_preemptions=self._num_preemptions,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            uptime_seconds=self._clock() - self._started,
            slots=tuple(
                SlotStats(
                    slot=index,
                    digest=slots.digest(index),
                    holds=slots.holds(index),
                    size_bytes=self.runner.slot_bytes(index),
                )
                for index in range(len(slots))
            ),
            host_digests=self.adapters.digests,
        )

    def close(self) -> None:
        self.adapters.close()

    def _check(self, request: Request) -> None:
        """Refuse what can never be served, with the numbers that say why."""
        if request.request_id in self._sequences:
            raise InvalidRequestError("a request of this id is running", param="request_id")
        length, limit = len(request.prompt_token_ids), self.info.max_model_len
        if length >= limit:
            raise InvalidRequestError(
                f"the prompt has {length} tokens; the model's context is {limit} tokens and must "
                "hold at least one more",
                param="prompt",
                code="context_length_exceeded",
            )
        vocab_size = self.text.vocab_size
        if not all(0 <= token < vocab_size for token in request.prompt_token_ids):
            raise InvalidRequestError(
                f"a prompt token id is not between 0 and {vocab_size - 1}", param="prompt"
            )
        for name in ("logit_bias", "stop_token_ids"):
            if any(token >= vocab_size for token in getattr(request.params, name)):
                raise InvalidRequestError(
                    f"a token id of {name} is not between 0 and {vocab_size - 1}", param=name
                )
        if len(self.scheduler.waiting) >= self._max_num_waiting:
            raise EngineOverloadedError(RETRY_AFTER_SECONDS)

    def _seed_of(self, request: Request) -> int:
        """The request's seed; one that brings none gets the next that the engine's seed gives."""
        if request.params.seed is not None:
            return request.params.seed
        self._num_drawn_seeds += 1
        return draw_seed(self._seed, self._num_drawn_seeds)

    def _drop_unneeded(self) -> None:
        needed = {sequence.digest for sequence in self._sequences.values()}
        for digest in self._dropping - needed:
            if self.adapters.is_loading(digest):
                continue
            slot = self.scheduler.slots.drop(digest)
            if slot is not None:
                self.runner.empty_slot(slot)
            self.adapters.drop(digest)
            self._dropping.remove(digest)

    def _finish_loads(self) -> list[RequestOutput]:
        """End the requests whose adapter turned out not to load."""
        outputs = []
        for digest, error in self.adapters.finish_loads().items():
            logger.warning("adapter_load_failed", digest=digest, reasons=error.reasons)
            hit = [s for s in self._sequences.values() if s.digest == digest]
            outputs += [self._end(s, FinishReason.ERROR, error=str(error)) for s in hit]
        return outputs

    def _count(self, batch: ScheduledBatch) -> None:
        now = self._clock()
        for sequence in batch.preempted:
            self._num_preemptions += 1
            logger.info(
                "sequence_preempted",
                request_id=sequence.request_id,
                tenant=sequence.request.tenant,
                times=sequence.num_preemptions,
            )
        for entry in batch.entries:
            sequence = entry.sequence
            if sequence.first_scheduled_time is None:
                sequence.first_scheduled_time = now
                self._prompt_tokens += sequence.num_prompt_tokens

    def _sample(self, batch: ScheduledBatch, logits: Tensor) -> list[RequestOutput]:
        """Count the step's tokens as computed and give each sampling sequence its token."""
        sampling = [entry.sequence for entry in batch.entries if entry.samples]
        self.scheduler.advance(batch)
        return [self._accept(sequence, row) for sequence, row in zip(sampling, logits, strict=True)]

    def _accept(self, sequence: Sequence, logits: Tensor) -> RequestOutput:
        sampled = sample(
            logits,
            sequence.request.params,
            seed=sequence.seed,
            prompt=sequence.request.prompt_token_ids,
            output=sequence.token_ids[sequence.num_prompt_tokens :],
            eos_token_ids=self.text.eos_token_ids,
        )
        if sampled.token_id is None:
            logger.warning("logits_not_finite", request_id=sequence.request_id)
            self.scheduler.forget_prefix(sequence)
            return self._end(
                sequence, FinishReason.ERROR, error="the model gave numbers that are not finite"
            )
        if sequence.first_token_time is None:
            sequence.first_token_time = self._clock()
        self._output_tokens += 1
        output = accept_token(sequence, sampled, self.text.eos_token_ids, self.info.max_model_len)
        if output.finish_reason is not None:
            self._forget(sequence)
        return replace(output, metrics=self._metrics(sequence))

    def _end(
        self, sequence: Sequence, reason: FinishReason, *, error: str | None = None
    ) -> RequestOutput:
        self._forget(sequence)
        sequence.finish(reason, error=error)
        return final_output(sequence, self._metrics(sequence))

    def _forget(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        del self._sequences[sequence.request_id]

    def _metrics(self, sequence: Sequence) -> RequestMetrics:
        """Seconds since arrival; a stage that was not reached lasts until now."""
        arrival, now = sequence.arrival_time, self._clock()
        scheduled = sequence.first_scheduled_time
        first_token = sequence.first_token_time
        return RequestMetrics(
            queued_seconds=(now if scheduled is None else scheduled) - arrival,
            first_token_seconds=(now if first_token is None else first_token) - arrival,
            total_seconds=now - arrival,
            num_preemptions=sequence.num_preemptions,
        )
