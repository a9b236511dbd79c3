"""A request's numbers have the same bits whatever shares its batch, however it is cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from manylora.engine import LLM, SamplingParams
from support.engine import make_llm, recorded_logits
from support.tiny_families import make_tiny_family
from support.tiny_model import make_adapter

PROMPT = [(7 * i + 3) % 256 for i in range(70)]
LONG_PROMPT = [(7 * i + 3) % 256 for i in range(165)]  # more than a chunk of keys and a window
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=12, seed=5, ignore_eos=True)


def observed(
    llm: LLM,
    adapter: Any,
    neighbours: list[tuple[list[int], Any]],
    at: int,
    prompt: list[int] = PROMPT,
) -> tuple[list[int], Tensor]:
    """The tokens drawn for a prompt among neighbours, and the logits of all its positions."""
    work = [*neighbours[:at], (prompt, adapter), *neighbours[at:]]
    with recorded_logits(llm) as seen:
        results = llm.generate([p for p, _ in work], SAMPLED, adapter=[a for _, a in work])
    rows = list(seen.values())[at]
    return results[at].outputs[0].token_ids, torch.stack([rows[i] for i in sorted(rows)])


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float64"])
def engines(
    request: pytest.FixtureRequest, tiny_model: Path, tiny_adapters: dict[str, Path]
) -> dict[int, tuple[LLM, list[Any]]]:
    """Engines of other step sizes, with the base and every adapter."""
    made = {}
    for budget in (8, 13, 64):
        options = {"max_num_batched_tokens": budget, "enable_prefix_caching": False}
        llm = make_llm(tiny_model, dtype=request.param, **options)
        made[budget] = (llm, [None, *(llm.load_adapter(p) for p in tiny_adapters.values())])
    return made


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_neighbours_and_chunking_change_no_bit(
    engines: dict[int, tuple[LLM, list[Any]]], data: st.DataObject
) -> None:
    which = data.draw(st.integers(0, 3), "adapter")
    alone, adapters = engines[64]
    tokens, logits = observed(alone, adapters[which], [], 0)
    budget = data.draw(st.sampled_from([8, 13, 64]), "step size")
    crowded, adapters = engines[budget]
    prompt = st.lists(st.integers(0, 255), min_size=1, max_size=40)
    neighbours = data.draw(
        st.lists(st.tuples(prompt, st.sampled_from(adapters)), max_size=6), "neighbours"
    )

    at = data.draw(st.integers(0, len(neighbours)), "place")
    crowded_tokens, crowded_logits = observed(crowded, adapters[which], neighbours, at)

    assert crowded_tokens == tokens
    assert torch.equal(crowded_logits, logits)


@pytest.fixture(scope="module", params=["gemma3_text", "qwen3", "qwen3_moe"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_family(tmp_path_factory.mktemp("family"), request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neighbours_and_chunking_change_no_bit_of_another_family(
    family: Path, tmp_path: Path, dtype: str
) -> None:
    """Windows, caps, norms of heads, and experts that other rows see too or do not."""
    adapter = make_adapter(family, tmp_path / "adapter", target_modules=["q_proj", "o_proj"])
    seen = []
    for budget, neighbours in ((96, []), (13, [5]), (64, [30, 170, 2]), (8, [40])):
        options = {"max_num_batched_tokens": budget, "enable_prefix_caching": False}
        with make_llm(family, dtype=dtype, **options) as llm:
            used = llm.load_adapter(adapter)
            others = [([(11 * i) % 256 for i in range(n)], None) for n in neighbours]
            seen.append(observed(llm, used, others, len(others) // 2, LONG_PROMPT))

    for tokens, logits in seen[1:]:
        assert tokens == seen[0][0]
        assert torch.equal(logits, seen[0][1])


def test_a_prefix_hit_in_a_window_changes_no_bit(tmp_path: Path) -> None:
    with make_llm(make_tiny_family(tmp_path, "gemma3_text")) as llm:
        cold_tokens, cold = observed(llm, None, [], 0, LONG_PROMPT)
        warm_tokens, warm = observed(llm, None, [], 0, LONG_PROMPT)

    assert len(warm) == len(cold) - 160
    assert warm_tokens == cold_tokens
    assert torch.equal(warm, cold[160:])


@pytest.mark.parametrize("name", ["base", "all"])
def test_a_prefix_hit_changes_no_bit(
    tiny_model: Path, tiny_adapters: dict[str, Path], name: str
) -> None:
    with make_llm(tiny_model) as llm:
        adapter = None if name == "base" else llm.load_adapter(tiny_adapters[name])
        cold_tokens, cold = observed(llm, adapter, [], 0)
        warm_tokens, warm = observed(llm, adapter, [], 0)

    assert len(cold) == len(PROMPT) + SAMPLED.max_tokens - 1
    assert len(warm) == len(cold) - 64  # four full blocks of 16 were not computed again
    assert warm_tokens == cold_tokens
    assert torch.equal(warm, cold[64:])


def test_preemption_changes_no_bit(tiny_model: Path, tiny_adapters: dict[str, Path]) -> None:
    params = SamplingParams(temperature=0.9, max_tokens=60, seed=5, ignore_eos=True)
    prompts = [PROMPT[i : i + 20] for i in range(4)]

    def generate(num_kv_blocks: int) -> tuple[list[list[int]], int]:
        with make_llm(tiny_model, num_kv_blocks=num_kv_blocks) as llm:
            adapter = llm.load_adapter(tiny_adapters["all"])
            results = llm.generate(prompts, params, adapter=[None, adapter, None, adapter])
            assert llm.stats().kv_blocks_used == 0
            return [r.outputs[0].token_ids for r in results], llm.stats().num_preemptions

    roomy, never = generate(64)
    tight, often = generate(12)

    assert never == 0
    assert often > 0
    assert tight == roomy


def test_the_number_of_threads_changes_no_bit(
    tiny_model: Path, tiny_adapters: dict[str, Path]
) -> None:
    seen = []
    try:
        for threads in (1, 2):
            with make_llm(tiny_model, threads=threads) as llm:
                seen.append(observed(llm, llm.load_adapter(tiny_adapters["all"]), [], 0))
    finally:
        torch.set_num_threads(1)

    assert seen[0][0] == seen[1][0]
    assert torch.equal(seen[0][1], seen[1][1])
