"""What prefix caching would give, or gives: the recorded traffic is served again in virtual time.

By the scheduler that serves and its recorded options: without prefix caching, and with it. What
eviction costs is told from the second run itself: a larger pool would also let requests begin
together that here began one after the other and could find each other's blocks.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from statistics import fmean

from manylora.engine.api import Request
from manylora.engine.blocks import BlockPool
from manylora.engine.lifecycle import WaitCause
from manylora.engine.prefix_cache import PrefixCache, chain_next
from manylora.engine.schedule import ScheduledBatch
from manylora.engine.scheduler import Scheduler
from manylora.engine.sequence import Sequence
from manylora.engine.simulation import Simulation
from manylora.engine.traffic import Pace, Traffic, read_traffic

ENOUGH_REQUESTS = 20  # none of which found anything: then less than 15 % do, at 95 % confidence
MEASUREMENTS = 3  # of what takes time on this machine; the shortest was disturbed the least
HASHED_BLOCKS = 1000  # in each

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
    hit_rate_unevicted: float  # the same had nothing been evicted before a request began
    prefill_seconds: Change  # for its tokens; steps have a part of their own besides
    first_token_mean_seconds: Change
    first_token_p95_seconds: Change
    overhead_seconds: float  # to hash blocks and look them up, measured on this machine
    is_pure_overhead: bool  # enough requests found nothing for it, evicted or not


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The same for all together, what it rests on, and each tenant and adapter."""

    recorded_with_caching: bool
    recorded_hit_rate: float  # as the engine counted it
    hit_rate: float
    hit_rate_unevicted: float
    num_kv_blocks: int
    requests_short_of_blocks: int  # with prefix caching: waited for KV blocks or lost them
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
    on, *again = [serve(traffic, prefix_caching=True) for _ in range(MEASUREMENTS)]
    for group, outcome in on.items():
        others = [outcomes[group].lookup_seconds for outcomes in again]
        outcome.lookup_seconds = min(outcome.lookup_seconds, *others)
    hashing = _hashing_seconds(traffic, seconds_a_block(header.engine.block_size))
    return Advice(
        recorded_with_caching=header.enable_prefix_caching,
        recorded_hit_rate=_rate(
            sum(request.num_cached_tokens for request in traffic.requests),
            sum(request.added.prompt_tokens for request in traffic.requests),
        ),
        hit_rate=_hit_rate(on.values()),
        hit_rate_unevicted=_unevicted_rate(on.values()),
        num_kv_blocks=header.engine.num_kv_blocks,
        requests_short_of_blocks=sum(len(outcome.short_of_blocks) for outcome in on.values()),
        num_steps=len(traffic.steps),
        step_seconds=traffic.cost.step,
        token_seconds=traffic.cost.token,
        groups=tuple(
            _advise_group(
                group,
                off[group],
                on[group],
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
        hit_rate_unevicted=_unevicted_rate([on]),
        prefill_seconds=Change(
            off.prefill_tokens * token_seconds, on.prefill_tokens * token_seconds
        ),
        first_token_mean_seconds=Change(fmean(first_off), fmean(first_on)),
        first_token_p95_seconds=Change(_p95(first_off), _p95(first_on)),
        overhead_seconds=hashing_seconds + on.lookup_seconds,
        is_pure_overhead=on.unevicted_tokens == 0 and len(first_on) >= ENOUGH_REQUESTS,
    )


@dataclass(slots=True)
class Outcome:
    """How one group fared in one run."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    unevicted_tokens: int = 0  # hit, had nothing been evicted before
    prefill_tokens: int = 0  # computed; once more after a preemption
    first_token_seconds: list[float] = field(default_factory=list)  # virtual
    lookup_seconds: float = 0.0  # in the prefix cache, on this machine
    short_of_blocks: set[str] = field(default_factory=set)  # request ids


def serve(traffic: Traffic, *, prefix_caching: bool) -> Mapping[Group, Outcome]:
    """Serve the traffic in virtual time, with adapters always at hand."""
    outcomes: defaultdict[Group, Outcome] = defaultdict(Outcome)
    scheduler = traffic.header.scheduler(
        adapter_ready=lambda digest: True, prefix_caching=prefix_caching
    )
    scheduler.prefixes = prefixes = _WatchedPrefixCache(scheduler.blocks, outcomes)
    find_short = _shortage(traffic, scheduler)

    def count(batch: ScheduledBatch) -> None:
        for entry in batch.entries:
            if entry.is_prefill:
                outcomes[_group(entry.sequence.request)].prefill_tokens += entry.num_tokens
        for sequence in batch.started:
            if sequence.num_preemptions == 0:
                unevicted = prefixes.count_ever_computed(sequence)
                outcomes[_group(sequence.request)].unevicted_tokens += unevicted
        for sequence in find_short(batch):
            outcomes[_group(sequence.request)].short_of_blocks.add(sequence.request_id)

    simulation = Simulation(scheduler, Pace(traffic), on_step=count)
    for served in simulation.run(request.arrival() for request in traffic.requests):
        outcome = outcomes[_group(served.request)]
        outcome.prompt_tokens += len(served.request.prompt_token_ids)
        outcome.hit_tokens += served.num_cached_tokens
        outcome.first_token_seconds.append(served.seconds_to_first_token)
    return outcomes


def _shortage(traffic: Traffic, scheduler: Scheduler) -> Callable[[ScheduledBatch], list[Sequence]]:
    """Who had to give KV blocks back in a step, or waits for some."""
    engine = traffic.header.engine

    def find(batch: ScheduledBatch) -> list[Sequence]:
        causes = {WaitCause.KV_BLOCKS}
        if (
            len(scheduler.running) < engine.max_num_seqs
            and batch.num_tokens < engine.max_num_batched_tokens
        ):
            causes.add(WaitCause.FAIRNESS)  # who is first by the policy then lacks blocks
        lost = [preemption.sequence for preemption in batch.preempted if preemption.blocks_short]
        return lost + [s for s in scheduler.waiting if s.wait_cause in causes]

    return find


class _WatchedPrefixCache(PrefixCache):
    """Adds up the time that each group's requests spend in the cache, and forgets no block."""

    def __init__(self, blocks: BlockPool, outcomes: Mapping[Group, Outcome]) -> None:
        # No root is made: all blocks come with their hashes.
        super().__init__(blocks, base_digest="", kv_dtype="", secret=b"", share_base_prefixes=False)
        self._outcomes = outcomes
        self._computed: defaultdict[bytes, set[str]] = defaultdict(set)  # tenants, by block hash

    def find(self, sequence: Sequence) -> list[int]:
        began = time.perf_counter()
        found = super().find(sequence)
        self._outcomes[_group(sequence.request)].lookup_seconds += time.perf_counter() - began
        return found

    def remember(self, sequence: Sequence, first_token: int) -> None:
        began = time.perf_counter()
        super().remember(sequence, first_token)
        self._outcomes[_group(sequence.request)].lookup_seconds += time.perf_counter() - began
        if not self._blocks.prefix_caching:
            return
        size = self._blocks.block_size
        full = sequence.num_computed_tokens // size
        hashes = self.hashes(sequence, full)
        for index in range(first_token // size, full):
            if self._blocks.find_prefix(hashes[index : index + 1]) == [sequence.block_table[index]]:
                self._computed[hashes[index]].add(sequence.request.tenant)

    def count_ever_computed(self, sequence: Sequence) -> int:
        """Tokens of its prompt that would be found now, had nothing been evicted.

        The tenant's own alone, as a hit is counted: computed when nobody else's was there.
        """
        if not self._blocks.prefix_caching or sequence.lacks_prompt_logprobs:
            return 0
        size = self._blocks.block_size
        full = (sequence.num_prompt_tokens - 1) // size
        chain = takewhile(self._computed.__contains__, self.hashes(sequence, full)[:full])
        tenant = sequence.request.tenant
        return size * sum(tenant in self._computed[block_hash] for block_hash in chain)


def seconds_a_block(block_size: int) -> float:
    """What it takes this machine to hash a full block of tokens."""
    tokens = range(block_size)

    def measure() -> float:
        link, began = b"", time.perf_counter()
        for _ in range(HASHED_BLOCKS):
            link = chain_next(link, tokens)
        return (time.perf_counter() - began) / HASHED_BLOCKS

    return min(measure() for _ in range(MEASUREMENTS))


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


def _unevicted_rate(outcomes: Iterable[Outcome]) -> float:
    all_outcomes = list(outcomes)
    return _rate(
        sum(o.unevicted_tokens for o in all_outcomes), sum(o.prompt_tokens for o in all_outcomes)
    )


def _rate(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _p95(values: list[float]) -> float:
    """The nearest-rank percentile."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]
