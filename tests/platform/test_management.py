"""`/api/v1`: what operators and tenant admins do, over HTTP."""

import errno
import json
from contextlib import AsyncExitStack
from typing import Any

import anyio
import httpx
import pytest
from starlette.datastructures import UploadFile

from manylora.engine.api import EngineStats, SlotStats
from manylora.engine.lifecycle import WaitCause
from manylora.platform import registry
from support.app import ADMIN_TOKEN, TestBed

HI = [{"role": "user", "content": "hi"}]


def call(
    bed: TestBed, method: str, path: str, body: Any = None, token: str = ADMIN_TOKEN, **more: Any
) -> httpx.Response:
    async def send() -> httpx.Response:
        async with bed.client(token) as client:
            return await client.request(method, path, json=body, **more)

    return anyio.run(send)


def upload(bed: TestBed, name: str, weights: bytes, **fields: str) -> httpx.Response:
    files = [
        ("files", ("adapter_config.json", b'{"r": 8}')),
        ("files", ("adapter_model.safetensors", weights)),
    ]
    data = {"name": name, **fields}
    return call(bed, "POST", "/api/v1/adapters", token=bed.keys["acme"], files=files, data=data)


def test_a_tenant_its_key_and_its_first_answer(bed: TestBed) -> None:
    made = call(bed, "POST", "/api/v1/tenants", {"slug": "initech", "name": "Initech"})
    issued = call(bed, "POST", "/api/v1/tenants/initech/keys", {"name": "ci"})
    listed = call(bed, "GET", f"/api/v1/tenants/{made.json()['id']}/keys")
    secret = issued.json()["key"]
    answer = call(
        bed, "POST", "/v1/chat/completions", {"model": "tiny", "messages": HI}, token=secret
    )

    assert (made.status_code, issued.status_code, answer.status_code) == (201, 201, 200)
    assert made.json() | {"id": "", "created_at": 0} == {
        "id": "",
        "object": "tenant",
        "slug": "initech",
        "name": "Initech",
        "status": "active",
        "created_at": 0,
    }
    assert issued.headers["cache-control"] == "no-store"
    [key] = listed.json()["data"]
    assert key["prefix"] == secret[:11]
    assert secret not in listed.text


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "/tenants", {"slug": "acme"}, 409, "slug"),
        ("POST", "/tenants", {"slug": "A b"}, 400, "slug"),
        ("POST", "/tenants", {"slug": "x", "name": "a\0"}, 400, "name"),
        ("POST", "/tenants", {"slug": "x", "admin": True}, 400, "admin"),
        ("GET", "/tenants/nosuch", None, 404, "tenant"),
        ("GET", "/tenants/%00", None, 404, "tenant"),
        ("PATCH", "/tenants/acme", {"status": "deleted"}, 400, "status"),
        ("POST", "/tenants/acme/keys", {"name": ""}, 400, "name"),
        ("POST", "/tenants/acme/keys", {"name": "k", "scopes": ["root"]}, 400, "scopes"),
        ("POST", "/tenants/acme/keys", {"name": "k", "expires_at": "soon"}, 400, "expires_at"),
        ("POST", "/tenants/acme/keys", {"name": "k", "expires_at": 1}, 400, "expires_at"),
        ("DELETE", "/tenants/acme/keys/nosuch", None, 404, "key_id"),
        ("DELETE", "/tenants/acme/keys/%00", None, 404, "key_id"),
        ("GET", "/tenants/acme/adapters/json", None, 404, "adapter"),
        ("DELETE", "/tenants/acme/adapters/json", None, 404, "adapter"),
        ("PUT", "/tenants/acme/adapters/pirate/aliases/live", {"version": 2}, 400, "version"),
        ("PUT", "/tenants/acme/adapters/pirate/aliases/v1", {"version": 1}, 400, "alias"),
        ("PUT", "/tenants/acme/adapters/json/aliases/live", {"version": 1}, 404, "adapter"),
    ],
)
def test_what_cannot_be_done_names_the_field(
    bed: TestBed, method: str, path: str, body: Any, status: int, param: str
) -> None:
    answer = call(bed, method, f"/api/v1{path}", body)

    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "expires_at", [4102444800, "2100-01-01", "2100-01-01T00:00:00Z", "2100-01-01T01:00:00+01:00"]
)
def test_times_are_unix_seconds_or_iso(bed: TestBed, expires_at: Any) -> None:
    body = {"name": "k", "expires_at": expires_at}

    answer = call(bed, "POST", "/api/v1/tenants/acme/keys", body)

    assert answer.json()["expires_at"] == 4102444800


