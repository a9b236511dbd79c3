"""Who is admitted next: first come, or fair between tenants."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Protocol

from manylora.engine.sequence import Sequence

INPUT_PRICE = 1.0  # of service, for a prompt token
OUTPUT_PRICE = 2.0


class Policy(Protocol):
    """The order of admission. The queue itself is the scheduler's."""

    def arrived(self, sequence: Sequence, waiting: Collection[Sequence]) -> None:
        """A sequence is about to join those that wait."""
        ...

    def order(self, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        """Those that wait, in the order to admit them. What is served meanwhile counts."""
        ...

    def served(self, sequence: Sequence, *, input_tokens: int = 0, output_tokens: int = 0) -> None:
        """A sequence's tenant was given this much service."""
        ...


class FirstCome:
    """In the order of the queue."""

    def arrived(self, sequence: Sequence, waiting: Collection[Sequence]) -> None: ...

    def order(self, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        yield from waiting

    def served(
        self, sequence: Sequence, *, input_tokens: int = 0, output_tokens: int = 0
    ) -> None: ...


class FairByTenant:
    """Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models",
    OSDI 2024, algorithm 2): the tenant with the least service for its weight goes next.

    Service is prompt tokens at 1 and output tokens at 2, divided by the tenant's weight. A tenant
    that comes back is lifted to where the others are, so that it cannot save up while away.
    """

    def __init__(self) -> None:
        self._service: dict[str, float] = {}
        self._last_to_leave: str | None = None

    def arrived(self, sequence: Sequence, waiting: Collection[Sequence]) -> None:
        tenant = sequence.request.tenant
        others = {other.request.tenant for other in waiting}
        if tenant in others:
            return
        levels = [self._service.get(other, 0.0) for other in others]
        if not levels and self._last_to_leave is not None:
            levels = [self._service[self._last_to_leave]]
        self._service[tenant] = max(self._service.get(tenant, 0.0), min(levels, default=0.0))

    def order(self, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        queues: dict[str, deque[Sequence]] = {}
        for sequence in waiting:
            queues.setdefault(sequence.request.tenant, deque()).append(sequence)
        while queues:
            tenant = min(queues, key=lambda name: self._service.get(name, 0.0))
            yield queues[tenant].popleft()
            if not queues[tenant]:
                del queues[tenant]

    def served(self, sequence: Sequence, *, input_tokens: int = 0, output_tokens: int = 0) -> None:
        request = sequence.request
        service = INPUT_PRICE * input_tokens + OUTPUT_PRICE * output_tokens
        before = self._service.get(request.tenant, 0.0)
        self._service[request.tenant] = before + service / request.weight
        self._last_to_leave = request.tenant
