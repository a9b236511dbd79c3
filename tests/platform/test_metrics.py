"""`/metrics`: who may read it, that it says what is true, and that it never fails or grows."""

import asyncio
import re
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import anyio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from manylora.engine.api import EngineStats, Remedies, SlotStats
from manylora.engine.lifecycle import WaitCause
from manylora.platform import generation, usage
from manylora.platform.api import metrics as route
from manylora.platform.app import create_metrics_app
from support.app import ADMIN_TOKEN, TestBed
from support.clients import until
from support.vllm_metrics import VLLM, WITHOUT_MODEL

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `(?P<name>[\w:]+)` \| (?P<type>\w+) \|(?P<labels>[^|]*)\|", re.MULTILINE)
PIRATE, SUPPORT = "a" * 64, "b" * 64

BUSY = EngineStats(
    num_running=3,
    num_waiting=5,
    waiting_by_cause={WaitCause.ADAPTER_SLOT: 1, WaitCause.GRAMMAR: 1, WaitCause.KV_BLOCKS: 3},
    kv_blocks_used=48,
    kv_blocks_total=64,
    num_steps=10,
    step_tokens=640,
    steps_by_tokens=(2, 0, 1, 0, 4, *[0] * 8, 3),
    num_preemptions=2,
    recomputed_tokens=30,
    prompt_tokens=500,
    output_tokens=100,
    prefix_queried_tokens=500,
    prefix_hit_tokens=200,
    queued_seconds_by_cause={WaitCause.FAIRNESS: 1.5},
    adapter_loads=7,
    slot_fills=9,
    uptime_seconds=60,
    remedies=Remedies(
        num_kv_blocks=80,
        max_num_seqs=4,
        max_num_batched_tokens=None,
        max_model_len=256,
        kv_bytes_factor=0.5,
    ),
    slots=(SlotStats(slot=0, digest=PIRATE, holds=2), SlotStats(slot=1, digest=SUPPORT)),
    host_digests=(PIRATE, SUPPORT, "c" * 64),
)


def request(bed: TestBed, method: str, path: str, key: str | None = None, **more: Any) -> Any:
    async def send() -> httpx.Response:
        async with bed.client(key) as client:
            return await client.request(method, path, **more)

    return anyio.run(send)


def scrape(bed: TestBed) -> str:
    answer = request(bed, "GET", "/metrics", ADMIN_TOKEN)
    assert answer.status_code == 200
    return str(answer.text)


def samples(text: str) -> dict[str, float]:
    """Values by series, without the labels that all of the engine's have."""
    found = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            labels = {k: v for k, v in one.labels.items() if k not in ("model_name", "engine")}
            shown = ",".join(f"{name}={labels[name]}" for name in sorted(labels))
            found[f"{one.name}{{{shown}}}" if shown else one.name] = one.value
    return found


def complete(bed: TestBed, **body: Any) -> httpx.Response:
    asked = {"model": "pirate", "prompt": "hello"} | body
    return request(bed, "POST", "/v1/completions", bed.keys["acme"], json=asked)


def test_it_needs_an_operator_token(bed: TestBed) -> None:
    assert request(bed, "GET", "/metrics").status_code == 401
    assert request(bed, "GET", "/metrics", bed.keys["acme"]).status_code == 403
    answer = request(bed, "GET", "/metrics", ADMIN_TOKEN)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_its_own_port_serves_it_to_anybody_and_nothing_else(bed: TestBed) -> None:
    alone = replace(bed, app=create_metrics_app(bed.services))

    assert request(alone, "GET", "/metrics").status_code == 200
    for path in ("/", "/health", "/v1/models", "/api/v1/tenants", "/admin", "/docs"):
        assert request(alone, "GET", path, ADMIN_TOKEN).status_code == 404


