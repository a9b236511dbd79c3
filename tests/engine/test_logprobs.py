"""Log-probabilities of prompt and output tokens, against log_softmax of transformers' float64."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manylora.engine import LLM, SamplingParams
from manylora.engine.api import TokenLogprob
from support.engine import make_llm, recorded_logits
from support.oracle import load_oracle, oracle_logits

PROMPT = [(7 * i + 3) % 256 for i in range(70)]
ABSOLUTE = 1e-4  # float32 logits of this model are some 10 wide
TELLING = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3)


def asking(num_top: int, **params: Any) -> SamplingParams:
    values = {"temperature": 0, "max_tokens": 3, "ignore_eos": True, **params}
    return SamplingParams(prompt_logprobs=num_top, **values)


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Tensor:
    """[T, V]: row t is of the token after `PROMPT[t]`."""
    return torch.log_softmax(oracle_logits(load_oracle(tiny_model), PROMPT), dim=-1)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return make_llm(tiny_model)


def check(told: Sequence[TokenLogprob], tokens: Sequence[int], oracle: Tensor, top: int) -> None:
    """Each token's value and its alternatives are the oracle's rows."""
    assert [one.token_id for one in told] == list(tokens)
    for one, row in zip(told, oracle, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=ABSOLUTE)
        values, ids = row.topk(top)
        assert [token for token, _ in one.top] == ids.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=ABSOLUTE)


def check_prompt(told: Sequence[TokenLogprob | None], oracle: Tensor, top: int) -> None:
    assert len(told) == len(PROMPT)
    assert told[0] is None
    check([one for one in told if one is not None], PROMPT[1:], oracle[:-1], top)


@pytest.mark.parametrize("budget", [1, 7, 64, 128])
def test_prompt_tokens_have_the_oracles_numbers_however_the_prompt_is_cut(
    tiny_model: Path, expected: Tensor, budget: int
) -> None:
    options = {"max_num_batched_tokens": budget, "max_num_seqs": min(budget, 4)}
    with make_llm(tiny_model, **options) as llm:
        (result,) = llm.generate(PROMPT, asking(4))

    check_prompt(result.prompt_logprobs, expected, 4)


def test_an_adapters_prompt_tokens_have_its_own_numbers_beside_the_base(
    tiny_model: Path, tiny_adapters: dict[str, Path], llm: LLM, expected: Tensor
) -> None:
    adapted = oracle_logits(load_oracle(tiny_model, tiny_adapters["all"]), PROMPT)
    adapter = llm.load_adapter(tiny_adapters["all"])

    one, other, silent = llm.generate(
        [PROMPT] * 3, [asking(2), asking(2), TELLING], adapter=[adapter, None, None]
    )

    check_prompt(one.prompt_logprobs, torch.log_softmax(adapted, dim=-1), 2)
    check_prompt(other.prompt_logprobs, expected, 2)
    assert silent.prompt_logprobs == []


def test_a_warm_prefix_cache_leaves_no_prompt_token_out(llm: LLM, expected: Tensor) -> None:
    (cold,) = llm.generate(PROMPT, asking(2))
    (warm,) = llm.generate(PROMPT, asking(2))
    (reusing,) = llm.generate(PROMPT, TELLING)

    check_prompt(warm.prompt_logprobs, expected, 2)
    assert warm.prompt_logprobs == cold.prompt_logprobs  # to the bit
    assert warm.num_cached_tokens == 0
    assert reusing.num_cached_tokens == 64  # what it computed is there for others


def test_a_preemption_leaves_no_prompt_token_out_and_tells_none_twice(
    tiny_model: Path, expected: Tensor
) -> None:
    """Blocks for less than the prompts: some are preempted within them, some behind them."""
    long = asking(2, max_tokens=40)
    with make_llm(tiny_model, num_kv_blocks=12, max_num_batched_tokens=16) as tight:
        results = tight.generate([PROMPT] * 4, long)
        preempted = tight.stats().num_preemptions

    assert preempted > 0
    for result in results:
        check_prompt(result.prompt_logprobs, expected, 2)
        assert len(result.outputs[0].token_ids) == 40


def test_a_preemption_within_the_prompt_goes_on_where_it_was(
    tiny_model: Path, expected: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other decodes into the blocks that a prompt of a token a step counted on."""
    options = {"max_num_batched_tokens": 2, "max_num_seqs": 2}
    with make_llm(tiny_model, num_kv_blocks=7, **options) as tight:
        run, computed = tight.core.runner.run, []

        def watching(batch: Any) -> Tensor:
            asks = [e for e in batch.entries if e.sequence.request.params.prompt_logprobs]
            computed.extend(position for entry in asks for position in entry.positions)
            return run(batch)

        monkeypatch.setattr(tight.core.runner, "run", watching)
        other = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
        _, result = tight.generate([[1] * 10, PROMPT], [other, asking(2)])

    again = computed.index(0, 1)
    assert 1 < again < len(PROMPT) - 1
    check_prompt(result.prompt_logprobs, expected, 2)


