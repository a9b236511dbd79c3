"""The offline front door: prompts in, completions out, in the caller's thread."""

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from manylora.engine.api import (
    AdapterInfo,
    EngineStats,
    FinishReason,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from manylora.engine.build import build_engine
from manylora.engine.config import EngineConfig
from manylora.engine.errors import InvalidRequestError

Prompt = str | Sequence[int]
T = TypeVar("T")


@dataclass(slots=True)
class CompletionOutput:
    """One completion."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass(slots=True)
class GenerationResult:
    """A prompt with its completions."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int = 0


class LLM:
    """An engine of one's own. Its options are `EngineConfig`'s, by name.

    Raises:
        ModelError: the model cannot be found or is not supported.
        InvalidRequestError: an option is out of its range; `param` names it.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        options.setdefault("max_num_waiting", sys.maxsize)  # there is no client to send away
        self.core = build_engine(EngineConfig(model=str(model), **options))
        self._ids = itertools.count()

    def load_adapter(self, folder: str | Path) -> AdapterInfo:
        """Check a PEFT folder and bring it into host memory.

        Raises:
            AdapterError: it would not be applied exactly; every reason is given.
        """
        return self.core.adapters.add_folder(Path(folder))

    def unload_adapter(self, adapter: AdapterInfo) -> None:
        """Drop an adapter from its slot and from host memory."""
        self.core.unload_adapter(adapter.digest)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: AdapterInfo | Sequence[AdapterInfo | None] | None = None,
    ) -> list[GenerationResult]:
        """Complete every prompt, batched; results keep the order of the prompts.

        Args:
            prompts: text or token ids, one or many.
            params: for all, or one for each prompt.
            adapter: for all, or one for each prompt; None is the base model.

        Raises:
            InvalidRequestError: a prompt can never be served; nothing was generated.
        """
        token_ids = [self._token_ids(prompt) for prompt in _as_list(prompts)]
        count = len(token_ids)
        requests = [
            Request(
                request_id=f"offline-{next(self._ids)}",
                prompt_token_ids=tuple(ids),
                params=one_params,
                tenant="offline",
                adapter=None if one_adapter is None else one_adapter.ref,
            )
            for ids, one_params, one_adapter in zip(
                token_ids,
                _for_each(params or SamplingParams(), count, "params"),
                _for_each(adapter, count, "adapter"),
                strict=True,
            )
        ]
        return self._run(requests)

    def chat(
        self,
        messages: Sequence[Mapping[str, object]] | Sequence[Sequence[Mapping[str, object]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: AdapterInfo | Sequence[AdapterInfo | None] | None = None,
    ) -> list[GenerationResult]:
        """Answer one conversation or many through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.core.text.encode_chat(one) for one in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, params, adapter=adapter)

    def stats(self) -> EngineStats:
        """A snapshot between two steps."""
        return self.core.stats()

    def close(self) -> None:
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _token_ids(self, prompt: Prompt) -> list[int]:
        return self.core.text.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _run(self, requests: list[Request]) -> list[GenerationResult]:
        results = {
            request.request_id: GenerationResult(
                list(request.prompt_token_ids), [CompletionOutput()]
            )
            for request in requests
        }
        try:
            for request in requests:
                self.core.add(request)
            while self.core.has_work:
                for output in self.core.step():
                    _merge(results[output.request_id], output)
        finally:
            for request in requests:
                self.core.abort(request.request_id)
        return list(results.values())


def _merge(result: GenerationResult, output: RequestOutput) -> None:
    completion = result.outputs[0]
    completion.text += output.text
    completion.token_ids += output.token_ids
    completion.logprobs += output.logprobs
    completion.finish_reason = output.finish_reason
    completion.stop_reason = output.stop_reason
    completion.error = output.error
    result.metrics = output.metrics
    result.num_cached_tokens = output.num_cached_tokens


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _for_each(value: T | Sequence[T], count: int, name: str) -> list[T]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{len(value)} {name} for {count} prompts", param=name)
    return list(value)
