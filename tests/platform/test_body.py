"""Bodies are read strictly: what two parsers could understand differently is refused."""

import inspect
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions
from pydantic import ValidationError

from manylora.platform.api import body
from manylora.platform.api.bodies import ASKS_FOR_NOTHING, ChatBody, CompletionBody, SamplingBody
from manylora.platform.api.body import (
    MAX_JSON_BYTES,
    MAX_JSON_DEPTH,
    MAX_JSON_MEMBERS,
    checked,
    parse_json,
)
from manylora.platform.errors import InvalidInputError
from support.app import TestBed

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), 1 << 63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_all_that_is_plain_json_is_read_as_it_is(value: Any) -> None:
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not JSON"),
        (b"{}{}", "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b'{"a": 01}', "not JSON"),
        (b'{"a": "\n"}', "not JSON"),
        (b'{"a": "\\x41"}', "not JSON"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"a": 1, "a": 2}', "duplicate"),
        (b'[{"b": {"a": 1, "a": 1}}]', "duplicate"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "UTF-8"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udc00": 1}', "surrogate"),
        (b"[" * 100_000, "deep"),
        (b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1), "deep"),
    ],
)
def test_what_is_refused_says_why(raw: bytes, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        parse_json(raw)


def test_the_deepest_that_is_allowed_is_read() -> None:
    assert parse_json(b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop": [["a"]]}, "stop[0]"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"user": 1}, "user"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [*HI, {"role": "root", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
        ({"temprature": 0}, "temprature"),
        ({"chat_template": "{{ 7*7 }}"}, "chat_template"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"messages": [*HI, HI[0] | {"tool_calls": [{"id": "x"}]}]}, "messages[1].tool_calls"),
        ({"messages": [HI[0] | {"refusal": "no"}]}, "messages[0].refusal"),
        ({"messages": [HI[0] | {"colour": "red"}]}, "messages[0].colour"),
        ({"messages": HI * 10_001}, "messages"),
        ({"priority": 1 << 40}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"skip_special_tokens": 1}, "skip_special_tokens"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"tools": []}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_the_field_at_fault_is_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        checked(ChatBody, {"model": "m", "messages": HI} | change)

    named = caught.value.param or ""
    assert named == param or named.startswith((param + ".", param + "["))


