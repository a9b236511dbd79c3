"""A client that goes away stops its request at once, whatever phase it is in, and is billed."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from fastapi.responses import StreamingResponse
from sqlalchemy import select
from sqlalchemy.orm import Session

from manylora.platform import usage
from manylora.platform.lives import Sight
from manylora.platform.models import UsageRecord
from support.app import TestBed, listening

PATIENCE_SECONDS = 5.0


@pytest.fixture
def base(bed: TestBed) -> Iterator[str]:
    with listening(bed.app) as base:
        yield base


def eventually(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def send(bed: TestBed, base: str, *, stream: bool) -> socket.socket:
    """A connection on which a request has been sent; closing it is going away."""
    body = {"model": "pirate", "stream": stream, "messages": [{"role": "user", "content": "hi"}]}
    raw = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {bed.keys['acme']}\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    address = urlsplit(base)
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(head.encode() + raw)
    return connection


def read_until(connection: socket.socket, mark: bytes) -> None:
    seen = b""
    while mark not in seen:
        piece = connection.recv(4096)
        assert piece, f"closed after {seen!r}"
        seen += piece


def rows(bed: TestBed) -> list[UsageRecord]:
    with bed.services.db.read() as session:
        return list(session.scalars(select(UsageRecord)))


@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_token(bed: TestBed, base: str, stream: bool) -> None:
    bed.engine.stalls_at = 0
    connection = send(bed, base, stream=stream)
    eventually(lambda: bed.engine.stalled)

    connection.close()

    eventually(lambda: bed.engine.aborted)
    eventually(lambda: rows(bed))
    [row] = rows(bed)
    assert (row.status, row.completion_tokens, row.delivered_tokens) == ("client_abort", 0, 0)
    assert row.prompt_tokens == len(bed.engine.requests[0].prompt_token_ids)
    life = bed.services.lives.find(row.request_id, Sight())
    assert (life["status"], life["counts"]["completion_tokens"]) == ("client_abort", 0)
    assert [stage["name"] for stage in life["stages"]] == ["received", "tokenised"]
    assert life["total_us"] > life["stages"][-1]["at_us"]


def test_in_the_middle_of_a_stream(bed: TestBed, base: str) -> None:
    bed.engine.stalls_at = 2
    connection = send(bed, base, stream=True)
    read_until(connection, b" one")
    eventually(lambda: bed.engine.stalled)

    connection.close()

    eventually(lambda: bed.engine.aborted)
    eventually(lambda: rows(bed))
    [row] = rows(bed)
    assert (row.status, row.completion_tokens, row.delivered_tokens) == ("client_abort", 2, 2)


def test_before_a_stream_that_was_about_to_begin(
    bed: TestBed, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its generator never runs, so that it cannot settle anything."""

    async def never_begins(*_: object) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(StreamingResponse, "__call__", never_begins)

    with send(bed, base, stream=True):
        eventually(lambda: rows(bed))

    [row] = rows(bed)
    assert (row.status, row.completion_tokens, row.delivered_tokens) == ("client_abort", 1, 0)
    assert bed.engine.aborted


def test_while_a_whole_answer_is_being_made(bed: TestBed, base: str) -> None:
    bed.engine.stalls_at = 2
    connection = send(bed, base, stream=False)
    eventually(lambda: bed.engine.requests)
    eventually(lambda: bed.engine.stalled)

    connection.close()

    eventually(lambda: bed.engine.aborted)
    eventually(lambda: rows(bed))
    [row] = rows(bed)
    assert (row.status, row.completion_tokens, row.delivered_tokens) == ("client_abort", 2, 0)


@pytest.mark.parametrize("terminal", [b'"finish_reason":"stop"', b"[DONE]"])
def test_a_client_that_saw_the_end_finds_its_row(
    bed: TestBed, base: str, monkeypatch: pytest.MonkeyPatch, terminal: bytes
) -> None:
    """The row is committed before the terminal chunk is sent, not soon after."""
    record = usage.record

    def slow_record(session: Session, row: usage.Usage) -> None:
        time.sleep(0.2)
        record(session, row)

    monkeypatch.setattr(usage, "record", slow_record)

    with send(bed, base, stream=True) as connection:
        read_until(connection, terminal)
        [row] = rows(bed)

    assert row.status == "ok"


def test_one_that_leaves_does_not_disturb_the_others(bed: TestBed, base: str) -> None:
    bed.engine.stalls_at = 2
    leaves = send(bed, base, stream=True)
    eventually(lambda: bed.engine.stalled)
    bed.engine.stalls_at = None

    with send(bed, base, stream=True) as stays:
        leaves.close()
        read_until(stays, b"[DONE]")

    eventually(lambda: len(rows(bed)) == 2)
    assert {row.status for row in rows(bed)} == {"ok", "client_abort"}
