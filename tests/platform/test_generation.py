"""A generation lets go of the engine and writes its row once, whatever it is told."""

import asyncio
from collections.abc import AsyncIterator

import anyio
import pytest
import structlog
from anyio.to_thread import current_default_thread_limiter
from sqlalchemy import select
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from manylora.engine.api import FinishReason, Request, RequestOutput, SamplingParams
from manylora.engine.errors import EngineUnavailableError, RequestFailedError
from manylora.engine.lifecycle import Stage, StageName
from manylora.platform import generation as module
from manylora.platform import usage
from manylora.platform.errors import ServerStoppingError
from manylora.platform.generation import Generation, all_settled, stop_running
from manylora.platform.keys import list_keys
from manylora.platform.life import Life
from manylora.platform.metrics import RequestMeter
from manylora.platform.models import UsageRecord
from manylora.platform.routing import Route
from support.app import TestBed


def generation(bed: TestBed) -> Generation:
    tenant_id = bed.tenant_ids["acme"]
    with bed.services.db.read() as session:
        key_id = list_keys(session, tenant_id)[0].id
    params = SamplingParams(max_tokens=16)
    request = Request(request_id="req_1", prompt_token_ids=(1, 2), params=params, tenant=tenant_id)
    life = Life(
        request_id="req_1",
        tenant_id=tenant_id,
        tenant="acme",
        key_id=key_id,
        endpoint="chat",
        route=Route(base_model="tiny"),
        num_prompt_tokens=2,
        received_at=0,
        stages=[Stage(StageName.RECEIVED, 0.0, "manylora.platform.api.edge")],
    )
    meter = RequestMeter(bed.services.metrics, tenant="acme", max_tokens=16)
    return Generation(
        engine=bed.engine, db=bed.services.db, request=request, life=life, meter=meter
    )


def rows(bed: TestBed) -> list[tuple[str, int, int]]:
    columns = (UsageRecord.status, UsageRecord.completion_tokens, UsageRecord.delivered_tokens)
    with bed.services.db.read() as session:
        return [(row[0], row[1], row[2]) for row in session.execute(select(*columns))]


def test_settling_early_aborts_what_still_runs(bed: TestBed) -> None:
    """As when the client leaves while a chunk is being written, and nobody waits for a token."""

    async def leave() -> None:
        running = generation(bed)
        await running.next()
        running.count_delivered()
        await running.next()
        await running.settle("client_abort")
        assert bed.engine.aborted == ["req_1"]

    anyio.run(leave)

    assert rows(bed) == [("client_abort", 2, 1)]


def test_one_that_is_stopped_between_two_outputs_goes_no_further(bed: TestBed) -> None:
    """As when the client is slow to read, and nobody waits for a token."""

    async def stop() -> None:
        running = generation(bed)
        await running.next()
        stop_running()
        with pytest.raises(ServerStoppingError):
            await running.next()
        await running.settle(running.cut_off_status)

    anyio.run(stop)

    assert rows(bed) == [("server_stop", 1, 0)]
    assert bed.engine.aborted == ["req_1"]


def test_the_first_settlement_counts_and_later_ones_cost_nothing(
    bed: TestBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[usage.Usage] = []
    record = usage.record

    def noted(session: Session, row: usage.Usage) -> None:
        writes.append(row)
        record(session, row)

    monkeypatch.setattr(usage, "record", noted)

    async def settle() -> None:
        running = generation(bed)
        while (await running.next()).finish_reason is None:
            pass
        await running.settle("ok")
        await running.settle("client_abort")

    anyio.run(settle)

    assert rows(bed) == [("ok", 4, 0)]
    assert len(writes) == 1


DOWN = [
    OperationalError("INSERT", {}, Exception("the disk is gone")),
    InterfaceError("INSERT", {}, Exception("the connection is closed")),
    PoolTimeoutError("no connection in 30 s"),
]


@pytest.mark.parametrize("error", DOWN)
def test_a_row_that_cannot_be_written_is_written_again(
    bed: TestBed, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    failures = [error, error]
    record = usage.record

    def flaky(session: Session, row: usage.Usage) -> None:
        record(session, row)
        if failures:
            raise failures.pop()

    monkeypatch.setattr(usage, "record", flaky)
    monkeypatch.setattr(module, "_RETRY_SECONDS", (0.0, 0.0))

    assert anyio.run(finish, generation(bed)) is True
    assert rows(bed) == [("ok", 4, 0)]


@pytest.mark.parametrize("error", DOWN)
def test_a_row_that_is_never_written_is_told_to_the_log(
    bed: TestBed, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def down(_session: Session, _row: usage.Usage) -> None:
        raise error

    monkeypatch.setattr(usage, "record", down)
    monkeypatch.setattr(module, "_RETRY_SECONDS", (0.0,))

    with structlog.testing.capture_logs() as logs:
        assert anyio.run(finish, generation(bed)) is False

    lost = logs[-1]
    assert (lost["event"], lost["log_level"]) == ("usage_lost", "error")
    assert (lost["request_id"], lost["prompt_tokens"], lost["completion_tokens"]) == ("req_1", 2, 4)


async def finish(running: Generation) -> bool:
    while (await running.next()).finish_reason is None:
        pass
    return await running.settle("ok")


def test_cancelling_who_settles_does_not_cancel_the_row(bed: TestBed) -> None:
    """As at a shutdown, while all threads are busy and the write has not even begun."""

    async def cancel() -> None:
        running = generation(bed)
        await running.next()
        threads = current_default_thread_limiter()
        busy = [object() for _ in range(int(threads.total_tokens))]
        for borrower in busy:
            threads.acquire_on_behalf_of_nowait(borrower)
        settling = asyncio.create_task(running.settle("client_abort"))
        await asyncio.sleep(0.05)

        settling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await settling
        for borrower in busy:
            threads.release_on_behalf_of(borrower)
        await all_settled()

    asyncio.run(cancel())

    assert rows(bed) == [("client_abort", 1, 0)]


def test_an_engine_that_is_gone_when_it_is_let_go_of_does_not_cost_the_row(
    bed: TestBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks(_request: Request) -> AsyncIterator[RequestOutput]:
        try:
            yield RequestOutput(request_id="req_1", num_output_tokens=1)
        finally:
            raise EngineUnavailableError("the socket is broken")

    monkeypatch.setattr(bed.engine, "generate", breaks)

    async def leave() -> None:
        running = generation(bed)
        await running.next()
        await running.settle("client_abort")

    anyio.run(leave)

    assert rows(bed) == [("client_abort", 1, 0)]


def test_closing_alone_leaves_no_row(bed: TestBed) -> None:
    async def close() -> None:
        await generation(bed).close()

    anyio.run(close)

    assert rows(bed) == []


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_an_engine_that_gives_up_is_an_error(
    bed: TestBed, monkeypatch: pytest.MonkeyPatch, reason: FinishReason
) -> None:
    def gives_up(_request: Request, _text: str, _number: int, _finish: object) -> RequestOutput:
        return RequestOutput(request_id="req_1", finish_reason=reason, error="no blocks")

    monkeypatch.setattr(bed.engine, "_output", gives_up)

    async def run() -> None:
        with pytest.raises(RequestFailedError):
            await generation(bed).next()

    anyio.run(run)
