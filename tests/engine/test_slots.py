"""Adapter slots: shared by digest, never refilled while held, least recently used out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.engine.slots import AdapterSlots


def hold(slots: AdapterSlots, digest: str) -> int:
    held = slots.hold(digest)
    assert held is not None
    return held[0]


def test_sequences_of_one_adapter_share_a_slot_that_is_filled_once() -> None:
    slots = AdapterSlots(2)

    first, second = slots.hold("a"), slots.hold("a")

    assert first == (0, True)
    assert second == (0, False)
    assert slots.holds(0) == 2


def test_an_adapter_stays_after_its_last_sequence() -> None:
    slots = AdapterSlots(1)
    slots.release(hold(slots, "a"))

    assert slots.hold("a") == (0, False)


def test_the_least_recently_used_idle_slot_is_refilled() -> None:
    slots = AdapterSlots(3)
    for digest in ("a", "b", "c", "a"):
        slots.release(hold(slots, digest))
    kept = hold(slots, "b")

    refilled = hold(slots, "d")

    assert [slots.digest(i) for i in range(3)] == ["a", "b", "d"]
    assert refilled != kept


def test_letting_go_more_often_than_held_is_caught() -> None:
    slots = AdapterSlots(1)
    slots.release(hold(slots, "a"))

    with pytest.raises(AssertionError, match="slot 0"):
        slots.release(0)


def test_a_held_slot_is_not_dropped_and_an_idle_one_is() -> None:
    slots = AdapterSlots(2)
    slot = hold(slots, "a")

    assert slots.drop("a") is None
    assert slots.digest(slot) == "a"

    slots.release(slot)

    assert slots.drop("a") == slot
    assert slots.digest(slot) is None
    assert slots.drop("a") is None


@given(st.integers(1, 3), st.lists(st.tuples(st.sampled_from("abcde"), st.booleans())))
def test_a_held_slot_never_changes(num_slots: int, moves: list[tuple[str, bool]]) -> None:
    slots = AdapterSlots(num_slots)
    held: list[tuple[int, str]] = []

    for digest, lets_go in moves:
        if lets_go and held:
            slots.release(held.pop(0)[0])
        got = slots.hold(digest)
        in_hands = {slot for slot, _ in held}
        if got is None:
            assert len(in_hands) == num_slots
            assert digest not in {d for _, d in held}
        else:
            held.append((got[0], digest))
        assert all(slots.digest(slot) == expected for slot, expected in held)

    for slot, _ in held:
        slots.release(slot)
    assert all(slots.holds(slot) == 0 for slot in range(num_slots))


def test_an_adapter_is_used_until_its_last_sequence_lets_go() -> None:
    slots = AdapterSlots(2)
    long, short = hold(slots, "long"), hold(slots, "short")
    slots.release(short)
    slots.release(long)

    assert hold(slots, "new") == short