def test_a_suspended_tenant_is_refused_and_comes_back(bed: TestBed) -> None:
    path, key = "/api/v1/tenants/acme", bed.keys["acme"]
    suspended = call(bed, "PATCH", path, {"status": "suspended"})
    refused = call(bed, "GET", "/v1/models", token=key)
    call(bed, "PATCH", path, {"status": "active"})

    assert suspended.json()["status"] == "suspended"
    assert refused.status_code == 403
    assert call(bed, "GET", "/v1/models", token=key).status_code == 200


def test_a_revoked_key_is_refused_at_once(bed: TestBed) -> None:
    issued = call(bed, "POST", "/api/v1/keys", {"name": "x"}, token=bed.keys["acme"]).json()
    before = call(bed, "GET", "/v1/models", token=issued["key"])
    revoked = call(bed, "DELETE", f"/api/v1/keys/{issued['id']}", token=bed.keys["acme"])

    assert before.status_code == 200
    assert revoked.json()["revoked_at"] is not None
    assert call(bed, "GET", "/v1/models", token=issued["key"]).status_code == 401


def test_another_tenants_key_cannot_be_revoked(bed: TestBed) -> None:
    issued = call(bed, "POST", "/api/v1/keys", {"name": "x"}, token=bed.keys["acme"]).json()

    answer = call(bed, "DELETE", f"/api/v1/keys/{issued['id']}", token=bed.keys["globex"])

    assert answer.status_code == 404
    assert call(bed, "GET", "/v1/models", token=issued["key"]).status_code == 200


def test_an_upload_is_callable_a_moment_later(bed: TestBed) -> None:
    first, again = upload(bed, "mine", b"1"), upload(bed, "mine", b"1")
    second = upload(bed, "mine", b"2", promote="true")
    answer = call(
        bed, "POST", "/v1/completions", {"model": "mine", "prompt": "x"}, token=bed.keys["acme"]
    )

    assert [a.status_code for a in (first, again, second)] == [201, 200, 201]
    assert first.json()["report"] == {"rank": 8, "ignored_files": []}
    assert (first.json()["version"], second.json()["version"]) == (1, 2)
    assert answer.headers["x-adapter-version"] == "v2"
    assert answer.headers["x-adapter-digest"] == second.json()["digest"]


def test_a_refused_upload_is_422_with_every_reason(bed: TestBed) -> None:
    files = [
        ("files", ("adapter_config.json", b"{}")),
        ("files", ("adapter_model.safetensors", b"x")),
    ]
    answer = call(
        bed, "POST", "/api/v1/adapters", token=bed.keys["acme"], files=files, data={"name": "m"}
    )

    error = answer.json()["error"]
    assert answer.status_code == 422
    assert error["reasons"] == ["r is missing", "nothing else is said either"]
    assert all(reason in error["message"] for reason in error["reasons"])


@pytest.mark.parametrize(
    ("fields", "files", "param"),
    [
        ({}, [("files", ("adapter_config.json", b"{}"))], "name"),
        ({"name": "m", "promote": "yes"}, [("files", ("adapter_config.json", b"{}"))], "promote"),
        ({"name": "m"}, [("archive", ("a.zip", b"PK"))], None),
        ({"name": "m", "files": "text"}, [("files", ("adapter_config.json", b"{}"))], "files"),
        ({"name": "m"}, [("files", ("adapter_config.json", b"{}"))], "files"),
    ],
)
def test_a_bad_form_is_refused(
    bed: TestBed, fields: dict[str, str], files: list[Any], param: str | None
) -> None:
    answer = call(bed, "POST", "/api/v1/adapters", token=bed.keys["acme"], files=files, data=fields)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_form_past_the_limit_is_refused_before_it_is_read(bed: TestBed) -> None:
    answer = upload(bed, "mine", b"x" * (3 << 20))

    assert answer.status_code == 413


def test_a_form_that_states_no_length_is_capped_as_it_comes(bed: TestBed) -> None:
    async def endless() -> Any:
        yield b'--b\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n'
        for _ in range(50):
            yield b"x" * 100_000

    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = call(
        bed,
        "POST",
        "/api/v1/adapters",
        token=bed.keys["acme"],
        content=endless(),
        headers=headers,
    )

    assert answer.status_code == 413


