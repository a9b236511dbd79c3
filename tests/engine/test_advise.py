"""What `advise` says of prefix caching is what a run with it, or without it, then really does."""

import re
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manylora.engine import SamplingParams
from manylora.engine.advice_text import advice_text
from manylora.engine.advise import ENOUGH_REQUESTS, Advice, advise
from manylora.engine.api import EngineStats, Request
from manylora.engine.simulation import StepCost
from manylora.engine.traffic import RecordedStep, fit_cost, read_traffic
from support.engine import make_llm
from support.recorded import RecordedScheduler, lines_of, make_header, record_model

TURNS = 5


def hits(advice: Advice) -> dict[tuple[str, str | None], int]:
    return {(group.tenant, group.adapter): group.hit_tokens for group in advice.groups}


@pytest.mark.parametrize("policy", ["fair", "fcfs", "priority"])
def test_the_hit_rate_of_a_run_with_caching_is_reproduced(
    tiny_model: Path, tiny_adapters: dict[str, Path], tmp_path: Path, policy: str
) -> None:
    path = tmp_path / "on.jsonl"
    stats = record_model(path, tiny_model, tiny_adapters, scheduling_policy=policy, aborts=False)

    advice = advise(path)

    recorded = stats.prefix_hit_tokens / stats.prompt_tokens
    assert recorded > 0.05
    assert advice.recorded_hit_rate == pytest.approx(recorded)
    assert advice.hit_rate == pytest.approx(recorded, abs=0.01)
    assert advice.recorded_with_caching
    assert advice.num_steps == stats.num_steps


def conversations(
    path: Path, model: Path, adapters: dict[str, Path], **options: Any
) -> EngineStats:
    """Several tenants' conversations, turn by turn: each prompt is all that was said before."""
    with make_llm(model, step_trace=str(path), block_size=4, **options) as llm:
        infos = [llm.load_adapter(folder) for folder in adapters.values()]
        said = {name: list(range(9 + index)) for index, name in enumerate("abc")}
        for turn in range(TURNS):
            for (tenant, text), adapter in zip(said.items(), infos, strict=True):
                params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
                request = Request(
                    request_id=f"{tenant}{turn}",
                    prompt_token_ids=tuple(text),
                    params=params,
                    tenant=tenant,
                    adapter=adapter.ref,
                )
                llm.core.add(request)
                while llm.core.has_work:
                    for output in llm.core.step():
                        text += output.token_ids
                text += [turn] if tenant != "c" else []
                if tenant == "c":  # who never says the same again
                    text[0] += 1
        return llm.stats()


