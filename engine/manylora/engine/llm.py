"""The offline front door: prompts in, completions out, in the caller's thread."""

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import structlog

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
from manylora.engine.completions import params_of_completions
from manylora.engine.config import EngineConfig
from manylora.engine.errors import EngineError, InvalidRequestError
from manylora.engine.logs import configure_logs
from manylora.engine.progress import ProgressBar

Prompt = str | Sequence[int]
Message = Mapping[str, object]
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
    """A prompt with its `n` completions.

    `prompt_logprobs`, where asked for, has one for each prompt token, None for the first.
    `metrics` are those of the completion that ended last.
    """

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.outputs)


class LLM:
    """An engine of one's own. Its options are `EngineConfig`'s, by name.

    Raises:
        ModelError: the model cannot be found or is not supported.
        InvalidRequestError: an option is out of its range; `param` names it.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        if not structlog.is_configured():  # its default writes to standard output
            configure_logs("info")
        options.setdefault("max_num_waiting", sys.maxsize)  # there is no client to send away
        self.core = build_engine(EngineConfig(model=str(model), **options))
        self._numbers = itertools.count()
        self.num_output_tokens = 0  # generated so far
        self._running: dict[str, tuple[GenerationResult, CompletionOutput]] = {}  # by request id

    def load_adapter(self, folder: str | Path) -> AdapterInfo:
        """Check a PEFT folder and bring it into host memory.

        Raises:
            AdapterError: it would not be applied exactly; every reason is given.
        """
        return self.core.add_adapter(Path(folder))

    def unload_adapter(self, adapter: AdapterInfo) -> None:
        """Drop an adapter from its slot and from host memory."""
        self.core.unload_adapter(adapter.digest)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: AdapterInfo | Sequence[AdapterInfo | None] | None = None,
        progress: bool | None = None,
    ) -> list[GenerationResult]:
        """Complete every prompt, batched; results keep the order of the prompts.

        Args:
            prompts: text or token ids, one or many.
            params: for all, or one for each prompt.
            adapter: for all, or one for each prompt; None is the base model.
            progress: show a bar on standard error. None: at a terminal, when the run lasts.

        Raises:
            InvalidRequestError: a prompt can never be served; nothing was generated.
        """
        all_prompts = _prompts(prompts)
        count = len(all_prompts)
        each = zip(
            all_prompts,
            _for_each(params or SamplingParams(), count, "params"),
            _for_each(adapter, count, "adapter"),
            strict=True,
        )
        results: list[GenerationResult] = []
        try:
            for prompt, one_params, one_adapter in each:
                results.append(self.submit(prompt, one_params, one_adapter))
            self._finish(results, progress)
        finally:
            self._abandon(results)
        return results

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: AdapterInfo | Sequence[AdapterInfo | None] | None = None,
        progress: bool | None = None,
    ) -> list[GenerationResult]:
        """Answer one conversation or many through the model's chat template."""
        prompts = [self.core.text.encode_chat(one) for one in _conversations(messages)]
        return self.generate(prompts, params, adapter=adapter, progress=progress)

    @property
    def num_unfinished(self) -> int:
        """Completions that are queued or being generated."""
        return len(self._running)

    def submit(
        self, prompt: Prompt, params: SamplingParams, adapter: AdapterInfo | None = None
    ) -> GenerationResult:
        """Queue one prompt; `step` fills the result, and returns it once it is finished.

        For work that comes bit by bit; `generate` is simpler where all prompts are there.

        Raises:
            InvalidRequestError: it can never be served; nothing was queued.
        """
        token_ids = self.core.text.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if params.n > 1 and params.seed is None:
            params = replace(params, seed=self.core.next_seed())
        result = GenerationResult(token_ids, [CompletionOutput() for _ in range(params.n)])
        number = next(self._numbers)
        try:
            for index, one_params in enumerate(params_of_completions(params)):
                request = Request(
                    request_id=f"offline-{number}-{index}",
                    prompt_token_ids=tuple(token_ids),
                    params=one_params,
                    tenant="offline",
                    adapter=None if adapter is None else adapter.ref,
                )
                self.core.add(request)
                self._running[request.request_id] = result, result.outputs[index]
        except EngineError:
            self._abandon([result])
            raise
        return result

    def step(self) -> list[GenerationResult]:
        """Take one step of the engine; the results that it finished."""
        finished = []
        for output in self.core.step():
            result, completion = self._running[output.request_id]
            _merge(result, completion, output)
            self.num_output_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                del self._running[output.request_id]
                if result.finished:
                    finished.append(result)
        return finished

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

    def _finish(self, results: list[GenerationResult], progress: bool | None) -> None:
        waiting = {id(result) for result in results}
        with ProgressBar(len(results), shown=progress) as bar:
            while waiting:
                before = len(waiting), self.num_output_tokens
                waiting -= {id(result) for result in self.step()}
                bar.add(done=before[0] - len(waiting), tokens=self.num_output_tokens - before[1])

    def _abandon(self, results: list[GenerationResult]) -> None:
        """Take what is not finished of these out of the engine."""
        abandoned = {id(result) for result in results}
        for request_id, (result, _) in list(self._running.items()):
            if id(result) in abandoned:
                self.core.abort(request_id)
                del self._running[request_id]


def _merge(result: GenerationResult, completion: CompletionOutput, output: RequestOutput) -> None:
    completion.text += output.text
    completion.token_ids += output.token_ids
    completion.logprobs += output.logprobs
    completion.finish_reason = output.finish_reason
    completion.stop_reason = output.stop_reason
    completion.error = output.error
    result.prompt_logprobs += output.prompt_logprobs
    result.metrics = output.metrics
    if completion is result.outputs[0]:  # the others may find what it computed
        result.num_cached_tokens = output.num_cached_tokens


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Many prompts as they are, one as a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    token_ids: list[int] = []
    many: list[Prompt] = []
    for item in prompts:
        if isinstance(item, int):
            token_ids.append(item)
        else:
            many.append(item)
    if token_ids and many:
        raise InvalidRequestError("prompts mixes token ids and whole prompts", param="prompts")
    return [token_ids] if token_ids else many


def _conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """Many conversations as they are, one as a list of one."""
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


def _for_each(value: T | Sequence[T], count: int, name: str) -> list[T]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{len(value)} {name} for {count} prompts", param=name)
    return list(value)
