"""The engine thread behind asyncio: failing steps and waiters that leave."""

import asyncio
import threading

import pytest

from manylora.engine.build import build_engine
from manylora.engine.config import EngineConfig
from manylora.engine.errors import EngineUnavailableError
from manylora.engine.local import LocalEngine
from support.clients import Store, collect, request, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_step_that_fails_ends_every_request_and_what_was_asked_meanwhile(
    config: EngineConfig,
) -> None:
    core = build_engine(config)
    died = asyncio.Event()
    engine = LocalEngine(core, on_death=died.set)
    outputs = engine.generate(request("r", max_tokens=500))
    await anext(outputs)
    in_step, go_on = threading.Event(), threading.Event()

    def fail(*_: object) -> None:
        in_step.set()
        go_on.wait()
        raise RuntimeError("the device is gone")

    core.runner.run = fail  # type: ignore[method-assign, assignment]
    await asyncio.to_thread(in_step.wait)
    asked = [asyncio.create_task(engine.stats()), asyncio.create_task(engine.stats())]
    asked.append(asyncio.create_task(collect(engine, request("queued"))))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    go_on.set()

    async with asyncio.timeout(20):
        with pytest.raises(EngineUnavailableError):
            async for _ in outputs:
                pass
        await died.wait()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(answer) for answer in answers] == [EngineUnavailableError] * 3
        with pytest.raises(EngineUnavailableError):
            await engine.stats()
        await engine.close()


async def test_who_gives_up_waiting_for_a_load_takes_it_from_nobody(
    config: EngineConfig, store: Store
) -> None:
    core = build_engine(config)
    engine = LocalEngine(core)
    worker_free = threading.Event()
    core.adapters._worker.submit(worker_free.wait)  # so that the load below has to queue
    digest = store.digests["mlp"]
    leaving = asyncio.create_task(engine.load_adapter(digest))
    staying = asyncio.create_task(collect(engine, request("r", digest=digest)))

    async def is_asked_for() -> bool:
        return (await engine.stats()).num_waiting == 1 and core.adapters.has_loads

    await until(is_asked_for)
    leaving.cancel()
    await asyncio.wait([leaving])
    worker_free.set()

    async with asyncio.timeout(20):
        assert (await staying).num_output_tokens == 8
        await engine.close()
