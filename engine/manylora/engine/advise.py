"""What prefix caching would give, or gives: the recorded traffic is served again in virtual time.

Three times, by the scheduler that serves and its recorded options: without prefix caching, with it,
and with it in a pool so large that nothing is evicted.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from manylora.engine.api import Request
from manylora.engine.blocks import BlockPool
from manylora.engine.prefix_cache import PrefixCache, chain_next
from manylora.engine.schedule import ScheduledBatch
from manylora.engine.sequence import Sequence
from manylora.engine.simulation import Simulation
from manylora.engine.traffic import Pace, Traffic, read_traffic

HASHED_BLOCKS = 2000  # to measure what one costs

Group = tuple[str, str | None]
"""A tenant, and an adapter's digest or None for the base."""


@dataclass(frozen=True, slots=True)
class Change:
    """A time in seconds without prefix caching, and with it."""

    off: float
    on: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvice:
    """What prefix caching does for one tenant's requests to one adapter."""

    tenant: str
    adapter: str | None  # its digest; None for the base
    requests: int
    prompt_tokens: int
    hit_tokens: int
    hit_rate: float  # of the prompt tokens
    hit_rate_unlimited: float  # the same in a pool that evicts nothing
    prefill_seconds: Change  # for its tokens; steps have a part of their own besides
    first_token_mean_seconds: Change
    first_token_p95_seconds: Change
    overhead_seconds: float  # to hash blocks and look them up, measured on this machine
    is_pure_overhead: bool  # nothing was found for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The same for all together, what it rests on, and each tenant and adapter."""

    recorded_with_caching: bool
    recorded_hit_rate: float  # as the engine counted it
    hit_rate: float
    hit_rate_unlimited: float
    num_kv_blocks: int
    num_steps: int
    step_seconds: float  # a step's own part of its time,
    token_seconds: float  # and what each of its tokens adds
    groups: tuple[GroupAdvice, ...]


def advise(path: Path) -> Advice:
    """Serve a recording's traffic anew, and compare.

    Raises:
        RecordingError: the file cannot be read.
    """
    traffic = read_traffic(path)
    header = traffic.header
    off = serve(traffic, prefix_caching=False)
    on = serve(traffic, prefix_caching=True)
    unlimited = serve(traffic, prefix_caching=True, num_kv_blocks=traffic.num_blocks_for_all)
    hashing = _hashing_seconds(traffic, seconds_a_block(header.engine.block_size))
    return Advice(
        recorded_with_caching=header.enable_prefix_caching,
        recorded_hit_rate=_rate(
            sum(request.num_cached_tokens for request in traffic.requests),
            sum(request.added.prompt_tokens for request in traffic.requests),
        ),
        hit_rate=_hit_rate(on.values()),
        hit_rate_unlimited=_hit_rate(unlimited.values()),
        num_kv_blocks=header.engine.num_kv_blocks,
        num_steps=len(traffic.steps),
        step_seconds=traffic.cost.step,
        token_seconds=traffic.cost.token,
        groups=tuple(
            _advise_group(
                group,
                off[group],
                on[group],
                hit_rate_unlimited=_hit_rate([unlimited[group]]),
                token_seconds=traffic.cost.token,
                hashing_seconds=hashing[group],
            )
            for group in sorted(on, key=lambda group: (group[0], group[1] or ""))
        ),
    )


def _advise_group(
    group: Group,
    off: "Outcome",
    on: "Outcome",
    *,
    hit_rate_unlimited: float,
    token_seconds: float,
    hashing_seconds: float,
) -> GroupAdvice:
    tenant, adapter = group
    first_off, first_on = off.first_token_seconds, on.first_token_seconds
    return GroupAdvice(
        tenant=tenant,
        adapter=adapter,
        requests=len(first_on),
        prompt_tokens=on.prompt_tokens,
        hit_tokens=on.hit_tokens,
        hit_rate=_hit_rate([on]),
        hit_rate_unlimited=hit_rate_unlimited,
        prefill_seconds=Change(
            off.prefill_tokens * token_seconds, on.prefill_tokens * token_seconds
        ),
        first_token_mean_seconds=Change(fmean(first_off), fmean(first_on)),
        first_token_p95_seconds=Change(_p95(first_off), _p95(first_on)),
        overhead_seconds=hashing_seconds + on.lookup_seconds,
        is_pure_overhead=on.hit_tokens == 0,
    )


