"""Requests and options say at once, and by name, what they cannot be."""

from typing import Any

import msgspec
import pytest

from manylora.engine.api import Request, SamplingParams
from manylora.engine.config import EngineConfig
from manylora.engine.errors import InvalidRequestError

BEYOND = 1 << 64  # cannot be sent to the engine


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 0},
        {"max_tokens": BEYOND},
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0},
        {"top_p": 1.01},
        {"top_p": float("nan")},
        {"top_k": -2},
        {"top_k": BEYOND},
        {"seed": BEYOND},
        {"seed": -BEYOND},
        {"logprobs": -1},
        {"logprobs": 21},
        {"prompt_logprobs": -1},
        {"prompt_logprobs": 21},
        {"n": 0},
        {"n": 129},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": "\ud800"},
        {"stop_token_ids": [5, -1]},
        {"stop_token_ids": [BEYOND]},
    ],
    ids=str,
)
def test_a_value_out_of_its_range_is_named(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**params)

    assert caught.value.param == next(iter(params))
    assert caught.value.param in caught.value.message.replace("stop string", "stop")
    caught.value.message.encode()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 2},
        {"top_p": 1},
        {"top_p": 5e-324},
        {"top_k": 1},
        {"seed": -1},
        {"seed": (1 << 63) - 1},
        {"logprobs": 0},
        {"logprobs": 20},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 20},
        {"n": 128},
        {"include_stop_str_in_output": True, "skip_special_tokens": False},
        {"max_tokens": 1},
        {"stop": "é"},
        {"stop_token_ids": [0]},
    ],
    ids=str,
)
def test_the_ends_of_each_range_are_taken_and_can_be_sent(params: dict[str, Any]) -> None:
    taken = SamplingParams(**params)

    encoded = msgspec.msgpack.encode(taken)
    assert msgspec.msgpack.decode(encoded, type=SamplingParams) == taken


def test_a_top_k_of_minus_1_is_no_limit() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_a_request_needs_a_prompt_that_can_be_sent() -> None:
    for tokens in ((), (1, -1), (1, BEYOND)):
        with pytest.raises(InvalidRequestError) as caught:
            Request(request_id="r", prompt_token_ids=tokens, params=SamplingParams(), tenant="a")
        assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int8"},
        {"block_size": 0},
        {"num_kv_blocks": 0},
        {"max_model_len": -1},
        {"max_loras": 0},
        {"threads": 0},
        {"max_num_batched_tokens": 31},
    ],
    ids=str,
)
def test_an_engine_option_out_of_its_range_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        EngineConfig(**options)

    assert caught.value.param == next(iter(options))


@pytest.mark.parametrize(
    "name", ["n", "max_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"]
)
@pytest.mark.parametrize("value", [8.5, 8.0, "8", True], ids=repr)
def test_a_count_that_is_no_whole_number_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})

    assert caught.value.param == name
