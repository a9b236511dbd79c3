"""What a request does to its logits before a token is chosen: bias, bans and penalties."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from manylora.engine.api import SamplingParams


def adjust_logits(
    logits: Tensor,
    params: SamplingParams,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    ending: Collection[int],
) -> Tensor:
    """The logits after `logit_bias`, `min_tokens` and the penalties, in vLLM's order.

    Args:
        logits: [V]; not changed.
        prompt, output: the sequence's token ids so far.
        ending: the token ids that would end it.
    """
    if not _asks_for_any(params, len(output)):
        return logits
    logits = logits.clone()
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias))
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype)
    if len(output) < params.min_tokens:
        logits[list(ending)] = -torch.inf
    if params.repetition_penalty != 1:
        _discourage_repetition(logits, params.repetition_penalty, {*prompt, *output})
    if output and (params.frequency_penalty or params.presence_penalty):
        ids, counts = torch.unique(torch.tensor(output), return_counts=True)
        logits[ids] -= params.frequency_penalty * counts.to(logits.dtype) + params.presence_penalty
    return logits


def _asks_for_any(params: SamplingParams, num_output_tokens: int) -> bool:
    return bool(
        params.logit_bias
        or num_output_tokens < params.min_tokens
        or params.repetition_penalty != 1
        or params.frequency_penalty
        or params.presence_penalty
    )


def _discourage_repetition(logits: Tensor, penalty: float, seen: Collection[int]) -> None:
    """In place, as CTRL does it (Keskar et al., arXiv 1909.05858)."""
    ids = torch.tensor(list(seen), dtype=torch.int64)
    scores = logits[ids]
    logits[ids] = torch.where(scores < 0, scores * penalty, scores / penalty)
