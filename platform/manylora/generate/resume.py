"""Going on with a run: a finished line must have the answer that this run would give."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from manylora.engine.errors import EngineError
from manylora.generate.input_lines import InputLine, parse_object, read_lines
from manylora.generate.results_file import ResultsFile
from manylora.platform.settings import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """What this run would answer with, against what the output was answered with."""

    source: Path
    results: ResultsFile
    options: bytes  # a digest of what shapes all answers
    adapter_digest: Callable[[str], str]  # by the name in a line; an EngineError if there is none

    def count_unfinished(self) -> int:
        """How many input lines are left.

        Raises:
            SettingsError: a finished line, or what answered it, is not what it was.
        """
        left = known = 0
        for line in read_lines(self.source):
            digest = self.results.finished.get(line.index)
            if digest is None:
                left += 1
                continue
            known += 1
            # Errors are no adapter's, like the answers of the base model.
            if digest != line.digest(self.options):
                self._check_adapter(line, digest)
        if known < self.results.finished.count:
            raise self._refusal(f"answers lines that {self.source} no longer has")
        return left

    def _check_adapter(self, line: InputLine, digest: bytes) -> None:
        place = f"{line} of {self.source}"
        try:
            now = self.adapter_digest(_adapter_name(line))
            said = f"that name now means adapter {now}"
        except EngineError as error:
            now, said = "", f"now there is none: {error}"
        if now and digest == line.digest(self.options, now):
            return
        before = self.results.adapter_digest(line.index)
        if before and digest == line.digest(self.options, before):
            raise self._refusal(f"has an answer by adapter {before} to {place}, and {said}")
        raise self._refusal(
            f"has the answer to another {place}, or one by another model or other options "
            "(dtype, seed, max_model_len, defaults of sampling)"
        )

    def _refusal(self, what: str) -> SettingsError:
        return SettingsError(f"output: {self.results.path} {what}; write to a new file")


def _adapter_name(line: InputLine) -> str:
    """
    Raises:
        InvalidRequestError: the line is no JSON object any more.
    """
    name = parse_object(line.raw).get("adapter")
    return name if isinstance(name, str) else ""
