"""What API and engine process say to each other: length-prefixed msgpack frames, no pickle.

A frame is 4 bytes of little-endian length and a message of one of the types below. Loads no torch.
"""

import asyncio
from typing import Any, TypeVar

import msgspec

from manylora.engine import errors
from manylora.engine.api import AdapterInfo, EngineInfo, EngineStats, Request, RequestOutput

MAX_FRAME_BYTES = 64 << 20
_ERRORS = {kind.__name__: kind for kind in errors.EngineError.__subclasses__()}


class Message(msgspec.Struct, frozen=True, tag=True):
    """Tagged by its class's name."""


class Fault(msgspec.Struct, frozen=True):
    """An error of `errors.py` on its way to the other process."""

    kind: str
    message: str
    values: dict[str, Any] = {}

    @classmethod
    def of(cls, error: errors.EngineError) -> "Fault":
        return cls(type(error).__name__, str(error), dict(vars(error)))

    def error(self) -> errors.EngineError:
        """The error again."""
        kind = _ERRORS.get(self.kind)
        values = {name: value for name, value in self.values.items() if name != "message"}
        match kind:
            case None:
                return errors.EngineError(self.message)
            case errors.AdapterError | errors.AdapterNotFoundError | errors.EngineOverloadedError:
                return kind(**values)
            case _:
                return kind(self.message, **values)


class Add(Message, frozen=True):
    request: Request


class Abort(Message, frozen=True):
    request_id: str


class LoadAdapter(Message, frozen=True):
    call_id: int
    digest: str


class UnloadAdapter(Message, frozen=True):
    call_id: int
    digest: str


class GetStats(Message, frozen=True):
    call_id: int


class Hello(Message, frozen=True):
    """The engine's first frame."""

    info: EngineInfo


class Heartbeat(Message, frozen=True):
    """Every second, from a thread that steps do not block."""

    step_age_seconds: float


class Output(Message, frozen=True):
    output: RequestOutput


class Failed(Message, frozen=True):
    """A request ended with an error instead of a finish reason."""

    request_id: str
    fault: Fault


class Reply(Message, frozen=True):
    """The answer to a call."""

    call_id: int
    info: AdapterInfo | None = None
    stats: EngineStats | None = None
    fault: Fault | None = None


ToEngine = Add | Abort | LoadAdapter | UnloadAdapter | GetStats
FromEngine = Hello | Heartbeat | Output | Failed | Reply
M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()
to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)


async def read_message(reader: asyncio.StreamReader, decoder: "msgspec.msgpack.Decoder[M]") -> M:
    """The next message.

    Raises:
        WireError: the frame is too long, or not a message with values in their ranges; the
            connection is of no more use.
        asyncio.IncompleteReadError: the other side is gone.
    """
    length = int.from_bytes(await reader.readexactly(4), "little")
    if length > MAX_FRAME_BYTES:
        raise errors.WireError(f"a frame of {length} bytes, more than {MAX_FRAME_BYTES}")
    try:
        return decoder.decode(await reader.readexactly(length))
    except (msgspec.MsgspecError, errors.EngineError) as error:
        raise errors.WireError(f"a frame that is not a message: {error}") from error


async def write_message(writer: asyncio.StreamWriter, message: Message) -> None:
    """Send a message and wait while the other side is slow.

    Raises:
        WireError: it is too long to be read there; nothing was sent.
        OSError: the other side is gone.
    """
    content = _encoder.encode(message)
    if len(content) > MAX_FRAME_BYTES:
        raise errors.WireError(f"a frame of {len(content)} bytes, more than {MAX_FRAME_BYTES}")
    writer.write(len(content).to_bytes(4, "little") + content)
    await writer.drain()
