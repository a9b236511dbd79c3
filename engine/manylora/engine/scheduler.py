"""Chooses the tokens of the next step. Pure: no torch, no clock.

Running decodes come first, with a token each, then running prefills, then waiting sequences are
admitted, in the order of the policy, while the token budget lasts. When KV blocks run out, the
sequence admitted last gives its blocks back and is recomputed later.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from manylora.engine.blocks import BlockPool, chain_next, chain_root
from manylora.engine.policy import FirstCome, Policy
from manylora.engine.sequence import Sequence, SequenceStatus
from manylora.engine.slots import AdapterSlots

MAX_PASSES = 64  # steps that a sequence may find every slot held by other adapters


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Compute the next `num_tokens` of this sequence's known tokens."""

    sequence: Sequence
    num_tokens: int

    @property
    def positions(self) -> range:
        """The positions to compute."""
        start = self.sequence.num_computed_tokens
        return range(start, start + self.num_tokens)

    @property
    def samples(self) -> bool:
        """Whether the last row's logits choose a new token."""
        computed = self.sequence.num_computed_tokens + self.num_tokens
        return computed == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step: what is computed, and which slots are filled before."""

    entries: tuple[ScheduledSequence, ...]
    fills: tuple[tuple[int, str], ...]  # (slot, digest)
    preempted: tuple[Sequence, ...]

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)


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
        adapter_ready: Callable[[str], bool],
    ) -> None:
        """
        Args:
            policy: who is admitted next; first come by default.
            adapter_ready: whether an adapter's weights are in host memory. A sequence whose
                adapter is not is passed over; the others are not held up.
        """
        self.blocks = blocks
        self.slots = slots
        self.policy = policy or FirstCome()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._long_prefill_token_threshold = long_prefill_token_threshold
        self._base_digest = base_digest
        self._kv_dtype = kv_dtype
        self._adapter_ready = adapter_ready

    def add(self, sequence: Sequence) -> None:
        self.policy.arrived(sequence, self.waiting)
        self.waiting.append(sequence)

    def schedule(self) -> ScheduledBatch:
        """Choose the next step's tokens and hold what they need."""
        budget = self._max_num_batched_tokens
        entries: list[ScheduledSequence] = []
        preempted: list[Sequence] = []
        for sequence in sorted(self.running, key=_is_prefilling):
            if sequence.status is not SequenceStatus.RUNNING or budget == 0:
                continue
            count = self._chunk(sequence.num_tokens - sequence.num_computed_tokens, budget)
            if self._make_room(sequence, count, preempted):
                entries.append(ScheduledSequence(sequence, count))
                budget -= count
        entries = [e for e in entries if e.sequence.status is SequenceStatus.RUNNING]
        fills = self._admit(budget, entries) if not preempted else []
        return ScheduledBatch(tuple(entries), tuple(fills), tuple(preempted))

    def advance(self, batch: ScheduledBatch) -> None:
        """Count a step's tokens as computed, and let its newly full blocks be found."""
        for entry in batch.entries:
            sequence = entry.sequence
            if entry.samples:
                self.policy.served(sequence, output_tokens=1)
            sequence.num_computed_tokens += entry.num_tokens
            if not self.blocks.prefix_caching:
                continue
            full = sequence.num_computed_tokens // self.blocks.block_size
            hashes = self._hash_blocks(sequence, full)
            first = (sequence.num_computed_tokens - entry.num_tokens) // self.blocks.block_size
            for index in range(first, full):
                self.blocks.remember(sequence.block_table[index], hashes[index])

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out of its queue and give back what it holds."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._give_back(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def forget_prefix(self, sequence: Sequence) -> None:
        """Let no other sequence find the blocks of one whose numbers went wrong."""
        for block in sequence.block_table:
            self.blocks.forget(block)

    def adapters_by_need(self) -> list[str]:
        """The adapters that waiting sequences need and no slot has, in the queue's order."""
        digests = (s.digest for s in self.waiting if s.digest is not None)
        return [d for d in dict.fromkeys(digests) if not self.slots.is_resident(d)]

    def _chunk(self, tokens_left: int, budget: int) -> int:
        """How many of a sequence's tokens to compute now: a long prompt leaves room for others."""
        threshold = self._long_prefill_token_threshold
        if threshold and len(self.running) + len(self.waiting) > 1:
            budget = min(budget, threshold)
        return min(tokens_left, budget)

    def _make_room(self, sequence: Sequence, count: int, preempted: list[Sequence]) -> bool:
        """Hold the blocks for `count` more tokens, preempting from the end of the running list."""
        while not self._grow(sequence, count):
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _grow(self, sequence: Sequence, count: int) -> bool:
        needed = self._blocks_for(sequence.num_computed_tokens + count)
        new = self.blocks.allocate(max(0, needed - len(sequence.block_table)))
        if new is None:
            return False
        sequence.block_table += new
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.block_table)
        sequence.block_table = []
        if sequence.slot is not None:
            self.slots.release(sequence.slot)
            sequence.slot = None

    def _admit(self, budget: int, entries: list[ScheduledSequence]) -> list[tuple[int, str]]:
        """Start waiting sequences while tokens, seats and blocks last; append to `entries`.

        One whose adapter is not ready or finds no slot is passed over, but not for ever: after
        `MAX_PASSES` steps no other adapter's newcomers start until a slot has drained. One that
        finds no blocks ends the admission, so that a long prompt is not overtaken for ever either.
        """
        fills: list[tuple[int, str]] = []
        starving = any(_is_starving(s) and self._is_ready(s) for s in self.waiting)
        for sequence in self.policy.order(tuple(self.waiting)):
            if budget == 0 or len(self.running) == self._max_num_seqs:
                break
            if not self._is_ready(sequence):
                continue
            if starving and sequence.digest is not None and not _is_starving(sequence):
                continue
            cached = self._find_cached(sequence)
            left = sequence.num_tokens - len(cached) * self.blocks.block_size
            count = self._chunk(left, budget)
            needed = self._blocks_for(sequence.num_tokens) - len(cached)
            spare = len(self.running)  # a block for each, or the newcomer is preempted at once
            if needed + self.blocks.count_free(cached) + spare > self.blocks.num_free:
                break
            if not self._take_slot(sequence, fills):
                continue
            self._start(sequence, cached, count)
            entries.append(ScheduledSequence(sequence, count))
            budget -= count
        return fills

    def _is_ready(self, sequence: Sequence) -> bool:
        digest = sequence.digest
        return digest is None or self.slots.is_resident(digest) or self._adapter_ready(digest)

    def _take_slot(self, sequence: Sequence, fills: list[tuple[int, str]]) -> bool:
        if sequence.digest is None:
            return True
        held = self.slots.hold(sequence.digest)
        if held is None:
            sequence.num_passes += 1
            return False
        sequence.num_passes = 0
        sequence.slot, fill = held
        if fill:
            fills.append((sequence.slot, sequence.digest))
        return True

    def _start(self, sequence: Sequence, cached: list[int], count: int) -> None:
        self.blocks.hold(cached)
        sequence.block_table = list(cached)
        sequence.num_computed_tokens = len(cached) * self.blocks.block_size
        if sequence.num_preemptions == 0:  # what is computed again is no further service
            sequence.num_cached_tokens = sequence.num_computed_tokens
            computed = sequence.num_prompt_tokens - sequence.num_cached_tokens
            self.policy.served(sequence, input_tokens=computed)
        grown = self._grow(sequence, count)
        assert grown, "the blocks were counted before"
        self.waiting.remove(sequence)
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)

    def _find_cached(self, sequence: Sequence) -> list[int]:
        """Cached blocks of its prefix; the last token is always left to compute."""
        if not self.blocks.prefix_caching:
            return []
        full = (sequence.num_tokens - 1) // self.blocks.block_size
        return self.blocks.find_prefix(self._hash_blocks(sequence, full)[:full])

    def _hash_blocks(self, sequence: Sequence, count: int) -> list[bytes]:
        """The hashes of the first `count` full blocks at least."""
        size, hashes = self.blocks.block_size, sequence.block_hashes
        while len(hashes) < count:
            parent = hashes[-1] if hashes else self._root(sequence)
            start = len(hashes) * size
            hashes.append(chain_next(parent, sequence.token_ids[start : start + size]))
        return hashes

    def _root(self, sequence: Sequence) -> bytes:
        return chain_root(
            tenant=sequence.request.tenant,
            base_digest=self._base_digest,
            adapter_digest=sequence.digest,
            kv_dtype=self._kv_dtype,
        )

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.blocks.block_size)


def _is_starving(sequence: Sequence) -> bool:
    return sequence.num_passes >= MAX_PASSES


def _is_prefilling(sequence: Sequence) -> bool:
    return sequence.num_tokens - sequence.num_computed_tokens > 1
