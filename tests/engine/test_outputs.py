"""From tokens to what a client sees: text, how a request ends, and the counts."""

from collections.abc import Sequence as Tokens
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.engine.api import FinishReason, Request, RequestOutput, SamplingParams
from manylora.engine.outputs import accept_token
from manylora.engine.sampler import SampledToken
from manylora.engine.sequence import Sequence
from manylora.engine.text.processor import TextProcessor
from manylora.engine.text.stops import StopMatcher
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


def feed(
    tokens: Tokens[int], *, max_model_len: int = 512, has_text: bool = True, **params: Any
) -> list[RequestOutput]:
    """Give a sequence these tokens until it ends."""
    values = {"max_tokens": 100, **params}
    request = Request(
        request_id="r",
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(**values),
        tenant="a",
    )
    sequence = Sequence(
        request=request,
        token_ids=[1, 2, 3],
        detokenizer=TEXT.detokenizer(request.prompt_token_ids) if has_text else None,
        stops=StopMatcher(request.params.stop) if request.params.stop else None,
    )
    outputs = []
    for token in tokens:
        outputs.append(
            accept_token(sequence, SampledToken(token), TEXT.eos_token_ids, max_model_len)
        )
        if outputs[-1].finish_reason is not None:
            break
    return outputs


def whole(outputs: list[RequestOutput]) -> RequestOutput:
    """What a reader gets who waits to the end."""
    merged = outputs[0]
    for output in outputs[1:]:
        merged = merged.merged_with(output)
    return merged


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
    output = whole(feed([1, 2, EOS], has_text=False))

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
