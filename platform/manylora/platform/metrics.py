"""What this process counts and times for Prometheus; the engine's own are in `engine_metrics.py`.

Names, types, labels and bucket bounds are vLLM's where vLLM has the thing (`vllm:…`); ours begin
with `manylora_`. Every label is of a bounded set: no request, key, prompt or adapter name is one.
"""

from collections.abc import Callable, Sequence
from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

from manylora.engine.api import FinishReason, RequestMetrics, RequestOutput
from manylora.platform.tenant_label import OTHER, TenantLabel
from manylora.platform.usage import Usage

ENGINE = "0"  # vLLM numbers its engines; a server has one
LABELS = ("model_name", "engine")
TOKEN_KINDS = ("prompt", "cached", "completion")  # cached ones are prompt tokens, too

# A second series for each counter and histogram, which tells when it was made: nothing reads it.
# The library has types, but not for this function.
disable_created_metrics()  # type: ignore[no-untyped-call]

# vLLM's bounds, with smaller ones before them: a small model is quicker than the first of vLLM's.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160, 640, 2560),
)
_EACH_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80),
)
_REQUEST = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))  # to 500,000
_CHOICES = (1, 2, 5, 10, 20)


class ServerMetrics:
    """The metrics of one server, whose base model's name is a label of vLLM's."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.registry = CollectorRegistry()
        self.engine_restarts: Callable[[], int] = lambda: 0  # whoever supervises it may say
        self.usage_lost = Counter(
            "manylora_usage_lost",
            "Usage rows that could not be written; the log has each in a line usage_lost.",
            registry=self.registry,
        )
        self._http = Counter(
            "manylora_http_requests",
            "HTTP requests by route and class of status.",
            ("route", "status"),
            registry=self.registry,
        )
        self._tenant_tokens = Counter(
            "manylora_tenant_tokens",
            "Tokens of the biggest tenants, and of all others together.",
            ("tenant", "kind"),
            registry=self.registry,
        )
        self._tenant_label = TenantLabel()
        self._make_request_metrics()
        build = Gauge("manylora_build_info", "1.", ("version",), registry=self.registry)
        build.labels(version("manylora")).set(1)
        ProcessCollector(registry=self.registry)

    def _make_request_metrics(self) -> None:
        made = self._histogram
        self.first_token = made("time_to_first_token_seconds", _FIRST_TOKEN, "To the first token.")
        self.inter_token = (
            made("inter_token_latency_seconds", _EACH_TOKEN, "From one token to the next."),
            made("time_per_output_token_seconds", _EACH_TOKEN, "The same by its older name."),
        )
        self.mean_token = made(
            "request_time_per_output_token_seconds", _EACH_TOKEN, "A request's mean of it."
        )
        self.whole = made("e2e_request_latency_seconds", _REQUEST, "From arrival to the end.")
        self.queue = made("request_queue_time_seconds", _REQUEST, "Waiting, whenever it was.")
        self.prefill = made("request_prefill_time_seconds", _REQUEST, "Running, to first token.")
        self.decode = made("request_decode_time_seconds", _REQUEST, "Running, after that.")
        self.inference = made("request_inference_time_seconds", _REQUEST, "Running.")
        self.prompt_tokens = made("request_prompt_tokens", _TOKENS, "Of the prompt.")
        self.computed_tokens = made(
            "request_prefill_kv_computed_tokens", _TOKENS, "Of the prompt, less cached ones."
        )
        self.output_tokens = made("request_generation_tokens", _TOKENS, "Generated.")
        self.asked_tokens = (
            made("request_params_max_tokens", _TOKENS, "max_tokens."),
            made("request_max_num_generation_tokens", _TOKENS, "The most of all choices."),
        )
        self.choices = made("request_params_n", _CHOICES, "n.")
        self.ended = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        for reason in FinishReason:
            self.ended.labels(self.model, ENGINE, reason)  # so that it is 0 before the first

    def _histogram(self, name: str, bounds: Sequence[float], text: str) -> Histogram:
        made = Histogram(f"vllm:{name}", text, LABELS, buckets=bounds, registry=self.registry)
        return made.labels(self.model, ENGINE)

    def count_http(self, route: str, status: int) -> None:
        """One answered HTTP request; `route` is a template of ours, never a path as it came."""
        self._http.labels(route, f"{status // 100}xx").inc()

    def count_tokens(self, row: Usage, tenant: str) -> None:
        """The tokens of one request to its tenant, by slug."""
        label, dropped = self._tenant_label.of(tenant, row.prompt_tokens + row.completion_tokens)
        if dropped is not None:
            for kind in TOKEN_KINDS:
                self._tenant_tokens.remove(dropped, kind)
        counts = (row.prompt_tokens, row.cached_tokens, row.completion_tokens)
        for kind, count in zip(TOKEN_KINDS, counts, strict=True):
            self._tenant_tokens.labels(label, kind).inc(count)


class RequestMeter:
    """Observes one request of a tenant (slug), from its first output to its end."""

    def __init__(self, metrics: ServerMetrics, *, tenant: str, max_tokens: int) -> None:
        self._metrics = metrics
        self._tenant = tenant
        self._max_tokens = max_tokens
        self._at_first = RequestMetrics()
        self._last = RequestMetrics()
        self._num_tokens = 0

    @property
    def has_output(self) -> bool:
        """Whether a token has come."""
        return self._num_tokens > 0

    def output(self, output: RequestOutput) -> None:
        """A delta. By the engine's clock: a client that is slow to read is no latency of ours."""
        times, new = output.metrics, output.num_output_tokens - self._num_tokens
        if new > 0 and not self.has_output:
            self._metrics.first_token.observe(times.first_token_seconds)
            self._at_first = times
        elif new > 0:
            mean = max(0.0, times.total_seconds - self._last.total_seconds) / new
            for _ in range(new):  # several when deltas were merged
                for histogram in self._metrics.inter_token:
                    histogram.observe(mean)
        self._num_tokens, self._last = output.num_output_tokens, times

    def end(self, row: Usage) -> None:
        """The request is over, and this is its usage row."""
        metrics = self._metrics
        metrics.count_tokens(row, self._tenant)
        metrics.ended.labels(metrics.model, ENGINE, _reason(row)).inc()
        if row.status == "ok":
            self._observe_times(row.completion_tokens)
            metrics.prompt_tokens.observe(row.prompt_tokens)
            metrics.computed_tokens.observe(row.prompt_tokens - row.cached_tokens)
            metrics.output_tokens.observe(row.completion_tokens)
            metrics.choices.observe(1)
            for histogram in metrics.asked_tokens:
                histogram.observe(self._max_tokens)

    def lose_usage(self) -> None:
        """That row could not be written."""
        self._metrics.usage_lost.inc()

    def _observe_times(self, num_tokens: int) -> None:
        """Queue, prefill and decode add up to the whole: waiting after a preemption is queue."""
        first, last, metrics = self._at_first, self._last, self._metrics
        prefill = max(0.0, first.first_token_seconds - first.queued_seconds)
        inference = max(prefill, last.total_seconds - last.queued_seconds)
        metrics.whole.observe(last.total_seconds)
        metrics.queue.observe(last.queued_seconds)
        metrics.prefill.observe(prefill)
        metrics.decode.observe(inference - prefill)
        metrics.inference.observe(inference)
        if num_tokens > 1:
            metrics.mean_token.observe((inference - prefill) / (num_tokens - 1))


def _reason(row: Usage) -> str:
    if row.status == "ok":
        return row.finish_reason or OTHER
    return FinishReason.ERROR if row.status == "engine_error" else FinishReason.ABORT
