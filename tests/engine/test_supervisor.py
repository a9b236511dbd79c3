"""The engine process is kept running: killed, hung, or without a model, and never outlives us."""

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from manylora.engine import supervisor
from manylora.engine.adapter_format import read_adapter
from manylora.engine.errors import EngineUnavailableError
from manylora.engine.models.config import DecoderConfig
from manylora.engine.supervisor import SupervisedEngine
from support.clients import (
    PATIENCE_SECONDS,
    collect,
    engine_config,
    request,
    supervised,
    until,
    until_idle,
    until_ready,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def running(engine: SupervisedEngine) -> Any:
    """A request that has its first token and wants many more."""
    outputs = engine.generate(request("running", max_tokens=500))
    await anext(outputs)
    return outputs


async def seconds_until_unavailable(outputs: Any) -> float:
    begun = time.monotonic()
    with pytest.raises(EngineUnavailableError):
        async for _ in outputs:
            pass
    return time.monotonic() - begun


async def test_a_killed_engine_fails_what_runs_at_once_and_comes_back_with_its_adapters(
    tiny_model: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    geometry = DecoderConfig.from_folder(tiny_model)
    digest = read_adapter(tiny_adapters["all"], geometry, max_lora_rank=64).digest
    shutil.copytree(tiny_adapters["all"], tmp_path / "store" / digest)
    config = engine_config(tiny_model, tmp_path / "store")

    async with supervised(config, tmp_path / "run") as engine:
        with pytest.raises(EngineUnavailableError, match="starting"):
            await engine.info()
        await until_ready(engine)
        before = await collect(engine, request("before", digest=digest))
        outputs, first_pid = await running(engine), engine.pid
        asked = asyncio.create_task(engine.stats())
        assert first_pid is not None

        os.kill(first_pid, signal.SIGKILL)

        assert await seconds_until_unavailable(outputs) < 1
        with pytest.raises(EngineUnavailableError):
            await asked
        with pytest.raises(EngineUnavailableError):
            await collect(engine, request("too soon"))
        await until_ready(engine)
        after = await collect(engine, request("after", digest=digest))
        assert after.token_ids == before.token_ids
        assert engine.pid != first_pid
        assert engine.num_restarts == 1
        await until_idle(engine)
        socket = tmp_path / "run" / "engine.sock"
        assert stat.S_IMODE(socket.stat().st_mode) == 0o600
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        last_pid = engine.pid

    assert engine.pid is None
    assert not is_alive(last_pid)


async def test_a_hanging_engine_is_killed_and_replaced(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "END_SECONDS", 0.5)
    async with supervised(engine_config(tiny_model), tmp_path, hang_seconds=2.5) as engine:
        await until_ready(engine)
        outputs, pid = await running(engine), engine.pid
        assert pid is not None

        os.kill(pid, signal.SIGSTOP)

        assert 1 < await seconds_until_unavailable(outputs) < 6
        await until_ready(engine)
        assert not is_alive(pid)
        assert (await collect(engine, request("later"))).num_output_tokens == 8


async def test_an_engine_that_is_busy_is_not_taken_for_a_hanging_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with supervised(engine_config(tiny_model), tmp_path, hang_seconds=2.5) as engine:
        await until_ready(engine)
        until_when = time.monotonic() + 3

        while time.monotonic() < until_when:
            await asyncio.gather(*(collect(engine, request(f"r{i}")) for i in range(4)))

        assert engine.num_restarts == 0


async def test_a_model_that_can_never_load_is_not_tried_for_ever(tmp_path: Path) -> None:
    async with supervised(engine_config(tmp_path / "no model"), tmp_path / "run") as engine:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await engine.wait_ended()

        with pytest.raises(EngineUnavailableError, match="cannot start"):
            await engine.info()
        assert engine.num_restarts == 0
        assert engine.pid is None


async def test_a_process_that_does_not_start_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))

    async with supervised(engine_config(tmp_path), tmp_path / "run") as engine:
        await until(lambda: engine.num_restarts >= 2)


async def test_the_pauses_between_tries_grow_until_it_serves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_SECONDS", 0.04)
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_SECONDS", 0.2)
    tries = []

    async def run_once() -> bool:
        tries.append(time.monotonic())
        return len(tries) in (1, 5)

    engine = SupervisedEngine(engine_config(tmp_path), tmp_path)
    monkeypatch.setattr(engine, "_run_once", run_once)
    await engine.start()
    await until(lambda: engine.num_restarts >= 6)
    await engine.close()

    pauses = [later - earlier for earlier, later in pairwise(tries)]
    for pause, expected in zip(pauses, [0.04, 0.08, 0.16, 0.2, 0.04], strict=False):
        assert expected <= pause < expected + 0.1


async def test_the_engine_ends_when_its_parent_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    parent = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", PARENT, str(tiny_model), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(await asyncio.to_thread(parent.stdout.readline))
    assert is_alive(pid)

    parent.kill()
    parent.wait()

    await until(lambda: not is_alive(pid))


PARENT = """
import asyncio, sys
from pathlib import Path
from manylora.engine.config import EngineConfig
from manylora.engine.adapter_format import read_adapter
from manylora.engine.errors import EngineUnavailableError
from manylora.engine.supervisor import SupervisedEngine

async def main():
    config = EngineConfig(model=sys.argv[1], num_kv_blocks=16, threads=1)
    engine = SupervisedEngine(config, Path(sys.argv[2]))
    await engine.start()
    while True:
        try:
            await engine.info()
            break
        except EngineUnavailableError:
            await asyncio.sleep(0.05)
    print(engine.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def is_alive(pid: int | None) -> bool:
    """Whether a process of this id runs; one that only waits to be reaped does not."""
    assert pid is not None
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
