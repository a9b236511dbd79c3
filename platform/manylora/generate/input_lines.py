"""Lines of the input: strict JSON objects, refused with the field that is at fault."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from manylora.engine.api import SamplingParams
from manylora.engine.errors import InvalidRequestError

T = TypeVar("T")

_PARAMS = frozenset(option.name for option in dataclasses.fields(SamplingParams))
_FAULT = re.compile(r"(?P<what>.*) - at .*`\$\.?(?P<path>[^`]*)`")


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line that is not blank; `index` counts all lines from 0."""

    index: int
    raw: bytes

    def __str__(self) -> str:
        """For messages: editors and `sed` count lines from 1."""
        return f"line {self.index + 1} (index {self.index})"

    def digest(self, options: bytes, adapter_digest: str = "") -> bytes:
        """16 bytes that the line decides, with what shapes its answer.

        Args:
            options: a digest of what shapes all answers.
            adapter_digest: of the adapter that answered; "" if it was the base model or an error.
        """
        return hashlib.sha256(options + adapter_digest.encode() + b"\n" + self.raw).digest()[:16]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What one line asks for: exactly one kind of prompt, perhaps an adapter, and how to draw."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    adapter: str | None = None
    id: str | int | None = None
    params: SamplingParams


_OWN = frozenset(Asked.__struct_fields__) - {"params"}


def read_lines(path: Path) -> Iterator[InputLine]:
    """One line after the other, so that a long file is never in memory."""
    with path.open("rb") as file:
        for index, line in enumerate(file):
            if raw := line.strip():
                yield InputLine(index, raw)


def parse_object(raw: bytes) -> dict[str, Any]:
    """A JSON object as RFC 8259 has it.

    Raises:
        InvalidRequestError: it is not that; a field given twice is refused too.
    """
    try:
        value = json.loads(raw, object_pairs_hook=_object, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError as error:  # not UTF-8, or a lone surrogate
        raise InvalidRequestError("the line is not valid Unicode") from error
    except RecursionError as error:
        raise InvalidRequestError("the line is nested too deep") from error
    except json.JSONDecodeError as error:
        what = f"{error.msg} at character {error.pos}"
        raise InvalidRequestError(f"the line is not JSON: {what}") from error
    except ValueError as error:
        raise InvalidRequestError("the line has a number of too many digits") from error
    if not isinstance(value, dict):
        raise InvalidRequestError("the line is not a JSON object")
    return value


def read_asked(fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> Asked:
    """What a line asks for; `defaults` are sampling parameters of lines that bring none.

    Raises:
        InvalidRequestError: naming the field that is unknown, missing or wrong.
    """
    for name in fields:
        if name not in _OWN | _PARAMS:
            raise InvalidRequestError(f"unknown field: {name}", param=name)
    params = {**defaults, **{name: fields[name] for name in fields if name in _PARAMS}}
    if isinstance(params.get("stop"), str):
        params["stop"] = [params["stop"]]
    own = {name: fields[name] for name in fields if name in _OWN}
    asked = _convert({**own, "params": _convert(params, SamplingParams)}, Asked)
    prompts = (asked.prompt, asked.prompt_token_ids, asked.messages)
    if sum(prompt is not None for prompt in prompts) != 1:
        raise InvalidRequestError(
            "give one of prompt, prompt_token_ids and messages", param="prompt"
        )
    return asked


def _convert(value: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        fault = _FAULT.fullmatch(str(error))
        path = fault["path"] if fault else ""
        what = fault["what"] if fault else str(error)
        raise InvalidRequestError(f"{path}: {what}", param=path) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise InvalidRequestError("the line has a field twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequestError(f"the line has {name}, which is not JSON")
