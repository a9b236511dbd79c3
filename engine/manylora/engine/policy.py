"""Who goes first, and who gives way: first come, by priority, or fair between tenants."""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Ordered
from heapq import heapify, heappop, heapreplace
from typing import Protocol

from manylora.engine.lifecycle import WaitCause
from manylora.engine.sequence import Sequence

INPUT_PRICE = 1.0  # of service, for a prompt token
OUTPUT_PRICE = 2.0
_BY_ORDER = {WaitCause.KV_BLOCKS, WaitCause.TOKEN_BUDGET, WaitCause.SEQUENCE_LIMIT}


class Policy(Protocol):
    """The order of prefills and admissions, and of giving way. The queues are the scheduler's."""

    reorders: bool  # whether a later request may start before an earlier one

    def arrived(self, sequence: Sequence, waiting: Collection[Sequence]) -> None:
        """A sequence is about to join those that wait."""
        ...

    def order(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        """Running prefills and those that wait, in the order to serve them.

        What is served meanwhile counts.
        """
        ...

    def served(self, sequence: Sequence, *, input_tokens: int = 0, output_tokens: int = 0) -> None:
        """A sequence's tenant was given this much service."""
        ...

    def victim(self, running: Ordered[Sequence], needy: Sequence) -> Sequence:
        """Who gives its KV blocks back when a running one needs some: perhaps `needy` itself."""
        ...

    def yielding(self, running: Ordered[Sequence], newcomer: Sequence) -> Sequence | None:
        """Who gives way to one that waits when there is no seat or no room for it, if anybody."""
        ...


class FirstCome:
    """In the order of the queue; who was admitted last gives way to those before."""

    reorders = False

    def arrived(self, sequence: Sequence, waiting: Collection[Sequence]) -> None: ...

    def order(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        yield from (sequence for sequence in running if sequence.is_prefilling)
        yield from waiting

    def served(
        self, sequence: Sequence, *, input_tokens: int = 0, output_tokens: int = 0
    ) -> None: ...

    def victim(self, running: Ordered[Sequence], needy: Sequence) -> Sequence:
        return running[-1]

    def yielding(self, running: Ordered[Sequence], newcomer: Sequence) -> Sequence | None:
        return None


class ByPriority(FirstCome):
    """The lowest `Request.priority` first, then the first to come. Who is of a higher number gives
    way, for blocks and for seats."""

    reorders = True

    def order(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        prefilling = (sequence for sequence in running if sequence.is_prefilling)
        yield from sorted((*prefilling, *waiting), key=_rank)

    def victim(self, running: Ordered[Sequence], needy: Sequence) -> Sequence:
        return max(running, key=_rank)

    def yielding(self, running: Ordered[Sequence], newcomer: Sequence) -> Sequence | None:
        last = max((s for s in running if s.may_yield), key=_rank, default=newcomer)
        return last if last.request.priority > newcomer.request.priority else None


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.priority, sequence.order


class FairByTenant:
    """Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models",
    OSDI 2024, algorithm 2): the tenant with the least service for its weight goes next.

    Service is prompt tokens at 1 and output tokens at 2, divided by the tenant's weight. A tenant
    that comes back is lifted to where the others are, so that it cannot save up while away.

    Beyond the paper, the seats are shared too: a tenant that holds less of them for its weight than
    another starts its next request at once, and the one of the other's that has computed least
    gives way to it.
    """

    reorders = True

    def __init__(self) -> None:
        self._service: dict[str, float] = {}
        self._last_served: str | None = None

    def arrived(self, sequence: Sequence, waiting: Collection[Sequence]) -> None:
        tenant = sequence.request.tenant
        if any(other.request.tenant == tenant for other in waiting):
            return
        levels = [self._level(other.request.tenant) for other in waiting]
        if not levels and self._last_served is not None:
            levels = [self._level(self._last_served)]
        self._service[tenant] = max(self._level(tenant), min(levels, default=0.0))

    def order(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        """Prefills that run and the next of each tenant that has less than its share of the seats,
        the smallest share first; then the rest by the counters."""
        running = tuple(running)
        seats = _Seats(running)
        queues: dict[str, deque[Sequence]] = {}
        for sequence in waiting:
            queues.setdefault(sequence.request.tenant, deque()).append(sequence)
        poor = [tenant for tenant, queue in queues.items() if seats.is_poor(queue[0])]
        first = [queues[tenant].popleft() for tenant in sorted(poor, key=self._level)]
        prefilling = [sequence for sequence in running if sequence.is_prefilling]
        yield from sorted(prefilling + first, key=seats.share)
        levels = [(self._level(tenant), i, tenant) for i, tenant in enumerate(queues)]
        heapify(levels)
        while levels:
            _, i, tenant = levels[0]
            if queues[tenant]:
                yield queues[tenant].popleft()
                heapreplace(levels, (self._level(tenant), i, tenant))
            else:
                heappop(levels)

    def served(self, sequence: Sequence, *, input_tokens: int = 0, output_tokens: int = 0) -> None:
        request = sequence.request
        service = INPUT_PRICE * input_tokens + OUTPUT_PRICE * output_tokens
        self._service[request.tenant] = self._level(request.tenant) + service / request.weight
        self._last_served = request.tenant

    def victim(self, running: Ordered[Sequence], needy: Sequence) -> Sequence:
        """The newest of the tenant that is furthest ahead, if it is ahead by more than computing
        that sequence again costs; else the newest of all, or two tenants would take turns."""
        ahead = max(dict.fromkeys(s.request.tenant for s in running), key=self._level)
        newest = _newest(running, ahead)
        lead = self._level(ahead) - self._level(needy.request.tenant)
        cost = INPUT_PRICE * newest.num_tokens / newest.request.weight
        return newest if lead > cost else running[-1]

    def yielding(self, running: Ordered[Sequence], newcomer: Sequence) -> Sequence | None:
        seats = _Seats(running)
        rich = seats.newest_of_richest
        if rich is None or not seats.is_poor(newcomer):
            return None
        able = (s for s in running if s.request.tenant == rich.request.tenant and s.may_yield)
        return min(able, key=lambda s: s.progress, default=None)

    def _level(self, tenant: str) -> float:
        return self._service.get(tenant, 0.0)


class _Seats:
    """How many sequences of each tenant run, for its weight."""

    def __init__(self, running: Ordered[Sequence]) -> None:
        newest = {sequence.request.tenant: sequence for sequence in running}
        counts = Counter([sequence.request.tenant for sequence in running])
        self._shares = {tenant: counts[tenant] * _seat(last) for tenant, last in newest.items()}
        richest = max(self._shares, key=lambda tenant: self._shares[tenant], default=None)
        self.newest_of_richest = None if richest is None else newest[richest]

    def share(self, sequence: Sequence) -> float:
        """What the sequence's tenant has."""
        return self._shares.get(sequence.request.tenant, 0.0)

    def is_poor(self, newcomer: Sequence) -> bool:
        """Whether its tenant would still have no more than the richest that gives a seat up."""
        rich = self.newest_of_richest
        if rich is None:
            return False
        return self.share(newcomer) + _seat(newcomer) <= self.share(rich) - _seat(rich)


def _seat(sequence: Sequence) -> float:
    return 1 / sequence.request.weight


def _newest(running: Ordered[Sequence], tenant: str) -> Sequence:
    return next(s for s in reversed(running) if s.request.tenant == tenant)


def name_fairness(running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
    """Where a later arrival of another tenant runs, it is the policy that a sequence waits for."""
    latest: dict[str, int] = {}
    for sequence in running:
        latest[sequence.request.tenant] = max(
            latest.get(sequence.request.tenant, 0), sequence.order
        )
    last, last_of_another = sorted([0, 0, *latest.values()])[:-3:-1]
    for sequence in waiting:
        is_last = latest.get(sequence.request.tenant) == last
        if sequence.wait_cause in _BY_ORDER and sequence.order < (
            last_of_another if is_last else last
        ):
            sequence.wait_cause = WaitCause.FAIRNESS


POLICIES: dict[str, type[Policy]] = {
    "fair": FairByTenant,
    "fcfs": FirstCome,
    "priority": ByPriority,
}