@pytest.mark.parametrize(
    ("model", "change", "says"),
    [
        (ChatBody, {"tools": []}, "tools is not supported by this server"),
        (ChatBody, {"logprobs": True}, "logprobs is not supported by this server"),
        (ChatBody, {"n": 2}, "n: only 1 is supported"),
        (ChatBody, {"tool_choice": "auto"}, 'tool_choice: only "none" is supported'),
        (ChatBody, {"parallel_tool_calls": 1}, "only true or false is supported"),
        (ChatBody, {"response_format": {}}, 'only {"type": "text"} is supported'),
        (
            ChatBody,
            {"messages": [HI[0] | {"tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls is not supported by this server",
        ),
        (ChatBody, {"messages": []}, "messages must not be empty"),
        (ChatBody, {"stop": ""}, "stop must not be empty"),
        (
            ChatBody,
            {"messages": [HI[0] | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type: images are not supported: only parts of type text",
        ),
        (CompletionBody, {"prompt": ["a", "b"]}, "prompt: one prompt per request"),
        (CompletionBody, {"prompt": [[1], [2]]}, "prompt: one prompt per request"),
    ],
)
def test_a_refusal_says_what_to_do(model: type[SamplingBody], change: Any, says: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        checked(model, {"messages": HI} | change if model is ChatBody else change)

    assert says in caught.value.message
    assert caught.value.param is not None


def test_what_asks_for_nothing_is_accepted_and_null_too() -> None:
    plain = checked(ChatBody, {"messages": HI})

    for name, values in ASKS_FOR_NOTHING.items():
        for value in (None, *values):
            assert checked(ChatBody, {"messages": HI, name: value}) == plain


@pytest.mark.parametrize(
    ("create", "model", "body"),
    [
        (ChatCompletions.create, ChatBody, {"messages": HI}),
        (Completions.create, CompletionBody, {"prompt": "x"}),
    ],
)
def test_every_field_of_the_sdk_may_be_null(
    create: Callable[..., Any], model: type[SamplingBody], body: dict[str, Any]
) -> None:
    of_the_client = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    fields = inspect.signature(create).parameters.keys() - of_the_client
    plain = checked(model, body)

    assert len(fields) > 10
    for name in fields - body.keys():
        assert checked(model, body | {name: None}) == plain


def test_an_answer_is_a_message_as_the_sdk_sends_it_back() -> None:
    answer = {"role": "assistant", "content": "hi", "refusal": None, "annotations": []}
    more = {"audio": None, "function_call": None, "tool_calls": None, "tool_call_id": None}

    for message in (answer, answer | more, answer | {"tool_calls": [], "name": None}):
        assert checked(ChatBody, {"messages": [message, *HI]}).messages[0].content == "hi"


FLOODS: list[tuple[type[SamplingBody], dict[str, Any]]] = [
    (CompletionBody, {"prompt": [[]] * 100_000}),
    (CompletionBody, {"prompt": [""] * 100_000}),
    (CompletionBody, {"prompt": [[""] * 100_000]}),
    (CompletionBody, {"prompt": [0] * 300_000}),
    (CompletionBody, {"prompt": "x", "stop": [1] * 100_000}),
    (CompletionBody, {"prompt": "x", "stop_token_ids": [""] * 100_000}),
    (ChatBody, {"messages": [{}] * 100_000}),
    (ChatBody, {"messages": [{"role": "user", "content": [[]] * 100_000}]}),
]


@pytest.mark.parametrize(("model", "value"), FLOODS)
def test_no_flood_of_faults_is_gathered(model: type[SamplingBody], value: dict[str, Any]) -> None:
    """Each takes its time, and pydantic lets nobody else run meanwhile."""
    with pytest.raises(InvalidInputError) as caught:
        checked(model, value)

    fault = caught.value.__cause__
    assert isinstance(fault, ValidationError)
    assert fault.error_count() < 40


def test_an_object_of_very_many_members_is_refused() -> None:
    members = ",".join(f'"{number}":0' for number in range(MAX_JSON_MEMBERS))

    assert len(parse_json(f"{{{members}}}".encode())) == MAX_JSON_MEMBERS
    with pytest.raises(InvalidInputError, match="members"):
        parse_json(f'{{{members},"x":0}}'.encode())


@pytest.mark.parametrize(
    ("prompt", "accepted"),
    [
        ("text", True),
        (["text"], True),
        ([1, 2], True),
        ([[1, 2]], True),
        (["a", "b"], False),
        ([[1], [2]], False),
        ([-1], False),
        ([1.5], False),
        ([True], False),
        ({"a": 1}, False),
        (None, False),
    ],
)
def test_a_prompt_is_one_text_or_one_list_of_ids(prompt: Any, accepted: bool) -> None:
    if accepted:
        assert checked(CompletionBody, {"prompt": prompt}).prompt == prompt
    else:
        with pytest.raises(InvalidInputError) as caught:
            checked(CompletionBody, {"prompt": prompt})
        assert (caught.value.param or "").startswith("prompt")


def post(bed: TestBed, content: Any, *headers: tuple[str, str]) -> httpx.Response:
    async def send() -> httpx.Response:
        async with bed.client(bed.keys["acme"]) as client:
            return await client.post(CHAT, content=content, headers=list(headers))

    return anyio.run(send)


def test_only_json_is_read(bed: TestBed) -> None:
    raw = json.dumps({"model": "pirate", "messages": HI}).encode()

    assert post(bed, raw).status_code == 200
    assert post(bed, raw, ("content-type", "application/json; charset=utf-8")).status_code == 200
    assert post(bed, raw, ("content-type", "text/plain")).status_code == 415


def test_a_body_too_long_is_refused_by_its_stated_or_its_true_length(bed: TestBed) -> None:
    async def endless() -> Any:
        for _ in range(MAX_JSON_BYTES // 100_000 + 1):
            yield b" " * 100_000

    assert post(bed, b" " * (MAX_JSON_BYTES + 1)).status_code == 413
    assert post(bed, endless()).status_code == 413


def test_a_long_body_is_checked_off_the_event_loop(
    bed: TestBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def noted(raw: bytes) -> Any:
        threads.append(threading.current_thread())
        return parse_json(raw)

    monkeypatch.setattr(body, "parse_json", noted)

    answer = post(bed, json.dumps({"messages": [[]] * 400_000}).encode())

    assert answer.status_code == 400
    assert threads != []
    assert threading.main_thread() not in threads


async def pieces(*given: bytes, pause: float) -> AsyncIterator[bytes]:
    for piece in given:
        yield piece
        await anyio.sleep(pause)


def test_a_body_that_stalls_is_given_up(bed: TestBed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "CHUNKED_IDLE_SECONDS", 0.1)

    answer = post(bed, pieces(b"{", pause=30))

    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "request_timeout"


def test_a_body_that_trickles_is_given_up(bed: TestBed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_SECONDS", 0.2)

    assert post(bed, pieces(*[b" "] * 20, pause=0.05)).status_code == 408


def test_a_large_body_may_take_its_time(bed: TestBed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(body, "SLOWEST_BYTES_PER_SECOND", 10_000)
    raw = json.dumps({"model": "pirate", "messages": HI}).encode()

    answer = post(bed, pieces(*[b" " * 1000] * 8, raw, pause=0.05))

    assert answer.status_code == 200


def test_a_value_is_never_echoed(bed: TestBed) -> None:
    answer = post(bed, json.dumps({"model": "pirate", "messages": "SECRET" * 1000}).encode())

    assert answer.status_code == 400
    assert "SECRET" not in answer.text
    assert len(answer.content) < 1000