def test_vllms_metrics_are_there_by_name_type_and_labels(bed: TestBed) -> None:
    families = {family.name: family for family in text_string_to_metric_families(scrape(bed))}

    assert {name: families[name].type for name in VLLM if name in families} == VLLM
    for name in VLLM.keys() - set(WITHOUT_MODEL):
        for sample in families[name].samples:
            assert sample.labels["model_name"] == "tiny"
            assert sample.labels["engine"] == "0"
    [lora] = families["vllm:lora_requests_info"].samples
    assert set(lora.labels) == {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
    ended = families["vllm:request_success"].samples
    assert {one.labels["finished_reason"] for one in ended} == {"stop", "length", "abort", "error"}


def test_the_engines_snapshot_is_told(bed: TestBed) -> None:
    bed.engine.snapshot = BUSY

    told = samples(scrape(bed))

    expected = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 5,
        "vllm:num_requests_waiting_by_reason{reason=capacity}": 3,
        "vllm:num_requests_waiting_by_reason{reason=deferred}": 2,
        "manylora_requests_waiting{cause=kv_blocks}": 3,
        "manylora_requests_waiting{cause=fairness}": 0,
        "manylora_queue_seconds_total{cause=fairness}": 1.5,
        "vllm:kv_cache_usage_perc": 0.75,
        "manylora_kv_blocks{state=free}": 16,
        "vllm:prefix_cache_queries_total": 500,
        "vllm:prefix_cache_hits_total": 200,
        "vllm:prompt_tokens_total": 500,
        "vllm:prompt_tokens_by_source_total{source=local_compute}": 300,
        "vllm:generation_tokens_total": 100,
        "vllm:iteration_tokens_total_sum": 640,
        "vllm:iteration_tokens_total_count": 10,
        "vllm:iteration_tokens_total_bucket{le=1.0}": 2,
        "vllm:iteration_tokens_total_bucket{le=16.0}": 3,
        "vllm:iteration_tokens_total_bucket{le=16384.0}": 7,
        "vllm:iteration_tokens_total_bucket{le=+Inf}": 10,
        "vllm:num_preemptions_total": 2,
        "manylora_recomputed_tokens_total": 30,
        "manylora_preemption_remedy{knob=num_kv_blocks}": 80,
        "manylora_preemption_remedy{knob=kv_bytes_factor}": 0.5,
        "manylora_adapter_slots{state=held}": 1,
        "manylora_adapter_slots{state=idle}": 1,
        "manylora_adapters_resident{tier=host}": 3,
        "manylora_adapter_loads_total": 7,
        "manylora_slot_fills_total": 9,
        "manylora_engine_up": 1,
        "manylora_engine_uptime_seconds": 60,
    }
    assert {name: told.get(name) for name in expected} == expected
    assert "manylora_preemption_remedy{knob=max_num_batched_tokens}" not in told
    [lora] = [name for name in told if name.startswith("vllm:lora_requests_info")]
    assert f"running_lora_adapters={'a' * 12},waiting" in lora


def test_an_engine_that_is_away_is_a_metric_and_not_an_error(bed: TestBed) -> None:
    complete(bed)
    bed.services.metrics.engine_restarts = lambda: 3
    bed.engine.alive = False

    told = samples(scrape(bed))

    assert told["manylora_engine_up"] == 0
    assert told["manylora_engine_restarts_total"] == 3
    assert told["vllm:e2e_request_latency_seconds_count"] == 1
    assert "vllm:num_requests_running" not in told


def test_an_engine_that_hangs_does_not_make_it_hang(
    bed: TestBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never() -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(bed.engine, "stats", never)
    monkeypatch.setattr(route, "PATIENCE_SECONDS", 0.05)

    began = time.monotonic()
    assert samples(scrape(bed))["manylora_engine_up"] == 0
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("stream", [True, False])
def test_an_answered_request_is_observed(bed: TestBed, stream: bool) -> None:
    assert complete(bed, stream=stream, max_tokens=3).status_code == 200

    told = samples(scrape(bed))

    assert told["vllm:request_success_total{finished_reason=length}"] == 1
    assert told["vllm:time_to_first_token_seconds_sum"] == 0.002
    assert told["vllm:request_prompt_tokens_sum"] == 5
    assert told["vllm:request_generation_tokens_sum"] == 3
    assert told["vllm:request_params_max_tokens_sum"] == 3
    assert told["vllm:inter_token_latency_seconds_count"] == 2
    assert told["manylora_tenant_tokens_total{kind=prompt,tenant=acme}"] == 5
    assert told["manylora_http_requests_total{route=/v1/completions,status=2xx}"] == 1


@pytest.mark.parametrize(
    ("stalls_at", "is_held", "waits"), [(0, False, True), (1, False, False), (0, True, False)]
)
def test_an_adapter_waits_until_its_request_has_a_token_or_its_slot_is_held(
    bed: TestBed, monkeypatch: pytest.MonkeyPatch, stalls_at: int, is_held: bool, waits: bool
) -> None:
    # Other tests' requests may have been left where their event loop ended.
    monkeypatch.setattr(generation, "_running", weakref.WeakSet())
    bed.engine.stalls_at = stalls_at

    async def ask_and_scrape() -> tuple[str, str]:
        async with bed.client(bed.keys["acme"]) as client, bed.operator() as operator:
            body = {"model": "pirate", "prompt": "hello"}
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: bool(bed.engine.stalled))
            adapter = bed.engine.requests[0].adapter
            assert adapter is not None
            slot = SlotStats(slot=0, digest=adapter.digest, holds=int(is_held))
            bed.engine.snapshot = EngineStats(slots=(slot,))
            text = (await operator.get("/metrics")).text
            asking.cancel()
            await asyncio.wait([asking])
            return text, adapter.digest[:12]

    text, digest = anyio.run(ask_and_scrape)

    [lora] = [name for name in samples(text) if name.startswith("vllm:lora_requests_info")]
    assert f"running_lora_adapters={digest if is_held else ''}," in lora
    assert lora.endswith(f"waiting_lora_adapters={digest if waits else ''}}}")


