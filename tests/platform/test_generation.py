"""A generation lets go of the engine and writes its row once, whatever it is told."""

import anyio
import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from manylora.engine.api import FinishReason, Request, RequestOutput, SamplingParams
from manylora.engine.errors import RequestFailedError
from manylora.platform import usage
from manylora.platform.generation import Generation
from manylora.platform.keys import list_keys
from manylora.platform.models import UsageRecord
from manylora.platform.routing import Route
from support.app import TestBed


def generation(bed: TestBed) -> Generation:
    tenant_id = bed.tenant_ids["acme"]
    with bed.services.db.read() as session:
        key_id = list_keys(session, tenant_id)[0].id
    params = SamplingParams(max_tokens=16)
    return Generation(
        engine=bed.engine,
        db=bed.services.db,
        request=Request(
            request_id="req_1", prompt_token_ids=(1, 2), params=params, tenant=tenant_id
        ),
        route=Route(base_model="tiny"),
        tenant_id=tenant_id,
        key_id=key_id,
        endpoint="chat",
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
