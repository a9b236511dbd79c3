"""Where a newcomer can run: seat, KV blocks and adapter slot, and who gives way for them.

Nobody gives way before it is certain that the newcomer then starts.
"""

from collections.abc import Collection
from collections.abc import Sequence as Ordered

from manylora.engine.blocks import BlockPool
from manylora.engine.demand import Demand
from manylora.engine.lifecycle import WaitCause
from manylora.engine.policy import Policy
from manylora.engine.sequence import Sequence
from manylora.engine.slots import AdapterSlots

YIELD_SHARE = 0.1  # of all computed tokens: what giving way for others may cost
MAX_PASSES = 64  # times that a sequence's turn may come while other adapters hold every slot


class Places:
    """Finds places by the rules of the policy. An adapter's slot is found in one of two ways more:

    a tenant with less than its share of the seats takes one that only the richest tenant's
    sequences hold; and whoever was passed over `MAX_PASSES` times takes the one whose sequences
    lose least. Then all others count anew, so that a slot's turn lasts.
    """

    def __init__(
        self,
        blocks: BlockPool,
        slots: AdapterSlots,
        demand: Demand,
        policy: Policy,
        max_num_seqs: int,
    ) -> None:
        self._blocks = blocks
        self._slots = slots
        self._demand = demand
        self._policy = policy
        self._max_num_seqs = max_num_seqs
        self._num_computed = 0
        self._num_wasted = 0

    def find(
        self,
        sequence: Sequence,
        cached: Ordered[int],
        running: Ordered[Sequence],
        started: Collection[Sequence],
    ) -> list[Sequence] | WaitCause:
        """Who must give way so that it certainly starts, perhaps nobody; or what it lacks.

        Args:
            cached: the blocks of its prefix that it would hold.
            started: those that began in this step, who give way to nobody.
        """
        yielding: list[Sequence] = []
        if sequence.digest is not None and not self._slots.can_hold(sequence.digest):
            yielding = self.slot_holders(sequence, running)
            if not yielding or any(holder in started for holder in yielding):
                return WaitCause.ADAPTER_SLOT
        staying = [other for other in running if other not in yielding]
        while (lack := self._lack(sequence, cached, staying, yielding)) is not None:
            victim = self._policy.yielding(staying, sequence)
            if victim is None or victim in started or not self._affords([*yielding, victim]):
                return lack
            staying.remove(victim)
            yielding.append(victim)
        return yielding

    def count(self, computed: int = 0, wasted: int = 0) -> None:
        """Tokens computed in a step, or those of a sequence that gave way for another tenant."""
        self._num_computed += computed
        self._num_wasted += wasted

    def _affords(self, yielding: Ordered[Sequence]) -> bool:
        """Whether the work to be done twice stays a small share of all, after a first pool's."""
        pool = self._blocks.num_blocks * self._blocks.block_size
        most = YIELD_SHARE * (self._num_computed + pool)
        return self._num_wasted + _lost(yielding) <= most

    def slot_holders(self, sequence: Sequence, running: Ordered[Sequence]) -> list[Sequence]:
        """Whose adapter's slot it may take; nobody when it must wait."""
        adapted = [other for other in running if other.slot is not None]
        victim = self._policy.yielding(adapted, sequence)
        if victim is not None:
            holders = [other for other in adapted if other.slot == victim.slot]
            if all(other.request.tenant == victim.request.tenant for other in holders):
                return holders
        if sequence.num_passes < MAX_PASSES:
            return []
        by_slot: dict[int, list[Sequence]] = {}
        for other in adapted:
            by_slot.setdefault(other.slot or 0, []).append(other)
        return min(by_slot.values(), key=_lost, default=[])

    def _lack(
        self,
        sequence: Sequence,
        cached: Ordered[int],
        staying: Ordered[Sequence],
        yielding: Ordered[Sequence],
    ) -> WaitCause | None:
        """What keeps it from joining those that stay, once the others have given all back."""
        if len(staying) == self._max_num_seqs:
            return WaitCause.SEQUENCE_LIMIT
        freed = self._blocks.count_released((s.block_table for s in yielding), kept=cached)
        if not self._demand.fits_now(staying, sequence, cached, freed):
            return WaitCause.KV_BLOCKS
        if yielding or self._demand.fits_later(staying, sequence, cached):
            return None
        goes_first = self._policy.yielding(staying, sequence) is not None
        return None if goes_first else WaitCause.KV_BLOCKS


def _lost(holders: Ordered[Sequence]) -> int:
    """Tokens that these would have computed in vain."""
    return sum(holder.progress for holder in holders)
