"""Takes the scheduler's steps without a model, and checks each step's rules."""

from collections.abc import Callable
from dataclasses import dataclass, field

from manylora.engine.api import AdapterRef, FinishReason, Request, SamplingParams
from manylora.engine.blocks import BlockPool
from manylora.engine.policy import POLICIES
from manylora.engine.schedule import ScheduledBatch
from manylora.engine.scheduler import Scheduler
from manylora.engine.sequence import Sequence
from manylora.engine.slots import AdapterSlots

Known = tuple[str, str | None, tuple[int, ...]]  # tenant, adapter, the tokens up to a position


def make_sequence(
    name: str,
    prompt: list[int],
    *,
    max_tokens: int = 4,
    adapter: str | None = None,
    tenant: str = "a",
    priority: int = 0,
) -> Sequence:
    request = Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens),
        tenant=tenant,
        adapter=None if adapter is None else AdapterRef(adapter),
        priority=priority,
    )
    return Sequence(request=request, token_ids=list(prompt))


@dataclass
class Engine:
    """Takes the scheduler's steps as the true engine does, with token 0 for every sample.

    It remembers what each KV position and slot would hold, and checks each step's rules.
    """

    num_blocks: int = 16
    block_size: int = 2
    num_slots: int = 2
    max_num_seqs: int = 4
    budget: int = 8
    prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    adapter_ready: Callable[[str], bool] = lambda digest: True
    kv: dict[tuple[int, int], Known] = field(default_factory=dict)
    slot_content: dict[int, str] = field(default_factory=dict)
    batches: list[ScheduledBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.blocks = BlockPool(
            self.num_blocks, self.block_size, prefix_caching=self.prefix_caching
        )
        self.slots = AdapterSlots(self.num_slots)
        self.scheduler = Scheduler(
            self.blocks,
            self.slots,
            policy=POLICIES[self.policy](),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            base_digest="base",
            kv_dtype="float32",
            adapter_ready=lambda digest: self.adapter_ready(digest),
        )

    def step(self) -> ScheduledBatch:
        before = list(self.scheduler.running)
        decodes = [s for s in before if s.num_tokens - s.num_computed_tokens == 1]
        held = {s.slot for s in before if s.slot is not None}

        batch = self.scheduler.schedule()
        self.batches.append(batch)

        scheduled = [entry.sequence for entry in batch.entries]
        gave_way = [preemption.sequence for preemption in batch.preempted]
        assert batch.num_tokens <= self.budget
        assert len(self.scheduler.running) <= self.max_num_seqs
        assert all(s in scheduled for s in decodes if s not in gave_way)
        assert scheduled[: len(decodes)] == [s for s in decodes if s in scheduled] or gave_way
        held -= {slot for slot in held if all(s.slot != slot for s in before)}
        assert all(slot not in held for slot, _ in batch.fills)
        assert list(self.scheduler.waiting)[: len(gave_way)] == gave_way[::-1]
        if any(preemption.blocks_short for preemption in batch.preempted):
            assert set(scheduled) <= set(before)
        assert all(s in self.scheduler.running for s in batch.started)
        if any(not preemption.blocks_short for preemption in batch.preempted):
            assert batch.started  # nobody gives way for nothing
        self.slot_content |= dict(batch.fills)
        self._check_holds()
        for entry in batch.entries:
            self._compute(entry.sequence, entry.num_tokens)
        self._advance(batch)
        return batch

    def _check_holds(self) -> None:
        running = self.scheduler.running
        for sequence in running:
            in_slot = None if sequence.slot is None else self.slot_content[sequence.slot]
            assert in_slot == sequence.digest
        for slot in range(self.num_slots):
            assert self.slots.holds(slot) == sum(s.slot == slot for s in running)
        assert self.blocks.num_used == len({b for s in running for b in s.block_table})
        assert all(not s.block_table and s.slot is None for s in self.scheduler.waiting)

    def _compute(self, sequence: Sequence, count: int) -> None:
        """All earlier positions are there, by whoever they were computed; now the next ones."""
        start = sequence.num_computed_tokens
        assert count > 0
        assert start + count <= sequence.num_tokens
        for position in range(start + count):
            block = sequence.block_table[position // self.block_size]
            place = (block, position % self.block_size)
            tokens = tuple(sequence.token_ids[: position + 1])
            known = (sequence.request.tenant, sequence.digest, tokens)
            if position < start:
                assert self.kv[place] == known
            else:
                self.kv[place] = known

    def _advance(self, batch: ScheduledBatch) -> None:
        sampling = [entry.sequence for entry in batch.entries if entry.samples]
        self.scheduler.advance(batch)
        for sequence in sampling:
            sequence.token_ids.append(0)
            if sequence.num_output_tokens == sequence.request.params.max_tokens:
                self.scheduler.remove(sequence)
                sequence.finish(FinishReason.LENGTH)

    def run(self, *sequences: Sequence, max_steps: int = 200) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)
        for _ in range(max_steps):
            if not self.scheduler.running and not self.scheduler.waiting:
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def assert_empty(self) -> None:
        assert self.blocks.num_used == 0
        assert all(self.slots.holds(slot) == 0 for slot in range(self.num_slots))
