"""A server that stops tells the requests it cuts off, and writes down that it was the server."""

from typing import Any

import anyio
import httpx
import pytest
from sqlalchemy import select

from manylora.platform.generation import count_running, stop_running
from manylora.platform.models import UsageRecord
from support.app import TestBed

TRIES = 500


def cut_off(bed: TestBed, **body: Any) -> httpx.Response:
    """The answer to a request that the server stops as soon as its engine stalls."""
    sent = {"model": "pirate", "messages": [{"role": "user", "content": "hi"}]} | body
    answers: list[httpx.Response] = []
    answered = anyio.Event()

    async def ask(client: httpx.AsyncClient) -> None:
        answers.append(await client.post("/v1/chat/completions", json=sent))
        answered.set()

    async def send_and_stop() -> None:
        async with bed.client(bed.keys["acme"]) as client, anyio.create_task_group() as tasks:
            tasks.start_soon(ask, client)
            for _ in range(TRIES):
                await anyio.sleep(0.01)
                if bed.engine.stalled:
                    break
            assert count_running() == 1
            stop_running()
            with anyio.move_on_after(TRIES * 0.01):
                await answered.wait()
            tasks.cancel_scope.cancel()

    anyio.run(send_and_stop)
    assert count_running() == 0
    return answers[0]


def rows(bed: TestBed) -> list[tuple[str, int, int]]:
    columns = (UsageRecord.status, UsageRecord.completion_tokens, UsageRecord.delivered_tokens)
    with bed.services.db.read() as session:
        return [(row[0], row[1], row[2]) for row in session.execute(select(*columns))]


def test_a_stream_ends_with_an_error_event_and_not_as_if_it_were_done(bed: TestBed) -> None:
    bed.engine.stalls_at = 2

    answer = cut_off(bed, stream=True)

    events = answer.text.strip().split("\n\n")
    assert " one" in answer.text
    assert '"type":"server_error"' in events[-1]
    assert '"code":"shutting_down"' in events[-1]
    assert "[DONE]" not in answer.text
    assert rows(bed) == [("server_stop", 2, 2)]
    assert len(bed.engine.aborted) == 1


@pytest.mark.parametrize(("stream", "stalls_at"), [(True, 0), (False, 0), (False, 2)])
def test_an_answer_that_has_not_begun_is_503(bed: TestBed, stream: bool, stalls_at: int) -> None:
    bed.engine.stalls_at = stalls_at

    answer = cut_off(bed, stream=stream)

    error = answer.json()["error"]
    assert answer.status_code == 503
    assert (error["type"], error["code"]) == ("server_error", "shutting_down")
    assert rows(bed) == [("server_stop", stalls_at, 0)]
    assert len(bed.engine.aborted) == 1
