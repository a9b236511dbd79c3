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
