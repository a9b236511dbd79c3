"""From logits to what the client gets: tokens, text, stop conditions, finish reason, counts."""

import torch
from torch import Tensor

from manylora.engine.api import FinishReason, RequestMetrics, RequestOutput, TokenLogprob
from manylora.engine.lifecycle import StageName
from manylora.engine.sampler import SampledToken, sample, token_logprob
from manylora.engine.sequence import Sequence


def take_logits(
    sequence: Sequence, rows: Tensor, *, samples: bool, eos_token_ids: frozenset[int]
) -> SampledToken | None:
    """Use a sequence's logits [n, V]: the last row may draw, those before tell of the prompt.

    Returns:
        None when it does not draw, a `SampledToken` of no token when they are not finite.
    """
    if not _add_prompt_logprobs(sequence, rows[:-1] if samples else rows):
        return SampledToken(None)
    if not samples:
        return None
    return sample(
        rows[-1],
        sequence.request.params,
        seed=sequence.seed,
        prompt=sequence.request.prompt_token_ids,
        output=sequence.token_ids[sequence.num_prompt_tokens :],
        eos_token_ids=eos_token_ids,
    )


def _add_prompt_logprobs(sequence: Sequence, rows: Tensor) -> bool:
    """Note the log-probabilities of the next prompt tokens, a row at a time; unless not finite."""
    if len(rows) == 0:
        return True
    if not bool(torch.isfinite(rows).all()):
        return False
    num_top = sequence.request.params.prompt_logprobs
    assert num_top is not None
    first = len(sequence.prompt_logprobs) + 1
    tokens = sequence.token_ids[first : first + len(rows)]
    sequence.prompt_logprobs += [
        token_logprob(row, token, num_top) for row, token in zip(rows, tokens, strict=True)
    ]
    return True


def accept_token(
    sequence: Sequence, sampled: SampledToken, eos_token_ids: frozenset[int], max_model_len: int
) -> RequestOutput:
    """Append a sampled token to its sequence and finish it when it must end here."""
    assert sampled.token_id is not None
    sequence.token_ids.append(sampled.token_id)
    text = _stop_or_text(sequence, sampled.token_id, eos_token_ids)
    at_limit = (
        sequence.num_output_tokens == sequence.request.params.max_tokens
        or sequence.num_tokens == max_model_len
    )
    if at_limit and sequence.finish_reason is None:
        sequence.finish(FinishReason.LENGTH)
    if sequence.finish_reason is not None and not isinstance(sequence.stop_reason, str):
        text += _flush_text(sequence)
    return RequestOutput(
        request_id=sequence.request_id,
        text=text,
        token_ids=(sampled.token_id,),
        logprobs=() if sampled.logprob is None else (sampled.logprob,),
        prompt_logprobs=_prompt_logprobs(sequence) if sequence.num_output_tokens == 1 else (),
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        num_output_tokens=sequence.num_output_tokens,
    )


def _prompt_logprobs(sequence: Sequence) -> tuple[TokenLogprob | None, ...]:
    if sequence.request.params.prompt_logprobs is None:
        return ()
    return (None, *sequence.prompt_logprobs)


def _stop_or_text(sequence: Sequence, token: int, eos_token_ids: frozenset[int]) -> str:
    """The token's text that is certain; finishes the sequence when the token ends it.

    A token that ends it has no text unless `include_stop_str_in_output`, as in vLLM.
    """
    params = sequence.request.params
    if token in params.stop_token_ids:
        sequence.stop_reason = token
        sequence.finish(FinishReason.STOP)
    elif token in eos_token_ids and not params.ignore_eos:
        sequence.finish(FinishReason.STOP)
    if sequence.finish_reason is not None and not params.include_stop_str_in_output:
        return ""
    return _add_text(sequence, token)


def request_metrics(sequence: Sequence, now: float) -> RequestMetrics:
    """Seconds since arrival; a stage that was not reached lasts until now."""
    life = sequence.life
    arrival = life.stages[0].at
    first_token = life.time_of(StageName.FIRST_TOKEN)
    return RequestMetrics(
        queued_seconds=sum(life.waited.values()),
        first_token_seconds=(now if first_token is None else first_token) - arrival,
        total_seconds=now - arrival,
        num_preemptions=sequence.num_preemptions,
        queued_by_cause=dict(life.waited),
        stages=life.untold(),
    )


def final_output(sequence: Sequence, metrics: RequestMetrics) -> RequestOutput:
    """The end of a sequence that ends without a further token: aborted, or given up."""
    return RequestOutput(
        request_id=sequence.request_id,
        finish_reason=sequence.finish_reason,
        error=sequence.error,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        num_output_tokens=sequence.num_output_tokens,
        metrics=metrics,
    )


def _add_text(sequence: Sequence, token: int) -> str:
    """The token's text that is certain; finishes the sequence at a stop string."""
    if sequence.detokenizer is None:
        return ""
    return _match_stops(sequence, sequence.detokenizer.push(token))


def _flush_text(sequence: Sequence) -> str:
    """What was held back. A stop string that only now is complete cuts it, nothing more."""
    if sequence.detokenizer is None:
        return ""
    text = _match_stops(sequence, sequence.detokenizer.flush())
    if sequence.stops is not None and not isinstance(sequence.stop_reason, str):
        text += sequence.stops.flush()
    return text


def _match_stops(sequence: Sequence, text: str) -> str:
    if sequence.stops is None:
        return text
    may_stop = sequence.num_output_tokens > sequence.request.params.min_tokens
    text, stop = sequence.stops.push(text, may_stop=may_stop)
    if stop is not None:
        sequence.stop_reason = stop
        sequence.finish(FinishReason.STOP)
    return text
