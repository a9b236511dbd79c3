"""Totals since the engine's start, and the line that says now and then how it goes."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

import structlog

from manylora.engine.api import NUM_STEP_SIZES, STEP_TOKEN_BOUNDS, EngineInfo, EngineStats
from manylora.engine.lifecycle import WaitCause
from manylora.engine.schedule import ScheduledBatch
from manylora.engine.sequence import Sequence

logger = structlog.get_logger(__name__)

REPORT_SECONDS = 10.0


@dataclass(slots=True)
class Counters:
    """What only grows."""

    step_tokens: int = 0
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * NUM_STEP_SIZES)
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    slot_fills: int = 0
    queued_seconds: Counter[WaitCause] = field(default_factory=Counter)

    def scheduled(self, batch: ScheduledBatch) -> None:
        """Count a step that was chosen, before its tokens count as computed."""
        if batch.entries:
            self.step_tokens += batch.num_tokens
            self.steps_by_tokens[bisect_left(STEP_TOKEN_BOUNDS, batch.num_tokens)] += 1
        self.slot_fills += len(batch.fills)
        for sequence in batch.started:
            if sequence.num_preemptions == 0:
                self.prompt_tokens += sequence.num_prompt_tokens
                self.prefix_queried_tokens += sequence.num_queried_tokens
                self.prefix_hit_tokens += sequence.num_found_tokens
        for entry in batch.entries:
            start, sequence = entry.positions.start, entry.sequence
            again = min(start + entry.num_tokens, sequence.num_once_computed) - start
            self.recomputed_tokens += max(0, again)

    def ended(self, sequence: Sequence) -> None:
        """Count the waits of a request that has left."""
        self.queued_seconds.update(sequence.life.waited)


class Reporter:
    """Logs how the engine goes, every `REPORT_SECONDS` while it works."""

    def __init__(self, counters: Counters, now: float) -> None:
        self._counters = counters
        self._last_step = now
        self._begin(now)

    def is_due(self, began: float, now: float) -> bool:
        """Whether it is time, after a step; an idle stretch before it does not count."""
        if began - self._last_step >= REPORT_SECONDS:
            self._begin(began)
        self._last_step = now
        return now - self._last >= REPORT_SECONDS

    def _begin(self, now: float) -> None:
        self._last = now
        self._tokens = self._counters.prompt_tokens, self._counters.output_tokens

    def report(self, stats: EngineStats, now: float) -> None:
        seconds, (prompt, output) = now - self._last, self._tokens
        self._begin(now)
        queried = stats.prefix_queried_tokens
        logger.info(
            "engine_steady",
            running=stats.num_running,
            waiting={str(cause): count for cause, count in stats.waiting_by_cause.items()},
            kv_used=f"{stats.kv_blocks_used}/{stats.kv_blocks_total}",
            prefix_hit_rate=round(stats.prefix_hit_tokens / queried, 3) if queried else None,
            preemptions=stats.num_preemptions,
            adapters_in_slots=sum(slot.digest is not None for slot in stats.slots),
            adapters_in_memory=len(stats.host_digests),
            prompt_tokens_per_second=round((stats.prompt_tokens - prompt) / seconds, 1),
            output_tokens_per_second=round((stats.output_tokens - output) / seconds, 1),
        )


def report_start(info: EngineInfo) -> None:
    """Log what was loaded and how much it holds."""
    kv_tokens = info.num_kv_blocks * info.block_size
    logger.info(
        "engine_ready",
        model=info.model,
        dtype=info.dtype,
        device=info.device,
        kernels=info.kernels,
        max_model_len=info.max_model_len,
        kv_blocks=info.num_kv_blocks,
        kv_tokens=kv_tokens,
        full_length_requests=round(kv_tokens / info.max_model_len, 1),
        max_num_seqs=info.max_num_seqs,
        adapter_slots=info.max_loras,
    )
