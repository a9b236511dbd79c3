"""The offline front door: prompts in, completions out, in the caller's thread."""

import itertools
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog

from manylora.engine.api import (
    AdapterInfo,
    AdapterRef,
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
from manylora.engine.config import EngineConfig, check_option_names
from manylora.engine.errors import AdapterError, EngineError
from manylora.engine.logs import configure_logs
from manylora.engine.progress import ProgressBar
from manylora.engine.prompts import (
    Message,
    Prompt,
    check_kinds,
    for_each_prompt,
    many_conversations,
    many_prompts,
    prompt_token_ids,
)

WINDOW = 2  # times max_num_seqs: as many wait as run


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


@dataclass(frozen=True, slots=True)
class _Checked:
    """A prompt that can be served."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    adapter: AdapterRef | None

    def request(self, request_id: str, params: SamplingParams) -> Request:
        return Request(
            request_id=request_id,
            prompt_token_ids=self.token_ids,
            params=params,
            tenant="offline",
            adapter=self.adapter,
        )


class LLM:
    """An engine of one's own. Its options are `EngineConfig`'s, by name.

    Raises:
        ModelError: the model cannot be found or is not supported.
        InvalidRequestError: an option is unknown or out of its range; `param` names it.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        if not structlog.is_configured():  # its default writes to standard output
            configure_logs("info")
        check_option_names(options)
        options.setdefault("max_num_waiting", sys.maxsize)  # there is no client to send away
        config = EngineConfig(model=str(model), **options)
        self.core = build_engine(config)
        self._window = min(WINDOW * config.max_num_seqs, config.max_num_waiting)
        self._numbers = itertools.count()
        self.num_output_tokens = 0  # generated so far
        self._running: dict[str, tuple[GenerationResult, CompletionOutput]] = {}  # by request id

    def load_adapter(self, folder: str | Path) -> AdapterInfo:
        """Check a PEFT folder and bring it into host memory.

        Raises:
            AdapterError: it would not be applied exactly; every reason is given.
        """
        if not Path(folder).is_dir():
            raise AdapterError([f"there is no folder {folder}"])
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
            prompts: one or many; see `Prompt`.
            params: for all, or one for each prompt.
            adapter: for all, or one for each prompt; None is the base model.
            progress: show a bar on standard error. None: at a terminal, when the run lasts.

        Raises:
            InvalidRequestError: a prompt can never be served; nothing was generated.
            AdapterNotFoundError: an adapter was unloaded; nothing was generated.
        """
        all_prompts = many_prompts(prompts)
        count = len(all_prompts)
        asked = [
            self._check(*one)
            for one in zip(
                all_prompts,
                for_each_prompt(SamplingParams() if params is None else params, count, "params"),
                for_each_prompt(adapter, count, "adapter"),
                strict=True,
            )
        ]
        results: list[GenerationResult] = []
        try:
            with ProgressBar(count, shown=progress) as bar:
                self._generate(asked, results, bar)
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
        prompts = [self.core.text.encode_chat(one) for one in many_conversations(messages)]
        return self.generate(prompts, params, adapter=adapter, progress=progress)

    @property
    def is_busy(self) -> bool:
        """Whether so much is queued that more would only make the queue longer."""
        return len(self._running) >= self._window

    def submit(
        self, prompt: Prompt, params: SamplingParams, adapter: AdapterInfo | None = None
    ) -> GenerationResult:
        """Queue one prompt; `step` fills the result, and returns it once it is finished.

        For work that comes bit by bit, not faster than `is_busy` allows; `generate` is simpler
        where all prompts are there.

        Raises:
            InvalidRequestError: it can never be served; nothing was queued.
            AdapterNotFoundError: its adapter was unloaded.
        """
        return self._queue(self._check(prompt, params, adapter))

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

    def _check(
        self, prompt: Prompt, params: SamplingParams, adapter: AdapterInfo | None
    ) -> _Checked:
        """
        Raises:
            InvalidRequestError: it can never be served.
            AdapterNotFoundError: its adapter was unloaded.
        """
        check_kinds(params, adapter)
        token_ids = tuple(prompt_token_ids(prompt, self.core.text))
        checked = _Checked(token_ids, params, None if adapter is None else adapter.ref)
        self.core.check(checked.request("offline", replace(params, n=1)))
        return checked

    def _queue(self, checked: _Checked) -> GenerationResult:
        params = checked.params
        seed = self.core.next_seed() if params.seed is None else params.seed
        outputs = [CompletionOutput() for _ in range(params.n)]
        result = GenerationResult(list(checked.token_ids), outputs)
        number = next(self._numbers)
        try:
            for index, one_params in enumerate(params_of_completions(params, seed)):
                request = checked.request(f"offline-{number}-{index}", one_params)
                self.core.add(request)
                self._running[request.request_id] = result, outputs[index]
        except EngineError:
            self._abandon([result])
            raise
        return result

    def _generate(
        self, asked: list[_Checked], results: list[GenerationResult], bar: ProgressBar
    ) -> None:
        """Fill `results`: the scheduler's work grows with its queue, which is kept short."""
        unfinished: set[int] = set()  # identities; a caller may have submitted others
        waiting = deque(asked)
        while waiting or unfinished:
            while waiting and not self.is_busy:
                results.append(self._queue(waiting.popleft()))
                unfinished.add(id(results[-1]))
            tokens = self.num_output_tokens
            done = unfinished & {id(result) for result in self.step()}
            unfinished -= done
            bar.add(done=len(done), tokens=self.num_output_tokens - tokens)

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
