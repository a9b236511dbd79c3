"""From a sampled token to what the client gets: text, stop conditions, finish reason, counts."""

from manylora.engine.api import FinishReason, RequestMetrics, RequestOutput
from manylora.engine.sampler import SampledToken
from manylora.engine.sequence import Sequence


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
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        num_output_tokens=sequence.num_output_tokens,
    )


def _stop_or_text(sequence: Sequence, token: int, eos_token_ids: frozenset[int]) -> str:
    """Finish the sequence at a token that ends it, which has no text; else the token's text."""
    params = sequence.request.params
    if token in params.stop_token_ids:
        sequence.stop_reason = token
        sequence.finish(FinishReason.STOP)
        return ""
    if token in eos_token_ids and not params.ignore_eos:
        sequence.finish(FinishReason.STOP)
        return ""
    return _add_text(sequence, token)


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
    text, stop = sequence.stops.push(text)
    if stop is not None:
        sequence.stop_reason = stop
        sequence.finish(FinishReason.STOP)
    return text
