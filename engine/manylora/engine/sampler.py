"""Logits to tokens, row by row: what a request draws depends on nothing but itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manylora.engine.api import SamplingParams, TokenLogprob
from manylora.engine.penalties import adjust_logits

_NUCLEUS = 256  # enough candidates for most nuclei; else the whole vocabulary is sorted


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token chosen for a sequence; None when its logits are not finite."""

    token_id: int | None
    logprob: TokenLogprob | None = None


def sample(
    logits: Tensor,
    params: SamplingParams,
    *,
    seed: int,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    eos_token_ids: frozenset[int] = frozenset(),
) -> SampledToken:
    """Choose one token. Log-probabilities are those of the logits as they came.

    Args:
        logits: [V], float32 or float64, on the host.
        seed: the request's.
        prompt, output: the sequence's token ids so far.
    """
    if not bool(torch.isfinite(logits).all()):
        return SampledToken(None)
    ending = {*params.stop_token_ids, *eos_token_ids}
    adjusted = adjust_logits(logits, params, prompt=prompt, output=output, ending=ending)
    if params.temperature == 0:
        token = int(adjusted.argmax())
    else:
        token = _draw(adjusted, params, _uniform(seed, len(prompt) + len(output)))
    if params.logprobs is None:
        return SampledToken(token)
    return SampledToken(token, token_logprob(logits, token, params.logprobs))


def _uniform(seed: int, position: int) -> float:
    """The number in [0, 1) of this seed and position: Philox is a function of both."""
    generator = np.random.Philox(key=seed % (1 << 64), counter=position)
    return float(np.random.Generator(generator).random())


def draw_seed(seed: int, count: int) -> int:
    """The seed of the `count`-th request that brings none, by the engine's seed."""
    return int(np.random.Philox(key=seed % (1 << 64), counter=count).random_raw()) >> 1


def _draw(logits: Tensor, params: SamplingParams, uniform: float) -> int:
    """Inverse transform sampling over what temperature, min_p, top_k and top_p leave."""
    below_best = logits.double() - logits.max()  # at most 0: no temperature makes it overflow
    weights = torch.softmax(below_best / params.temperature, dim=-1)
    if params.min_p:
        weights = torch.where(weights < params.min_p * weights.max(), 0, weights)
    if params.top_k == 0 and params.top_p == 1:
        return _inverse(weights, uniform)
    kept, tokens = _nucleus(weights, params)
    return int(tokens[_inverse(kept, uniform)])


def _inverse(weights: Tensor, uniform: float) -> int:
    """The first index whose cumulative weight exceeds `uniform` of the whole."""
    cumulative = weights.cumsum(0)
    index = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
    return min(index, len(weights) - 1)


def _nucleus(weights: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The likeliest tokens: at most top_k, and of those the fewest that reach top_p
    (Holtzman et al., arXiv 1904.09751)."""
    sizes = (params.top_k,) if params.top_k else (_NUCLEUS, len(weights))
    for size in (min(size, len(weights)) for size in sizes):
        kept, tokens = _top(weights, size)
        # The last of the running sums: unlike `sum`, it is not split by the number of threads.
        whole = (kept if params.top_k else weights).cumsum(0)[-1]
        before = kept.cumsum(0) - kept
        count = max(1, int((before < params.top_p * whole).sum()))
        if count < size:
            break
    return kept[:count], tokens[:count]


def _top(weights: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The `size` greatest with their indices, greatest first, equals by index."""
    least = torch.topk(weights, size).values[-1]
    above = torch.nonzero(weights > least).flatten()
    equal = torch.nonzero(weights == least).flatten()[: size - len(above)]
    indices = torch.cat([above, equal])
    values, order = torch.sort(weights[indices], descending=True, stable=True)
    return values, indices[order]


def token_logprob(logits: Tensor, token: int, num_top: int) -> TokenLogprob:
    """How likely a token is by its finite logits [V], and the `num_top` likeliest beside it."""
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    num_top = min(num_top, len(logprobs))
    values, indices = _top(logprobs, num_top) if num_top else (logprobs[:0], logprobs[:0])
    top = tuple(zip(indices.tolist(), values.tolist(), strict=True))
    value = float(logprobs[token])
    assert math.isfinite(value)
    return TokenLogprob(token, value, top)
