"""Sampling: the exact distribution, the same draw for the same seed, and no draw that fails."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from manylora.engine.api import SamplingParams
from manylora.engine.sampler import sample

NUM_DRAWS = 3000
LOGITS = torch.tensor([0.1, 2.0, -1.0, 1.2, 0.9, -3.0, 1.9, 0.0], dtype=torch.float32)


def draw(logits: Tensor, seed: int = 0, position: int = 0, **params: Any) -> int:
    token = sample(logits, SamplingParams(**params), seed=seed, prompt=[0] * position).token_id
    assert token is not None
    return token


def expected_weights(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> np.ndarray:
    """Softmax, then the top_k likeliest, then the fewest of those that reach top_p; in float64."""
    scaled = logits.double().numpy() / temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights, kind="stable")
    weights[order[top_k or len(order) :]] = 0
    weights /= weights.sum()
    reached = np.cumsum(weights[order]) >= top_p - 1e-12
    weights[order[int(np.argmax(reached)) + 1 :]] = 0
    return weights / weights.sum()


def chi_square(logits: Tensor, expected: np.ndarray, **params: Any) -> float:
    """The statistic of draws with as many seeds, over its 1 - 1e-6 quantile (Wilson-Hilferty)."""
    draws = [draw(logits, seed, position=seed % 7, **params) for seed in range(NUM_DRAWS)]
    counts = np.bincount(draws, minlength=len(expected))
    possible = expected > 0
    assert counts[~possible].sum() == 0
    wanted = NUM_DRAWS * expected[possible]
    statistic = float(((counts[possible] - wanted) ** 2 / wanted).sum())
    freedom = max(1, int(possible.sum()) - 1)
    spread = 2 / (9 * freedom)
    return statistic / (freedom * (1 - spread + 4.753 * spread**0.5) ** 3)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_k": 100},
        {"top_p": 0.7},
        {"top_k": 5, "top_p": 0.8, "temperature": 1.5},
    ],
    ids=str,
)
def test_tokens_come_as_often_as_softmax_says(params: dict[str, Any]) -> None:
    assert chi_square(LOGITS, expected_weights(LOGITS, **params), **params) < 1


def test_a_temperature_a_fifth_off_is_seen() -> None:
    """The test above has the power to find a small error in the distribution."""
    assert chi_square(LOGITS, expected_weights(LOGITS), temperature=1.2) > 1


def test_neighbouring_seeds_and_positions_are_unrelated() -> None:
    flat = torch.zeros(2)
    tokens = np.array([[draw(flat, seed, at) for at in range(64)] for seed in range(64)])

    for one, other in ((tokens[1:], tokens[:-1]), (tokens[:, 1:], tokens[:, :-1])):
        assert abs(np.mean(one == other) - 0.5) < 5 * 0.5 / one.size**0.5


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    places = [(seed, position) for seed in (-1, 0, 1, 1 << 63) for position in (0, 1, 500)]
    first = [draw(LOGITS, *place) for place in places]
    torch.manual_seed(1)
    np.random.seed(1)  # the global state must not matter

    assert [draw(LOGITS, *place) for place in reversed(places)] == first[::-1]
    assert len(set(first)) > 1


@pytest.mark.parametrize("size", [300, 1000])
def test_a_nucleus_may_be_larger_than_the_first_candidates(size: int) -> None:
    logits = torch.linspace(0, 0.5, size)
    expected = expected_weights(logits, top_p=0.9)

    tokens = {draw(logits, seed, top_p=0.9) for seed in range(1500)}

    assert (expected > 0).sum() > 256
    assert tokens <= set(np.flatnonzero(expected))
    assert min(tokens) < size - 256


@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_k": 1}, {"top_p": 1e-9}], ids=str)
def test_one_token_is_left_to_draw(params: dict[str, Any]) -> None:
    assert {draw(LOGITS, seed, **params) for seed in range(20)} == {1}


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-40])
@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 2}], ids=str)
def test_the_smallest_temperature_is_greedy(temperature: float, params: dict[str, Any]) -> None:
    assert draw(LOGITS, temperature=temperature, **params) == 1


@pytest.mark.parametrize("params", [{}, {"top_k": 1}, {"top_k": 4}], ids=str)
def test_the_smallest_top_p_leaves_one_token(params: dict[str, Any]) -> None:
    assert draw(torch.zeros(1000), top_p=5e-324, **params) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_give_no_token(value: float, temperature: float) -> None:
    logits = LOGITS.clone()
    logits[3] = value

    params = SamplingParams(temperature=temperature)

    assert sample(logits, params, seed=0).token_id is None


def test_log_probabilities_are_those_of_log_softmax_whatever_shapes_the_draw() -> None:
    params = SamplingParams(temperature=0.5, top_k=2, logprobs=3)
    expected = torch.log_softmax(LOGITS.double(), dim=-1)

    for seed in range(5):
        sampled = sample(LOGITS, params, seed=seed)

        assert sampled.logprob is not None
        assert sampled.logprob.token_id == sampled.token_id
        assert sampled.logprob.logprob == pytest.approx(float(expected[sampled.token_id]))
        assert [token for token, _ in sampled.logprob.top] == [1, 6, 3]
        values = [value for _, value in sampled.logprob.top]
        assert values == pytest.approx(expected[[1, 6, 3]].tolist())


@pytest.mark.parametrize("num_top", [0, 8, 20])
def test_as_many_alternatives_are_reported_as_there_are(num_top: int) -> None:
    sampled = sample(LOGITS, SamplingParams(logprobs=num_top), seed=0)

    assert sampled.logprob is not None
    assert len(sampled.logprob.top) == min(num_top, len(LOGITS))


def test_of_equal_logits_those_of_lowest_index_are_taken() -> None:
    """In bfloat16 many logits are equal: which of them are kept must not be an accident."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(0, 3, (1000,), generator=generator).float()
    greatest = torch.nonzero(logits == 2).flatten().tolist()

    params = SamplingParams(temperature=0, logprobs=5)
    sampled = sample(logits, params, seed=0)

    assert sampled.logprob is not None
    assert sampled.token_id == greatest[0]
    assert [token for token, _ in sampled.logprob.top] == greatest[:5]
    assert {draw(logits, seed, top_k=3) for seed in range(50)} == set(greatest[:3])
    assert {draw(torch.zeros(1000), seed, top_p=0.0025) for seed in range(50)} == {0, 1, 2}


def test_the_draw_of_a_float64_model_is_that_of_its_logits() -> None:
    assert [draw(LOGITS.double(), seed) for seed in range(50)] == [
        draw(LOGITS, seed) for seed in range(50)
    ]


def test_a_nucleus_of_a_large_vocabulary_is_the_same_on_any_number_of_threads() -> None:
    """torch splits the sum of more than 32,768 numbers by threads; no draw may depend on that."""
    vocabulary = torch.randn(49_152, generator=torch.Generator().manual_seed(0)) * 0.1
    drawn = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            weights = torch.softmax(vocabulary.double(), 0)
            # Borders that a sum one bit off would move: exact running sums of the weights.
            borders = (weights.sort(descending=True).values.cumsum(0)[400:440]).tolist()
            drawn.append(
                [draw(vocabulary, seed, top_p=top_p) for seed, top_p in enumerate(borders)]
            )
    finally:
        torch.set_num_threads(1)

    assert drawn[0] == drawn[1]
