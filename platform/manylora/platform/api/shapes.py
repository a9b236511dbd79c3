"""Answers in the OpenAI API's shapes, whole and by chunk."""

from dataclasses import dataclass
from typing import Any, Protocol

from manylora.engine.api import RequestOutput


def usage_block(last: RequestOutput) -> dict[str, Any]:
    """`usage` from the engine's totals. `prompt_tokens` includes the cached ones."""
    return {
        "prompt_tokens": last.num_prompt_tokens,
        "completion_tokens": last.num_output_tokens,
        "total_tokens": last.num_prompt_tokens + last.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": last.num_cached_tokens},
    }


class Shape(Protocol):
    """How one endpoint writes its answer."""

    def whole(self, text: str, last: RequestOutput) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        ...

    def opening(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        ...

    def delta(self, text: str) -> dict[str, Any]:
        """More text."""
        ...

    def closing(self, last: RequestOutput) -> dict[str, Any]:
        """The finish reason."""
        ...

    def usage(self, last: RequestOutput) -> dict[str, Any]:
        """The chunk that `include_usage` asks for."""
        ...


@dataclass(frozen=True, slots=True)
class ChatShape:
    """`chat.completion` and `chat.completion.chunk`."""

    id: str
    created: int  # Unix seconds
    model: str
    include_usage: bool = False

    def whole(self, text: str, last: RequestOutput) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": last.finish_reason,
        }
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
            "usage": usage_block(last),
        }

    def opening(self) -> list[dict[str, Any]]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def delta(self, text: str) -> dict[str, Any]:
        return self._chunk({"content": text})

    def closing(self, last: RequestOutput) -> dict[str, Any]:
        return self._chunk({}, last.finish_reason)

    def usage(self, last: RequestOutput) -> dict[str, Any]:
        return self._chunk(None) | {"choices": [], "usage": usage_block(last)}

    def _chunk(self, delta: dict[str, Any] | None, finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        chunk: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }
        return chunk | {"usage": None} if self.include_usage else chunk


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """`text_completion`, whole and by chunk alike."""

    id: str
    created: int  # Unix seconds
    model: str
    include_usage: bool = False

    def whole(self, text: str, last: RequestOutput) -> dict[str, Any]:
        return self._body(text, last.finish_reason) | {"usage": usage_block(last)}

    def opening(self) -> list[dict[str, Any]]:
        return []

    def delta(self, text: str) -> dict[str, Any]:
        return self._chunk(text)

    def closing(self, last: RequestOutput) -> dict[str, Any]:
        return self._chunk("", last.finish_reason)

    def usage(self, last: RequestOutput) -> dict[str, Any]:
        return self._body("") | {"choices": [], "usage": usage_block(last)}

    def _chunk(self, text: str, finish: str | None = None) -> dict[str, Any]:
        body = self._body(text, finish)
        return body | {"usage": None} if self.include_usage else body

    def _body(self, text: str, finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }
