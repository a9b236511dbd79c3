"""What callers of `LLM` write: prompts in each of their forms, and what goes with them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from manylora.engine.api import AdapterInfo, SamplingParams
from manylora.engine.errors import InvalidRequestError
from manylora.engine.text.processor import TextProcessor

Prompt = str | Sequence[int] | Mapping[str, object]
"""Text, token ids, or as vLLM has them `{"prompt": text}` or `{"prompt_token_ids": token ids}`."""
Message = Mapping[str, object]
T = TypeVar("T")

_WHAT = 'text, token ids, {"prompt": text} or {"prompt_token_ids": token ids}'


def many_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Many prompts as they are, one as a list of one.

    Raises:
        InvalidRequestError: token ids among whole prompts, or neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise _refusal(prompts)
    items: list[Any] = list(prompts)
    are_ids = {type(item) is int for item in items}
    if are_ids == {True, False}:
        raise InvalidRequestError("prompts mixes token ids and whole prompts", param="prompts")
    return [items] if are_ids == {True} else items


def prompt_token_ids(prompt: Prompt, text: TextProcessor) -> list[int]:
    """
    Raises:
        InvalidRequestError: it is no prompt, or text that cannot be encoded.
    """
    match prompt:
        case str(written) | {"prompt": str(written)} if _is_alone(prompt):
            return text.encode(written)
        case [*token_ids] | {"prompt_token_ids": [*token_ids]} if _is_alone(prompt):
            whole = [token for token in token_ids if type(token) is int]
            if len(whole) == len(token_ids):
                return whole
    raise _refusal(prompt)


def many_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """Many conversations as they are, one as a list of one.

    Raises:
        InvalidRequestError: messages among whole conversations.
    """
    one: list[Message] = []
    many: list[Sequence[Message]] = []
    for item in messages:
        if isinstance(item, Mapping):
            one.append(item)
        else:
            many.append(item)
    if one and many:
        raise InvalidRequestError("messages mixes messages and conversations", param="messages")
    return [one] if one else many


def for_each_prompt(value: Sequence[T] | T, count: int, name: str) -> list[T]:
    """One value for all prompts, or one for each.

    Raises:
        InvalidRequestError: not as many as prompts.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{len(value)} {name} for {count} prompts", param=name)
    return list(value)


def check_kinds(params: object, adapter: object) -> None:
    """
    Raises:
        InvalidRequestError: one is something else than what `LLM` takes.
    """
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError("params must be SamplingParams", param="params")
    if adapter is not None and not isinstance(adapter, AdapterInfo):
        raise InvalidRequestError("adapter must be what load_adapter returned", param="adapter")


def _is_alone(prompt: Prompt) -> bool:
    return not isinstance(prompt, Mapping) or len(prompt) == 1


def _refusal(prompt: object) -> InvalidRequestError:
    kind = type(prompt).__name__
    keys = f" with {sorted(map(str, prompt))}" if isinstance(prompt, Mapping) else ""
    return InvalidRequestError(f"a prompt must be {_WHAT}; it is {kind}{keys}", param="prompt")
