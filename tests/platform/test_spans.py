"""Spans say what the life says, below the caller's own; and cost nothing where they are off."""

import http.server
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from manylora.engine.errors import RequestFailedError
from manylora.platform.db import Database, sqlite_url
from manylora.platform.migrate import upgrade
from manylora.platform.settings import Settings, SettingsError
from manylora.platform.spans import SpanExport
from manylora.serve import _span_export
from support.app import ADMIN_TOKEN, TestBed, make_testbed

SECRET = "a secret that is nobody's business"
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{CALLER}-01"


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[TestBed]:
    """On SQLite alone: no span comes from the database."""
    database = Database(sqlite_url(tmp_path / "test.db"))
    upgrade(database)
    yield make_testbed(database, tmp_path)
    database.close()


@dataclass
class Collector:
    """What was posted to it, decoded."""

    url: str
    bodies: list[bytes] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)

    @property
    def requests(self) -> list[ExportTraceServiceRequest]:
        return [ExportTraceServiceRequest.FromString(body) for body in self.bodies]

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.paths.add(self.path)
            found.bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        found = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield found
        server.shutdown()


@contextmanager
def exporting(bed: TestBed, endpoint: str) -> Iterator[None]:
    """Ended lives go to the endpoint; what is queued is sent when the block ends."""
    export = bed.services.lives.export = SpanExport(endpoint)
    try:
        yield
    finally:
        export.close()


def chat(bed: TestBed, *headers: tuple[str, str], **more: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        async with bed.client(bed.keys["acme"]) as client:
            body = {"model": "pirate", "messages": [{"role": "user", "content": SECRET}], **more}
            return await client.post("/v1/chat/completions", json=body, headers=list(headers))

    return anyio.run(send)


def life_of(bed: TestBed, answer: httpx.Response) -> dict[str, Any]:
    async def look() -> httpx.Response:
        async with bed.client(ADMIN_TOKEN) as client:
            return await client.get(f"/api/v1/requests/{answer.headers['x-request-id']}")

    return anyio.run(look).json()


def value_of(value: AnyValue) -> Any:
    if value.HasField("array_value"):
        return [value_of(item) for item in value.array_value.values]
    return getattr(value, value.WhichOneof("value"))


def attributes(span: Span) -> dict[str, Any]:
    return {pair.key: value_of(pair.value) for pair in span.attributes}


def nanoseconds(span: Span) -> int:
    return span.end_time_unix_nano - span.start_time_unix_nano


@pytest.mark.parametrize("stream", [False, True])
def test_each_stage_is_a_span_below_the_request_below_the_caller(
    bed: TestBed, collector: Collector, stream: bool
) -> None:
    before = time.time_ns()
    with exporting(bed, collector.url):
        answer = chat(bed, ("traceparent", SAMPLED), stream=stream)
    after = time.time_ns()

    life = life_of(bed, answer)
    assert collector.paths == {"/v1/traces"}
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    [whole] = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert whole.parent_span_id.hex() == CALLER
    assert whole.name == "chat pirate"
    assert nanoseconds(whole) == life["total_us"] * 1000
    assert before - 1000 <= whole.start_time_unix_nano <= whole.end_time_unix_nano <= after
    parts = [span for span in collector.spans if span.span_id != whole.span_id]
    parts.sort(key=lambda span: span.end_time_unix_nano)
    assert {span.parent_span_id for span in parts} == {whole.span_id}
    assert [(span.name, nanoseconds(span)) for span in parts] == [
        (stage["name"], stage["since_previous_us"] * 1000) for stage in life["stages"][1:]
    ]
    assert [attributes(span)["manylora.component"] for span in parts] == [
        stage["component"] for stage in life["stages"][1:]
    ]
    assert parts[0].start_time_unix_nano == whole.start_time_unix_nano
    assert parts[-1].end_time_unix_nano == whole.end_time_unix_nano


def test_attributes_have_the_conventions_names_and_no_secrets(
    bed: TestBed, collector: Collector
) -> None:
    with exporting(bed, collector.url):
        answer = chat(bed)

    usage = answer.json()["usage"]
    [whole] = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    found = attributes(whole)
    assert {name: value for name, value in found.items() if name.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "manylora",
        "gen_ai.request.model": "pirate",
        "gen_ai.response.model": "pirate@v1",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
    }
    assert found["manylora.queue.kv_blocks_us"] == 334
    sent = b"".join(collector.bodies)
    for secret in (SECRET, bed.keys["acme"], " one two"):
        assert secret.encode() not in sent


def test_a_failure_is_an_error_span(bed: TestBed, collector: Collector) -> None:
    bed.engine.fails_at, bed.engine.error = 0, RequestFailedError("no blocks")

    with exporting(bed, collector.url):
        chat(bed)

    [whole] = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert whole.status.code == Status.STATUS_CODE_ERROR
    assert attributes(whole)["manylora.status"] == "engine_error"


@pytest.mark.parametrize(
    "lines",
    [
        ["rubbish"],
        [f"00-{'0' * 32}-{CALLER}-01"],
        [f"ff-{TRACE}-{CALLER}-01"],
        [f"00-{TRACE}-{CALLER}-01-more"],
        [SAMPLED, SAMPLED],
        ["\xff"],
        ["0" * 10_000],
    ],
)
def test_a_malformed_traceparent_is_ignored(
    bed: TestBed, collector: Collector, lines: list[str]
) -> None:
    headers = [(b"traceparent", line.encode("latin-1")) for line in lines]

    with exporting(bed, collector.url):
        answer = chat(bed, *headers, (b"tracestate", b"=,=,"))

    assert answer.status_code == 200
    [whole] = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert (whole.parent_span_id, whole.trace_id.hex() == TRACE) == (b"", False)


def test_a_caller_that_does_not_sample_is_heeded(bed: TestBed, collector: Collector) -> None:
    with exporting(bed, collector.url):
        chat(bed, ("traceparent", f"00-{TRACE}-{CALLER}-00"))

    assert collector.spans == []


def test_an_endpoint_that_is_down_costs_log_lines_alone(
    bed: TestBed, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()

    with exporting(bed, "http://127.0.0.1:9/v1/traces"):
        answers = [chat(bed) for _ in range(3)]
        answered = time.monotonic()

    assert [answer.status_code for answer in answers] == [200] * 3
    assert answered - began < 3
    assert time.monotonic() - answered < 5
    assert any(record.name.startswith("opentelemetry") for record in caplog.records)


def test_nothing_that_exports_is_loaded_where_it_is_off() -> None:
    """FastAPI itself brings and imports `opentelemetry-api`, which without an SDK does nothing."""
    program = (
        "import sys, manylora.serve, manylora.platform.app, manylora.web.app\n"
        "parts = ('opentelemetry.sdk', 'opentelemetry.exporter', 'opentelemetry.proto', 'google')\n"
        "print([name for name in sys.modules if name.startswith(parts)])"
    )

    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert loaded.stdout == "[]\n", loaded.stderr


def test_an_endpoint_without_the_packages_is_refused_with_the_extras_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "manylora.platform.spans", None)

    async def start() -> None:
        async with _span_export(Settings(otlp_traces_endpoint="http://localhost:4318/v1/traces")):
            pass

    with pytest.raises(SettingsError, match=r"otlp_traces_endpoint.*manylora\[otlp\]"):
        anyio.run(start)
