"""The engine's snapshot as Prometheus metrics, read when somebody scrapes.

An engine process that starts anew counts from 0 again, which Prometheus takes for what it is: the
reset of a counter. While the engine is away its metrics are absent rather than old.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from manylora.engine.api import STEP_TOKEN_BOUNDS, EngineInfo, EngineStats, Remedies
from manylora.engine.lifecycle import WaitCause
from manylora.platform.metrics import ENGINE, LABELS

# vLLM's two reasons: what the scheduler passes over for now, and what waits for room.
_DEFERRED = (WaitCause.ADAPTER_LOAD, WaitCause.ADAPTER_SLOT, WaitCause.GRAMMAR)
_DIGEST_CHARS = 12  # of an adapter's digest, as the pages show it


def engine_metrics(
    model: str,
    info: EngineInfo,
    stats: EngineStats,
    *,
    prefix_caching: bool,
    waiting_digests: Iterable[str],
) -> Iterator[Metric]:
    """All metrics of an engine that answers.

    Args:
        waiting_digests: adapters of requests that have no output yet.
    """
    engine = _Families((model, ENGINE))
    yield from _requests(engine, stats)
    yield from _memory(engine, stats)
    yield from _tokens(engine, stats)
    yield from _adapters(engine, stats)
    yield _cache_config(info, prefix_caching)
    yield _lora_requests(info, stats, waiting_digests)
    yield engine.gauge("manylora_engine_uptime_seconds", "Since its start.", stats.uptime_seconds)
    yield engine.gauge(
        "manylora_preemption_remedy",
        "The value of each option that would have spared the latest preemption.",
        _remedies(stats.remedies),
        "knob",
    )


@dataclass(frozen=True, slots=True)
class _Families:
    """Makes metrics that carry vLLM's two labels, and one more where there is a value for each."""

    labels: tuple[str, str]

    def gauge(
        self, name: str, text: str, value: float | Mapping[str, float], label: str | None = None
    ) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_names(label))
        for labels, number in self._samples(value):
            family.add_metric(labels, number)
        return family

    def counter(
        self, name: str, text: str, value: float | Mapping[str, float], label: str | None = None
    ) -> Metric:
        family = CounterMetricFamily(name, text, labels=_names(label))
        for labels, number in self._samples(value):
            family.add_metric(labels, number)
        return family

    def _samples(self, value: float | Mapping[str, float]) -> Iterator[tuple[list[str], float]]:
        if isinstance(value, Mapping):
            yield from (([*self.labels, key], number) for key, number in value.items())
        else:
            yield [*self.labels], value


def _names(label: str | None) -> tuple[str, ...]:
    return LABELS if label is None else (*LABELS, label)


def _by_cause(values: Mapping[WaitCause, float]) -> dict[str, float]:
    return {cause.value: values.get(cause, 0) for cause in WaitCause}


def _requests(engine: _Families, stats: EngineStats) -> Iterator[Metric]:
    deferred = sum(stats.waiting_by_cause.get(cause, 0) for cause in _DEFERRED)
    reasons = {"capacity": stats.num_waiting - deferred, "deferred": deferred}
    yield engine.gauge("vllm:num_requests_running", "Running requests.", stats.num_running)
    yield engine.gauge("vllm:num_requests_waiting", "Waiting requests.", stats.num_waiting)
    yield engine.gauge(
        "vllm:num_requests_waiting_by_reason", "Waiting requests by reason.", reasons, "reason"
    )
    yield engine.gauge(
        "manylora_requests_waiting",
        "Waiting requests by what they lack.",
        _by_cause(stats.waiting_by_cause),
        "cause",
    )
    yield engine.counter(
        "manylora_queue_seconds",
        "Seconds that requests have waited, by what they lacked.",
        _by_cause(stats.queued_seconds_by_cause),
        "cause",
    )
    yield engine.counter("vllm:num_preemptions", "Preemptions.", stats.num_preemptions)


