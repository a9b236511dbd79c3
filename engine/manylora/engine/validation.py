"""Refuses a request that can never be served, with the numbers that say why."""

from collections.abc import Container

from manylora.engine.api import EngineInfo, Request
from manylora.engine.errors import InvalidRequestError


def check_request(
    request: Request, info: EngineInfo, vocab_size: int, *, running: Container[str]
) -> None:
    """
    Args:
        running: the ids in use.

    Raises:
        InvalidRequestError: `param` names the field.
    """
    if request.request_id in running:
        raise InvalidRequestError("a request of this id is running", param="request_id")
    length, limit = len(request.prompt_token_ids), info.max_model_len
    if length >= limit:
        raise InvalidRequestError(
            f"the prompt has {length} tokens; the model's context is {limit} tokens and must "
            "hold at least one more",
            param="prompt",
            code="context_length_exceeded",
        )
    if not all(0 <= token < vocab_size for token in request.prompt_token_ids):
        raise InvalidRequestError(
            f"a prompt token id is not between 0 and {vocab_size - 1}", param="prompt"
        )
    for name in ("logit_bias", "stop_token_ids"):
        if any(token >= vocab_size for token in getattr(request.params, name)):
            raise InvalidRequestError(
                f"a token id of {name} is not between 0 and {vocab_size - 1}", param=name
            )
