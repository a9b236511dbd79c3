"""One run: a bounded window of input lines in the engine, answers written as they finish."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from manylora.engine.api import AdapterInfo, FinishReason, SamplingParams
from manylora.engine.build import context_length
from manylora.engine.config import EngineConfig
from manylora.engine.errors import EngineError, InvalidRequestError
from manylora.engine.llm import LLM, CompletionOutput, GenerationResult
from manylora.engine.models.source import ModelSource, resolve_model
from manylora.engine.progress import ProgressBar
from manylora.engine.sampler import draw_seed
from manylora.generate.adapters import AdapterDigests, adapter_folder
from manylora.generate.input_lines import Asked, InputLine, parse_object, read_asked, read_lines
from manylora.generate.results_file import ResultsFile
from manylora.generate.resume import Resume
from manylora.platform.settings import SettingsError


@dataclass(frozen=True, slots=True)
class Summary:
    """How many lines of the output are answers and how many errors, earlier runs included."""

    num_answers: int
    num_errors: int
    num_found: int  # of both, by earlier runs


def generate_file(
    source: Path,
    output: Path,
    config: EngineConfig,
    *,
    defaults: Mapping[str, Any],
    adapters: Mapping[str, Path],
) -> Summary:
    """Answer every line of `source` that `output` does not answer yet.

    Args:
        defaults: sampling parameters of lines that bring none.
        adapters: folders by the names that lines may use.

    Raises:
        SettingsError: a file or an option does not fit; nothing was generated.
        ModelError: the model cannot be found or is not supported.
    """
    _check(source, output, defaults, adapters)
    model = resolve_model(config.model)
    options = _digest_of_options(model, config, defaults)
    with ResultsFile(output, most_lines=source.stat().st_size) as results:
        num_found = results.finished.count
        resume = Resume(
            source=source,
            results=results,
            options=options,
            adapter_digest=AdapterDigests(model.folder, adapters, config.max_lora_rank),
        )
        left = resume.count_unfinished()
        if left:
            with (
                _open_engine(replace(config, model=str(model.folder))) as llm,
                ProgressBar(left, shown=None, what="lines", says_end=True) as bar,
            ):
                run = _Run(
                    llm=llm,
                    results=results,
                    bar=bar,
                    options=options,
                    defaults=defaults,
                    folders=adapters,
                    seed=config.seed,
                )
                run.answer(x for x in read_lines(source) if results.finished.get(x.index) is None)
    return Summary(num_found + left - results.num_errors, results.num_errors, num_found)


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A line whose prompt is in the engine."""

    line: InputLine
    asked: Asked
    adapter: AdapterInfo | None
    result: GenerationResult


