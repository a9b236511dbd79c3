"""Every way to reach an engine keeps the same promises: in this process, and over the socket."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from manylora.engine import LLM
from manylora.engine.api import FinishReason, RequestOutput, SamplingParams
from manylora.engine.build import build_engine
from manylora.engine.client import EngineClient
from manylora.engine.config import EngineConfig
from manylora.engine.errors import (
    AdapterError,
    AdapterNotFoundError,
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidRequestError,
)
from manylora.engine.lifecycle import StageName, WaitCause
from manylora.engine.local import LocalEngine
from manylora.engine.remote import RemoteEngine
from support.clients import (
    DAMAGED,
    Store,
    collect,
    request,
    supervised,
    until,
    until_idle,
    until_ready,
)
from support.engine import make_llm

pytestmark = pytest.mark.anyio
UNKNOWN = "f" * 64


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Reach:
    """An engine for all tests, and how to make another client of the same kind."""

    engine: EngineClient
    another: Callable[[], Awaitable[EngineClient]]


@pytest.fixture(scope="module", params=["local", "remote"])
async def reach(
    request: pytest.FixtureRequest, config: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Reach]:
    if request.param == "local":

        async def another_local() -> EngineClient:
            return LocalEngine(build_engine(config))

        engine = await another_local()
        yield Reach(engine, another_local)
        await engine.close()
        return
    run_dir = tmp_path_factory.mktemp("run")

    async def another_remote() -> EngineClient:
        return await RemoteEngine.connect(run_dir / "engine.sock")

    async with supervised(config, run_dir) as remote:
        await until_ready(remote)
        yield Reach(remote, another_remote)


@pytest.fixture
async def engine(reach: Reach) -> AsyncIterator[EngineClient]:
    """No test leaves a request behind, nor a hold of a slot."""
    yield reach.engine
    await until_idle(reach.engine)
    assert all(slot.holds == 0 for slot in (await reach.engine.stats()).slots)


@pytest.fixture(scope="module")
def offline(tiny_model: Path) -> LLM:
    return make_llm(tiny_model)


async def test_a_request_gets_what_the_offline_engine_says(
    engine: EngineClient, offline: LLM, store: Store, tiny_adapters: dict[str, Path]
) -> None:
    params = SamplingParams(
        temperature=0.8, seed=3, max_tokens=20, logprobs=2, prompt_logprobs=1, ignore_eos=True
    )
    (expected,) = offline.generate(
        [[5, 6, 7]], params, adapter=offline.load_adapter(tiny_adapters["all"])
    )

    output = await collect(
        engine,
        request(
            "r",
            [5, 6, 7],
            digest=store.digests["all"],
            max_tokens=20,
            temperature=0.8,
            seed=3,
            logprobs=2,
            prompt_logprobs=1,
        ),
    )

    assert list(output.token_ids) == expected.outputs[0].token_ids
    assert output.text == expected.outputs[0].text
    assert list(output.logprobs) == expected.outputs[0].logprobs
    assert list(output.prompt_logprobs) == expected.prompt_logprobs
    assert output.finish_reason is FinishReason.LENGTH
    assert (output.num_prompt_tokens, output.num_output_tokens) == (3, 20)
    times = output.metrics
    assert 0 <= times.queued_seconds <= times.first_token_seconds <= times.total_seconds


async def test_the_engine_says_what_it_serves(engine: EngineClient, config: EngineConfig) -> None:
    info = await engine.info()

    assert info.max_model_len == 512
    assert info.num_kv_blocks == config.num_kv_blocks
    assert info.dtype == "float32"
    assert len(info.model_digest) == 64


async def test_many_requests_at_once_get_what_each_gets_alone(
    engine: EngineClient, store: Store
) -> None:
    digests = [None, *store.digests.values()]
    wanted = [
        request(f"r{i}", range(1, 10 + 3 * i), digest=digests[i % 4], max_tokens=10 + i)
        for i in range(12)
    ]
    alone = [await collect(engine, one) for one in wanted]

    together = await asyncio.gather(*(collect(engine, one) for one in wanted))

    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert [o.text for o in together] == [o.text for o in alone]
    assert len({o.token_ids[:10] for o in alone}) > 6


async def test_closing_the_iterator_frees_what_the_request_holds(engine: EngineClient) -> None:
    before = await engine.stats()
    outputs = engine.generate(request("r", max_tokens=500))
    await anext(outputs)
    assert (await engine.stats()).kv_blocks_used > 0

    await outputs.aclose()  # type: ignore[attr-defined]

    await until_idle(engine)
    assert (await engine.stats()).output_tokens - before.output_tokens < 400


@pytest.mark.parametrize("delay_seconds", [0, 0.001, 0.05])
async def test_cancelling_the_reader_frees_what_the_request_holds(
    engine: EngineClient, delay_seconds: float
) -> None:
    before = await engine.stats()
    reading = asyncio.create_task(collect(engine, request("r", max_tokens=500)))
    await asyncio.sleep(delay_seconds)

    reading.cancel()
    await asyncio.wait([reading])

    assert reading.cancelled()
    await until_idle(engine)
    assert (await engine.stats()).output_tokens - before.output_tokens < 400


async def test_a_slow_reader_loses_nothing(engine: EngineClient) -> None:
    expected = await collect(engine, request("fast", max_tokens=100))

    outputs = [o async for o in slowly(engine, request("slow", max_tokens=100))]

    assert len(outputs) < 20
    assert "".join(o.text for o in outputs) == expected.text
    assert sum((o.token_ids for o in outputs), ()) == expected.token_ids
    assert [o.finish_reason for o in outputs[:-1]] == [None] * (len(outputs) - 1)


async def slowly(engine: EngineClient, wanted: object) -> AsyncIterator[RequestOutput]:
    """Takes the first delta, and the next when the engine has long finished."""
    async for output in engine.generate(wanted):  # type: ignore[arg-type]
        yield output
        await until_idle(engine)


async def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(engine: EngineClient) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await collect(engine, request("r", [1] * 512))

    assert caught.value.param == "prompt"
    assert caught.value.code == "context_length_exceeded"
    assert "512 tokens" in caught.value.message


async def test_an_unknown_token_id_is_refused(engine: EngineClient) -> None:
    with pytest.raises(InvalidRequestError, match="between 0 and 259") as caught:
        await collect(engine, request("r", [260]))

    assert caught.value.param == "prompt"


async def test_an_adapter_that_is_not_in_the_store_is_not_found(engine: EngineClient) -> None:
    for digest in (UNKNOWN, "../..", "x" * 300):
        with pytest.raises(AdapterNotFoundError) as caught:
            await collect(engine, request("r", digest=digest))
        assert caught.value.digest == digest


async def test_an_adapter_that_does_not_load_fails_its_own_requests_only(
    engine: EngineClient, store: Store
) -> None:
    good = asyncio.create_task(
        collect(engine, request("good", digest=store.digests["mlp"], max_tokens=50))
    )
    bad = [request(f"bad{i}", digest=DAMAGED) for i in range(2)]

    failed = await asyncio.gather(*(collect(engine, b) for b in bad))

    assert [output.finish_reason for output in failed] == [FinishReason.ERROR] * 2
    assert "adapter_model.safetensors" in (failed[0].error or "")
    assert failed[0].metrics.stages[0].name is StageName.QUEUED
    assert failed[0].metrics.queued_by_cause[WaitCause.ADAPTER_LOAD] > 0
    assert (await good).num_output_tokens == 50


async def test_a_full_queue_refuses_and_says_when_to_try_again(engine: EngineClient) -> None:
    async def first(name: str) -> None:
        outputs = engine.generate(request(name, max_tokens=500))
        try:
            await anext(outputs)
            await asyncio.Event().wait()
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]

    tasks = [asyncio.create_task(first(f"r{i}")) for i in range(30)]
    await until(lambda: any(task.done() for task in tasks))
    errors = [task.exception() for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)

    assert all(isinstance(error, EngineOverloadedError) for error in errors)
    assert errors[0].retry_after > 0  # type: ignore[union-attr]


async def test_a_request_id_that_is_running_is_refused_and_the_first_goes_on(
    engine: EngineClient,
) -> None:
    outputs = engine.generate(request("same", max_tokens=60))
    seen = [await anext(outputs)]

    with pytest.raises(InvalidRequestError) as caught:
        await collect(engine, request("same"))
    async with asyncio.timeout(20):
        seen += [output async for output in outputs]

    assert caught.value.param == "request_id"
    assert sum(len(output.token_ids) for output in seen) == 60


async def test_an_adapter_is_loaded_ahead_and_unloaded(engine: EngineClient, store: Store) -> None:
    digest = store.digests["attention"]

    info = await engine.load_adapter(digest)
    assert info.digest == digest
    assert info.report["targets"] == ["q_proj", "v_proj"]
    await collect(engine, request("r", digest=digest))
    stats = await engine.stats()
    assert digest in stats.host_digests
    assert any(slot.digest == digest and slot.size_bytes > 0 for slot in stats.slots)

    for _ in range(2):
        await engine.unload_adapter(digest)
        stats = await engine.stats()
        assert digest not in stats.host_digests
        assert all(slot.digest != digest for slot in stats.slots)


async def test_unloading_does_not_disturb_a_request_that_runs(
    engine: EngineClient, store: Store
) -> None:
    digest = store.digests["all"]
    expected = await collect(engine, request("before", digest=digest, max_tokens=60))
    outputs = engine.generate(request("during", digest=digest, max_tokens=60))
    seen = [await anext(outputs)]

    await engine.unload_adapter(digest)
    seen += [output async for output in outputs]

    assert sum((o.token_ids for o in seen), ()) == expected.token_ids
    stats = await engine.stats()
    assert digest not in stats.host_digests
    assert all(slot.digest != digest for slot in stats.slots)


async def test_an_adapter_that_is_asked_for_again_after_unloading_stays(
    engine: EngineClient, store: Store
) -> None:
    digest = store.digests["all"]
    outputs = engine.generate(request("first", digest=digest, max_tokens=60))
    await anext(outputs)

    await engine.unload_adapter(digest)
    await collect(engine, request("second", digest=digest))
    async for _ in outputs:
        pass

    assert digest in (await engine.stats()).host_digests


async def test_loading_what_is_not_there_or_damaged_says_so(engine: EngineClient) -> None:
    with pytest.raises(AdapterNotFoundError):
        await engine.load_adapter(UNKNOWN)
    with pytest.raises(AdapterError) as caught:
        await engine.load_adapter(DAMAGED)

    assert "adapter_model.safetensors" in caught.value.reasons[0]


async def test_closing_ends_what_runs_and_refuses_what_comes(reach: Reach) -> None:
    client = await reach.another()
    outputs = client.generate(request("r", max_tokens=500))
    await anext(outputs)

    await client.close()

    async with asyncio.timeout(20):
        with pytest.raises(EngineUnavailableError):
            async for _ in outputs:
                pass
        for call in (client.stats(), client.unload_adapter(UNKNOWN), client.load_adapter(UNKNOWN)):
            with pytest.raises(EngineUnavailableError):
                await call
        with pytest.raises(EngineUnavailableError):
            await collect(client, request("later"))
    await until_idle(reach.engine)
