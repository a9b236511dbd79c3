"""Lives as OpenTelemetry spans, sent over OTLP/HTTP. Imported only where an endpoint is set.

The span of a request is a child of the caller's, whom its W3C `traceparent` names; below it is one
span for each stage, from the end of the stage before. Names of attributes are those of the GenAI
semantic conventions where they have the thing. Never prompts, answers or keys.
"""

import os
import threading
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from manylora.platform.life import Life

MAX_QUEUED_SPANS = 8192  # beyond them the oldest are dropped
SEND_EVERY_SECONDS = 1.0
SEND_SECONDS = 5.0  # for one batch, tries anew included
CLOSE_SECONDS = 3.0
_OPERATIONS = {"chat": "chat", "completions": "text_completion"}
_FAILURES = ("engine_error", "server_stop", "refused")


class SpanExport:
    """Takes ended lives and sends their spans from a thread of its own, or drops them."""

    def __init__(self, endpoint: str) -> None:
        """Nothing is connected to yet; an endpoint that does not answer costs log lines alone."""
        name = os.environ.get("OTEL_SERVICE_NAME", "manylora")
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": name}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                OTLPSpanExporter(endpoint=endpoint, timeout=SEND_SECONDS),
                max_queue_size=MAX_QUEUED_SPANS,
                schedule_delay_millis=SEND_EVERY_SECONDS * 1000,
            )
        )
        self._tracer = self._provider.get_tracer(__name__)
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, life: Life) -> None:
        """Put the spans of an ended life on the queue."""
        told = life.as_json()
        start_us = life.received_at
        whole = self._tracer.start_span(
            f"{_OPERATIONS[life.endpoint]} {told['adapter'] or told['model']}",
            context=self._propagator.extract(life.trace_headers, context=Context()),
            kind=SpanKind.SERVER,
            attributes=_attributes(told),
            start_time=start_us * 1000,
        )
        if life.status in _FAILURES:
            whole.set_status(StatusCode.ERROR)
        inside = set_span_in_context(whole, Context())
        for stage in told["stages"][1:]:
            end_us = start_us + stage["at_us"]
            part = self._tracer.start_span(
                stage["name"],
                context=inside,
                attributes={"manylora.component": stage["component"]}
                | ({"manylora.tokens": stage["tokens"]} if "tokens" in stage else {}),
                start_time=(end_us - stage["since_previous_us"]) * 1000,
            )
            part.end(end_us * 1000)
        whole.end((start_us + told["total_us"]) * 1000)

    def close(self) -> None:
        """Send what is left, or give up after some seconds."""
        # The processor itself waits for as long as its exporter tries.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def _attributes(told: dict[str, Any]) -> dict[str, AttributeValue]:
    counts, queue = told["counts"], told["queue"]
    version = f"{told['adapter']}@v{told['adapter_version']}"
    known: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": _OPERATIONS[told["endpoint"]],
        "gen_ai.provider.name": "manylora",
        "gen_ai.request.model": told["adapter"] or told["model"],
        "gen_ai.response.model": version if told["adapter"] else told["model"],
        "gen_ai.response.finish_reasons": told["finish_reason"] and [told["finish_reason"]],
        "gen_ai.usage.input_tokens": counts["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": counts["cached_tokens"],
        "gen_ai.usage.output_tokens": counts["completion_tokens"],
        "manylora.request_id": told["request_id"],
        "manylora.tenant": told["tenant"],
        "manylora.adapter.digest": told["adapter_digest"],
        "manylora.status": told["status"],
        "manylora.preemptions": counts["preemptions"],
    }
    waits = {f"manylora.queue.{cause}_us": us for cause, us in queue["by_cause"].items()}
    return {name: value for name, value in known.items() if value is not None} | waits
