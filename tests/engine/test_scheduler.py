"""The scheduler without a model: each step's rules over random traffic, and who goes first."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.engine.api import FinishReason
from manylora.engine.lifecycle import WaitCause
from manylora.engine.places import MAX_PASSES
from manylora.engine.policy import POLICIES
from manylora.engine.sequence import Sequence, SequenceStatus
from support.scheduled import Engine, make_sequence


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: list[int]
    max_tokens: int
    adapter: str | None
    tenant: str
    priority: int
    aborted_at: int | None


arrivals = st.builds(
    Arrival,
    step=st.integers(0, 12),
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
    max_tokens=st.integers(1, 8),
    adapter=st.sampled_from([None, "x", "y", "z"]),
    tenant=st.sampled_from("ab"),
    priority=st.integers(-1, 1),
    aborted_at=st.none() | st.integers(0, 20),
)


@settings(max_examples=300, deadline=None)
@given(
    engine=st.builds(
        Engine,
        num_blocks=st.integers(11, 20),  # the longest request takes 22 positions
        num_slots=st.integers(1, 3),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(5, 12),
        prefix_caching=st.booleans(),
        long_prefill_token_threshold=st.sampled_from([0, 3]),
        policy=st.sampled_from(sorted(POLICIES)),
    ),
    traffic=st.lists(arrivals, max_size=9),
    ready_at=st.fixed_dictionaries({d: st.integers(0, 15) for d in "xyz"}),
)
def test_every_request_ends_and_gives_everything_back(
    engine: Engine, traffic: list[Arrival], ready_at: dict[str, int]
) -> None:
    engine.adapter_ready = lambda digest: step >= ready_at[digest]
    sequences: list[tuple[Arrival, Sequence]] = []
    # At worst each runs alone from its start for each token of each request before it.
    tokens = [len(a.prompt) + a.max_tokens for a in traffic]
    bound = 30 + sum(tokens) * (1 + len(traffic))

    for step in range(bound):
        for number, arrival in enumerate(traffic):
            if arrival.step == step:
                sequence = make_sequence(
                    str(number),
                    arrival.prompt,
                    max_tokens=arrival.max_tokens,
                    adapter=arrival.adapter,
                    tenant=arrival.tenant,
                    priority=arrival.priority,
                )
                sequences.append((arrival, sequence))
                engine.scheduler.add(sequence)
        for arrival, sequence in sequences:
            if arrival.aborted_at == step and sequence.status is not SequenceStatus.FINISHED:
                engine.scheduler.remove(sequence)
                sequence.finish(FinishReason.ABORT)
        engine.step()
        if len(sequences) == len(traffic) and not (
            engine.scheduler.running or engine.scheduler.waiting
        ):
            break

    assert all(sequence.status is SequenceStatus.FINISHED for _, sequence in sequences)
    assert len(sequences) == len(traffic)
    engine.assert_empty()


def test_a_long_prompt_comes_in_pieces_beside_running_decodes() -> None:
    engine = Engine(budget=4)
    short = make_sequence("short", [1], max_tokens=6)
    long = make_sequence("long", [0] * 10, max_tokens=1)

    engine.run(short, long)

    rows = [[(e.sequence.request_id, e.num_tokens) for e in b.entries] for b in engine.batches]
    assert rows[:4] == [
        [("short", 1), ("long", 3)],
        [("short", 1), ("long", 3)],
        [("short", 1), ("long", 3)],
        [("short", 1), ("long", 1)],
    ]


def test_a_sequence_whose_adapter_is_not_ready_does_not_hold_up_others() -> None:
    engine = Engine(adapter_ready=lambda digest: digest != "slow")
    slow = make_sequence("slow", [1], adapter="slow")
    others = [make_sequence("base", [1]), make_sequence("fast", [1], adapter="fast")]
    for sequence in (slow, *others):
        engine.scheduler.add(sequence)

    engine.step()
    assert engine.scheduler.running == others

    engine.adapter_ready = lambda digest: True
    engine.step()
    assert slow in engine.scheduler.running


def test_a_sequence_that_finds_no_slot_does_not_hold_up_others() -> None:
    engine = Engine(num_slots=1)
    holder = make_sequence("holder", [1], adapter="x", max_tokens=3)
    blocked = make_sequence("blocked", [1], adapter="y", max_tokens=1)
    others = [make_sequence("same", [1], adapter="x"), make_sequence("base", [1])]
    for sequence in (holder, blocked, *others):
        engine.scheduler.add(sequence)

    engine.step()
    assert engine.scheduler.running == [holder, *others]

    engine.run()
    assert blocked.status is SequenceStatus.FINISHED
    assert engine.slot_content == {0: "y"}


def test_a_sequence_that_finds_no_blocks_is_not_overtaken() -> None:
    engine = Engine(num_blocks=4, block_size=2)
    first = make_sequence("first", [0] * 5, max_tokens=1)
    large = make_sequence("large", [1] * 6, max_tokens=1)
    small = make_sequence("small", [1], max_tokens=1)
    for sequence in (first, large, small):
        engine.scheduler.add(sequence)

    batch = engine.step()

    assert [entry.sequence for entry in batch.entries] == [first]


def test_the_last_admitted_is_preempted_and_computed_again_from_the_front_of_the_queue() -> None:
    engine = Engine(num_blocks=6, block_size=2, prefix_caching=False)
    older = make_sequence("older", [0, 0, 0], max_tokens=9)
    newer = make_sequence("newer", [1, 1, 1], max_tokens=9, adapter="x")
    later = make_sequence("later", [1], max_tokens=1)
    for sequence in (older, newer):
        engine.scheduler.add(sequence)
    engine.step()
    assert engine.scheduler.running == [older, newer]
    engine.scheduler.add(later)

    batch = engine.step()
    while not batch.preempted:
        batch = engine.step()

    (preemption,) = batch.preempted
    assert (preemption.sequence, preemption.blocks_short) == (newer, 1)
    assert preemption.num_lost_tokens == 6
    assert [entry.sequence for entry in batch.entries] == [older]
    assert list(engine.scheduler.waiting) == [newer, later]
    assert newer.num_computed_tokens == 0
    assert newer.num_preemptions == 1
    assert newer.wait_cause is WaitCause.PREEMPTED
    assert engine.slots.holds(0) == 0


def test_a_long_prompt_leaves_room_for_others_and_none_when_alone() -> None:
    engine = Engine(num_blocks=64, budget=8, long_prefill_token_threshold=4)
    engine.scheduler.add(make_sequence("long", [0] * 40, max_tokens=1))
    alone = engine.step()
    engine.scheduler.add(make_sequence("short", [1] * 4, max_tokens=1))
    shared = engine.step()

    assert [entry.num_tokens for entry in alone.entries] == [8]
    assert [entry.num_tokens for entry in shared.entries] == [4, 4]
    assert shared.entries[1].sequence.num_output_tokens == 1  # not behind the long prompt's 32


def test_a_rare_adapter_gets_a_slot_however_busy_the_others_are() -> None:
    """Staggered requests of one adapter hold its slot without a gap; another's must get in."""
    engine = Engine(num_blocks=128, num_slots=1, max_num_seqs=12, budget=16)
    rare = make_sequence("rare", [1], adapter="y", tenant="b")
    for step in range(MAX_PASSES + 20):
        if step % 2 == 0:
            engine.scheduler.add(make_sequence(f"busy{step}", [0], max_tokens=9, adapter="x"))
        if step == 5:
            engine.scheduler.add(rare)
        engine.step()

    assert rare.num_output_tokens > 0
    assert any((0, "y") in batch.fills for batch in engine.batches)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_rare_adapter_waits_64_turns_at_most_however_long_the_answers(policy: str) -> None:
    engine = Engine(num_blocks=512, num_slots=1, max_num_seqs=12, budget=16, policy=policy)
    engine.scheduler.add(make_sequence("long", [0], max_tokens=900, adapter="x"))
    engine.step()
    rare = make_sequence("rare", [1], max_tokens=2, adapter="y")
    engine.scheduler.add(rare)
    for _ in range(MAX_PASSES + 2):
        engine.step()

    assert rare.num_output_tokens > 0
    engine.run(max_steps=1200)
    assert sum(len(batch.preempted) for batch in engine.batches) < 20  # a turn lasts