@dataclass(slots=True, kw_only=True)
class _Run:
    """Lines on their way through the engine, not more than it needs to be busy."""

    llm: LLM
    results: ResultsFile
    bar: ProgressBar
    options: bytes
    defaults: Mapping[str, Any]
    folders: Mapping[str, Path]  # of adapters by name
    seed: int
    adapters: dict[str, AdapterInfo | EngineError] = field(default_factory=dict)
    in_flight: dict[int, _InFlight] = field(default_factory=dict)  # by the result's identity

    def answer(self, lines: Iterable[InputLine]) -> None:
        for line in lines:
            while self.llm.is_busy:
                self._step()
            self._begin(line)
        while self.in_flight:
            self._step()

    def _begin(self, line: InputLine) -> None:
        """Queue a line, or answer at once what is wrong with it."""
        fields: Mapping[str, Any] = {}
        try:
            fields = parse_object(line.raw)
            asked = read_asked(fields, self.defaults)
            adapter = None if asked.adapter is None else self._adapter(asked.adapter)
            result = self.llm.submit(self._prompt(asked), self._params(asked, line), adapter)
        except EngineError as error:
            name = fields.get("id")
            self._write(line, name if type(name) in (str, int) else None, {"error": str(error)})
        else:
            self.in_flight[id(result)] = _InFlight(line, asked, adapter, result)

    def _step(self) -> None:
        before = self.llm.num_output_tokens
        for result in self.llm.step():
            one = self.in_flight.pop(id(result))
            self._write(one.line, one.asked.id, _answer(one))
        self.bar.add(tokens=self.llm.num_output_tokens - before)
        self.results.flush_if_due()

    def _write(self, line: InputLine, name: str | int | None, answer: Mapping[str, Any]) -> None:
        named = {} if name is None else {"id": name}
        digest = line.digest(self.options, answer.get("adapter_digest", "")).hex()
        self.results.append({**named, "index": line.index, **answer, "digest": digest})
        self.bar.add(done=1)

    def _prompt(self, asked: Asked) -> str | list[int]:
        if asked.messages is not None:
            return self.llm.core.text.encode_chat(asked.messages)
        prompt = asked.prompt if asked.prompt is not None else asked.prompt_token_ids
        assert prompt is not None, "read_asked lets nothing else through"
        return prompt

    def _params(self, asked: Asked, line: InputLine) -> SamplingParams:
        """A line without a seed draws from the engine's and its own place, in any run."""
        if asked.params.seed is not None:
            return asked.params
        return replace(asked.params, seed=draw_seed(self.seed, line.index + 1))

    def _adapter(self, name: str) -> AdapterInfo:
        """Each adapter is read once, however many lines name it."""
        if name not in self.adapters:
            try:
                self.adapters[name] = self.llm.load_adapter(adapter_folder(name, self.folders))
            except EngineError as error:
                self.adapters[name] = error
        found = self.adapters[name]
        if isinstance(found, EngineError):
            raise found
        return found


def _check(
    source: Path, output: Path, defaults: Mapping[str, Any], adapters: Mapping[str, Path]
) -> None:
    if not source.is_file():
        raise SettingsError(f"INPUT: there is no file {source}")
    if output.exists() and output.samefile(source):
        raise SettingsError("output: it is the input")
    for name, folder in adapters.items():
        if not folder.is_dir():
            raise SettingsError(f"lora_modules: {name}: there is no folder {folder}")
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise SettingsError(error.message) from error


def _open_engine(config: EngineConfig) -> LLM:
    options = {option.name: getattr(config, option.name) for option in dataclasses.fields(config)}
    try:
        return LLM(options.pop("model"), **options)
    except InvalidRequestError as error:
        raise SettingsError(error.message) from error


def _digest_of_options(
    model: ModelSource, config: EngineConfig, defaults: Mapping[str, Any]
) -> bytes:
    """Of what shapes all answers: with another model or temperature a run cannot go on."""
    try:
        max_model_len = context_length(config, model.folder)
    except InvalidRequestError as error:
        raise SettingsError(error.message) from error
    shaping = [model.digest, config.dtype, config.seed, max_model_len, dict(defaults)]
    return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).digest()


def _answer(one: _InFlight) -> dict[str, Any]:
    """The fields of an output line; nothing in it depends on when or beside what it ran."""
    completions = one.result.outputs
    errors = [c.error for c in completions if c.finish_reason is FinishReason.ERROR]
    if errors:
        return {"error": errors[0]}
    outputs = [_completion(completion, one.asked) for completion in completions]
    answer: dict[str, Any] = outputs[0] if one.asked.params.n == 1 else {"outputs": outputs}
    answer["prompt_tokens"] = len(one.result.prompt_token_ids)
    answer["completion_tokens"] = sum(len(completion.token_ids) for completion in completions)
    if one.asked.params.prompt_logprobs is not None:
        answer["prompt_logprobs"] = one.result.prompt_logprobs
    if one.adapter is not None:
        answer["adapter_digest"] = one.adapter.digest
    return answer


def _completion(completion: CompletionOutput, asked: Asked) -> dict[str, Any]:
    """Token ids are answered with token ids: the model may have no tokenizer."""
    fields: dict[str, Any] = {"text": completion.text, "finish_reason": completion.finish_reason}
    if completion.stop_reason is not None:
        fields["stop_reason"] = completion.stop_reason
    if asked.prompt_token_ids is not None:
        fields["token_ids"] = completion.token_ids
    if asked.params.logprobs is not None:
        fields["logprobs"] = completion.logprobs
    return fields
