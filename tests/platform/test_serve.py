"""`manylora serve` as a process: both processes start, answer, survive and end together."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIStatusError, OpenAI

from support.served import free_port
from support.tiny_model import make_tiny_llama

TOKEN = "operator-token-of-the-test"
HI = [{"role": "user", "content": "hi"}]
PATIENCE_SECONDS = 90.0


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    base: str
    run_dirs: Path
    log: Path

    def operator(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"authorization": f"Bearer {TOKEN}"}
        url = f"{self.base}/api/v1{path}"
        return httpx.request(method, url, json=body, headers=headers).raise_for_status().json()

    def engine_pid(self) -> int | None:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for child in children.split():
            if "manylora.engine.server" in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
        return None

    def is_ready(self) -> bool:
        assert self.process.poll() is None, "the server ended"
        try:
            return httpx.get(f"{self.base}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False


def eventually(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("serve")
    run_dirs = folder / "tmp"
    run_dirs.mkdir()
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if "MANYLORA" not in name}
    environment |= {
        "MANYLORA_MODEL": str(make_tiny_llama(folder / "tiny")),
        "MANYLORA_PORT": str(port),
        "MANYLORA_DATA_DIR": str(folder / "data"),
        "MANYLORA_CACHE": str(folder / "cache"),
        "MANYLORA_ADMIN_TOKEN": TOKEN,
        "MANYLORA_NUM_KV_BLOCKS": "64",
        "MANYLORA_THREADS": "1",
        "TMPDIR": str(run_dirs),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "manylora", "serve"],
        env=environment,
        stdout=(folder / "log").open("wb"),
        stderr=subprocess.STDOUT,
    )
    running = Running(process, f"http://127.0.0.1:{port}", run_dirs, folder / "log")
    try:
        eventually(running.is_ready)
        yield running
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    server.operator("POST", "/tenants", {"slug": "acme"})
    key = server.operator("POST", "/tenants/acme/keys", {"name": "test"})["key"]
    return OpenAI(base_url=f"{server.base}/v1", api_key=key, max_retries=0)


def test_a_chat_is_answered_and_billed(server: Running, client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=4, extra_body={"ignore_eos": True}
    )

    headers = {"authorization": f"Bearer {TOKEN}"}
    records = httpx.get(f"{server.base}/api/v1/usage/records", headers=headers).text
    [row] = [json.loads(line) for line in records.splitlines()]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == row["completion_tokens"] == 4
    assert answer.usage.prompt_tokens == row["prompt_tokens"]
    assert row["total_us"] > row["ttft_us"] > 0


def test_no_prompt_answer_or_key_is_in_the_log(server: Running, client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "CANARY"}], max_tokens=4
    )
    with pytest.raises(APIStatusError):
        client.chat.completions.create(model="CANARY", messages=HI)

    said = server.log.read_text(errors="replace")
    assert answer.id
    assert "request_settled" in said
    assert "CANARY" not in said
    assert client.api_key not in said
    assert TOKEN not in said


def test_a_killed_engine_comes_back_by_itself(server: Running, client: OpenAI) -> None:
    first = server.engine_pid()
    assert first is not None

    os.kill(first, signal.SIGKILL)

    eventually(lambda: server.engine_pid() not in (None, first))
    eventually(server.is_ready)
    again = client.completions.create(model="tiny", prompt="x", max_tokens=1)
    assert again.usage is not None
    assert again.usage.completion_tokens == 1


def test_told_to_stop_it_ends_both_processes_and_leaves_no_socket(server: Running) -> None:
    engine = server.engine_pid()
    assert engine is not None

    server.process.send_signal(signal.SIGTERM)

    assert server.process.wait(timeout=30) == 0
    eventually(lambda: not Path(f"/proc/{engine}").exists())
    assert list(server.run_dirs.iterdir()) == []
