"""What is observed of one request: by the engine's clock, and with parts that add up."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from manylora.engine.api import FinishReason, RequestMetrics, RequestOutput
from manylora.platform.metrics import RequestMeter, ServerMetrics
from manylora.platform.usage import Usage

LABELS = {"model_name": "tiny", "engine": "0"}
ROW = Usage(
    tenant_id="ten_1",
    key_id="key_1",
    request_id="req_1",
    base_model="tiny",
    route="chat",
    status="ok",
    finish_reason="stop",
    prompt_tokens=7,
    cached_tokens=4,
    completion_tokens=3,
    delivered_tokens=3,
    queued_us=0,
    ttft_us=0,
    total_us=0,
)


def output(tokens: int, *, queued: float, first: float, total: float) -> RequestOutput:
    times = RequestMetrics(queued_seconds=queued, first_token_seconds=first, total_seconds=total)
    return RequestOutput(request_id="req_1", num_output_tokens=tokens, metrics=times)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(name, {**LABELS, **labels})
    assert found is not None, name
    return found


def metered(outputs: list[RequestOutput], row: Usage = ROW) -> CollectorRegistry:
    metrics = ServerMetrics("tiny")
    meter = RequestMeter(metrics, tenant="acme", max_tokens=16)
    for one in outputs:
        meter.output(one)
    meter.end(row)
    return metrics.registry


def test_a_request_is_observed_in_its_parts() -> None:
    registry = metered(
        [
            output(0, queued=2, first=2, total=2),  # nothing yet
            output(1, queued=2, first=3, total=3),
            output(3, queued=2, first=3, total=7),  # two deltas, merged
            output(4, queued=7, first=3, total=13),  # preempted for 5 s in between
        ],
        replace(ROW, completion_tokens=4),
    )

    def seconds(name: str) -> float:
        return value(registry, f"vllm:{name}_seconds_sum")

    assert seconds("time_to_first_token") == 3
    assert seconds("inter_token_latency") == seconds("time_per_output_token") == 10
    assert value(registry, "vllm:inter_token_latency_seconds_count") == 3
    assert value(registry, "vllm:inter_token_latency_seconds_bucket", le="2.5") == 2
    assert seconds("e2e_request_latency") == 13
    assert seconds("request_queue_time") == 7
    assert seconds("request_prefill_time") == 1
    assert seconds("request_decode_time") == 5
    assert seconds("request_inference_time") == 6
    assert seconds("request_time_per_output_token") == pytest.approx(5 / 3)


def test_its_sizes_and_its_end_are_counted() -> None:
    registry = metered([output(3, queued=0, first=1, total=1)])

    assert value(registry, "vllm:request_prompt_tokens_sum") == 7
    assert value(registry, "vllm:request_prefill_kv_computed_tokens_sum") == 3
    assert value(registry, "vllm:request_generation_tokens_sum") == 3
    assert value(registry, "vllm:request_params_max_tokens_sum") == 16
    assert value(registry, "vllm:request_max_num_generation_tokens_sum") == 16
    assert value(registry, "vllm:request_params_n_sum") == 1
    assert value(registry, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(registry, "vllm:request_success_total", finished_reason="length") == 0
    for kind, count in {"prompt": 7, "cached": 4, "completion": 3}.items():
        labels = {"tenant": "acme", "kind": kind}
        assert registry.get_sample_value("manylora_tenant_tokens_total", labels) == count


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("client_abort", FinishReason.ABORT),
        ("server_stop", FinishReason.ABORT),
        ("engine_error", FinishReason.ERROR),
    ],
)
def test_one_that_was_cut_off_counts_its_tokens_and_not_its_times(
    status: str, reason: FinishReason
) -> None:
    row = replace(ROW, status=status, finish_reason=None)
    registry = metered([output(3, queued=0, first=1, total=9)], row)

    assert value(registry, "vllm:request_success_total", finished_reason=reason) == 1
    assert value(registry, "vllm:e2e_request_latency_seconds_count") == 0
    assert value(registry, "vllm:time_to_first_token_seconds_count") == 1
    labels = {"tenant": "acme", "kind": "completion"}
    assert registry.get_sample_value("manylora_tenant_tokens_total", labels) == 3


@given(
    st.floats(0, 5),
    st.lists(st.tuples(st.integers(1, 4), st.floats(0, 5), st.floats(0, 5)), min_size=1),
)
def test_the_parts_always_add_up(first_wait: float, deltas: list[tuple[int, float, float]]) -> None:
    """Over any waits and any merging of deltas."""
    tokens, queued, total, first, outputs = 0, first_wait, first_wait, 0.0, []
    for new, wait, run in deltas:
        queued, total = queued + wait, total + wait + run
        tokens, first = tokens + new, first or total
        outputs.append(output(tokens, queued=queued, first=first, total=total))
    registry = metered(outputs, replace(ROW, completion_tokens=tokens))

    def part(name: str) -> float:
        return value(registry, f"vllm:request_{name}_time_seconds_sum")

    assert part("queue") + part("prefill") + part("decode") == pytest.approx(total)
    assert part("prefill") + part("decode") == pytest.approx(part("inference"))
    between = value(registry, "vllm:inter_token_latency_seconds_sum")
    assert between == pytest.approx(total - outputs[0].metrics.total_seconds, abs=1e-6)
    steps = value(registry, "vllm:inter_token_latency_seconds_count")
    assert steps == tokens - outputs[0].num_output_tokens
