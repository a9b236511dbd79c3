"""A request's life: complete when it has ended, known while it runs, and its readers' alone."""

import asyncio
import time
from typing import Any

import anyio
import httpx
import pytest
from sqlalchemy import func, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from manylora.engine.api import RequestMetrics, RequestOutput
from manylora.engine.errors import EngineOverloadedError, RequestFailedError
from manylora.engine.lifecycle import Stage, StageName, WaitCause
from manylora.platform import lives as module
from manylora.platform.generation import stop_running
from manylora.platform.keys import list_keys
from manylora.platform.life import Life
from manylora.platform.metrics import RequestMeter
from manylora.platform.models import RequestLife
from manylora.platform.routing import Route
from support.app import ADMIN_TOKEN, TestBed
from support.clients import until
from support.life import assert_whole

HI = [{"role": "user", "content": "hi"}]
STAGES = [
    "received",
    "tokenised",
    "queued",
    "scheduled",
    "prefill_chunk",
    "first_token",
    "last_token",
    "detokenised",
    "sent",
]


async def chat(bed: TestBed, token: str | None = None, **more: Any) -> httpx.Response:
    async with bed.client(token or bed.keys["acme"]) as client:
        body = {"model": "pirate", "messages": HI, **more}
        return await client.post("/v1/chat/completions", json=body)


async def look(bed: TestBed, path: str, token: str = ADMIN_TOKEN) -> httpx.Response:
    async with bed.client(token) as client:
        return await client.get(f"/api/v1/requests{path}")


def life_of(bed: TestBed, answer: httpx.Response) -> dict[str, Any]:
    found = anyio.run(look, bed, "/" + answer.headers["x-request-id"])
    assert found.status_code == 200, found.text
    return found.json()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answered_request_has_a_whole_life(bed: TestBed, stream: bool) -> None:
    began = time.monotonic()
    answer = anyio.run(lambda: chat(bed, stream=stream))
    seconds = time.monotonic() - began

    life = life_of(bed, answer)

    assert_whole(life, client_seconds=seconds)
    assert [stage["name"] for stage in life["stages"]] == STAGES
    assert life["stages"][4]["tokens"] == life["counts"]["prompt_tokens"]
    assert (life["status"], life["finish_reason"]) == ("ok", "stop")
    assert (life["tenant"], life["adapter"], life["adapter_version"]) == ("acme", "pirate", 1)
    assert life["adapter_digest"] == answer.headers["x-adapter-digest"]
    assert life["counts"]["completion_tokens"] == life["counts"]["delivered_tokens"] == 4
    assert life["queue"] == {
        "total_us": 1000,
        "by_cause": {"step": 333, "kv_blocks": 334, "fairness": 333},
    }
    [row] = anyio.run(look, bed, "").json()["data"]
    assert row == life


@pytest.mark.parametrize(
    "parts",
    [[0.1 + 0.2], [1e-7] * 9, [0.0000005, 0.0000015, 0.0000025], [1 / 3, 1 / 7, 1 / 11]],
)
def test_the_rounded_waits_sum_to_the_rounded_whole(parts: list[float]) -> None:
    waits = dict(zip(WaitCause, parts, strict=False))
    life = some_life()
    life.last = RequestOutput(request_id="r", metrics=RequestMetrics(queued_by_cause=waits))

    queue = life.as_json()["queue"]

    assert sum(queue["by_cause"].values()) == queue["total_us"]
    assert abs(queue["total_us"] - sum(parts) * 1e6) <= 1
    for cause, seconds in waits.items():
        assert abs(queue["by_cause"][cause] - seconds * 1e6) <= 1


def some_life(**values: Any) -> Life:
    received = Stage(StageName.RECEIVED, time.monotonic(), "manylora.platform.api.edge")
    defaults = {
        "request_id": "req_" + "0" * 32,
        "tenant_id": "ten_1",
        "tenant": "acme",
        "key_id": "key_1",
        "endpoint": "chat",
        "route": Route(base_model="tiny"),
        "num_prompt_tokens": 2,
        "received_at": 1_000_000,
        "stages": [received],
    }
    return Life(**defaults | values)


