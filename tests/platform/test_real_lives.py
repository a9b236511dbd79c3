"""Lives of real requests: a server of two processes, a tiny model, adapters and a scarce pool."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.life import assert_whole
from support.served import free_port, served
from support.tiny_model import make_adapter, make_tiny_llama

TOKEN = "operator-token-of-the-test"
ENGINE_STAGES = [
    "queued",
    "scheduled",
    "prefill_chunk",
    "first_token",
    "last_token",
    "detokenised",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """An operator's client of a server whose KV pool holds less than two of the longer requests."""
    folder = tmp_path_factory.mktemp("lives")
    model, port = make_tiny_llama(folder / "tiny"), free_port()
    options = {
        "MANYLORA_MODEL": str(model),
        "MANYLORA_PORT": str(port),
        "MANYLORA_DATA_DIR": str(folder / "data"),
        "MANYLORA_CACHE": str(folder / "cache"),
        "MANYLORA_ADMIN_TOKEN": TOKEN,
        "MANYLORA_NUM_KV_BLOCKS": "12",
        "MANYLORA_BLOCK_SIZE": "16",
        "MANYLORA_MAX_NUM_SEQS": "4",
        "MANYLORA_MAX_NUM_BATCHED_TOKENS": "32",
        "MANYLORA_MAX_MODEL_LEN": "160",
        "MANYLORA_THREADS": "1",
    }
    with (
        served(["manylora", "serve"], options, port=port, log=folder / "log") as base,
        httpx.Client(
            base_url=base, headers={"authorization": f"Bearer {TOKEN}"}, timeout=120
        ) as client,
    ):
        client.post("/api/v1/tenants", json={"slug": "acme"}).raise_for_status()
        upload(client, make_adapter(model, folder / "pirate"))
        yield client


def upload(client: httpx.Client, adapter: Path) -> None:
    names = ("adapter_config.json", "adapter_model.safetensors")
    files = [("files", (name, (adapter / name).read_bytes())) for name in names]
    path = "/api/v1/tenants/acme/adapters"
    client.post(path, data={"name": "pirate"}, files=files).raise_for_status()


@pytest.fixture(scope="module")
def key(server: httpx.Client) -> str:
    made = server.post("/api/v1/tenants/acme/keys", json={"name": "test"}).raise_for_status()
    return str(made.json()["key"])


def complete(client: httpx.Client, key: str, **body: Any) -> tuple[dict[str, Any], float]:
    """The life of one completion, and the seconds that it took its client."""
    body = {"model": "tiny", "prompt": "x" * 40, "temperature": 0, "ignore_eos": True} | body
    headers = {"authorization": f"Bearer {key}"}
    began = time.monotonic()
    answer = client.post("/v1/completions", json=body, headers=headers).raise_for_status()
    seconds = time.monotonic() - began
    return life_of(client, answer.headers["x-request-id"]), seconds


def life_of(client: httpx.Client, request_id: str) -> dict[str, Any]:
    """The life once its end is written, a moment after the last byte was read."""
    deadline = time.monotonic() + 5
    while True:
        life = client.get(f"/api/v1/requests/{request_id}").raise_for_status().json()
        if life["stages"][-1]["name"] == "sent":
            return dict(life)
        assert time.monotonic() < deadline, life
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_one_request_is_traced_from_the_post_to_the_last_byte(
    server: httpx.Client, key: str, stream: bool
) -> None:
    prompt = ("s" if stream else "w") * 40  # neither finds the other in the prefix cache
    life, seconds = complete(server, key, prompt=prompt, max_tokens=8, stream=stream)

    assert_whole(life, client_seconds=seconds)
    # 40 prompt tokens within 32 a step: two chunks.
    two_chunks = [*ENGINE_STAGES[:3], "prefill_chunk", *ENGINE_STAGES[3:]]
    names = [stage["name"] for stage in life["stages"]]
    assert names == ["received", "tokenised", *two_chunks, "sent"]
    chunks = [stage["tokens"] for stage in life["stages"] if stage["name"] == "prefill_chunk"]
    assert chunks == [32, 8]
    assert life["counts"]["completion_tokens"] == life["counts"]["delivered_tokens"] == 8


def test_a_request_with_an_adapter_says_when_that_was_ready(server: httpx.Client, key: str) -> None:
    life, seconds = complete(server, key, model="pirate", max_tokens=4)

    assert_whole(life, client_seconds=seconds)
    assert "adapter_ready" in [stage["name"] for stage in life["stages"]]
    assert life["queue"]["by_cause"].get("adapter_load", 0) > 0


def test_a_stream_that_is_cut_off_keeps_what_the_engine_had_told(
    server: httpx.Client, key: str
) -> None:
    body = {"model": "tiny", "prompt": "c" * 40, "max_tokens": 100, "stream": True}
    headers = {"authorization": f"Bearer {key}"}
    with server.stream(
        "POST", "/v1/completions", json=body | {"ignore_eos": True}, headers=headers
    ) as answer:
        request_id = answer.headers["x-request-id"]
        lines = answer.iter_lines()  # kept: it closes the stream when it goes
        next(lines)
        running = server.get(f"/api/v1/requests/{request_id}").raise_for_status().json()

    deadline = time.monotonic() + 5
    while (life := server.get(f"/api/v1/requests/{request_id}").json())["status"] == "running":
        assert time.monotonic() < deadline, life
        time.sleep(0.01)
    for told in (running, life):
        names = [stage["name"] for stage in told["stages"]]
        assert names[:6] == ["received", "tokenised", *ENGINE_STAGES[:3], "prefill_chunk"]
        assert "first_token" in names
    assert (running["status"], life["status"]) == ("running", "client_abort")


def test_what_waits_and_what_is_preempted_says_why(server: httpx.Client, key: str) -> None:
    """Six requests of 120 tokens each over 192 tokens of KV and four sequences at most."""
    with ThreadPoolExecutor(6) as pool:
        sent = [
            pool.submit(complete, server, key, prompt=letter * 40, max_tokens=80)
            for letter in "abcdef"
        ]
        lives = [each.result() for each in sent]

    for life, seconds in lives:
        assert_whole(life, client_seconds=seconds)
        names = [stage["name"] for stage in life["stages"]]
        assert names.count("preempted") == names.count("resumed") == life["counts"]["preemptions"]
        waited = life["queue"]["by_cause"]
        assert (waited.get("preempted", 0) > 0) == (life["counts"]["preemptions"] > 0)
    causes = {cause for life, _ in lives for cause, us in life["queue"]["by_cause"].items() if us}
    assert causes & {"kv_blocks", "sequence_limit"}


def test_the_usage_row_and_the_life_agree(server: httpx.Client, key: str) -> None:
    life, _ = complete(server, key, max_tokens=5)

    rows = server.get("/api/v1/usage/records?format=jsonl").text.splitlines()
    [row] = [row for line in rows if (row := json.loads(line))["request_id"] == life["request_id"]]
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "delivered_tokens"):
        assert row[name] == life["counts"][name]
    assert abs(row["queued_us"] - life["queue"]["total_us"]) <= 1
    assert row["total_us"] <= life["total_us"]