@pytest.fixture(scope="module")
def both(
    tiny_model: Path, tiny_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[bool, tuple[Path, EngineStats]]:
    """The same conversations without and with prefix caching."""
    folder = tmp_path_factory.mktemp("recorded")
    runs = {}
    for caching in (False, True):
        path = folder / f"{caching}.jsonl"
        stats = conversations(path, tiny_model, tiny_adapters, enable_prefix_caching=caching)
        runs[caching] = path, stats
    return runs


def test_a_run_without_caching_tells_the_hits_of_one_with_it(
    both: dict[bool, tuple[Path, EngineStats]],
) -> None:
    """To the token, output blocks included: each turn finds the answers before it."""
    real: Counter[tuple[str, str | None]] = Counter()
    for request in read_traffic(both[True][0]).requests:
        real[request.added.tenant, request.added.adapter] += request.num_cached_tokens

    told = advise(both[False][0])

    assert not told.recorded_with_caching
    assert both[False][1].prefix_hit_tokens == 0
    assert hits(told) == dict(real)
    assert sum(real.values()) == both[True][1].prefix_hit_tokens > 0


def test_a_hit_saves_prefill_and_a_group_without_one_is_named(
    both: dict[bool, tuple[Path, EngineStats]],
) -> None:
    advice = advise(both[False][0])
    a, _, c = advice.groups

    saved = a.prefill_seconds.off - a.prefill_seconds.on
    assert saved == pytest.approx(a.hit_tokens * advice.token_seconds)
    assert saved / a.prefill_seconds.off == pytest.approx(a.hit_rate)
    assert not a.is_pure_overhead
    assert c.hit_tokens == 0
    assert c.prefill_seconds.off == c.prefill_seconds.on
    assert 0 < c.overhead_seconds < 1
    assert [g.requests for g in advice.groups] == [TURNS] * 3

    text = advice_text(advice)
    assert f"\nc on {str(c.adapter)[:12]} hit nothing in {TURNS} requests: too few" in text
    assert "\na on" not in text
    assert "pure overhead:" not in text
    assert "recorded without prefix caching" in text


def test_the_times_to_first_token_are_those_of_the_recorded_run(
    both: dict[bool, tuple[Path, EngineStats]],
) -> None:
    """Without caching the simulation has the recorded steps, so it must have their times."""
    lines = lines_of(both[False][0])
    added = {line["request_id"]: line for line in lines if line["line"] == "added"}
    waited: dict[str, list[float]] = {}
    for step in (line for line in lines if line["line"] == "step"):
        for name, first, count, _ in step["rows"]:
            if first + count == added[name]["prompt_tokens"]:
                seconds = step["at"] + step["seconds"] - added[name]["at"]
                waited.setdefault(added[name]["tenant"], []).append(seconds)

    for group in advise(both[False][0]).groups:
        seconds = sorted(waited[group.tenant])
        assert group.first_token_mean_seconds.off == pytest.approx(sum(seconds) / TURNS, rel=0.2)
        assert group.first_token_p95_seconds.off == pytest.approx(seconds[-1], rel=0.2)


def test_a_pool_that_is_too_small_is_named_as_the_limit(tmp_path: Path) -> None:
    """Two tenants take turns with prompts of which the pool holds only one."""
    path = tmp_path / "steps.jsonl"
    engine = RecordedScheduler(path, make_header(num_kv_blocks=12, max_num_seqs=1))
    for turn in range(6):
        engine.add("ab"[turn % 2], None, 37, 3)
        engine.finish(adapters=set(), close=turn == 5)

    advice = advise(path)

    assert advice.hit_rate == advice.recorded_hit_rate < 0.2
    assert advice.hit_rate_unevicted == pytest.approx(4 * 36 / (6 * 37))
    assert "the 12 KV blocks are the limit" in advice_text(advice)
    assert advice.requests_short_of_blocks == 0  # none was there while another ran


def test_requests_that_began_one_by_one_for_want_of_blocks_are_told(tmp_path: Path) -> None:
    """They find each other's blocks only because they wait: with more blocks none would."""
    path = tmp_path / "steps.jsonl"
    options = {"num_kv_blocks": 14, "max_num_batched_tokens": 512, "max_num_seqs": 16}
    engine = RecordedScheduler(path, make_header(**options))
    for _ in range(6):
        engine.add("a", None, 27, 12)
    engine.finish(adapters=set())

    advice = advise(path)
    text = advice_text(advice)

    assert advice.hit_rate == advice.recorded_hit_rate > 0.4
    assert advice.hit_rate_unevicted >= advice.hit_rate
    assert advice.requests_short_of_blocks >= 4
    assert "not the limit" not in text
    short = f"{advice.requests_short_of_blocks} requests waited for some"
    assert f"of the 14 KV blocks, though, {short}" in text


BURST = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 40), st.integers(1, 20), st.booleans()),
    min_size=1,
    max_size=6,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    bursts=st.lists(BURST, min_size=1, max_size=4),
    num_kv_blocks=st.integers(15, 40),
    policy=st.sampled_from(["fair", "fcfs", "priority"]),
    share=st.booleans(),
)
def test_without_eviction_no_group_would_have_found_less(
    tmp_path: Path,
    bursts: list[list[tuple[str, int, int, bool]]],
    num_kv_blocks: int,
    policy: str,
    share: bool,
) -> None:
    path = tmp_path / "steps.jsonl"
    header = make_header(
        num_kv_blocks=num_kv_blocks, scheduling_policy=policy, share_base_prefixes=share
    )
    engine = RecordedScheduler(path, header)
    for burst in bursts:
        for tenant, prompt, output, with_logprobs in burst:
            logprobs = 0 if with_logprobs else None
            engine.add(tenant, None, prompt, output, prompt_logprobs=logprobs)
        engine.finish(adapters=set(), close=False)
    engine.trace.close()

    advice = advise(path)

    steps = [line for line in lines_of(path) if line["line"] == "step"]
    assert advice.hit_rate == advice.recorded_hit_rate
    assert all(group.hit_rate_unevicted >= group.hit_rate for group in advice.groups)
    if not any(step.get("evicted_blocks") for step in steps):
        assert advice.hit_rate_unevicted == advice.hit_rate
    if any("kv_blocks" in step.get("waiting", {}) for step in steps):
        assert advice.requests_short_of_blocks > 0
        assert "not the limit" not in advice_text(advice)