def test_a_running_request_is_told_as_far_as_it_is_known(bed: TestBed) -> None:
    bed.engine.stalls_at = 2
    told: list[dict[str, Any]] = []

    async def look_meanwhile() -> None:
        await until(lambda: bool(bed.engine.stalled))
        told.extend((await look(bed, "?status=running")).json()["data"])
        told.append((await look(bed, "/" + bed.engine.stalled[0])).json())
        stop_running()

    async def both() -> httpx.Response:
        answer, _ = await asyncio.gather(chat(bed), look_meanwhile())
        return answer

    answer = anyio.run(both)

    for life in told:
        assert life["request_id"] == bed.engine.stalled[0]
        assert (life["status"], life["finish_reason"]) == ("running", None)
        assert [stage["name"] for stage in life["stages"]] == ["received", "tokenised"]
        assert life["total_us"] >= life["stages"][-1]["at_us"]
        assert life["counts"]["completion_tokens"] == 2
    assert len(told) == 2
    assert life_of(bed, answer)["status"] == "server_stop"
    assert anyio.run(look, bed, "?status=running").json()["data"] == []


@pytest.mark.parametrize(
    ("error", "status"),
    [(EngineOverloadedError(1.0), "refused"), (RequestFailedError("no"), "engine_error")],
)
def test_a_request_that_gets_no_token_has_a_life(bed: TestBed, error: Any, status: str) -> None:
    bed.engine.fails_at, bed.engine.error = 0, error

    life = life_of(bed, anyio.run(chat, bed))

    assert (life["status"], life["finish_reason"]) == (status, None)
    assert [stage["name"] for stage in life["stages"]] == ["received", "tokenised", "sent"]
    assert life["counts"]["prompt_tokens"] == len(bed.engine.requests[0].prompt_token_ids)
    assert_whole(life)


def test_an_engine_that_is_away_and_a_prompt_that_cannot_fit_refuse(bed: TestBed) -> None:
    too_long = anyio.run(lambda: chat(bed, max_tokens=10_000))
    bed.engine.alive = False
    away = anyio.run(chat, bed)

    assert (too_long.status_code, away.status_code) == (400, 503)
    assert life_of(bed, too_long)["status"] == life_of(bed, away)["status"] == "refused"


def test_what_breaks_off_after_some_tokens_keeps_its_counts(bed: TestBed) -> None:
    bed.engine.fails_at = 2

    life = life_of(bed, anyio.run(lambda: chat(bed, stream=True)))

    assert life["status"] == "engine_error"
    assert life["counts"]["completion_tokens"] == life["counts"]["delivered_tokens"] == 2
    assert life["stages"][-1]["name"] == "sent"


def test_who_may_look_and_what_others_are_told(bed: TestBed) -> None:
    """Another's request, another key's, one that never was and one that cannot be: all alike."""
    infer, other = bed.issue("acme", "infer"), bed.issue("acme", "infer")
    path = "/" + anyio.run(chat, bed, infer).headers["x-request-id"]

    for token in (ADMIN_TOKEN, bed.keys["acme"], infer):
        assert anyio.run(look, bed, path, token).status_code == 200
        assert len(anyio.run(look, bed, "", token).json()["data"]) == 1
    for token in (bed.keys["globex"], other):
        assert anyio.run(look, bed, "", token).json()["data"] == []
    refusals = [
        anyio.run(look, bed, path, bed.keys["globex"]),
        anyio.run(look, bed, path, other),
        anyio.run(look, bed, "/req_" + "0" * 32, other),
        anyio.run(look, bed, "/req_%00", ADMIN_TOKEN),
    ]
    assert {refusal.status_code for refusal in refusals} == {404}
    assert len({refusal.text for refusal in refusals}) == 1
    assert anyio.run(look, bed, path, "sk-nope").status_code == 401


def test_a_running_request_of_another_is_not_there_either(bed: TestBed) -> None:
    life = some_life(tenant_id=bed.tenant_ids["acme"], key_id="key_1")
    bed.services.lives.begin(life)

    for token in (bed.keys["globex"], bed.issue("acme", "infer")):
        assert anyio.run(look, bed, "/" + life.request_id, token).status_code == 404
        assert anyio.run(look, bed, "", token).json()["data"] == []


def test_pages_join_to_the_whole_newest_first(bed: TestBed) -> None:
    sent = [anyio.run(chat, bed).headers["x-request-id"] for _ in range(5)]
    running = some_life(request_id="req_" + "f" * 32)
    bed.services.lives.begin(running)

    read, query = [], "?limit=2"
    while query:
        page = anyio.run(look, bed, query)
        read += [life["request_id"] for life in page.json()["data"]]
        cursor = page.headers.get("x-next-page")
        query = f"?limit=2&page={cursor}" if cursor else ""

    assert read == [running.request_id, *reversed(sent)]


