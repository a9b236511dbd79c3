"""The snapshot of an engine that `/api/v1/engine`, `/metrics` and the log line are made from."""

from collections import Counter
from typing import TYPE_CHECKING

from manylora.engine.api import EngineStats, SlotStats

if TYPE_CHECKING:
    from manylora.engine.core import EngineCore


def snapshot(core: "EngineCore") -> EngineStats:
    """How the engine stands between two steps."""
    scheduler, counters = core.scheduler, core.counters
    blocks, slots = scheduler.blocks, scheduler.slots
    queued = counters.queued_seconds.copy()
    now = core.clock()
    for sequence in core.sequences.values():
        queued.update(sequence.life.waited_until(now))
    return EngineStats(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        waiting_by_cause=Counter(s.wait_cause for s in scheduler.waiting),
        kv_blocks_used=blocks.num_used,
        kv_blocks_total=blocks.num_blocks,
        num_steps=core.trace.num_steps,
        step_tokens=counters.step_tokens,
        steps_by_tokens=tuple(counters.steps_by_tokens),
        num_preemptions=core.preemptions.count,
        recomputed_tokens=counters.recomputed_tokens,
        prompt_tokens=counters.prompt_tokens,
        output_tokens=counters.output_tokens,
        prefix_queried_tokens=counters.prefix_queried_tokens,
        prefix_hit_tokens=counters.prefix_hit_tokens,
        queued_seconds_by_cause=queued,
        adapter_loads=core.adapters.num_loads,
        slot_fills=counters.slot_fills,
        uptime_seconds=core.uptime_seconds,
        remedies=core.preemptions.remedies,
        slots=tuple(
            SlotStats(
                slot=index,
                digest=slots.digest(index),
                holds=slots.holds(index),
                size_bytes=core.runner.slot_bytes(index),
            )
            for index in range(len(slots))
        ),
        host_digests=core.adapters.digests,
    )
