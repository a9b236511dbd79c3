"""From a sampled token to what the client gets: text, stop conditions, finish reason, counts."""

from manylora.engine.api import FinishReason, RequestMetrics, RequestOutput
from manylora.engine.sampler import SampledToken
from manylora.engine.sequence import Sequence


def accept_token(
    sequence: Sequence, sampled: SampledToken, eos_token_ids: frozenset[int], max_model_len: int
) -> RequestOutput:
    """Append a sampled token to its sequence and finish it when it must end here."""
    assert sampled.token_id is not None
    token = sampled.token_id
    sequence.token_ids.append(token)
    params = sequence.request.params
    text = ""
    if token in params.stop_token_ids:
        sequence.stop_reason = token
        sequence.finish(FinishReason.STOP)
    elif token in eos_token_ids and not params.ignore_eos:
        sequence.finish(FinishReason.STOP)
    else:
        text = _add_text(sequence, token)
        at_limit = (
            sequence.num_output_tokens == params.max_tokens or sequence.num_tokens == max_model_len
        )
        if at_limit and sequence.finish_reason is None:
            sequence.finish(FinishReason.LENGTH)
    if sequence.finish_reason is not None and not isinstance(sequence.stop_reason, str):
        text += _flush_text(sequence)
    logprobs = () if sampled.logprob is None else (sampled.logprob,)
    return RequestOutput(
        request_id=sequence.request_id,
        text=text,
        token_ids=(token,),
        logprobs=logprobs,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        num_output_tokens=sequence.num_output_tokens,
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
    text, stop = sequence.stops.push(text)
    if stop is not None:
        sequence.stop_reason = stop
        sequence.finish(FinishReason.STOP)
    return text
