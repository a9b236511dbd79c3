"""Tokens given to a sequence as if sampled, and what its reader gets."""

from collections.abc import Sequence as Tokens
from typing import Any

from manylora.engine.api import Request, RequestOutput, SamplingParams
from manylora.engine.outputs import accept_token
from manylora.engine.sampler import SampledToken
from manylora.engine.sequence import Sequence
from manylora.engine.text.processor import TextProcessor


def feed(
    text: TextProcessor,
    tokens: Tokens[int],
    *,
    prompt: Tokens[int] = (1, 2, 3),
    max_model_len: int = 512,
    **params: Any,
) -> list[RequestOutput]:
    """Give a sequence these tokens until it ends."""
    request = Request(
        request_id="r",
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**({"max_tokens": 100} | params)),
        tenant="a",
    )
    sequence = Sequence.begin(request, text, seed=0, arrival_step=0)
    outputs = []
    for token in tokens:
        sampled = SampledToken(token)
        outputs.append(accept_token(sequence, sampled, text.eos_token_ids, max_model_len))
        if outputs[-1].finish_reason is not None:
            break
    return outputs


def whole(outputs: list[RequestOutput]) -> RequestOutput:
    """What a reader gets who waits to the end."""
    merged = outputs[0]
    for output in outputs[1:]:
        merged = merged.merged_with(output)
    return merged
