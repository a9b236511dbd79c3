"""Engines behind the client protocol, and what a reader gets from one."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manylora.engine.api import AdapterRef, Request, RequestOutput, SamplingParams
from manylora.engine.client import EngineClient
from manylora.engine.config import EngineConfig
from manylora.engine.errors import EngineUnavailableError
from manylora.engine.supervisor import SupervisedEngine

PATIENCE_SECONDS = 60.0
DAMAGED = "0" * 64  # the digest of the adapter in a `Store` that does not load


@dataclass
class Store:
    """A folder of adapters by digest."""

    folder: Path
    digests: dict[str, str]  # by name


def engine_config(model: Path, store: Path | None = None, **options: Any) -> EngineConfig:
    """A small float32 engine on one thread."""
    values: dict[str, Any] = {
        "dtype": "float32",
        "num_kv_blocks": 160,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_num_waiting": 12,
        "max_loras": 4,
        "threads": 1,
        "adapter_store": None if store is None else str(store),
    }
    return EngineConfig(model=str(model), **(values | options))


def request(
    name: str,
    prompt: Sequence[int] = (1, 2, 3),
    *,
    digest: str | None = None,
    max_tokens: int = 8,
    **params: Any,
) -> Request:
    """Greedy, and as long as asked unless the test says otherwise."""
    values = {"temperature": 0, "ignore_eos": True, **params}
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens, **values),
        tenant="a",
        adapter=None if digest is None else AdapterRef(digest),
    )


async def collect(engine: EngineClient, wanted: Request) -> RequestOutput:
    """All deltas of a request as one."""
    merged: RequestOutput | None = None
    async for output in engine.generate(wanted):
        merged = output if merged is None else merged.merged_with(output)
    assert merged is not None
    return merged


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait until a condition holds; an engine that is away does not meet it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not await _holds(condition):
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.01)


async def _holds(condition: Callable[[], bool | Awaitable[bool]]) -> bool:
    try:
        answer = condition()
        return answer if isinstance(answer, bool) else await answer
    except EngineUnavailableError:
        return False


async def until_ready(engine: EngineClient) -> None:
    async def is_ready() -> bool:
        return bool(await engine.info())

    await until(is_ready)


async def until_idle(engine: EngineClient) -> None:
    """Wait until no request runs or waits and every KV block is free."""

    async def is_idle() -> bool:
        stats = await engine.stats()
        return stats.num_running == stats.num_waiting == stats.kv_blocks_used == 0

    await until(is_idle)


@asynccontextmanager
async def supervised(
    config: EngineConfig, run_dir: Path, **options: Any
) -> AsyncIterator[SupervisedEngine]:
    """An engine process that is kept running while the block runs."""
    engine = SupervisedEngine(config, run_dir, **options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
