"""Stop strings: the oracle is a search over the whole text, one character more at a time."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from manylora.engine.text.stops import StopMatcher

# Two letters only, so that stop strings overlap, nest and occur often.
TEXTS = st.text("ab", max_size=20)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def first_completed(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What may be shown, and the stop string: the longest of those that end earliest."""
    for end in range(len(text) + 1):
        ending_here = [stop for stop in stops if text[:end].endswith(stop)]
        if ending_here:
            stop = max(ending_here, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(st.lists(TEXTS, max_size=6), STOPS)
@example(["a", "b", "a"], ["aba", "b"])
def test_the_result_is_that_of_the_whole_text_however_it_is_cut(
    chunks: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown, found = "", None

    for chunk in chunks:
        text, found = matcher.push(chunk)
        shown += text
        if found is not None:
            break
    if found is None:
        shown += matcher.flush()

    assert (shown, found) == first_completed("".join(chunks), stops)


@given(st.lists(TEXTS, max_size=6), STOPS)
def test_no_character_is_held_back_that_cannot_begin_a_stop_string(
    chunks: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown, so_far = "", ""

    for chunk in chunks:
        text, found = matcher.push(chunk)
        if found is not None:
            return
        shown, so_far = shown + text, so_far + chunk
        held = so_far[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@given(st.lists(TEXTS, max_size=6), STOPS)
@example(["a", "bab", "b"], ["abb"])
def test_a_shown_stop_string_belongs_to_the_text_and_nothing_is_held_back(
    chunks: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops, shown=True)
    shown, so_far, found = "", "", None

    for chunk in chunks:
        text, found = matcher.push(chunk)
        shown, so_far = shown + text, so_far + chunk
        if found is not None:
            break
        assert shown == so_far

    before, stop = first_completed("".join(chunks), stops)
    assert (shown + matcher.flush(), found) == (before + (stop or ""), stop)


@given(st.lists(TEXTS, max_size=4), st.lists(TEXTS, max_size=4), STOPS, st.booleans())
@example(["a"], ["b"], ["a", "ab"], False)
@example(["ab"], ["a"], ["aba", "b"], False)
def test_only_what_later_text_completes_ends_it_while_it_may_not_stop(
    early: list[str], late: list[str], stops: list[str], shown: bool
) -> None:
    matcher = StopMatcher(stops, shown=shown)
    text, found = "", None

    for chunk, may_stop in [*((c, False) for c in early), *((c, True) for c in late)]:
        more, found = matcher.push(chunk, may_stop=may_stop)
        text += more
        if found is not None:
            break
    text += matcher.flush() if found is None else ""

    whole, least = "".join([*early, *late]), len("".join(early))
    ends = [
        (end, -len(stop), stop)
        for end in range(least + 1, len(whole) + 1)
        for stop in stops
        if whole[:end].endswith(stop)
    ]
    if not ends:
        assert (text, found) == (whole, None)
    else:
        end, minus_length, stop = min(ends)
        assert (text, found) == (whole[: end if shown else end + minus_length], stop)


def test_without_stop_strings_everything_is_shown_at_once() -> None:
    assert StopMatcher(()).push("anything") == ("anything", None)


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_stop_string_cut_in_two_is_still_found(cut: int) -> None:
    text = "end###rest"
    matcher = StopMatcher(["###"])

    shown, found = matcher.push(text[:cut])
    if found is None:
        more, found = matcher.push(text[cut:])
        shown += more

    assert (shown, found) == ("end", "###")
