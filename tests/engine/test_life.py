"""A request's life as the engine tells it: stages in order, and waits by cause that sum up."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from manylora.engine import LLM, SamplingParams
from manylora.engine.api import AdapterRef, Request, RequestMetrics
from manylora.engine.lifecycle import Stage, StageName, WaitCause
from support.engine import make_llm

EXACT = 1e-9


class Ticks:
    """A clock that goes on by a second whenever it is looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def lives(
    llm: LLM, requests: list[Request], *, late: dict[int, Request] | None = None
) -> dict[str, RequestMetrics]:
    """Each request's metrics at its end; `late` ones come before the step of that number."""
    core = llm.core
    core.clock = Ticks()
    for request in requests:
        core.add(request)
    told: dict[str, list[Stage]] = defaultdict(list)
    ended, step = {}, 0
    while core.has_work:
        if late and step in late:
            core.add(late[step])
        for output in core.step():
            told[output.request_id] += output.metrics.stages
            if output.finish_reason is not None:
                ended[output.request_id] = replace(
                    output.metrics, stages=tuple(told[output.request_id])
                )
        step += 1
    return ended


def request(
    name: str,
    *,
    prompt: int = 20,
    output: int = 3,
    adapter: str | None = None,
    tenant: str = "a",
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(i % 250 for i in range(prompt)),
        params=SamplingParams(max_tokens=output, ignore_eos=True, temperature=0),
        tenant=tenant,
        adapter=None if adapter is None else AdapterRef(adapter),
    )


def waited(metrics: RequestMetrics) -> float:
    """The time between the stages in which it was queued, by its stamps alone."""
    total, since = 0.0, 0.0
    for stage in metrics.stages:
        if stage.name in (StageName.QUEUED, StageName.PREEMPTED):
            since = stage.at
        elif stage.name in (StageName.SCHEDULED, StageName.RESUMED):
            total += stage.at - since
    return total


def names(metrics: RequestMetrics) -> list[StageName]:
    return [stage.name for stage in metrics.stages]


def test_a_life_has_its_stages_in_order_and_each_chunk_of_the_prompt(tiny_model: Path) -> None:
    with make_llm(tiny_model, max_num_batched_tokens=8) as llm:
        metrics = lives(llm, [request("r", prompt=20, output=2)])["r"]

    assert names(metrics) == [
        StageName.QUEUED,
        StageName.SCHEDULED,
        *[StageName.PREFILL_CHUNK] * 3,
        StageName.FIRST_TOKEN,
        StageName.LAST_TOKEN,
        StageName.DETOKENISED,
    ]
    chunks = [s.tokens for s in metrics.stages if s.name is StageName.PREFILL_CHUNK]
    assert chunks == [8, 8, 4]
    times = [stage.at for stage in metrics.stages]
    assert times == sorted(times)


def test_an_adapter_is_ready_before_its_request_runs(
    tiny_model: Path, tiny_adapters: dict[str, Path]
) -> None:
    with make_llm(tiny_model) as llm:
        digest = llm.load_adapter(tiny_adapters["all"]).digest
        metrics = lives(llm, [request("r", adapter=digest)])["r"]

    assert names(metrics)[:3] == [StageName.QUEUED, StageName.ADAPTER_READY, StageName.SCHEDULED]


def test_waits_by_cause_sum_to_the_time_between_the_stages(
    tiny_model: Path, tiny_adapters: dict[str, Path]
) -> None:
    """Seats, steps, slots, blocks and fairness all run short here."""
    options = {"num_kv_blocks": 14, "max_num_seqs": 3, "max_num_batched_tokens": 16, "max_loras": 1}
    with make_llm(tiny_model, **options) as llm:
        one, other = (llm.load_adapter(tiny_adapters[n]).digest for n in ("all", "mlp"))
        requests = [
            request(f"r{i}", prompt=10 + 7 * i, output=50, adapter=(None, one, other)[i % 3])
            for i in range(6)
        ]
        late = {4: request("late", tenant="b", prompt=30, output=2)}
        ended = lives(llm, requests, late=late)
        totals = llm.stats().queued_seconds_by_cause

    assert set(ended) == {r.request_id for r in [*requests, *late.values()]}
    for metrics in ended.values():
        parts = metrics.queued_by_cause
        assert sum(parts.values()) == pytest.approx(metrics.queued_seconds, abs=EXACT)
        assert metrics.queued_seconds == pytest.approx(waited(metrics), abs=EXACT)
        assert metrics.num_preemptions == names(metrics).count(StageName.PREEMPTED)
        assert (WaitCause.PREEMPTED in parts) == (metrics.num_preemptions > 0)
    assert sum(totals.values()) == pytest.approx(
        sum(metrics.queued_seconds for metrics in ended.values()), abs=EXACT
    )
    seen = {cause for metrics in ended.values() for cause in metrics.queued_by_cause}
    assert {WaitCause.ADAPTER_SLOT, WaitCause.PREEMPTED} <= seen


@pytest.mark.parametrize(
    ("cause", "options", "count", "prompt", "output"),
    [
        (WaitCause.SEQUENCE_LIMIT, {"max_num_seqs": 2}, 3, 10, 5),
        (WaitCause.TOKEN_BUDGET, {"max_num_batched_tokens": 16, "max_num_seqs": 4}, 3, 40, 5),
        (WaitCause.KV_BLOCKS, {"num_kv_blocks": 8}, 3, 50, 5),
    ],
)
def test_what_runs_short_is_what_the_last_one_waits_for(
    tiny_model: Path,
    cause: WaitCause,
    options: dict[str, int],
    count: int,
    prompt: int,
    output: int,
) -> None:
    with make_llm(tiny_model, enable_prefix_caching=False, **options) as llm:
        requests = [request(f"r{i}", prompt=prompt, output=output) for i in range(count)]
        last = lives(llm, requests)[requests[-1].request_id]

    assert last.queued_by_cause[cause] >= 0.5 * last.queued_seconds


def test_who_is_overtaken_by_another_tenants_later_request_waits_for_fairness(
    tiny_model: Path,
) -> None:
    with make_llm(tiny_model, max_num_seqs=2) as llm:
        flood = [request(f"r{i}", output=12) for i in range(4)]
        late = {3: request("late", tenant="b", output=12)}
        ended = lives(llm, flood, late=late)

    assert ended["late"].queued_by_cause.keys() <= {WaitCause.STEP, WaitCause.SEQUENCE_LIMIT}
    assert ended["r2"].queued_by_cause[WaitCause.FAIRNESS] > 0


def test_a_wait_for_a_running_step_counts_from_the_arrival(tiny_model: Path) -> None:
    with make_llm(tiny_model) as llm:
        llm.core.clock = Ticks()
        llm.core.clock.now = 100.0
        llm.core.add(request("r", output=1), arrived=90.0)
        (output,) = llm.core.step()

    assert output.metrics.queued_by_cause[WaitCause.STEP] > 10
    assert output.metrics.total_seconds > 10