@pytest.mark.parametrize("budget", [8, 64])
def test_no_more_logits_than_a_steps_are_ever_held(
    tiny_model: Path, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_llm(tiny_model, max_num_batched_tokens=budget) as llm:
        run, rows = llm.core.runner.run, []

        def counting(batch: Any) -> Tensor:
            logits = run(batch)
            rows.append(len(logits))
            return logits

        monkeypatch.setattr(llm.core.runner, "run", counting)
        llm.generate([PROMPT, [1, 2, 3]], [asking(0), TELLING])

    assert max(rows) <= budget
    # All of PROMPT's rows but none twice, two more steps of it, and five steps of the other.
    assert sum(rows) == len(PROMPT) + 2 + 5


@pytest.mark.parametrize("num_top", [0, 20])
def test_as_many_alternatives_come_as_were_asked_for(llm: LLM, num_top: int) -> None:
    (result,) = llm.generate([5, 6, 7], asking(num_top))

    assert [one and len(one.top) for one in result.prompt_logprobs] == [None, num_top, num_top]


def test_a_prompt_of_one_token_has_nothing_to_tell(llm: LLM) -> None:
    (result,) = llm.generate([5], asking(3))

    assert result.prompt_logprobs == [None]
    assert len(result.outputs[0].token_ids) == 3


def test_they_are_those_of_the_model_whatever_shapes_the_draw(
    llm: LLM, tiny_model: Path, expected: Tensor
) -> None:
    shaped = asking(2, temperature=0.5, top_k=1, logit_bias={3: 50.0}, repetition_penalty=2.0)

    (result,) = llm.generate(PROMPT, shaped)

    check_prompt(result.prompt_logprobs, expected, 2)


def test_output_tokens_have_the_oracles_numbers(llm: LLM, tiny_model: Path) -> None:
    oracle = load_oracle(tiny_model)

    for sampling in ({}, {"temperature": 1.0, "seed": 4}, {"temperature": 2.0, "min_p": 0.01}):
        params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=5, **sampling)
        (result,) = llm.generate(PROMPT, params)
        tokens = result.outputs[0].token_ids
        rows = torch.log_softmax(oracle_logits(oracle, PROMPT + tokens), dim=-1)
        check(result.outputs[0].logprobs, tokens, rows[len(PROMPT) - 1 : -1], 5)


@pytest.mark.parametrize("position", [3, 68], ids=["within the prompt", "before its last token"])
def test_a_prompt_whose_numbers_went_wrong_is_given_up(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    run = llm.core.runner.run

    def poisoned(batch: Any) -> Tensor:
        logits, row = run(batch).clone(), 0
        for entry in batch.entries:
            for at in entry.logit_positions:
                if entry.sequence.request.params.prompt_logprobs is not None and at == position:
                    logits[row] = float("nan")
                row += 1
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(llm.core.runner, "run", poisoned)
        bad, good = llm.generate([PROMPT, PROMPT], [asking(2), TELLING])

    assert bad.outputs[0].finish_reason == "error"
    assert "not finite" in (bad.outputs[0].error or "")
    assert bad.outputs[0].token_ids == []
    assert good.outputs[0].finish_reason == "length"
    assert llm.stats().kv_blocks_used == 0


def test_a_recorded_run_sees_every_position_once_more(llm: LLM) -> None:
    """The tests' own recorder hands the engine what it asks for."""
    with recorded_logits(llm) as seen:
        (result,) = llm.generate(PROMPT, asking(1))
    (rows,) = seen.values()

    for position, told in enumerate(result.prompt_logprobs[1:]):
        row = torch.log_softmax(rows[position].double(), dim=-1)
        assert told is not None
        assert told.logprob == float(row[PROMPT[position + 1]])