@dataclass(slots=True)
class Outcome:
    """How one group fared in one run."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    prefill_tokens: int = 0  # computed; once more after a preemption
    first_token_seconds: list[float] = field(default_factory=list)  # virtual
    lookup_seconds: float = 0.0  # in the prefix cache, on this machine


def serve(
    traffic: Traffic, *, prefix_caching: bool, num_kv_blocks: int | None = None
) -> Mapping[Group, Outcome]:
    """Serve the traffic in virtual time, with adapters always at hand."""
    outcomes: defaultdict[Group, Outcome] = defaultdict(Outcome)
    scheduler = traffic.header.scheduler(
        adapter_ready=lambda digest: True,
        prefix_caching=prefix_caching,
        num_kv_blocks=num_kv_blocks,
    )
    scheduler.prefixes = _TimedPrefixCache(scheduler.blocks, outcomes)

    def count(batch: ScheduledBatch) -> None:
        for entry in batch.entries:
            if entry.is_prefill:
                outcomes[_group(entry.sequence.request)].prefill_tokens += entry.num_tokens

    simulation = Simulation(scheduler, Pace(traffic), on_step=count)
    for served in simulation.run(request.arrival() for request in traffic.requests):
        outcome = outcomes[_group(served.request)]
        outcome.prompt_tokens += len(served.request.prompt_token_ids)
        outcome.hit_tokens += served.num_cached_tokens
        outcome.first_token_seconds.append(served.seconds_to_first_token)
    return outcomes


class _TimedPrefixCache(PrefixCache):
    """Adds up the time that each group's requests spend in the cache."""

    def __init__(self, blocks: BlockPool, outcomes: Mapping[Group, Outcome]) -> None:
        # No root is made: all blocks come with their hashes.
        super().__init__(blocks, base_digest="", kv_dtype="", secret=b"", share_base_prefixes=False)
        self._outcomes = outcomes

    def find(self, sequence: Sequence) -> list[int]:
        began = time.perf_counter()
        found = super().find(sequence)
        self._outcomes[_group(sequence.request)].lookup_seconds += time.perf_counter() - began
        return found

    def remember(self, sequence: Sequence, first_token: int) -> None:
        began = time.perf_counter()
        super().remember(sequence, first_token)
        self._outcomes[_group(sequence.request)].lookup_seconds += time.perf_counter() - began


def seconds_a_block(block_size: int) -> float:
    """What it takes this machine to hash a full block of tokens."""
    link, tokens = b"", range(block_size)
    began = time.perf_counter()
    for _ in range(HASHED_BLOCKS):
        link = chain_next(link, tokens)
    return (time.perf_counter() - began) / HASHED_BLOCKS


def _hashing_seconds(traffic: Traffic, seconds: float) -> Mapping[Group, float]:
    """To hash the blocks of each group's requests, which the recording has hashed already."""
    total: defaultdict[Group, float] = defaultdict(float)
    for request in traffic.requests:
        total[request.added.tenant, request.added.adapter] += seconds * len(request.blocks)
    return total


def _group(request: Request) -> Group:
    return request.tenant, None if request.adapter is None else request.adapter.digest


def _hit_rate(outcomes: Iterable[Outcome]) -> float:
    all_outcomes = list(outcomes)
    return _rate(
        sum(o.hit_tokens for o in all_outcomes), sum(o.prompt_tokens for o in all_outcomes)
    )


def _rate(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _p95(values: list[float]) -> float:
    """The nearest-rank percentile."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]
