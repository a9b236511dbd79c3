"""One request's life: what is known of it while it runs, and how it reads."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from manylora.engine.api import RequestOutput
from manylora.engine.lifecycle import Stage, StageName, WaitCause
from manylora.platform.routing import Route

RUNNING = "running"
REFUSED = "refused"  # it never got into the engine's queue
STATUSES = (RUNNING, "ok", "client_abort", "server_stop", "engine_error", REFUSED)


@dataclass(slots=True, kw_only=True, eq=False)
class Life:
    """A request whose prompt was found fit to run. It changes until its last byte is sent.

    `stages` are this process's own and those that the engine has told so far.
    """

    request_id: str
    tenant_id: str
    tenant: str  # slug
    key_id: str
    endpoint: str  # "chat" or "completions"
    route: Route
    num_prompt_tokens: int
    received_at: int  # UTC microseconds; all its other times are offsets from here
    stages: list[Stage]  # the first is RECEIVED
    trace_headers: Mapping[str, str] = field(default_factory=dict)  # W3C trace context
    status: str = RUNNING
    last: RequestOutput | None = None  # the engine's totals so far
    delivered_tokens: int = 0
    ended: float | None = None  # monotonic seconds

    @property
    def totals(self) -> RequestOutput:
        """The engine's, or what there is to say before its first output."""
        return self.last or RequestOutput(
            request_id=self.request_id, num_prompt_tokens=self.num_prompt_tokens
        )

    def hear(self, output: RequestOutput) -> None:
        """The engine has gone on with it."""
        self.last = output
        self.stages += output.metrics.stages

    def end(self, status: str) -> None:
        """Its status is known; the first one counts."""
        if self.status == RUNNING:
            self.status, self.ended = status, time.monotonic()

    def sent(self, component: str) -> None:
        """The last byte of its answer was handed to the socket."""
        if self.status != "client_abort":  # else nobody was there to send it to
            self.ended = time.monotonic()
            self.stages.append(Stage(StageName.SENT, self.ended, component))

    def as_json(self) -> dict[str, Any]:
        """The life as the API shows it, as far as it is known. Times are microseconds."""
        metrics = self.totals.metrics
        return {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "key_id": self.key_id,
            "endpoint": self.endpoint,
            "model": self.route.base_model,
            "adapter": self.route.adapter,
            "adapter_version": self.route.version,
            "adapter_digest": self.route.digest,
            "status": self.status,
            "finish_reason": self.totals.finish_reason if self.status == "ok" else None,
            "received_at": self.received_at,
            "total_us": self._offset_us(self.ended or time.monotonic()),
            "stages": self._stages(),
            "queue": _queue(metrics.queued_by_cause),
            "counts": self._counts(),
        }

    def _stages(self) -> list[dict[str, Any]]:
        known = sorted(self.stages, key=lambda stage: stage.at)
        offsets = [self._offset_us(stage.at) for stage in known]
        since = [0, *(later - earlier for earlier, later in pairwise(offsets))]
        return [
            {
                "name": str(stage.name),
                "at_us": at_us,
                "since_previous_us": since_us,
                "component": stage.component,
            }
            | ({"tokens": stage.tokens} if stage.tokens else {})
            for stage, at_us, since_us in zip(known, offsets, since, strict=True)
        ]

    def _counts(self) -> dict[str, int]:
        last = self.totals
        return {
            "prompt_tokens": last.num_prompt_tokens,
            "cached_tokens": last.num_cached_tokens,
            "completion_tokens": last.num_output_tokens,
            "delivered_tokens": min(self.delivered_tokens, last.num_output_tokens),
            "preemptions": last.metrics.num_preemptions,
        }

    def _offset_us(self, at: float) -> int:
        return round((at - self.stages[0].at) * 1_000_000)


def _queue(by_cause: Mapping[WaitCause, float]) -> dict[str, Any]:
    """The waits in whole microseconds. Rounding the running sums makes the parts sum exactly."""
    sums = [round(seconds * 1_000_000) for seconds in accumulate(by_cause.values(), initial=0.0)]
    parts = (later - earlier for earlier, later in pairwise(sums))
    named = {str(cause): us for cause, us in zip(by_cause, parts, strict=True)}
    return {"total_us": sums[-1], "by_cause": named}