def test_a_newcomer_leaves_each_running_sequence_a_block_to_grow_into() -> None:
    """Otherwise the newcomer is preempted at once, and what it computed was for nothing."""
    engine = Engine(num_blocks=4, block_size=2, prefix_caching=False)
    running = make_sequence("running", [0, 0, 0], max_tokens=3)
    newcomer = make_sequence("newcomer", [1, 1, 1], max_tokens=1)

    engine.run(running, newcomer)

    assert newcomer.num_preemptions == 0
    engine.assert_empty()


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    engine = Engine(num_blocks=8, block_size=2, budget=12)
    first = make_sequence("first", [0] * 4, max_tokens=9)
    second = make_sequence("second", [1] * 4, max_tokens=9)

    engine.run(first, second)

    assert second.num_preemptions > 0
    again = [e for b in engine.batches for e in b.entries if e.sequence is second]
    assert sum(entry.num_tokens for entry in again) < 2 * second.num_tokens
    engine.assert_empty()


def test_a_prefix_hit_leaves_the_last_token_to_compute() -> None:
    engine = Engine()
    prompt = [0, 1, 0, 1]
    engine.run(make_sequence("cold", prompt, max_tokens=1))
    warm = make_sequence("warm", prompt, max_tokens=1)

    engine.run(warm)

    assert warm.num_cached_tokens == 2
    assert [e.num_tokens for e in engine.batches[-1].entries] == [2]


def test_a_prefix_of_another_tenant_or_adapter_is_not_found() -> None:
    engine = Engine()
    prompt = [0, 1, 0, 1, 0]
    engine.run(make_sequence("cold", prompt, adapter="x", max_tokens=1))
    others = [
        make_sequence("tenant", prompt, adapter="x", tenant="b", max_tokens=1),
        make_sequence("adapter", prompt, adapter="y", max_tokens=1),
        make_sequence("base", prompt, max_tokens=1),
    ]

    engine.run(*others)

    assert [sequence.num_cached_tokens for sequence in others] == [0, 0, 0]
