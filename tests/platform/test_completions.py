"""Completions: a prompt as it stands, by text or by token ids."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anyio
import httpx
import pytest
from openai import OpenAI
from sqlalchemy import select

from manylora.platform.models import UsageRecord
from support.app import TestBed, listening
from support.fake_engine import INFO


def ask(bed: TestBed, **body: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        async with bed.client(bed.keys["acme"]) as client:
            return await client.post("/v1/completions", json={"model": "pirate"} | body)

    return anyio.run(send)


def test_the_prompt_reaches_the_engine_as_it_stands(bed: TestBed) -> None:
    ask(bed, prompt="é<x>")
    ask(bed, prompt=["é<x>"])
    ask(bed, prompt=[1, 2, 3])
    ask(bed, prompt=[[1, 2, 3]])

    prompts = [request.prompt_token_ids for request in bed.engine.requests]
    assert prompts[0] == prompts[1]
    assert bed.services.text.decode(prompts[0]) == "é<x>"
    assert prompts[2:] == [(1, 2, 3), (1, 2, 3)]


def test_sampling_reaches_the_engine(bed: TestBed) -> None:
    ask(
        bed,
        prompt="x",
        max_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        seed=-3,
        stop="end",
        stop_token_ids=[5],
        ignore_eos=True,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-0.5,
        frequency_penalty=1,
        logit_bias={"7": -100, "0": 2.5},
        min_tokens=3,
    )
    ask(bed, prompt="x")

    asked, default = (request.params for request in bed.engine.requests)
    assert (asked.max_tokens, asked.temperature, asked.top_p, asked.top_k) == (7, 0, 0.5, 0)
    assert (asked.seed, asked.stop, asked.stop_token_ids) == (-3, ("end",), (5,))
    assert asked.ignore_eos
    assert (asked.min_p, asked.repetition_penalty, asked.min_tokens) == (0.1, 1.2, 3)
    assert (asked.presence_penalty, asked.frequency_penalty) == (-0.5, 1)
    assert asked.logit_bias == {7: -100, 0: 2.5}
    assert (default.max_tokens, default.temperature, default.top_p) == (16, 1.0, 1.0)
    assert (default.seed, default.stop, default.ignore_eos) == (None, (), False)


def test_the_salt_of_cached_prefixes_and_how_text_is_cut_reach_the_engine(bed: TestBed) -> None:
    ask(bed, prompt="x", cache_salt="s", include_stop_str_in_output=True, skip_special_tokens=False)
    ask(bed, prompt="x")

    asked, default = bed.engine.requests
    assert (asked.cache_salt, default.cache_salt) == ("s", None)
    assert asked.params.include_stop_str_in_output
    assert not asked.params.skip_special_tokens
    assert default.params.skip_special_tokens


def test_a_priority_counts_only_under_the_policy_that_heeds_it(
    bed: TestBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = ask(bed, prompt="x", priority=-5)
    nothing_asked = ask(bed, prompt="x", priority=0)
    heeding = replace(INFO, scheduling_policy="priority")
    monkeypatch.setattr("support.fake_engine.INFO", heeding)
    taken = ask(bed, prompt="x", priority=-5)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    assert (nothing_asked.status_code, taken.status_code) == (200, 200)
    assert [request.priority for request in bed.engine.requests] == [0, -5]


def test_the_default_limit_is_16_or_what_is_left(bed: TestBed) -> None:
    ask(bed, prompt="x" * (INFO.max_model_len - 3))

    assert bed.engine.requests[0].params.max_tokens == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [256]}, "prompt"),
        ({"prompt": "x", "stop_token_ids": [256]}, "stop_token_ids"),
        ({"prompt": "x", "logit_bias": {"256": 1}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"07": 1}}, "logit_bias.07"),
        ({"prompt": "x", "logit_bias": {"7": 101}}, "logit_bias.7"),
        ({"prompt": "x", "min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"prompt": "x", "presence_penalty": 2.1}, "presence_penalty"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "logprobs": 1}, "logprobs"),
        ({}, "prompt"),
        ({"prompt": "x" * INFO.max_model_len}, "prompt"),
    ],
)
def test_what_cannot_be_served_names_the_field(
    bed: TestBed, body: dict[str, Any], param: str
) -> None:
    answer = ask(bed, **body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert bed.engine.requests == []


def test_a_stream_has_text_a_finish_and_usage(bed: TestBed) -> None:
    answer = ask(bed, prompt="abc", stream=True, stream_options={"include_usage": True})

    *deltas, finish, usage = [
        json.loads(event.removeprefix("data: "))
        for event in answer.text.split("\n\n")[:-1]
        if event != "data: [DONE]"
    ]
    with bed.services.db.read() as session:
        row = session.scalars(select(UsageRecord)).one()
    assert answer.text.endswith("data: [DONE]\n\n")
    assert "".join(chunk["choices"][0]["text"] for chunk in deltas).endswith(" one two three")
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert (usage["choices"], usage["usage"]["prompt_tokens"]) == ([], 3)
    assert (row.route, row.prompt_tokens, row.completion_tokens) == ("completions", 3, 4)


@pytest.fixture
def client(bed: TestBed) -> Iterator[OpenAI]:
    with listening(bed.app) as base:
        yield OpenAI(
            base_url=f"{base}/adapters/support/v1", api_key=bed.keys["acme"], max_retries=0
        )


def test_the_openai_client_on_an_adapters_own_url(client: OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    whole = client.completions.create(model="support", prompt="x")
    pieces = client.completions.create(model="support@v1", prompt="x", stream=True)

    assert names == ["support", "support@live"]
    assert client.models.retrieve("support@v1").parent == "tiny"  # type: ignore[attr-defined]
    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in pieces)
