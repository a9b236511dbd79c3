"""From tokens to what a client sees: text, how a request ends, and the counts."""

from collections.abc import Sequence as Tokens
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.engine.api import FinishReason, RequestOutput
from manylora.engine.text.processor import TextProcessor
from support.outputs import feed as feed_to
from support.outputs import whole
from support.tiny_model import VOCAB_SIZE, byte_tokenizer

EOS = 257
TEXT = TextProcessor(
    vocab_size=VOCAB_SIZE,
    eos_token_ids=frozenset({EOS}),
    tokenizer=byte_tokenizer().backend_tokenizer,
)


def ids(text: str) -> list[int]:
    """One token for each byte."""
    return TEXT.encode(text)


def feed(tokens: Tokens[int], **options: Any) -> list[RequestOutput]:
    return feed_to(TEXT, tokens, **options)


def test_a_request_ends_at_max_tokens_with_all_its_text() -> None:
    output = whole(feed(ids("hello there"), max_tokens=5))

    assert output.text == "hello"
    assert output.finish_reason is FinishReason.LENGTH
    assert output.stop_reason is None
    assert (output.num_prompt_tokens, output.num_output_tokens) == (3, 5)


def test_a_request_ends_at_the_models_context() -> None:
    output = whole(feed(ids("hello there"), max_model_len=7))

    assert output.text == "hell"
    assert output.finish_reason is FinishReason.LENGTH


def test_the_end_of_sequence_token_ends_a_request_and_is_counted_without_text() -> None:
    output = whole(feed([*ids("hi"), EOS, *ids("never")]))

    assert output.text == "hi"
    assert output.finish_reason is FinishReason.STOP
    assert output.stop_reason is None
    assert output.num_output_tokens == 3


def test_the_end_of_sequence_token_is_passed_over_where_asked() -> None:
    output = whole(feed([*ids("hi"), EOS, *ids(" you")], ignore_eos=True, max_tokens=7))

    assert output.text == "hi you"
    assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("token", [ids("!")[0], EOS])
def test_a_stop_token_ends_a_request_and_is_named(token: int) -> None:
    output = whole(feed([*ids("hi"), token], stop_token_ids=[token], ignore_eos=True))

    assert output.text == "hi"
    assert output.finish_reason is FinishReason.STOP
    assert output.stop_reason == token
    assert output.num_output_tokens == 3


@pytest.mark.parametrize(
    ("end", "params", "text"),
    [
        (ids("!")[0], {}, "hi!"),
        (EOS, {}, "hi"),
        (EOS, {"skip_special_tokens": False}, "hi<|im_end|>"),
        (EOS, {"skip_special_tokens": False, "include_stop_str_in_output": False}, "hi"),
    ],
)
def test_the_token_that_ends_it_belongs_to_the_text_where_asked(
    end: int, params: dict[str, Any], text: str
) -> None:
    options = {"include_stop_str_in_output": True, "stop_token_ids": ids("!"), **params}

    output = whole(feed([*ids("hi"), end], **options))

    assert output.text == text
    assert output.finish_reason is FinishReason.STOP
    assert output.stop_reason == (None if end == EOS else end)


def test_special_tokens_within_the_text_are_shown_where_asked() -> None:
    tokens = [*ids("a"), 256, *ids("b")]

    assert whole(feed(tokens, max_tokens=3)).text == "ab"
    assert whole(feed(tokens, max_tokens=3, skip_special_tokens=False)).text == "a<|im_start|>b"


def test_a_special_token_can_complete_a_stop_string_only_where_it_is_text() -> None:
    tokens = [*ids("a"), 256, *ids("b")]

    skipped = whole(feed(tokens, max_tokens=3, stop="<|im_start|>"))
    shown = whole(feed(tokens, max_tokens=3, stop="<|im_start|>", skip_special_tokens=False))

    assert (skipped.text, skipped.finish_reason) == ("ab", FinishReason.LENGTH)
    assert (shown.text, shown.stop_reason) == ("a", "<|im_start|>")


@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, "ab"), (5, "ab"), (6, "abSTOPcd"), (11, "abSTOPcd"), (12, "abSTOPcdSTOP")],
)
def test_no_stop_string_ends_a_request_before_its_fewest_tokens(min_tokens: int, text: str) -> None:
    """As in vLLM, one that is completed by a later token counts, wherever it began."""
    output = whole(feed(ids("abSTOPcdSTOP"), stop="STOP", min_tokens=min_tokens, max_tokens=12))

    assert output.text == text


def test_a_stop_string_at_the_last_allowed_token_is_a_stop() -> None:
    output = whole(feed(ids("abSTOP"), stop="STOP", max_tokens=6))

    assert output.text == "ab"
    assert output.finish_reason is FinishReason.STOP
    assert output.stop_reason == "STOP"


@pytest.mark.parametrize("end", [[], [EOS], ids("!")])
def test_text_held_back_for_a_stop_string_comes_when_the_request_ends(end: list[int]) -> None:
    tokens = [*ids("abSTO"), *end]

    output = whole(feed(tokens, stop="STOP", max_tokens=5 + len(end), stop_token_ids=ids("!")))

    assert output.text == "abSTO"


def test_half_a_character_at_the_end_is_a_replacement_character() -> None:
    output = whole(feed(ids("aé")[:2], max_tokens=2))

    assert output.text == "a\ufffd"


def test_a_stop_string_of_replacement_characters_is_seen_at_the_end() -> None:
    output = whole(feed(ids("aé")[:2], max_tokens=2, stop="\ufffd"))

    assert output.text == "a"
    assert output.finish_reason is FinishReason.STOP


def test_a_model_without_a_tokenizer_gives_token_ids() -> None:
    mute = TextProcessor(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))

    output = whole(feed_to(mute, [1, 2, EOS]))

    assert output.token_ids == (1, 2, EOS)
    assert output.text == ""
    assert output.finish_reason is FinishReason.STOP


@given(
    before=st.text("aé😀S", max_size=5),
    stop=st.text("aé😀ST", min_size=1, max_size=4),
    after=st.text("aé😀T", max_size=3),
    others=st.lists(st.text("SX", min_size=1, max_size=3), max_size=2),
)
def test_the_stream_is_the_text_before_the_first_stop_string_wherever_tokens_end(
    before: str, stop: str, after: str, others: list[str]
) -> None:
    text = before + stop + after
    ends = [(text.find(s) + len(s), text.find(s), s) for s in (stop, *others) if s in text]
    end, start, first = min(ends)

    outputs = feed(ids(text), stop=(stop, *others))

    output = whole(outputs)
    assert output.text == text[:start] == "".join(o.text for o in outputs)
    assert output.stop_reason == first
    assert output.finish_reason is FinishReason.STOP
    assert output.num_output_tokens == len(text[:end].encode())  # what completed it is counted
    assert output.token_ids == tuple(ids(text[:end]))


@given(text=st.text(min_size=1, max_size=12), stop=st.lists(st.text(min_size=1), max_size=2))
def test_nothing_shown_is_ever_taken_back(text: str, stop: list[str]) -> None:
    outputs = feed(ids(text), stop=stop, max_tokens=len(text.encode()))

    assert text.startswith(whole(outputs).text)
    for number, output in enumerate(outputs, start=1):
        assert output.num_output_tokens == number
        assert "\ufffd" not in output.text or "\ufffd" in text