def test_the_answer_names_the_files_that_are_not_kept(bed: TestBed) -> None:
    files = [
        ("files", ("adapter_config.json", b'{"r": 8}')),
        ("files", ("adapter_model.safetensors", b"1")),
        ("files", ("tokenizer.json", b"{}")),
    ]

    answer = call(
        bed, "POST", "/api/v1/adapters", token=bed.keys["acme"], files=files, data={"name": "m"}
    )

    assert answer.json()["report"]["ignored_files"] == ["tokenizer.json"]


def test_one_upload_too_many_is_told_when_to_come_back(
    bed: TestBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "UPLOAD_PATIENCE_SECONDS", 0.05)
    form = {
        "files": [
            ("files", ("adapter_config.json", b'{"r": 8}')),
            ("files", ("adapter_model.safetensors", b"1")),
        ],
        "data": {"name": "m"},
    }

    async def crowd() -> tuple[httpx.Response, httpx.Response]:
        async with bed.client(bed.keys["acme"]) as client:
            async with AsyncExitStack() as others:
                for _ in range(registry.MAX_UPLOADS):
                    await others.enter_async_context(bed.services.adapters.turn())
                refused = await client.post("/api/v1/adapters", **form)
            return refused, await client.post("/api/v1/adapters", **form)

    refused, taken = anyio.run(crowd)

    assert (refused.status_code, taken.status_code) == (503, 201)
    assert int(refused.headers["retry-after"]) > 0


def test_a_disk_that_fills_while_an_upload_comes_in_is_507(
    bed: TestBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(_file: UploadFile, _data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(UploadFile, "write", full)

    assert upload(bed, "mine", b"1").status_code == 507


def test_an_adapter_shows_versions_aliases_and_residency(bed: TestBed) -> None:
    upload(bed, "mine", b"1")
    digests = [upload(bed, "mine", weights).json()["digest"] for weights in (b"2", b"3")]
    bed.engine.snapshot = EngineStats(
        slots=(SlotStats(slot=0, digest=digests[0]),), host_digests=(digests[1],)
    )

    moved = call(
        bed,
        "PUT",
        "/api/v1/adapters/mine/aliases/stable",
        {"version": 2},
        token=bed.keys["acme"],
    )
    shown = call(bed, "GET", "/api/v1/adapters/mine", token=bed.keys["acme"]).json()

    assert moved.json() == {"alias": "stable", "version": 2, "generation": 1}
    assert {v["version"]: v["residency"] for v in shown["versions"]} == {
        1: "disk",
        2: "slot",
        3: "host",
    }
    assert {alias: entry["version"] for alias, entry in shown["aliases"].items()} == {
        "live": 1,
        "stable": 2,
    }
    bed.engine.alive = False
    by_id = call(bed, "GET", f"/api/v1/adapters/{shown['id']}", token=bed.keys["acme"]).json()
    assert {v["residency"] for v in by_id["versions"]} == {"unknown"}


def test_a_deleted_adapter_is_gone_for_callers_and_kept_for_usage(bed: TestBed) -> None:
    ask = {"model": "pirate", "messages": HI}
    before = call(bed, "POST", "/v1/chat/completions", ask, token=bed.keys["acme"])
    deleted = call(bed, "DELETE", "/api/v1/adapters/pirate", token=bed.keys["acme"])
    after = call(bed, "POST", "/v1/chat/completions", ask, token=bed.keys["acme"])

    records = call(bed, "GET", "/api/v1/usage/records", token=bed.keys["acme"])
    assert (before.status_code, deleted.status_code, after.status_code) == (200, 200, 404)
    assert json.loads(records.text)["adapter"] == "pirate"


def test_the_engine_tells_its_facts_and_load(bed: TestBed) -> None:
    bed.engine.snapshot = EngineStats(num_running=3, slots=(SlotStats(slot=0, holds=3),))

    answer = call(bed, "GET", "/api/v1/engine").json()

    assert answer["info"]["max_model_len"] == 512
    assert (answer["stats"]["num_running"], answer["stats"]["slots"][0]["holds"]) == (3, 3)


def test_the_engine_tells_the_queue_by_cause(bed: TestBed) -> None:
    bed.engine.snapshot = EngineStats(
        waiting_by_cause={WaitCause.KV_BLOCKS: 2}, queued_seconds_by_cause={WaitCause.STEP: 0.5}
    )

    stats = call(bed, "GET", "/api/v1/engine").json()["stats"]

    assert stats["waiting_by_cause"] == {"kv_blocks": 2}
    assert stats["queued_seconds_by_cause"] == {"step": 0.5}
