"""Who may do what: no route without a credential check, and no sight of another tenant."""

import time
from typing import Any

import anyio
import httpx
import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from manylora.platform.adapters import find_adapter_named
from manylora.platform.api.auth import CREDENTIAL_CHECKS
from manylora.platform.base_models import register_base_model
from manylora.platform.keys import find_key, list_keys, revoke_key
from manylora.platform.tenants import find_tenant, suspend
from support.app import ADMIN_TOKEN, TestBed

OPEN = {"/health", "/ready"}
HI = [{"role": "user", "content": "hi"}]


def get(bed: TestBed, path: str, *headers: tuple[str, str]) -> httpx.Response:
    return request(bed, "GET", path, *headers)


def request(
    bed: TestBed, method: str, path: str, *headers: tuple[str, str], **more: Any
) -> httpx.Response:
    async def send() -> httpx.Response:
        async with bed.client() as client:
            return await client.request(method, path, headers=list(headers), **more)

    return anyio.run(send)


def bearer(token: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {token}")


def is_checked(dependant: Dependant) -> bool:
    return dependant.call in CREDENTIAL_CHECKS or any(
        is_checked(below) for below in dependant.dependencies
    )


def routes_of(app: Any) -> list[APIRoute]:
    found: list[APIRoute] = []
    pending = list(app.routes)
    while pending:
        route = pending.pop()
        if isinstance(route, APIRoute):
            found.append(route)
        pending += getattr(getattr(route, "original_router", None), "routes", [])
    return found


def test_every_route_checks_a_credential(bed: TestBed) -> None:
    routes = routes_of(bed.app)

    assert len(routes) > 20
    unchecked = {route.path for route in routes if not is_checked(route.dependant)}
    assert unchecked == OPEN


def test_every_refusal_of_a_key_has_the_same_body(bed: TestBed) -> None:
    revoked, expired = (
        bed.issue("acme", "infer"),
        bed.issue("acme", "infer", expires_at=time.time_ns() // 1000 + 300_000),
    )
    with bed.services.db.write() as session:
        revoke_key(session, find_of(session, bed, revoked))
    time.sleep(0.4)

    well_formed_stranger = revoked[:-6]
    answers = [
        get(bed, "/v1/models"),
        get(bed, "/v1/models", ("authorization", "Basic abc")),
        get(bed, "/v1/models", bearer("")),
        get(bed, "/v1/models", bearer("sk-nope")),
        get(bed, "/v1/models", bearer(well_formed_stranger)),
        get(bed, "/v1/models", bearer(revoked)),
        get(bed, "/v1/models", bearer(expired)),
        get(bed, "/v1/models", bearer("x"), bearer(bed.keys["acme"])),
        get(bed, "/v1/models", bearer(bed.keys["acme"]), bearer("x")),
        get(bed, f"/v1/models?api_key={bed.keys['acme']}"),
    ]

    assert {answer.status_code for answer in answers} == {401}
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/v1/models", "/api/v1/keys", "/api/v1/tenants/globex/keys"])
def test_a_suspended_tenant_is_told_so(bed: TestBed, path: str) -> None:
    with bed.services.db.write() as session:
        suspend(session, find_tenant(session, "globex"))

    answer = get(bed, path, bearer(bed.keys["globex"]))

    assert answer.status_code == 403
    assert answer.json()["error"]["type"] == "permission_error"
    assert "suspended" in answer.json()["error"]["message"]


def find_of(session: Any, bed: TestBed, secret: str) -> Any:
    return next(
        find_key(session, key.id) for key in list_keys(session) if secret.endswith(key.last4)
    )


def test_the_scheme_is_case_insensitive_and_the_key_is_not(bed: TestBed) -> None:
    key = bed.keys["acme"]

    assert get(bed, "/v1/models", ("authorization", f"bEARER {key}")).status_code == 200
    assert get(bed, "/v1/models", bearer(key.swapcase())).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models/{model}", None),
        ("POST", "/v1/chat/completions", {"model": "{model}", "messages": HI}),
        ("POST", "/v1/completions", {"model": "{model}", "prompt": "x"}),
        ("GET", "/adapters/{model}/v1/models", None),
        ("POST", "/adapters/{model}/v1/chat/completions", {"messages": HI}),
        ("POST", "/adapters/{model}/v1/chat/completions", {"messages": HI, "model": "pirate"}),
    ],
)
def test_a_foreign_model_is_told_like_one_that_does_not_exist(
    bed: TestBed, method: str, path: str, body: dict[str, Any] | None
) -> None:
    def ask(model: str) -> tuple[int, str]:
        sent = body and {k: model if v == "{model}" else v for k, v in body.items()}
        answer = request(bed, method, path.format(model=model), bearer(bed.keys["acme"]), json=sent)
        return answer.status_code, answer.text.replace(f"The model {model} ", "The model NAME ")

    foreign, absent = ask("json"), ask("nosuch")

    assert foreign == absent
    assert foreign[0] == 404
    assert '"model_not_found"' in foreign[1]
    assert "The model NAME does not exist" in foreign[1]
    assert "GET /v1/models" in foreign[1]


