"""Bias, bans and penalties, against transformers' processors and the formulas of the OpenAI API."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
)

from manylora.engine.api import SamplingParams
from manylora.engine.errors import InvalidRequestError
from manylora.engine.penalties import adjust_logits
from manylora.engine.sampler import sample
from support.engine import make_llm

VOCABULARY = 12
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=10)
penalty = st.floats(-2, 2)


def logits(seed: int = 0) -> Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)).double() * 3


def adjusted(prompt: list[int], output: list[int], **params: Any) -> Tensor:
    return adjust_logits(
        logits(), SamplingParams(**params), prompt=prompt, output=output, ending=[1, 5]
    )


@given(prompt=tokens, output=tokens, factor=st.floats(0.5, 3))
def test_the_repetition_penalty_is_that_of_transformers(
    prompt: list[int], output: list[int], factor: float
) -> None:
    ids = torch.tensor([[*prompt, *output]], dtype=torch.int64)
    expected = RepetitionPenaltyLogitsProcessor(factor)(ids, logits().unsqueeze(0))[0]

    torch.testing.assert_close(adjusted(prompt, output, repetition_penalty=factor), expected)


@given(prompt=tokens, output=tokens, presence=penalty, frequency=penalty)
def test_presence_and_frequency_count_the_output_alone(
    prompt: list[int], output: list[int], presence: float, frequency: float
) -> None:
    counts = Counter(output)
    expected = [
        float(logit) - counts[token] * frequency - (counts[token] > 0) * presence
        for token, logit in enumerate(logits())
    ]

    ours = adjusted(prompt, output, presence_penalty=presence, frequency_penalty=frequency)

    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64))


def test_a_bias_is_added_and_nothing_else_changes() -> None:
    before = logits()

    ours = adjusted([], [], logit_bias={3: -100.0, 7: 2.5})

    assert ours[3] == before[3] - 100
    assert ours[7] == before[7] + 2.5
    others = [token for token in range(VOCABULARY) if token not in (3, 7)]
    assert torch.equal(ours[others], before[others])
    assert torch.equal(logits(), before)


def test_nothing_ends_a_sequence_before_its_fewest_tokens() -> None:
    early, late = (adjusted([1], [0] * n, min_tokens=3, max_tokens=9) for n in (2, 3))

    assert early[[1, 5]].tolist() == [-torch.inf, -torch.inf]
    assert torch.equal(late, logits())


@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
def test_min_p_leaves_the_tokens_that_transformers_leaves(min_p: float) -> None:
    kept = MinPLogitsWarper(min_p)(torch.zeros(1, 0), logits().unsqueeze(0))[0].isfinite()
    params = SamplingParams(min_p=min_p)

    drawn = {sample(logits(), params, seed=seed).token_id for seed in range(2000)}

    assert drawn <= set(kept.nonzero().flatten().tolist())
    assert len(drawn) >= min(int(kept.sum()), 3)


@pytest.mark.parametrize(
    "params",
    [
        {"min_p": 1.1},
        {"repetition_penalty": 0},
        {"presence_penalty": -2.1},
        {"frequency_penalty": float("nan")},
        {"logit_bias": {1: 100.1}},
        {"logit_bias": {-1: 0.0}},
        {"min_tokens": 17, "max_tokens": 16},
    ],
    ids=str,
)
def test_a_value_out_of_its_range_is_named(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**params)

    assert caught.value.param == next(iter(params))


def test_the_engine_applies_them_to_each_request_alone(tiny_model: Path) -> None:
    """A ban, a bias and a fewest of tokens beside a request that asks for none."""
    prompt = [1, 2, 3]
    plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with make_llm(tiny_model) as llm:
        (alone,) = llm.generate(prompt, plain)
        banned = dict.fromkeys(alone.outputs[0].token_ids, -100.0)
        results = llm.generate(
            [prompt] * 4,
            [
                plain,
                SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias=banned),
                SamplingParams(temperature=0, max_tokens=8, logit_bias={257: 100.0}),
                SamplingParams(temperature=0, max_tokens=8, logit_bias={257: 100.0}, min_tokens=5),
            ],
        )
        with pytest.raises(InvalidRequestError, match="logit_bias"):
            llm.generate(prompt, SamplingParams(logit_bias={260: 1.0}))

    ids = [result.outputs[0].token_ids for result in results]
    assert ids[0] == alone.outputs[0].token_ids
    assert not set(ids[1]) & banned.keys()
    assert ids[2] == [257]  # the end of sequence, at once
    assert len(ids[3]) == 6
    assert ids[3][-1] == 257
