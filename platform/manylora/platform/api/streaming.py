"""Sending answers: whole or as server-sent events, and noticing that the client has gone.

Usage is committed before the terminal bytes are sent: a client that saw the end finds its row.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from manylora.engine.api import RequestOutput
from manylora.engine.errors import EngineError, EngineOverloadedError, InvalidRequestError
from manylora.platform.api.body import JsonAnswer
from manylora.platform.api.shapes import Shape
from manylora.platform.errors import DatabaseUnavailableError, ServerStoppingError, envelope
from manylora.platform.generation import Generation
from manylora.platform.life import REFUSED

_REFUSALS = (EngineOverloadedError, InvalidRequestError)
_DONE = b"data: [DONE]\n\n"
T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection; nobody reads an answer."""


async def answer(
    http: Request, generation: Generation, shape: Shape, *, stream: bool, include_usage: bool
) -> Response:
    """Run the generation and send what it makes.

    Nothing is sent before the first output exists, so that an error until then has its status.

    Raises:
        EngineError, ClientGoneError, DatabaseUnavailableError, ServerStoppingError: before the
            first byte of it.
    """
    headers = generation.life.route.headers
    if not stream:
        body = await unless_client_goes(http, _whole(generation, shape), generation)
        return JsonAnswer(body, headers=headers)
    first = await unless_client_goes(http, generation.next(), generation)
    events = _events(generation, shape, first, include_usage)
    return _Stream(generation, events, headers)


class _Stream(StreamingResponse):
    """Server-sent events that settle their generation however they end, even before they begin."""

    def __init__(
        self, generation: Generation, events: AsyncIterator[bytes], headers: dict[str, str]
    ) -> None:
        headers = headers | {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Unless it was settled before.
            await self._generation.settle(self._generation.cut_off_status)


async def unless_client_goes(
    http: Request, work: Coroutine[Any, Any, T], generation: Generation
) -> T:
    """The work's result, or its cancellation at once when the client disconnects.

    Starlette cancels a stream on disconnect, but not an endpoint that still computes.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            await _abort(working, generation)
            raise ClientGoneError
        return working.result()
    except asyncio.CancelledError:
        await _abort(working, generation)
        raise
    except EngineError as error:
        await _give_up(generation, error)
        raise
    except ServerStoppingError:
        await generation.settle("server_stop")
        raise
    finally:
        await _cancel(watching)


async def _whole(generation: Generation, shape: Shape) -> dict[str, Any]:
    text = ""
    while True:
        output = await generation.next()
        text += output.text
        if output.finish_reason is not None:
            break
    await _complete(generation)
    return shape.whole(text, output)


async def _events(
    generation: Generation, shape: Shape, output: RequestOutput, include_usage: bool
) -> AsyncIterator[bytes]:
    try:
        for chunk in shape.opening():
            yield _event(chunk)
        while True:
            if output.text:
                generation.count_delivered()
                yield _event(shape.delta(output.text))
            if output.finish_reason is not None:
                break
            output = await generation.next()
        await _complete(generation)
        yield _event(shape.closing(output))
        if include_usage:
            yield _event(shape.usage(output))
        yield _DONE
    except (EngineError, DatabaseUnavailableError) as error:
        await generation.settle("engine_error")
        yield _event(envelope(error))  # and no [DONE]: the SDKs raise
    except ServerStoppingError as error:
        await generation.settle("server_stop")
        yield _event(envelope(error))


async def _complete(generation: Generation) -> None:
    """All of the answer exists; it is complete with its usage row.

    Raises:
        DatabaseUnavailableError
    """
    generation.count_delivered()
    if not await generation.settle("ok"):
        raise DatabaseUnavailableError("the database does not answer")


async def _abort(working: asyncio.Future[Any], generation: Generation) -> None:
    await _cancel(working)
    await generation.settle(generation.cut_off_status)


async def _give_up(generation: Generation, error: EngineError) -> None:
    """An error before the answer began: a usage row only if the engine made tokens."""
    if generation.life.totals.num_output_tokens:
        await generation.settle("engine_error")
    else:
        generation.life.end(REFUSED if isinstance(error, _REFUSALS) else "engine_error")
        await generation.close()


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError, EngineError, ServerStoppingError):
        await task


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
