"""Bodies are read strictly: what two parsers could understand differently is refused."""

import json
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.platform.api import body
from manylora.platform.api.bodies import ASKS_FOR_NOTHING, ChatBody, CompletionBody
from manylora.platform.api.body import MAX_JSON_BYTES, MAX_JSON_DEPTH, checked, parse_json
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


def test_what_asks_for_nothing_is_accepted_and_null_too() -> None:
    plain = checked(ChatBody, {"messages": HI})

    for name, values in ASKS_FOR_NOTHING.items():
        for value in (None, *values):
            assert checked(ChatBody, {"messages": HI, name: value}) == plain


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


def test_a_body_that_stalls_is_given_up(bed: TestBed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "CHUNKED_TIMEOUT_SECONDS", 0.1)

    async def stalling() -> Any:
        yield b"{"
        await anyio.sleep(30)

    answer = post(bed, stalling())

    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "request_timeout"


def test_a_value_is_never_echoed(bed: TestBed) -> None:
    answer = post(bed, json.dumps({"model": "pirate", "messages": "SECRET" * 1000}).encode())

    assert answer.status_code == 400
    assert "SECRET" not in answer.text
    assert len(answer.content) < 1000