def test_a_usage_row_that_is_lost_is_counted(bed: TestBed, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(_session: Session, _row: usage.Usage) -> NoReturn:
        raise OperationalError("INSERT", {}, Exception("the disk is gone"))

    monkeypatch.setattr(usage, "record", down)
    monkeypatch.setattr(generation, "_RETRY_SECONDS", ())
    assert samples(scrape(bed))["manylora_usage_lost_total"] == 0

    assert complete(bed).status_code == 503

    assert samples(scrape(bed))["manylora_usage_lost_total"] == 1


def test_routes_are_told_as_templates_and_bugs_as_5xx(
    bed: TestBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug() -> NoReturn:
        raise ZeroDivisionError

    request(bed, "GET", "/adapters/pirate/v1/models/pirate@v1", bed.keys["acme"])
    request(bed, "GET", "/api/v1/tenants/acme/keys", ADMIN_TOKEN)
    monkeypatch.setattr(bed.engine, "info", bug)
    request(bed, "GET", "/api/v1/engine", ADMIN_TOKEN)
    monkeypatch.undo()

    told = samples(scrape(bed))

    name = "manylora_http_requests_total"
    assert told[f"{name}{{route=/adapters/{{name}}/v1/models/{{model_id}},status=2xx}}"] == 1
    assert told[f"{name}{{route=/api/v1/tenants/{{tenant}}/keys,status=2xx}}"] == 1
    assert told[f"{name}{{route=/api/v1/engine,status=5xx}}"] == 1


def test_no_client_makes_series_or_reads_its_words_in_them(bed: TestBed) -> None:
    def junk(number: int) -> None:
        word = f"canary{number}"
        request(bed, "GET", f"/{word}?{word}")
        request(bed, "GET", f"/v1/models/{word}", bed.keys["acme"])
        request(bed, "GET", f"/adapters/{word}/v1/models", bed.keys["acme"])
        request(bed, "GET", f"/api/v1/tenants/{word}/keys", word)
        request(bed, f"CANARY{number}", "/v1/models")
        complete(bed, model=word)
        complete(bed, prompt=word, user=word)

    junk(0)
    before = samples(scrape(bed))
    for number in range(1, 25):
        junk(number)
    text = scrape(bed)

    scraped = {"manylora_http_requests_total{route=/metrics,status=2xx}"}
    assert samples(text).keys() - before.keys() == scraped
    assert "canary" not in text.lower()
    assert bed.keys["acme"] not in text


def test_a_scraper_that_would_rather_have_openmetrics_gets_the_same(bed: TestBed) -> None:
    """Of a library that spells vLLM's names otherwise there."""
    accept = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}

    answer = request(bed, "GET", "/metrics", ADMIN_TOKEN, headers=accept)

    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in answer.text


def test_the_page_about_metrics_has_each_and_no_other(bed: TestBed) -> None:
    bed.engine.snapshot = BUSY
    complete(bed)
    scrape(bed)  # counts itself
    page = {
        row["name"]: (row["type"], set(re.findall(r"`(\w+)`", row["labels"])))
        for row in ROW.finditer((ROOT / "docs" / "metrics.md").read_text())
    }

    live = {}
    for family in text_string_to_metric_families(scrape(bed)):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = set().union(*(one.labels for one in family.samples)) - {"le"}
        live[name] = (family.type, labels - ({"engine"} if "model_name" in labels else set()))
    assert page == live
