"""Reading bodies: capped, paced, strict JSON, strict models; and answers written by orjson.

orjson and msgspec keep the last of duplicate keys in silence, so that a proxy in front and we
may read one body differently; the standard library's parser lets us refuse them.
"""

import json
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NoReturn, TypeVar

import anyio
import orjson
from anyio.to_thread import run_sync
from fastapi import Request, Response
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from python_multipart.exceptions import FormParserError
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from manylora.platform.errors import (
    InvalidInputError,
    RequestTimeoutError,
    TooLargeError,
    UnsupportedMediaTypeError,
)

MAX_JSON_BYTES = 2_000_000
MAX_JSON_DEPTH = 64
MAX_JSON_MEMBERS = 1000  # of one object
BODY_SECONDS = 25.0  # for a whole body, and more as bytes come
SLOWEST_BYTES_PER_SECOND = 16 << 10
IDLE_SECONDS = 25.0  # between two pieces of a body
CHUNKED_IDLE_SECONDS = 4.0  # the same of a JSON body that states no length: it is made already
_INLINE_BYTES = 16 << 10  # a longer body is checked in a thread
_MAX_NUMBER_LENGTH = 4000  # below Python's own limit for int()
_MAX_FORM_FILES = 16
_MAX_FORM_FIELDS = 16


BodyT = TypeVar("BodyT", bound=BaseModel)


class JsonAnswer(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        # A dictionary's keys may be members of a StrEnum, which orjson does not take for strings.
        return orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)


def json_body(model: type[BodyT]) -> Callable[[Request], Awaitable[BodyT]]:
    """A dependency that reads the body as this model."""

    async def read(request: Request) -> BodyT:
        raw = await read_raw(request)
        if len(raw) <= _INLINE_BYTES:
            return checked(model, parse_json(raw))
        return await run_sync(lambda: checked(model, parse_json(raw)))

    return read


async def read_raw(request: Request) -> bytes:
    """The bytes of a JSON body.

    Raises:
        UnsupportedMediaTypeError, TooLargeError, RequestTimeoutError
        InvalidInputError: it ended early.
    """
    media_type = request.headers.get("content-type", "application/json").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise UnsupportedMediaTypeError("send the body as application/json")
    _refuse_long(request, MAX_JSON_BYTES)
    states_length = "content-length" in request.headers
    idle = IDLE_SECONDS if states_length else CHUNKED_IDLE_SECONDS
    paced = Request(request.scope, _paced(request.receive, MAX_JSON_BYTES, idle))
    try:
        return await paced.body()
    except ClientDisconnect as error:
        raise InvalidInputError("the body ended early") from error


async def read_form(request: Request, *, max_bytes: int) -> FormData:
    """The body as a form, files spooled to disk. The caller closes it.

    Raises:
        UnsupportedMediaTypeError, TooLargeError, RequestTimeoutError
        InvalidInputError: not a well-formed form, or too many parts.
    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise UnsupportedMediaTypeError("send the body as multipart/form-data")
    _refuse_long(request, max_bytes)
    paced = Request(request.scope, _paced(request.receive, max_bytes, IDLE_SECONDS))
    try:
        return await paced.form(max_files=_MAX_FORM_FILES, max_fields=_MAX_FORM_FIELDS)
    except (HTTPException, MultiPartException, FormParserError) as error:
        raise InvalidInputError("the form cannot be read") from error
    except ClientDisconnect as error:
        raise InvalidInputError("the body ended early") from error


def parse_json(raw: bytes) -> Any:
    """Strict JSON (RFC 8259): what two parsers could read differently is refused.

    Raises:
        InvalidInputError
    """
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_refuse_constant,
        )
    except RecursionError as error:
        raise InvalidInputError("the body is nested too deep") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError("the body is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise InvalidInputError(
            f"the body is not JSON: {error.msg} at character {error.pos}"
        ) from error
    _check_depth_and_text(value)
    return value


def checked(model: type[BodyT], value: Any) -> BodyT:
    """The value as a strict model.

    Raises:
        InvalidInputError: `param` is the path of the first field at fault.
    """
    if not isinstance(value, dict):
        raise InvalidInputError("the body must be a JSON object")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        fault, path = _deepest_fault(error, value)
        raise InvalidInputError(_said(fault, path), param=path) from error


def _deepest_fault(error: ValidationError, value: Any) -> tuple[ErrorDetails, str]:
    """The first fault and its path, or one further inside it: unions tell a fault per branch."""
    first, *others = error.errors(include_url=False, include_input=False)
    path = _path(first["loc"], value)
    for fault in others:
        inside = _path(fault["loc"], value)
        if len(inside) > len(path) and inside.startswith(path):
            return fault, inside
    return first, path


def _said(fault: ErrorDetails, path: str) -> str:
    if fault["type"] == "extra_forbidden":
        return f"unknown field: {path}"
    if fault["type"] == "not_supported":
        return f"{path} is {fault['msg']}"
    if fault["type"] in ("too_short", "string_too_short"):  # every least length here is one
        return f"{path} must not be empty"
    return f"{path}: {fault['msg'].removeprefix('Value error, ')}"


def _path(location: tuple[int | str, ...], value: Any) -> str:
    """`messages[3].content`; without pydantic's own labels for the branches of a union."""
    path = ""
    for depth, part in enumerate(location):
        if isinstance(part, int):
            path += f"[{part}]"
            value = value[part] if isinstance(value, list) and part < len(value) else None
        elif isinstance(value, dict) and (part in value or depth == len(location) - 1):
            path += f".{part[:64]}" if path else part[:64]
            value = value.get(part)
    return path


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_JSON_MEMBERS:  # each may be a fault, and each fault takes its time
        raise InvalidInputError(f"the body has an object of more than {MAX_JSON_MEMBERS} members")
    found = dict(pairs)
    if len(found) < len(pairs):
        raise InvalidInputError("the body has an object with a duplicate key")
    return found


def _integer(digits: str) -> int:
    if len(digits) > _MAX_NUMBER_LENGTH:
        raise InvalidInputError("the body has a number of too many digits")
    return int(digits)


def _number(digits: str) -> float:
    number = float(digits) if len(digits) <= _MAX_NUMBER_LENGTH else math.inf
    if not math.isfinite(number):
        raise InvalidInputError("the body has a number out of range")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidInputError(f"the body has {name}, which is not JSON")


def _check_depth_and_text(value: Any) -> None:
    """Refuse deep nesting and lone surrogates, which JSON can spell but UTF-8 cannot."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        for text in (item for item in level if isinstance(item, str)):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InvalidInputError("the body has a lone surrogate") from error
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    raise InvalidInputError("the body is nested too deep")


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _refuse_long(request: Request, max_bytes: int) -> None:
    """Refuse by the stated length before reading, and so before `100 Continue`."""
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 18 or int(length) > max_bytes:
        raise TooLargeError(f"the body is larger than {max_bytes} bytes")


def _paced(receive: Receive, max_bytes: int, idle_seconds: float) -> Receive:
    """`receive` that gives up on a body that is too long, stalls or trickles."""
    read = 0
    started = anyio.current_time()

    async def paced() -> Message:
        nonlocal read
        end = started + BODY_SECONDS + read / SLOWEST_BYTES_PER_SECOND
        with anyio.move_on_after(min(idle_seconds, end - anyio.current_time())):
            message = await receive()
            read += len(message.get("body", b""))
            if read > max_bytes:
                raise TooLargeError(f"the body is larger than {max_bytes} bytes")
            return message
        raise RequestTimeoutError("the body did not arrive in time")

    return paced
