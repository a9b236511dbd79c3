"""How many KV blocks the running sequences will want before they end, as far as one can expect.

Admitting all that fits now makes the pool run dry a little later, and what is preempted is computed
twice. The peak of the demand to come is that of Gong et al., "Past-Future Scheduler for LLM Serving
under SLA Guarantees" (ASPLOS 2025); what a request will still produce is expected from what the
latest ones did.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from itertools import accumulate

from manylora.engine.blocks import BlockPool
from manylora.engine.sequence import Sequence

KEPT_LENGTHS = 256


class Demand:
    """What running sequences want of a pool, by the output lengths of the latest to end."""

    def __init__(self, blocks: BlockPool) -> None:
        self._blocks = blocks
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] | None = None  # of the i greatest
        self._demands: list[tuple[int, int]] | None = None  # of those that run in this step
        self._most_tokens = 0  # all of them at their ends

    def ended(self, length: int) -> None:
        """A request ended after `length` output tokens."""
        if len(self._latest) == KEPT_LENGTHS:
            del self._sorted[bisect_right(self._sorted, self._latest.popleft()) - 1]
        self._latest.append(length)
        insort(self._sorted, length)
        self._sums = None

    @property
    def num_known(self) -> int:
        """How many ends the expectations rest on."""
        return len(self._latest)

    def expect_left(self, sequence: Sequence) -> int:
        """Output tokens that a sequence will still want: the mean of the longer ones kept.

        Longer than all, it is expected to go on for as long as it has (or for a block).
        """
        done = len(sequence.token_ids) - len(sequence.request.prompt_token_ids)
        most = sequence.request.params.max_tokens - done
        if self._sums is None:
            self._sums = [0, *accumulate(reversed(self._sorted))]
        count = len(self._sorted) - bisect_right(self._sorted, done)
        left = self._sums[count] // count - done if count else max(done, self._blocks.block_size)
        return min(most, left)

    def begin_step(self) -> None:
        """Forget what was expected of those that run: they have moved on, or are others."""
        self._demands = None

    def started(self, sequence: Sequence) -> None:
        """One more runs in this step."""
        if self._demands is not None:
            demand = self._demand(sequence)
            self._demands.append(demand)
            self._most_tokens += sum(demand)

    def fits_now(
        self,
        running: Ordered[Sequence],
        newcomer: Sequence,
        cached: Ordered[int],
        freed: int = 0,
    ) -> bool:
        """Whether the newcomer's known tokens fit, and a block more for each that runs.

        Args:
            cached: the blocks of its prefix that it would hold.
            freed: blocks that will be free besides those that are.
        """
        needed = -(-newcomer.num_tokens // self._blocks.block_size) - len(cached)
        used_up = needed + self._blocks.count_free(cached)
        return used_up + len(running) <= self._blocks.num_free + freed

    def fits_later(
        self, running: Ordered[Sequence], newcomer: Sequence, cached: Ordered[int]
    ) -> bool:
        """Whether the expected peak of all their demand fits, so that nobody need give way."""
        demands = self._demands_of(running)
        new = self._demand(newcomer)
        size, limit = self._blocks.block_size, self._blocks.num_blocks
        held = sum([len(s.block_table) for s in running]) + len(cached)
        shared = held - self._blocks.num_used - self._blocks.count_free(cached)
        if (self._most_tokens + sum(new)) // size + len(demands) + 1 - shared <= limit:
            return True  # even if all were longest at once
        return peak_blocks([*demands, new], size) - shared <= limit or not running

    def _demands_of(self, running: Ordered[Sequence]) -> list[tuple[int, int]]:
        if self._demands is None:
            self._demands = [self._demand(sequence) for sequence in running]
            self._most_tokens = sum([now + left for now, left in self._demands])
        return self._demands

    def _demand(self, sequence: Sequence) -> tuple[int, int]:
        """(Tokens that it has blocks for or knows, tokens still to come)."""
        held = len(sequence.block_table) * self._blocks.block_size
        return max(len(sequence.token_ids), held), self.expect_left(sequence)


def peak_blocks(demands: Iterable[tuple[int, int]], block_size: int) -> int:
    """The most KV blocks wanted at once while all go on, a token each, until each ends.

    Args:
        demands: (tokens now, tokens still to come) of each sequence.
    """
    peak = tokens = 0
    latest_first = sorted(demands, key=lambda demand: -demand[1])
    for count, (now, left) in enumerate(latest_first, start=1):
        tokens += now
        # When this one ends, these have grown by as much as it has; half a block of each is empty.
        peak = max(peak, (tokens + count * left) // block_size + (count + 1) // 2)
    return peak
