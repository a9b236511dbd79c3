"""Usage rows: one for each request, read by pages that miss and repeat nothing."""

import csv
import io
import json
import threading
import time
from pathlib import Path

import anyio
import httpx
import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from manylora.platform import usage
from manylora.platform.db import Database, sqlite_url
from manylora.platform.ids import now_us
from manylora.platform.keys import list_keys
from manylora.platform.migrate import upgrade
from manylora.platform.models import UsageRecord
from manylora.platform.usage import Usage, recent, record
from support.app import ADMIN_TOKEN, TestBed, make_testbed


def key_of(bed: TestBed, session: Session, slug: str = "acme") -> str:
    return list_keys(session, bed.tenant_ids[slug])[0].id


def row(bed: TestBed, key_id: str, number: int, slug: str = "acme") -> Usage:
    return Usage(
        tenant_id=bed.tenant_ids[slug],
        key_id=key_id,
        request_id=f"req_{number}",
        base_model="tiny",
        route="chat",
        status="ok",
        finish_reason="stop",
        prompt_tokens=number,
        cached_tokens=0,
        completion_tokens=1,
        delivered_tokens=1,
        queued_us=1,
        ttft_us=2,
        total_us=3,
    )


@pytest.fixture
def ten_rows(bed: TestBed, monkeypatch: pytest.MonkeyPatch) -> TestBed:
    """Ten of acme at seconds 100, 100, 101, 101 and so on, and one of globex at 102."""
    with bed.services.db.write() as session:
        for number in range(10):
            monkeypatch.setattr(usage, "now_us", lambda at=number: (100 + at // 2) * 1_000_000)
            record(session, row(bed, key_of(bed, session), number))
        monkeypatch.setattr(usage, "now_us", lambda: 102_000_000)
        record(session, row(bed, key_of(bed, session, "globex"), 99, "globex"))
    return bed


def get(bed: TestBed, query: str, token: str | None = None) -> httpx.Response:
    async def send() -> httpx.Response:
        async with bed.client(token or bed.keys["acme"]) as client:
            return await client.get(f"/api/v1/usage/records{query}")

    return anyio.run(send)


def numbers(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line)["prompt_tokens"] for line in answer.text.splitlines()]


def test_the_same_request_is_recorded_once(bed: TestBed) -> None:
    for _ in range(2):
        with bed.services.db.write() as session:
            record(session, row(bed, key_of(bed, session), 1))

    with bed.services.db.read() as session:
        assert session.scalar(select(func.count()).select_from(UsageRecord)) == 1


def test_a_row_happens_when_it_can_be_written_not_when_it_began_to_wait(tmp_path: Path) -> None:
    """Else an export up to now could miss rows that are written later with an earlier time."""
    database = Database(sqlite_url(tmp_path / "test.db"))
    upgrade(database)
    bed = make_testbed(database, tmp_path)
    released: list[int] = []

    def write() -> None:
        with database.write() as session:
            record(session, row(bed, bed_key, 1))

    with database.read() as session:
        bed_key = key_of(bed, session)
    with database.write() as session:
        session.connection()  # holds the lock
        waiting = threading.Thread(target=write)
        waiting.start()
        time.sleep(0.3)
        released.append(now_us())
    waiting.join()

    with database.read() as session:
        assert session.scalars(select(UsageRecord)).one().occurred_at >= released[0]
    database.close()


def test_pages_join_to_the_whole(ten_rows: TestBed) -> None:
    read: list[int] = []
    page = ""
    for _ in range(4):
        answer = get(ten_rows, f"?limit=3{page}")
        read += numbers(answer)
        page = "&page=" + answer.headers.get("x-next-page", "")

    assert sorted(read) == list(range(10))
    assert [number // 2 for number in read] == sorted(number // 2 for number in read)
    assert page == "&page="


def test_a_range_has_its_start_and_not_its_end(ten_rows: TestBed) -> None:
    answer = get(ten_rows, "?start_time=101&end_time=1970-01-01T00:01:43Z")

    assert sorted(numbers(answer)) == [2, 3, 4, 5]


def test_a_tenant_reads_its_own_and_an_operator_all(ten_rows: TestBed) -> None:
    assert len(numbers(get(ten_rows, ""))) == 10
    assert numbers(get(ten_rows, "", ten_rows.keys["globex"])) == [99]
    assert len(numbers(get(ten_rows, "", ADMIN_TOKEN))) == 11


def test_csv_says_what_json_lines_say(ten_rows: TestBed) -> None:
    lines = [json.loads(line) for line in get(ten_rows, "").text.splitlines()]
    table = list(csv.DictReader(io.StringIO(get(ten_rows, "?format=csv").text)))

    assert [
        {name: "" if value is None else str(value) for name, value in line.items()}
        for line in lines
    ] == table
    assert lines[0]["occurred_at"] == "1970-01-01T00:01:40.000000Z"
    assert lines[0]["tenant"] == "acme"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=-1", "limit"),
        ("limit=x", "limit"),
        ("limit=1000000000", "limit"),
        ("format=xml", "format"),
        ("page=nonsense", "page"),
        ("page=1-use_", "page"),
        ("tenant_id=globex", "tenant_id"),
        ("offset=1", "offset"),
        ("start_time=soon", "start_time"),
        ("start_time=99999999999999999999", "start_time"),
        ("start_time=2026-12-01&end_time=2026-01-01", "end_time"),
    ],
)
def test_a_bad_query_is_refused_by_name(bed: TestBed, query: str, param: str) -> None:
    answer = get(bed, f"?{query}")

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_the_newest_come_first_for_display(ten_rows: TestBed) -> None:
    with ten_rows.services.db.read() as session:
        lines = recent(session, tenant_id=ten_rows.tenant_ids["acme"], limit=2)
        everybody = recent(session)

    assert {line.record.prompt_tokens for line in lines} == {8, 9}
    assert (lines[0].tenant, lines[0].key) == ("acme", "test")
    assert len(everybody) == 11