def _memory(engine: _Families, stats: EngineStats) -> Iterator[Metric]:
    used, total = stats.kv_blocks_used, stats.kv_blocks_total
    usage = used / total if total else 0.0
    for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):  # now, and before
        yield engine.gauge(name, "KV blocks in use; 1 is all of them.", usage)
    yield engine.gauge(
        "manylora_kv_blocks",
        "KV blocks by state.",
        {"used": used, "free": total - used},
        "state",
    )
    yield engine.counter(
        "vllm:prefix_cache_queries", "Tokens looked up.", stats.prefix_queried_tokens
    )
    yield engine.counter("vllm:prefix_cache_hits", "Tokens found.", stats.prefix_hit_tokens)


def _tokens(engine: _Families, stats: EngineStats) -> Iterator[Metric]:
    hits = stats.prefix_hit_tokens
    sources = {"local_compute": max(0, stats.prompt_tokens - hits), "local_cache_hit": hits}
    yield engine.counter("vllm:prompt_tokens", "Prompt tokens.", stats.prompt_tokens)
    yield engine.counter("vllm:prompt_tokens_cached", "Prompt tokens found in the cache.", hits)
    yield engine.counter(
        "vllm:prompt_tokens_by_source", "Prompt tokens by where they come from.", sources, "source"
    )
    yield engine.counter("vllm:generation_tokens", "Generated tokens.", stats.output_tokens)
    yield engine.counter(
        "manylora_recomputed_tokens",
        "Tokens computed once more after preemptions.",
        stats.recomputed_tokens,
    )
    iterations = HistogramMetricFamily(
        "vllm:iteration_tokens_total", "Tokens computed in a step.", labels=LABELS
    )
    bounds = [*map(str, map(float, STEP_TOKEN_BOUNDS)), "+Inf"]
    buckets = list(zip(bounds, accumulate(stats.steps_by_tokens), strict=True))
    iterations.add_metric(engine.labels, buckets, sum_value=stats.step_tokens)
    yield iterations


def _adapters(engine: _Families, stats: EngineStats) -> Iterator[Metric]:
    filled = [slot for slot in stats.slots if slot.digest is not None]
    held = sum(slot.holds > 0 for slot in filled)
    slots = {"held": held, "idle": len(filled) - held, "empty": len(stats.slots) - len(filled)}
    yield engine.gauge("manylora_adapter_slots", "Adapter slots by state.", slots, "state")
    yield engine.gauge(
        "manylora_adapters_resident",
        "Adapters in memory by tier; one in a slot lies in host memory, too.",
        {"slot": len(filled), "host": len(stats.host_digests)},
        "tier",
    )
    yield engine.counter(
        "manylora_adapter_loads", "Adapters loaded into host memory.", stats.adapter_loads
    )
    yield engine.counter("manylora_slot_fills", "Adapters put into a slot.", stats.slot_fills)


def _cache_config(info: EngineInfo, prefix_caching: bool) -> Metric:
    """As vLLM's: an info metric by name, a gauge by type, without the model's name."""
    facts = {
        "engine": ENGINE,
        "block_size": str(info.block_size),
        "num_gpu_blocks": str(info.num_kv_blocks),
        "cache_dtype": info.dtype,
        "enable_prefix_caching": str(prefix_caching),
    }
    family = GaugeMetricFamily("vllm:cache_config_info", "1.", labels=tuple(facts))
    family.add_metric(list(facts.values()), 1)
    return family


def _lora_requests(info: EngineInfo, stats: EngineStats, waiting: Iterable[str]) -> Metric:
    """As vLLM's, whose value is the time; by digest: names are a tenant's, and not unique."""
    running = {slot.digest for slot in stats.slots if slot.digest is not None and slot.holds}
    family = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "The time; the labels tell which adapters' requests run and wait.",
        labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    )
    labels = [str(info.max_loras), _joined(running), _joined(set(waiting) - running)]
    family.add_metric(labels, time.time())
    return family


def _joined(digests: Iterable[str]) -> str:
    return ",".join(sorted(digest[:_DIGEST_CHARS] for digest in digests))


def _remedies(remedies: Remedies | None) -> dict[str, float]:
    if remedies is None:
        return {}
    values = {name: getattr(remedies, name) for name in Remedies.__slots__}
    return {name: value for name, value in values.items() if value is not None}
