"""Chooses the tokens of the next step. Pure: no torch, no clock.

Running decodes come first, with a token each; then prefills, running ones and those to be admitted,
in the order of the policy, while the token budget lasts. When KV blocks run out, the policy names
the sequence that gives its blocks back and is recomputed later.
"""

from collections import deque
from collections.abc import Callable

from manylora.engine.blocks import BlockPool
from manylora.engine.demand import Demand
from manylora.engine.lifecycle import WaitCause
from manylora.engine.places import MAX_PASSES, Places
from manylora.engine.policy import FirstCome, Policy, name_fairness
from manylora.engine.prefix_cache import PrefixCache
from manylora.engine.schedule import Preemption, ScheduledBatch, Step
from manylora.engine.sequence import Sequence, SequenceStatus
from manylora.engine.slots import AdapterSlots


class Scheduler:
    """The waiting and running queues over a block pool and the adapter slots."""

    def __init__(
        self,
        blocks: BlockPool,
        slots: AdapterSlots,
        *,
        policy: Policy | None = None,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int = 0,
        base_digest: str,
        kv_dtype: str,
        cache_secret: bytes = b"",
        share_base_prefixes: bool = False,
        adapter_ready: Callable[[str], bool],
    ) -> None:
        """
        Args:
            policy: who is admitted next; first come by default.
            cache_secret, share_base_prefixes: see `PrefixCache`.
            adapter_ready: whether an adapter's weights are in host memory. A sequence whose
                adapter is not is passed over; the others are not held up.
        """
        self.blocks = blocks
        self.slots = slots
        self.policy = policy or FirstCome()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.demand = Demand(blocks)
        self.prefixes = PrefixCache(
            blocks,
            base_digest=base_digest,
            kv_dtype=kv_dtype,
            secret=cache_secret,
            share_base_prefixes=share_base_prefixes,
        )
        self.places = Places(blocks, slots, self.demand, self.policy, max_num_seqs)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._long_prefill_token_threshold = long_prefill_token_threshold
        self._adapter_ready = adapter_ready
        self._num_arrivals = 0

    def add(self, sequence: Sequence) -> None:
        self._num_arrivals += 1
        sequence.order = self._num_arrivals
        self.policy.arrived(sequence, self.waiting)
        self.waiting.append(sequence)

    def schedule(self) -> ScheduledBatch:
        """Choose the next step's tokens and hold what they need."""
        step = Step(self._max_num_batched_tokens)
        self.demand.begin_step()
        size = self.blocks.block_size
        for sequence in [s for s in self.running if not s.is_prefilling]:
            if sequence.num_computed_tokens < len(sequence.block_table) * size:
                if sequence.status is SequenceStatus.RUNNING:
                    step.give(sequence, 1)
            else:
                self._continue(sequence, step)
        if step.preempted:
            step.stop = WaitCause.KV_BLOCKS
        self._prefill_and_admit(step)
        self._explain_rest(step)
        return step.batch()

    def advance(self, batch: ScheduledBatch) -> None:
        """Count a step's tokens as computed, and let its newly full blocks be found."""
        self.places.count(computed=batch.num_tokens)
        size = self.blocks.block_size
        given: dict[str, list[Sequence]] = {}
        for entry in batch.entries:
            sequence = entry.sequence
            if entry.samples:
                given.setdefault(sequence.request.tenant, []).append(sequence)
            first = sequence.num_computed_tokens
            sequence.num_computed_tokens += entry.num_tokens
            if first % size + entry.num_tokens >= size:
                self.prefixes.remember(sequence, first)
        for sequences in given.values():
            self.policy.served(sequences[0], output_tokens=len(sequences))

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out of its queue and give back what it holds."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self.running.remove(sequence)
            self._give_back(sequence)
            if sequence.finish_reason is not None:
                self.demand.ended(sequence.num_output_tokens)

    def adapters_by_need(self) -> list[str]:
        """The adapters that waiting sequences need and no slot has, in the policy's order."""
        if all(s.digest is None or self.slots.is_resident(s.digest) for s in self.waiting):
            return []
        ordered = self.policy.order(tuple(self.running), tuple(self.waiting))
        digests = (s.digest for s in ordered if s.status is SequenceStatus.WAITING and s.digest)
        return [d for d in dict.fromkeys(digests) if not self.slots.is_resident(d)]

    def _continue(self, sequence: Sequence, step: Step) -> None:
        """Give a running sequence its next tokens, if there are blocks for them."""
        if sequence.status is not SequenceStatus.RUNNING or step.budget == 0:
            return
        count = self._chunk(sequence.num_tokens_left, step.budget)
        while not self._grow(sequence, count):
            if step.started:  # in this very step: let them begin, and see in the next
                return
            needed = self._blocks_for(sequence.num_computed_tokens + count)
            short = needed - len(sequence.block_table) - self.blocks.num_free
            victim = self.policy.victim(self.running, sequence)
            self._preempt(victim, step, blocks_short=short, tenant=sequence.request.tenant)
            step.stop = WaitCause.KV_BLOCKS
            if victim is sequence:
                return
        step.give(sequence, count)

    def _chunk(self, tokens_left: int, budget: int) -> int:
        """How many of a sequence's tokens to compute now: a long prompt leaves room for others."""
        threshold = self._long_prefill_token_threshold
        if threshold and len(self.running) + len(self.waiting) > 1:
            budget = min(budget, threshold)
        return min(tokens_left, budget)

    def _grow(self, sequence: Sequence, count: int) -> bool:
        needed = self._blocks_for(sequence.num_computed_tokens + count) - len(sequence.block_table)
        if needed <= 0:
            return True
        new = self.blocks.allocate(needed)
        if new is None:
            return False
        sequence.block_table += new
        return True

    def _preempt(self, victim: Sequence, step: Step, *, blocks_short: int, tenant: str) -> None:
        """Take all that a running sequence holds; it waits at the front of the queue."""
        step.take_back(victim)
        step.preempted.append(Preemption(victim, blocks_short, tenant, victim.num_computed_tokens))
        self.running.remove(victim)
        self.demand.begin_step()
        self._give_back(victim)
        victim.status = SequenceStatus.WAITING
        victim.wait_cause = WaitCause.PREEMPTED
        victim.num_wasted_tokens = victim.progress
        victim.num_once_computed = max(victim.num_once_computed, victim.num_computed_tokens)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.waiting.appendleft(victim)

    def _give_back(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.block_table)
        sequence.block_table = []
        if sequence.slot is not None:
            self.slots.release(sequence.slot)
            sequence.slot = None

    def _prefill_and_admit(self, step: Step) -> None:
        prefills = {sequence for sequence in self.running if sequence.is_prefilling}
        for sequence in self.policy.order(tuple(self.running), tuple(self.waiting)):
            if sequence in prefills:
                prefills.remove(sequence)
                self._continue(sequence, step)
            elif step.stop is None:
                self._consider(sequence, step)
            elif not prefills:
                break  # those behind it need not be looked at

    def _explain_rest(self, step: Step) -> None:
        """Say why those wait that were not looked at."""
        for sequence in self.waiting:
            if sequence not in step.considered and sequence.num_preemptions == 0:
                ready = self._is_ready(sequence)
                sequence.wait_cause = step.stop if ready and step.stop else WaitCause.ADAPTER_LOAD
        if self.policy.reorders and self.waiting:
            name_fairness(self.running, self.waiting)

    def _consider(self, sequence: Sequence, step: Step) -> None:
        """Admit a waiting sequence, or note why not.

        One whose adapter is not ready or finds no slot is passed over, but not for ever: see
        `Places`. One that finds no seat or no blocks ends the admission, or it would be overtaken
        for ever.
        """
        step.considered.add(sequence)
        cause = self._lacks_adapter(sequence, step) or self._admit(sequence, step)
        if cause is None:
            return
        if cause not in (WaitCause.ADAPTER_LOAD, WaitCause.ADAPTER_SLOT):
            step.stop = cause
        preempted = sequence.num_preemptions > 0
        sequence.wait_cause = WaitCause.PREEMPTED if preempted else cause

    def _lacks_adapter(self, sequence: Sequence, step: Step) -> WaitCause | None:
        if sequence.digest is None:
            return None
        if not self._is_ready(sequence):
            return WaitCause.ADAPTER_LOAD
        if self.slots.can_hold(sequence.digest):
            return None
        tenant = sequence.request.tenant
        if tenant not in step.slotless or sequence.num_passes >= MAX_PASSES:
            if self.places.slot_holders(sequence, self.running):
                return None
            step.slotless.add(tenant)
        sequence.num_passes += 1
        return WaitCause.ADAPTER_SLOT

    def _admit(self, sequence: Sequence, step: Step) -> WaitCause | None:
        """Start a sequence whose adapter has a slot or may take one; or what it lacks."""
        if step.budget == 0:
            return WaitCause.TOKEN_BUDGET
        cached = self.prefixes.find(sequence)
        yielding = self.places.find(sequence, cached, self.running, step.started)
        if isinstance(yielding, WaitCause):
            return yielding
        if sequence.num_passes >= MAX_PASSES:  # a slot's turn lasts
            for other in self.waiting:
                other.num_passes = 0
        for victim in yielding:
            self.places.count(wasted=victim.progress)
            self._preempt(victim, step, blocks_short=0, tenant=sequence.request.tenant)
        self._start(sequence, cached, step)
        return None

    def _start(self, sequence: Sequence, cached: list[int], step: Step) -> None:
        if sequence.digest is not None:
            held = self.slots.hold(sequence.digest)
            assert held is not None, "the slot was looked for before"
            sequence.num_passes = 0
            sequence.slot, fill = held
            if fill:
                step.fills.append((sequence.slot, sequence.digest))
        self._use_cached(sequence, cached)
        count = self._chunk(sequence.num_tokens_left, step.budget)
        grown = self._grow(sequence, count)
        assert grown, "the blocks were counted before"
        self.waiting.remove(sequence)
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        self.demand.started(sequence)
        step.started.append(sequence)
        step.give(sequence, count)

    def _use_cached(self, sequence: Sequence, cached: list[int]) -> None:
        self.blocks.hold(cached)
        sequence.block_table = list(cached)
        sequence.num_computed_tokens = len(cached) * self.blocks.block_size
        sequence.num_reused_tokens = sequence.num_computed_tokens
        if sequence.num_preemptions == 0:  # what is computed again is no further service
            looked_up = self.blocks.prefix_caching and not sequence.lacks_prompt_logprobs
            sequence.num_queried_tokens = sequence.num_prompt_tokens if looked_up else 0
            sequence.num_found_tokens = sequence.num_computed_tokens
            own = self.blocks.count_owned(cached, sequence.request.tenant)
            sequence.num_cached_tokens = own * self.blocks.block_size
            computed = sequence.num_prompt_tokens - sequence.num_computed_tokens
            self.policy.served(sequence, input_tokens=computed)

    def _is_ready(self, sequence: Sequence) -> bool:
        digest = sequence.digest
        return digest is None or self.slots.is_resident(digest) or self._adapter_ready(digest)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.blocks.block_size)