def test_a_list_is_filtered(bed: TestBed) -> None:
    anyio.run(chat, bed)
    anyio.run(lambda: chat(bed, model="support"))
    bed.engine.fails_at = 0
    anyio.run(chat, bed)

    def found(query: str) -> list[tuple[str, str]]:
        lives = anyio.run(look, bed, query).json()["data"]
        return [(life["adapter"], life["status"]) for life in lives]

    assert found("?adapter=pirate") == [("pirate", "engine_error"), ("pirate", "ok")]
    assert found("?status=ok") == [("support", "ok"), ("pirate", "ok")]
    assert found("?adapter=pirate&status=ok") == [("pirate", "ok")]
    assert found("?adapter=nobody") == []


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("status=great", "status"),
        ("page=1", "page"),
        ("adapter=%00", "adapter"),
        ("tenant=acme", "tenant"),
    ],
)
def test_a_bad_query_is_refused_by_name(bed: TestBed, query: str, param: str) -> None:
    answer = anyio.run(look, bed, f"?{query}")

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_the_oldest_beyond_the_bound_go_a_bite_at_a_time(
    bed: TestBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PRUNE_EVERY", 3)
    monkeypatch.setattr(module, "PRUNE_BITE", 4)
    bed.services.lives.kept = 5
    with bed.services.db.write() as session:
        for number in range(10):
            module.keep(session, kept_life(bed, session, number))

    counts = []
    for _ in range(7):
        anyio.run(chat, bed)
        with bed.services.db.read() as session:
            counts.append(session.scalar(select(func.count()).select_from(RequestLife)))
            oldest = session.scalar(select(func.min(RequestLife.request_id)))

    assert counts == [7, 8, 9, 6, 7, 8, 5]
    assert oldest > "req_" + "0" * 32


def kept_life(bed: TestBed, session: Session, number: int) -> Life:
    tenant_id = bed.tenant_ids["acme"]
    ids = {"tenant_id": tenant_id, "key_id": list_keys(session, tenant_id)[0].id}
    return some_life(request_id=f"req_{number:032x}", status="ok", ended=0.0, **ids)


def test_a_life_that_cannot_be_written_costs_a_log_line_alone(
    bed: TestBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = module.keep

    def down_at_the_end(session: Session, life: Life) -> None:
        if life.stages[-1].name is StageName.SENT:
            raise OperationalError("INSERT", {}, Exception("the disk is gone"))
        keep(session, life)

    monkeypatch.setattr(module, "keep", down_at_the_end)

    with capture_logs() as logs:
        answer = anyio.run(chat, bed)

    assert answer.status_code == 200
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == [
        "life_not_written"
    ]
    # What was written with its usage row is still there.
    life = life_of(bed, answer)
    assert (life["status"], life["stages"][-1]["name"]) == ("ok", "detokenised")


def test_what_a_bug_of_ours_ends_is_not_called_refused(
    bed: TestBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(RequestMeter, "output", bug)

    answer = anyio.run(chat, bed)

    assert answer.status_code == 500
    assert life_of(bed, answer)["status"] == "engine_error"


@pytest.mark.parametrize("written", [True, False])
def test_an_export_that_fails_costs_a_log_line_alone(
    bed: TestBed, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """It comes after the row, and whether or not there is one."""
    exported = []

    def export(life: Life) -> None:
        exported.append(life.request_id)
        raise TypeError("no such attribute")

    def down(*_args: object) -> None:
        raise OperationalError("INSERT", {}, Exception("the disk is gone"))

    bed.engine.fails_at = 0
    bed.services.lives.export = export
    if not written:
        monkeypatch.setattr(module, "keep", down)

    with capture_logs() as logs:
        answer = anyio.run(chat, bed)

    request_id = answer.headers["x-request-id"]
    assert answer.status_code == 503
    assert exported == [request_id]
    failures = [line["event"] for line in logs if line["event"].startswith("life_")]
    assert failures == [*([] if written else ["life_not_written"]), "life_not_exported"]
    found = anyio.run(look, bed, f"/{request_id}")
    assert found.status_code == (200 if written else 404)
