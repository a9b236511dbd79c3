"""What every answer has, whatever went wrong: a request id, an envelope, and no secrets."""

from typing import Any

import anyio
import httpx
import pytest
from sqlalchemy.exc import OperationalError

from manylora.platform.db import Database
from support.app import TestBed

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


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("GET", "/v1/models", 401),
        ("GET", "/v1/nosuch", 404),
        ("GET", "/nosuch", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/chat/completions/", 404),
    ],
)
def test_every_answer_has_a_request_id_of_ours_and_errors_an_envelope(
    bed: TestBed, method: str, path: str, status: int
) -> None:
    answer = request(bed, method, path, ("x-request-id", "mine"))

    assert answer.status_code == status
    assert answer.headers["x-request-id"].startswith("req_")
    if status >= 400:
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


def test_a_bug_is_a_500_that_tells_nothing(bed: TestBed, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("/secret/path SELECT 1")

    monkeypatch.setattr(bed.services.text, "encode_chat", broken)

    answer = request(
        bed,
        "POST",
        "/v1/chat/completions",
        bearer(bed.keys["acme"]),
        json={"model": "pirate", "messages": HI},
    )

    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/models", [("x", "a" * 70_000)], 431),
        ("/v1/models", [(f"x{i}", "1") for i in range(200)], 431),
        ("/v1/models?" + "a" * 20_000, [], 414),
    ],
)
def test_heads_that_are_too_large_are_refused(
    bed: TestBed, path: str, headers: list[tuple[str, str]], status: int
) -> None:
    answer = get(bed, path, *headers)

    assert answer.status_code == status
    assert "error" in answer.json()


def test_ready_says_whether_the_engine_is(bed: TestBed) -> None:
    assert get(bed, "/ready").status_code == 200
    bed.engine.alive = False
    assert get(bed, "/ready").status_code == 503
    assert get(bed, "/health").status_code == 200


def test_a_database_that_does_not_answer_is_503(
    bed: TestBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(_database: Database) -> None:
        raise OperationalError("SELECT secret", {}, Exception("secret"))

    monkeypatch.setattr(Database, "read", down)

    answer = get(bed, "/v1/models", bearer(bed.keys["acme"]))

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "database_unavailable"
    assert "secret" not in answer.text
