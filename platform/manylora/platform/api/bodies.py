"""What clients may send to `/v1`. Strict: no coercion, and unknown fields are refused by name."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from manylora.platform.errors import InvalidInputError

_MAX_INT64 = (1 << 63) - 1
_MAX_STOPS = 16
_MAX_MESSAGES = 10_000
_MAX_PRIORITY = 1 << 31
_MAX_PROMPT_IDS = 1 << 18

Stop = Annotated[str, Field(min_length=1, max_length=256)]
Label = Annotated[str, Field(max_length=512)]
TokenId = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
TokenIdText = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]  # JSON keys are text
Bias = Annotated[float, Field(ge=-100, le=100)]

# Fields of the OpenAI API and of vLLM that this server does not act on yet. A value that asks for
# nothing is accepted, null too; any other would change the answer, so it is refused by name.
Neutral = Mapping[str, tuple[Any, ...]]
ASKS_FOR_NOTHING: Neutral = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": (),
    "length_penalty": (1,),
    "logprobs": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": (),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}


class Body(BaseModel):
    """A request body, or an object in one."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    asks_for_nothing: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        kept = dict(value)
        for name in cls.asks_for_nothing.keys() & kept.keys():
            asked = kept.pop(name)
            if asked is not None and not _is_one_of(asked, cls.asks_for_nothing[name]):
                raise _not_supported(name, cls.asks_for_nothing[name])
        return kept


class StreamOptions(Body):
    """How to stream."""

    asks_for_nothing: ClassVar[Neutral] = {"continuous_usage_stats": (False,)}

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis; none is sent


class SamplingBody(Body):
    """The fields that chat and completions share."""

    asks_for_nothing: ClassVar[Neutral] = ASKS_FOR_NOTHING

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, le=_MAX_INT64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=(1 << 31) - 1)  # -1 and 0: no limit
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[TokenIdText, Bias] | None = Field(None, max_length=1024)
    min_tokens: int | None = Field(None, ge=0, le=_MAX_INT64)
    seed: int | None = Field(None, ge=-_MAX_INT64 - 1, le=_MAX_INT64)
    stop: Stop | Annotated[list[Stop], Field(max_length=_MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=_MAX_STOPS)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    priority: int | None = Field(None, ge=-_MAX_PRIORITY, le=_MAX_PRIORITY)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Labels for the client's own use: checked, then let go.
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    service_tier: Label | None = None
    metadata: (
        Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)] | None
    ) = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "SamplingBody":
        if self.stream_options is not None and not self.stream:
            raise InvalidInputError(
                "stream_options is only allowed with stream=true", param="stream_options"
            )
        return self


def _is_one_of(asked: Any, neutral: tuple[Any, ...]) -> bool:
    """`True == 1` does not count."""
    return any(asked == n and isinstance(asked, bool) == isinstance(n, bool) for n in neutral)


def _not_supported(name: str, neutral: tuple[Any, ...]) -> ValidationError:
    """A fault that has its place in the body; pydantic adds where this object is in it."""
    if any(neutral):
        values = " or ".join(json.dumps(value) for value in neutral)
        kind = PydanticCustomError("only_neutral", "only {values} is supported", {"values": values})
    else:  # no value, or one like false and [], is not to have it at all
        kind = PydanticCustomError("not_supported", "not supported by this server")
    fault = InitErrorDetails(type=kind, loc=(name,), input=None)
    return ValidationError.from_exception_data("Body", [fault])


class TextPart(Body):
    """A piece of a message. Images and sound are refused: the model reads text."""

    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "text":
            raise PydanticCustomError(
                "only_text", "images are not supported: only parts of type text"
            )
        return value


class Message(Body):
    """One message of a chat. An answer of this server is one too, as the SDKs send it back."""

    asks_for_nothing: ClassVar[Neutral] = {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "reasoning_content": (),
        "refusal": (),
        "tool_call_id": (),
        "tool_calls": ([],),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]
    name: Label | None = None

    def for_template(self) -> dict[str, object]:
        """As chat templates read it: text parts joined by newlines, `developer` as `system`."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        return {"role": role, "content": "\n".join(part.text for part in self.content)}


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`."""

    # One fault is enough to refuse it: telling all would hold up everybody else.
    messages: Annotated[
        list[Message], Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True)
    ]
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_INT64)

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatBody":
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise InvalidInputError(
                "max_tokens and max_completion_tokens disagree", param="max_tokens"
            )
        return self

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate, under either name."""
        return self.max_completion_tokens or self.max_tokens


TokenIds = Annotated[list[TokenId], Field(max_length=_MAX_PROMPT_IDS, fail_fast=True)]
Prompt = (
    str
    | TokenIds
    | Annotated[list[str], Field(min_length=1, max_length=1)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=1)]
)


class CompletionBody(SamplingBody):
    """`POST /v1/completions`. One prompt: text or token ids, bare or as a list of one."""

    prompt: Prompt

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        several = isinstance(value, list) and len(value) > 1
        if several and all(isinstance(part, str | list) for part in value[:2]):
            raise PydanticCustomError("one_prompt", "one prompt per request")
        return value
