"""Chats: the answer's shape, its stream, its usage row, and every way to fail."""

import json
from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import pytest
from openai import APIError, BadRequestError, NotFoundError, OpenAI
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from manylora.engine.errors import (
    EngineError,
    EngineOverloadedError,
    EngineUnavailableError,
    RequestFailedError,
)
from manylora.platform import generation
from manylora.platform.db import Database
from manylora.platform.models import UsageRecord
from support.app import TestBed, listening
from support.fake_engine import INFO

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
HI_TOKENS = len("<user>hi<assistant>")


def ask(bed: TestBed, slug: str = "acme", path: str = CHAT, **body: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        async with bed.client(bed.keys[slug]) as client:
            return await client.post(path, json={"model": "pirate", "messages": HI} | body)

    return anyio.run(send)


def rows(bed: TestBed) -> list[UsageRecord]:
    with bed.services.db.read() as session:
        return list(session.scalars(select(UsageRecord).order_by(UsageRecord.id)))


def events(answer: httpx.Response) -> list[Any]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def test_an_adapter_answers_with_its_version_and_digest(bed: TestBed) -> None:
    answer = ask(bed)

    body = answer.json()
    digest = answer.headers["x-adapter-digest"]
    assert bed.engine.requests[0].adapter.digest == digest
    assert answer.headers["x-adapter-version"] == "v1"
    assert body["choices"][0]["message"]["content"] == digest[:8] + " one two three"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["model"] == "pirate"
    assert body["id"].startswith("chatcmpl-")


def test_the_base_model_answers_by_its_name_without_adapter_headers(bed: TestBed) -> None:
    answer = ask(bed, model="tiny")

    assert answer.json()["choices"][0]["message"]["content"].startswith("base")
    assert "x-adapter-digest" not in answer.headers


def test_one_row_is_left_whose_tokens_are_those_of_the_answer(bed: TestBed) -> None:
    answer = ask(bed)

    usage = answer.json()["usage"]
    [row] = rows(bed)
    assert usage == {
        "prompt_tokens": HI_TOKENS,
        "completion_tokens": 4,
        "total_tokens": HI_TOKENS + 4,
        "prompt_tokens_details": {"cached_tokens": HI_TOKENS // 2},
    }
    assert (row.prompt_tokens, row.completion_tokens) == (HI_TOKENS, 4)
    assert (row.cached_tokens, row.delivered_tokens) == (HI_TOKENS // 2, 4)
    assert (row.status, row.finish_reason, row.route) == ("ok", "stop", "chat")
    assert row.request_id == answer.headers["x-request-id"]
    assert row.adapter_digest == answer.headers["x-adapter-digest"]
    assert (row.queued_us, row.ttft_us, row.total_us) == (1000, 2000, 3000)


def test_a_stream_begins_with_the_role_and_ends_with_done(bed: TestBed) -> None:
    first, *deltas, finish, done = events(ask(bed, stream=True))

    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in deltas).endswith(" three")
    assert finish["choices"][0] | {"index": 0} == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert done == "[DONE]"
    assert "usage" not in finish


def test_include_usage_adds_one_chunk_equal_to_the_row(bed: TestBed) -> None:
    *chunks, usage, _done = events(ask(bed, stream=True, stream_options={"include_usage": True}))

    [row] = rows(bed)
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == row.prompt_tokens
    assert usage["usage"]["completion_tokens"] == row.completion_tokens == 4
    assert {chunk["usage"] for chunk in chunks} == {None}


def test_max_tokens_ends_with_length(bed: TestBed) -> None:
    answer = ask(bed, max_tokens=2)

    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == 2


def test_without_a_limit_the_rest_of_the_context_is_asked_for(bed: TestBed) -> None:
    ask(bed)

    assert bed.engine.requests[0].params.max_tokens == INFO.max_model_len - HI_TOKENS


def test_a_prompt_longer_than_the_context_names_both_numbers(bed: TestBed) -> None:
    answer = ask(bed, messages=[{"role": "user", "content": "x" * 600}])

    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert str(INFO.max_model_len) in error["message"]
    assert str(600 + len("<user><assistant>")) in error["message"]
    assert rows(bed) == []


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_limit_past_the_context_is_refused_by_its_name(bed: TestBed, field: str) -> None:
    answer = ask(bed, **{field: INFO.max_model_len - HI_TOKENS + 1})
    fits = ask(bed, **{field: INFO.max_model_len - HI_TOKENS})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert fits.status_code == 200


def test_text_parts_are_joined_and_developer_is_system(bed: TestBed) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]

    ask(bed, messages=messages)

    prompt = bed.services.text.decode(bed.engine.requests[0].prompt_token_ids)
    assert prompt == "<system>be<user>a\nb<assistant>"


ERRORS: list[tuple[EngineError, int, str]] = [
    (EngineOverloadedError(3), 503, "overloaded"),
    (EngineUnavailableError("/secret/path died"), 503, "engine_unavailable"),
    (RequestFailedError("/secret/path"), 503, "request_failed"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "code"), ERRORS)
def test_an_error_before_the_first_token_keeps_its_status(
    bed: TestBed, stream: bool, error: EngineError, status: int, code: str
) -> None:
    bed.engine.fails_at, bed.engine.error = 0, error

    answer = ask(bed, stream=stream)

    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert "secret" not in answer.text
    assert ("retry-after" in answer.headers) == (status == 503)
    assert rows(bed) == []


def test_an_error_after_the_first_token_ends_a_stream_without_done(bed: TestBed) -> None:
    bed.engine.fails_at = 2

    *_, last = events(ask(bed, stream=True))

    [row] = rows(bed)
    assert last["error"]["code"] == "engine_unavailable"
    assert (row.status, row.finish_reason) == ("engine_error", None)
    assert (row.completion_tokens, row.delivered_tokens) == (2, 2)


def test_an_error_after_the_first_token_of_a_whole_answer_is_still_billed(bed: TestBed) -> None:
    bed.engine.fails_at = 2

    answer = ask(bed)

    [row] = rows(bed)
    assert answer.status_code == 503
    assert (row.status, row.completion_tokens, row.delivered_tokens) == ("engine_error", 2, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_without_its_usage_row_no_answer_is_complete(
    bed: TestBed, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def down(_database: Database) -> None:
        raise OperationalError("INSERT", {}, Exception("the disk is gone"))

    ask(bed)  # its key is fresh now, so that nothing but the usage row is written
    monkeypatch.setattr(generation, "_RETRY_SECONDS", ())
    monkeypatch.setattr(Database, "write", down)

    answer = ask(bed, stream=stream)

    assert "[DONE]" not in answer.text
    assert "database_unavailable" in answer.text
    assert answer.status_code == (200 if stream else 503)


def test_a_dead_engine_is_503_and_not_ready(bed: TestBed) -> None:
    bed.engine.alive = False

    assert ask(bed).status_code == 503


@pytest.fixture
def client(bed: TestBed) -> Iterator[OpenAI]:
    with listening(bed.app) as base:
        yield OpenAI(base_url=f"{base}/v1", api_key=bed.keys["acme"], max_retries=0)


def test_the_openai_client_lists_chats_and_streams(bed: TestBed, client: OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    whole = client.chat.completions.create(model="support", messages=HI)
    stream = client.chat.completions.create(model="support", messages=HI, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]

    assert names == ["tiny", "pirate", "pirate@live", "support", "support@live"]
    assert whole.choices[0].message.content == "".join(pieces)
    assert whole._request_id is not None


def test_the_openai_client_chats_for_two_turns(bed: TestBed, client: OpenAI) -> None:
    messages: list[Any] = list(HI)
    first = client.chat.completions.create(model="support", messages=messages)
    messages += [first.choices[0].message, {"role": "user", "content": "more"}]

    client.chat.completions.create(model="support", messages=messages)

    prompt = bed.services.text.decode(bed.engine.requests[1].prompt_token_ids)
    said = first.choices[0].message.content
    assert prompt == f"<user>hi<assistant>{said}<user>more<assistant>"


def test_the_openai_client_raises_its_own_errors(bed: TestBed, client: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        client.chat.completions.create(model="json", messages=HI)
    with pytest.raises(BadRequestError, match="temperature"):
        client.chat.completions.create(model="support", messages=HI, temperature=9)

    bed.engine.fails_at = 2
    with pytest.raises(APIError, match="engine is not available"):
        list(client.chat.completions.create(model="support", messages=HI, stream=True))
