"""Frames between API and engine process: what goes in comes out; what is none harms nobody."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from manylora.engine import errors, wire
from manylora.engine.api import (
    AdapterInfo,
    EngineStats,
    FinishReason,
    RequestOutput,
    SlotStats,
    TokenLogprob,
)
from manylora.engine.remote import RemoteEngine
from manylora.engine.server import _Connection
from manylora.engine.wire import Abort, Add, Failed, Fault, GetStats, Hello, Message, Output, Reply
from support.clients import collect, request, until
from support.fake_engine import INFO, FakeEngine

ERRORS = [
    errors.EngineError("plain"),
    errors.InvalidRequestError("no", param="prompt", code="context_length_exceeded"),
    errors.InvalidRequestError("no"),
    errors.AdapterError(["first", "second"]),
    errors.AdapterNotFoundError("f" * 64),
    errors.ModelError("no model"),
    errors.RecordingError("line 7: not a line"),
    errors.EngineOverloadedError(2.5),
    errors.EngineUnavailableError("away", retry_after=3.0),
    errors.RequestFailedError("given up"),
    errors.WireError("garbage"),
]


def test_every_kind_of_error_is_tried() -> None:
    kinds = {v for v in vars(errors).values() if isinstance(v, type)}
    assert {type(error) for error in ERRORS} == kinds


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_it_was(error: errors.EngineError) -> None:
    sent = msgspec.msgpack.encode(Failed("r", Fault.of(error)))

    arrived = wire.from_engine.decode(sent)

    assert isinstance(arrived, Failed)
    again = arrived.fault.error()
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_an_error_that_this_side_does_not_know_is_still_an_error() -> None:
    for kind in ("NewError", "asyncio", "__name__", "EngineError"):
        again = Fault(kind, "what happened", {"detail": 1}).error()

        assert type(again) is errors.EngineError
        assert str(again) == "what happened"


@pytest.mark.parametrize(
    "message",
    [
        Add(
            request(
                "r",
                [1, 259],
                digest="f" * 64,
                stop=["é", "b"],
                seed=-1,
                logprobs=2,
                prompt_logprobs=1,
            )
        ),
        Abort("r"),
        GetStats(7),
        wire.LoadAdapter(1, "f" * 64),
        wire.UnloadAdapter(2, "f" * 64),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_is_sent_to_the_engine_arrives_as_it_was(message: Message) -> None:
    assert wire.to_engine.decode(msgspec.msgpack.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Hello(INFO),
        wire.Heartbeat(0.25),
        Output(
            RequestOutput(
                request_id="r",
                text="é",
                token_ids=(1, 2),
                logprobs=(TokenLogprob(1, -0.5, ((1, -0.5), (2, -1.5))),),
                prompt_logprobs=(None, TokenLogprob(3, -2.5, ((3, -2.5),))),
                finish_reason=FinishReason.STOP,
                stop_reason="é",
            )
        ),
        Output(RequestOutput(request_id="r", stop_reason=5)),
        Reply(1, stats=EngineStats(slots=(SlotStats(slot=0, digest="d"),), host_digests=("d",))),
        Reply(1, info=AdapterInfo(digest="d", report={"modules": [{"path": "x", "rank": 1}]})),
        Reply(1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_the_engine_sends_arrives_as_it_was(message: Message) -> None:
    assert wire.from_engine.decode(msgspec.msgpack.encode(message)) == message


@dataclass
class Served(FakeEngine):
    """The engine in memory, as the server uses one."""

    step_age_seconds: float = 0.0
    broken: bool = False

    async def stats(self) -> EngineStats:
        if self.broken:
            raise KeyError("a fault of ours")
        return await super().stats()


@asynccontextmanager
async def serving(folder: Path, engine: Served) -> AsyncIterator[Path]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _Connection(engine, reader, writer).run()  # type: ignore[arg-type]

    socket = folder / "engine.sock"
    async with await asyncio.start_unix_server(serve, socket):
        yield socket


def run(test: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(limited())


@pytest.mark.parametrize(
    "garbage",
    [
        (wire.MAX_FRAME_BYTES + 1).to_bytes(4, "little"),
        b"\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\n\r\n",
        (3).to_bytes(4, "little") + b"\xc1\xc1\xc1",
        (0).to_bytes(4, "little"),
        (11).to_bytes(4, "little") + msgspec.msgpack.encode({"type": "Oops"}),
        (1).to_bytes(4, "little") + b"\x05",
    ],
    ids=repr,
)
def test_garbage_ends_its_own_connection_only(tmp_path: Path, garbage: bytes) -> None:
    async def test() -> None:
        engine = Served(stalls_at=1)
        async with serving(tmp_path, engine) as socket:
            other = await RemoteEngine.connect(socket)
            outputs = other.generate(request("other"))
            await anext(outputs)
            reader, writer = await asyncio.open_unix_connection(socket)
            await wire.read_message(reader, wire.from_engine)

            writer.write(garbage)

            assert await reader.read() == b""  # ended by the engine
            assert await other.stats() == EngineStats()
            assert engine.aborted == []
            await other.close()

    run(test)


def test_what_a_connection_left_running_is_aborted_when_it_goes(tmp_path: Path) -> None:
    async def test() -> None:
        engine = Served(stalls_at=1)
        async with serving(tmp_path, engine) as socket:
            _, writer = await asyncio.open_unix_connection(socket)
            for name in ("first", "second", "first"):
                await wire.write_message(writer, Add(request(name)))
            await until(lambda: engine.stalled == ["first", "second", "first"])

            writer.close()

            await until(lambda: len(engine.aborted) >= 3)
            assert sorted(engine.aborted) == ["first", "first", "second"]

    run(test)


def test_an_abort_of_what_does_not_run_is_no_fault(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, Served()) as socket:
            reader, writer = await asyncio.open_unix_connection(socket)
            await wire.read_message(reader, wire.from_engine)

            await wire.write_message(writer, Abort("unknown"))
            await wire.write_message(writer, GetStats(5))

            assert await wire.read_message(reader, wire.from_engine) == Reply(
                5, stats=EngineStats()
            )
            writer.close()

    run(test)


@pytest.mark.parametrize("error", [ValueError("ours"), errors.RequestFailedError("the engine's")])
def test_a_fault_inside_the_engine_reaches_the_one_who_asked(
    tmp_path: Path, error: Exception
) -> None:
    async def test() -> None:
        engine = Served(fails_at=1, error=error, broken=True)  # type: ignore[arg-type]
        async with serving(tmp_path, engine) as socket:
            remote = await RemoteEngine.connect(socket)

            with pytest.raises(errors.RequestFailedError):
                await collect(remote, request("r"))
            with pytest.raises(errors.EngineError):
                await remote.stats()

            engine.fails_at = None
            assert (await collect(remote, request("later"))).text.endswith("three")
            await remote.close()

    run(test)


def test_a_frame_that_is_too_long_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 2000)

    async def test() -> None:
        async with serving(tmp_path, Served()) as socket:
            remote = await RemoteEngine.connect(socket)

            with pytest.raises(errors.InvalidRequestError, match="more than 2000"):
                await collect(remote, request("r", [1] * 3000))

            assert (await collect(remote, request("later"))).finish_reason is FinishReason.STOP
            await remote.close()

    run(test)


def test_nobody_at_the_socket_is_an_engine_that_is_away(tmp_path: Path) -> None:
    async def test() -> None:
        with pytest.raises(errors.EngineUnavailableError):
            await RemoteEngine.connect(tmp_path / "nothing.sock")

    run(test)