def test_the_name_of_an_unknown_model_is_shown_short_and_printable(bed: TestBed) -> None:
    sent = {"model": "a\n\u202e" + "x" * 200, "messages": HI}

    answer = request(bed, "POST", "/v1/chat/completions", bearer(bed.keys["acme"]), json=sent)

    assert f"The model a??{'x' * 61}... does not exist" in answer.json()["error"]["message"]


def test_the_list_is_exactly_what_can_be_called(bed: TestBed) -> None:
    key = bearer(bed.keys["globex"])
    listed = [model["id"] for model in get(bed, "/v1/models", key).json()["data"]]

    assert listed == ["tiny", "json", "json@live"]
    for model in listed:
        body = {"model": model, "prompt": "x"}
        assert request(bed, "POST", "/v1/completions", key, json=body).status_code == 200


def test_an_adapter_of_another_base_is_not_served_by_this_one(bed: TestBed) -> None:
    with bed.services.db.write() as session:
        other = register_base_model(session, name="other", digest="1" * 64)
        view = find_adapter_named(session, bed.tenant_ids["acme"], "pirate")
        assert view is not None
        view.adapter.base_model_id = other.id
    key = bearer(bed.keys["acme"])

    listed = [model["id"] for model in get(bed, "/v1/models", key).json()["data"]]

    assert listed == ["tiny", "support", "support@live"]
    assert get(bed, "/v1/models/pirate", key).status_code == 404


def test_versions_and_aliases_are_reached_by_name(bed: TestBed) -> None:
    bed.upload("acme", "pirate", b"better pirate")
    key = bearer(bed.keys["acme"])

    def version(model: str) -> str | None:
        return get(bed, f"/v1/models/{model}", key).headers.get("x-adapter-version")

    assert version("pirate") == version("pirate@live") == version("pirate@v1") == "v1"
    assert version("pirate@v2") == "v2"
    for model in ("pirate@v3", "pirate@v0", "pirate@V2", "pirate@", "PIRATE", "pirate@stable"):
        assert get(bed, f"/v1/models/{model}", key).status_code == 404


def test_an_adapters_own_url_takes_only_its_own_names(bed: TestBed) -> None:
    def ask(**body: Any) -> httpx.Response:
        path = "/adapters/pirate/v1/chat/completions"
        return request(bed, "POST", path, bearer(bed.keys["acme"]), json={"messages": HI, **body})

    assert ask().json()["model"] == "pirate"
    assert ask(model="pirate").status_code == 200
    assert ask(model="pirate@v1").json()["model"] == "pirate@v1"
    for other in ("support", "tiny", "pirates"):
        assert ask(model=other).status_code == 400
        assert ask(model=other).json()["error"]["param"] == "model"
    assert ask(model="pirate@v9").status_code == 404


@pytest.mark.parametrize("path", ["", "/keys", "/adapters", "/usage/records"])
def test_a_manage_key_reaches_its_own_tenant_only(bed: TestBed, path: str) -> None:
    key = bearer(bed.keys["acme"])
    if path:
        assert get(bed, f"/api/v1{path}", key).status_code == 200
        assert get(bed, f"/api/v1/tenants/acme{path}", key).status_code == 200
        foreign = get(bed, f"/api/v1/tenants/globex{path}", key)
        absent = get(bed, f"/api/v1/tenants/nosuch{path}", key)
        assert (foreign.status_code, foreign.text) == (absent.status_code, absent.text)
        assert foreign.status_code == 404
    else:
        assert get(bed, "/api/v1/tenants/acme", key).status_code == 403


@pytest.mark.parametrize("path", ["keys", "adapters", "usage/records"])
def test_an_infer_key_may_not_manage_nor_a_manage_key_infer(bed: TestBed, path: str) -> None:
    infer, manage = bed.issue("acme", "infer"), bed.issue("acme", "manage")

    refused = get(bed, f"/api/v1/{path}", bearer(infer))

    assert refused.status_code == 403
    assert refused.json()["error"]["type"] == "permission_error"
    assert get(bed, "/v1/models", bearer(manage)).status_code == 403
    assert get(bed, f"/api/v1/{path}", bearer(manage)).status_code == 200


@pytest.mark.parametrize("path", ["/api/v1/tenants", "/api/v1/engine"])
def test_only_an_operator_reaches_what_is_everybodys(bed: TestBed, path: str) -> None:
    assert get(bed, path).status_code == 401
    assert get(bed, path, bearer(bed.keys["acme"])).status_code == 403
    assert get(bed, path, bearer(ADMIN_TOKEN)).status_code == 200


def test_the_operator_token_is_not_a_tenants_key(bed: TestBed) -> None:
    assert get(bed, "/v1/models", bearer(ADMIN_TOKEN)).status_code == 401
    unnamed = get(bed, "/api/v1/keys", bearer(ADMIN_TOKEN))
    assert unnamed.status_code == 400
    assert unnamed.json()["error"]["param"] == "tenant"