@pytest.mark.parametrize(
    ("count", "is_pure"), [(ENOUGH_REQUESTS - 1, False), (ENOUGH_REQUESTS, True)]
)
def test_only_enough_requests_without_a_hit_are_called_pure_overhead(
    tmp_path: Path, count: int, is_pure: bool
) -> None:
    path = tmp_path / "steps.jsonl"
    engine = RecordedScheduler(path, make_header(num_kv_blocks=1000))
    for number in range(count):
        engine.add("a", None, 17, 2, cache_salt=str(number))  # nobody's is another's
    engine.finish(adapters=set())

    advice = advise(path)

    assert advice.groups[0].is_pure_overhead == is_pure
    text = advice_text(advice)
    assert f"a on base hit nothing in {count} requests" in text
    assert ("pure overhead: a on base" in text) == is_pure
    assert ("too few" in text) != is_pure


def test_what_was_evicted_before_it_was_asked_for_is_no_pure_overhead(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    engine = RecordedScheduler(path, make_header(num_kv_blocks=10, max_num_seqs=1))
    for number in range(2 * ENOUGH_REQUESTS):
        engine.add("ab"[number % 2], None, 37, 2)
        engine.finish(adapters=set(), close=False)
    engine.trace.close()

    advice = advise(path)

    assert [group.hit_tokens for group in advice.groups] == [0, 0]
    assert not any(group.is_pure_overhead for group in advice.groups)
    evicted = f"{100 * 19 * 36 / (20 * 37):.1f} % had been evicted before"
    assert advice_text(advice).count(f"hit nothing in {ENOUGH_REQUESTS} requests: {evicted}") == 2


def test_an_interruption_while_it_is_measured_is_no_overhead(
    both: dict[bool, tuple[Path, EngineStats]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine does something else for a second, in one of the measurements."""
    calls = interrupted = 0

    def clock() -> float:
        nonlocal calls
        calls += 1
        return (calls >= interrupted) + time.monotonic()

    monkeypatch.setattr("manylora.engine.advise.time.perf_counter", clock)
    advise(both[False][0])
    for interrupted in range(2, calls, 42):  # the second of two readings, each time another
        calls = 0
        advice = advise(both[False][0])

        assert calls >= interrupted
        assert 0 < sum(group.overhead_seconds for group in advice.groups) < 0.5
        rows = advice_text(advice).splitlines()[5:8]
        assert all(re.search(r"~[\d.]+ ms$", row) for row in rows)


def test_requests_that_still_run_at_the_end_count_with_what_was_seen(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    engine = RecordedScheduler(path, make_header())
    engine.add("a", None, 9, 30)
    engine.add("b", None, 9, 30)
    for _ in range(6):
        engine.step()
    engine.add("c", None, 9, 30)
    engine.trace.close()

    advice = advise(path)

    assert [group.tenant for group in advice.groups] == ["a", "b"]  # c has never run
    assert [request.num_output_tokens for request in read_traffic(path).requests] == [6, 5]


def test_nothing_to_advise_is_said(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    RecordedScheduler(path, make_header()).trace.close()

    assert advice_text(advise(path)) == "no request ran in this recording"
    assert asdict(advise(path))["groups"] == ()


@pytest.mark.parametrize(
    ("times", "cost"),
    [
        ({1: 0.3, 2: 0.5, 5: 1.1}, StepCost(0.1, 0.2)),  # on a line
        ({4: 0.5}, StepCost(0.5, 0.0)),  # steps that are all alike tell nothing of tokens
        ({1: 0.5, 3: 0.1}, StepCost(0.3, 0.0)),  # more tokens do not take less time
        ({2: 0.1, 4: 0.5}, StepCost(0.0, 0.11)),  # and no step less than none
        ({}, StepCost(0.0, 0.0)),
    ],
)
def test_the_cost_of_a_step_is_fitted(times: dict[int, float], cost: StepCost) -> None:
    steps = [RecordedStep(0.0, tokens, seconds, seconds) for tokens, seconds in times.items()]

    fitted = fit_cost([*steps, RecordedStep(0.0, 7, 0.0, 0.0)])  # one that failed does not count

    assert (fitted.step, fitted.token) == pytest.approx((cost.step, cost.token))
