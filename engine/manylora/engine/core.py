"""The engine without threads or processes: add requests, take steps, get outputs.

A step finishes adapter loads, schedules, fills slots, runs the model, samples, and advances.
`EngineCore` belongs to one thread.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import structlog
import torch
from torch import Tensor

from manylora.engine.adapters import AdapterCache, AdapterWeights
from manylora.engine.api import (
    AdapterInfo,
    EngineInfo,
    EngineStats,
    FinishReason,
    Request,
    RequestOutput,
)
from manylora.engine.counters import Counters, Reporter
from manylora.engine.errors import EngineOverloadedError
from manylora.engine.lifecycle import StageName, WaitCause
from manylora.engine.outputs import accept_token, final_output, request_metrics, take_logits
from manylora.engine.preemptions import PreemptionLog
from manylora.engine.runner import ModelRunner
from manylora.engine.sampler import draw_seed
from manylora.engine.schedule import ScheduledBatch
from manylora.engine.scheduler import Scheduler
from manylora.engine.sequence import Sequence
from manylora.engine.stats import snapshot
from manylora.engine.text.processor import TextProcessor
from manylora.engine.trace import StepTrace
from manylora.engine.validation import check_request

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
        trace: StepTrace,
        max_num_waiting: int,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self.text = text
        self.runner = runner
        self.adapters = adapters
        self.scheduler = scheduler
        self.trace = trace
        self.counters = Counters()
        self.preemptions = PreemptionLog(info)
        self._max_num_waiting = max_num_waiting
        self._seed = seed
        self.clock = clock
        self._started = clock()
        self._reporter = Reporter(self.counters, self._started)
        self._step_began: float | None = None
        self.sequences: dict[str, Sequence] = {}  # waiting and running
        self._num_drawn_seeds = 0
        self._dropping: set[str] = set()  # adapters that leave with their last sequence

    @property
    def has_work(self) -> bool:
        return bool(self.sequences) or self.adapters.has_loads

    @property
    def step_age_seconds(self) -> float:
        """How long the step that runs now has run; 0 between steps. Safe from any thread."""
        began = self._step_began
        return 0.0 if began is None else self.clock() - began

    def add(self, request: Request, *, arrived: float | None = None) -> None:
        """Queue a request.

        Args:
            arrived: when it came, if that was during a step; by default now.

        Raises:
            InvalidRequestError: it can never be served.
            EngineOverloadedError: the queue is full.
            AdapterNotFoundError: its adapter is not in the store.
        """
        self.check(request)
        if len(self.scheduler.waiting) >= self._max_num_waiting:
            raise EngineOverloadedError(RETRY_AFTER_SECONDS)
        if request.adapter is not None:
            self._dropping.discard(request.adapter.digest)
        seed = self.next_seed() if request.params.seed is None else request.params.seed
        step = self.trace.num_steps
        sequence = Sequence.begin(request, self.text, seed=seed, arrival_step=step)
        arrived = self.clock() if arrived is None else arrived
        sequence.life.stamp(StageName.QUEUED, arrived)
        sequence.life.wait(WaitCause.STEP, arrived)
        self.sequences[request.request_id] = sequence
        self.scheduler.add(sequence)
        self.trace.added(sequence, arrived)

    def check(self, request: Request) -> None:
        """
        Raises:
            InvalidRequestError: it can never be served.
            AdapterNotFoundError: its adapter is not in the store.
        """
        check_request(request, self.info, self.text.vocab_size, running=self.sequences)
        if request.adapter is not None:
            self.adapters.check_known(request.adapter.digest)

    def next_seed(self) -> int:
        """The seed of the next request that brings none: all follow from the engine's seed."""
        self._num_drawn_seeds += 1
        return draw_seed(self._seed, self._num_drawn_seeds)

    def abort(self, request_id: str) -> None:
        """Forget a request and free what it holds; unknown ids are no error."""
        sequence = self.sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, FinishReason.ABORT)

    def step(self) -> list[RequestOutput]:
        """Take one step; the deltas of every sequence that got a token or ended."""
        self._step_began = began = self.clock()
        outputs = self._finish_loads()
        self.trace.ready(self.adapters.digests, began)
        batch = self.scheduler.schedule()
        self._explain(batch)
        for slot, digest in batch.fills:
            self.runner.fill_slot(slot, self.adapters.get(digest))
        if batch.entries:
            self.trace.add(batch, began)
            outputs += self._sample(batch, self.runner.run(batch))
        self.adapters.make_ready(self.scheduler.adapters_by_need())
        self._drop_unneeded()
        now = self.clock()
        if self._reporter.is_due(began, now):
            self._reporter.report(self.stats(), now)
        self.trace.end_step(now, is_last=not self.has_work)
        self._step_began = None
        return outputs

    def add_adapter(self, folder: Path) -> AdapterInfo:
        """Load a PEFT folder outside the store now.

        Raises:
            AdapterError: it would not be applied exactly.
        """
        info = self.adapters.add_folder(folder)
        self._dropping.discard(info.digest)
        return info

    def begin_load(self, digest: str) -> Future[AdapterWeights]:
        """Start loading an adapter of the store; see `AdapterCache.begin_load`."""
        self._dropping.discard(digest)
        return self.adapters.begin_load(digest)

    def unload_adapter(self, digest: str) -> None:
        """Drop an adapter from its slot and from host memory once no sequence needs it."""
        self._dropping.add(digest)
        self._drop_unneeded()

    @property
    def uptime_seconds(self) -> float:
        return self.clock() - self._started

    def stats(self) -> EngineStats:
        return snapshot(self)

    def flush_trace(self) -> None:
        """Write what is recorded, before a wait of unknown length."""
        self.trace.flush(self.clock())

    def close(self) -> None:
        self.trace.close()
        self.adapters.close()

    def _drop_unneeded(self) -> None:
        if not self._dropping:
            return
        needed = {sequence.digest for sequence in self.sequences.values()}
        for digest in self._dropping - needed:
            if self.adapters.is_loading(digest):
                continue
            slot = self.scheduler.slots.drop(digest)
            if slot is not None:
                self.runner.empty_slot(slot)
                self.trace.slot_emptied(slot, digest, self.clock())
            self.adapters.drop(digest)
            self._dropping.remove(digest)

    def _finish_loads(self) -> list[RequestOutput]:
        """End the requests whose adapter turned out not to load."""
        outputs = []
        for digest, error in self.adapters.finish_loads().items():
            logger.warning("adapter_load_failed", digest=digest, reasons=error.reasons)
            hit = [s for s in self.sequences.values() if s.digest == digest]
            outputs += [self._end(s, FinishReason.ERROR, error=str(error)) for s in hit]
        return outputs

    def _explain(self, batch: ScheduledBatch) -> None:
        """Note what the scheduler decided: in each life it changed, in the totals, in the log."""
        now = self.clock()
        self.counters.scheduled(batch)
        for preemption in batch.preempted:
            preemption.sequence.life.stamp(StageName.PREEMPTED, now)
        self.preemptions.tell(batch.preempted, self.scheduler, now)
        for sequence in self.scheduler.waiting:
            if sequence.life.cause is not sequence.wait_cause:
                sequence.note_wait(sequence.wait_cause, now)
        for sequence in batch.started:
            sequence.note_wait(None, now)
            first = sequence.num_preemptions == 0
            sequence.life.stamp(StageName.SCHEDULED if first else StageName.RESUMED, now)

    def _sample(self, batch: ScheduledBatch, logits: Tensor) -> list[RequestOutput]:
        """Count the step's tokens as computed and give each sampling sequence its token."""
        now = self.clock()
        for entry in batch.entries:
            if entry.is_prefill:
                entry.sequence.life.stamp(StageName.PREFILL_CHUNK, now, entry.num_tokens)
        rows = torch.split(logits, [len(entry.logit_positions) for entry in batch.entries])
        sampling = [entry.samples for entry in batch.entries]
        self.scheduler.advance(batch)
        outputs = [
            self._accept(entry.sequence, its_rows, samples=samples)
            for entry, its_rows, samples in zip(batch.entries, rows, sampling, strict=True)
        ]
        return [output for output in outputs if output is not None]

    def _accept(self, sequence: Sequence, rows: Tensor, *, samples: bool) -> RequestOutput | None:
        eos_token_ids = self.text.eos_token_ids
        sampled = take_logits(sequence, rows, samples=samples, eos_token_ids=eos_token_ids)
        if sampled is None:
            return None
        if sampled.token_id is None:
            logger.warning("logits_not_finite", request_id=sequence.request_id)
            self.scheduler.prefixes.forget(sequence)
            self.trace.prefix_forgotten(sequence, self.clock())
            return self._end(
                sequence, FinishReason.ERROR, error="the model gave numbers that are not finite"
            )
        now = self.clock()
        if sequence.num_output_tokens == 0:
            sequence.life.stamp(StageName.FIRST_TOKEN, now)
        self.counters.output_tokens += 1
        output = accept_token(sequence, sampled, eos_token_ids, self.info.max_model_len)
        if output.finish_reason is not None:
            sequence.life.stamp(StageName.LAST_TOKEN, now)
            sequence.life.stamp(StageName.DETOKENISED, self.clock())
            self._forget(sequence, output.finish_reason)
        return replace(output, metrics=request_metrics(sequence, self.clock()))

    def _end(
        self, sequence: Sequence, reason: FinishReason, *, error: str | None = None
    ) -> RequestOutput:
        self._forget(sequence, reason)  # first: its length says nothing of what others will want
        sequence.finish(reason, error=error)
        return final_output(sequence, request_metrics(sequence, self.clock()))

    def _forget(self, sequence: Sequence, reason: FinishReason) -> None:
        now = self.clock()
        sequence.life.wait(None, now)
        self.counters.ended(sequence)
        self.preemptions.ended(sequence)
        self.scheduler.remove(sequence)
        self.trace.removed(sequence, reason, now)
        del self.sequences[sequence.request_id]
