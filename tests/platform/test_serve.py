"""`manylora serve` as a process: both processes start, answer, survive and end together."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIStatusError, OpenAI
from sqlalchemy import select

from manylora.platform.db import open_database
from manylora.platform.demo import OPERATOR_EMAIL
from manylora.platform.models import UsageRecord
from manylora.platform.operators import sign_in
from support.served import free_port
from support.tiny_model import make_tiny_llama

TOKEN = "operator-token-of-the-test"
HI = [{"role": "user", "content": "hi"}]
PATIENCE_SECONDS = 90.0


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    base: str
    folder: Path

    @property
    def run_dirs(self) -> Path:
        return self.folder / "tmp"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def log(self) -> Path:
        return self.folder / "log"

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


def environment_of(folder: Path, port: int) -> dict[str, str]:
    run_dirs = folder / "tmp"
    run_dirs.mkdir()
    inherited = {name: value for name, value in os.environ.items() if "MANYLORA" not in name}
    return inherited | {
        "MANYLORA_MODEL": str(make_tiny_llama(folder / "tiny")),
        "MANYLORA_PORT": str(port),
        "MANYLORA_DATA_DIR": str(folder / "data"),
        "MANYLORA_CACHE": str(folder / "cache"),
        "MANYLORA_ADMIN_TOKEN": TOKEN,
        "MANYLORA_NUM_KV_BLOCKS": "64",
        "MANYLORA_THREADS": "1",
        "TMPDIR": str(run_dirs),
    }


@contextmanager
def running(
    folder: Path, *program: str, wait: bool = True, port: int | None = None, **more: str
) -> Iterator[Running]:
    port = port or free_port()
    environment = environment_of(folder, port) | more
    process = subprocess.Popen(
        [sys.executable, *(program or ("-m", "manylora")), "serve"],
        env=environment,
        stdout=(folder / "log").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    server = Running(process, f"http://127.0.0.1:{port}", folder)
    try:
        if wait:
            eventually(server.is_ready)
        yield server
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("serve")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return client_of(server)


def client_of(server: Running) -> OpenAI:
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


def rows_of(server: Running) -> list[dict[str, Any]]:
    """The usage rows, with the server up or down."""
    with (
        open_database(f"sqlite:///{server.data}/manylora.db") as database,
        database.read() as session,
    ):
        found = session.execute(select(UsageRecord.status, UsageRecord.completion_tokens))
        return [dict(row._mapping) for row in found]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_told_to_stop_it_settles_what_streams_and_ends_both_processes(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As Ctrl-C at a terminal does it, which tells the whole process group."""
    hurried = "from manylora import __main__, serve; serve.GRACE_SECONDS = 0.1; __main__.main()"
    with running(tmp_path, "-c", hurried, MANYLORA_LOG_LEVEL="warning") as server:
        engine = server.engine_pid()
        client = client_of(server)
        stream = client.completions.create(
            model="tiny", prompt="x", stream=True, max_tokens=500, extra_body={"ignore_eos": True}
        )
        next(iter(stream))

        os.killpg(server.process.pid, number)

        assert server.process.wait(timeout=60) == 0
        [row] = rows_of(server)
        assert row["status"] == "server_stop"
        assert 0 < row["completion_tokens"] < 500
        assert not Path(f"/proc/{engine}").exists()
        assert list(server.run_dirs.iterdir()) == []
        said = server.log.read_text()
        assert "Traceback" not in said
        assert "engine_ready" not in said  # the level is the engine process's too


def test_told_to_stop_while_it_starts_it_leaves_nothing(tmp_path: Path) -> None:
    with running(tmp_path, wait=False) as server:
        eventually(server.engine_pid)

        server.process.terminate()

        assert server.process.wait(timeout=60) == 0
        assert list(server.run_dirs.iterdir()) == []
        assert "Traceback" not in server.log.read_text()


def test_a_first_start_tells_the_password_even_when_it_fails(tmp_path: Path) -> None:
    """Nobody could ever sign in: the operator is made once."""
    with running(tmp_path, wait=False, MANYLORA_MAX_MODEL_LEN="9999") as server:
        assert server.process.wait(timeout=60) != 0

    said = server.log.read_text()
    password = re.search(rf"{OPERATOR_EMAIL} +(\S+)", said)
    assert password is not None
    with open_database(f"sqlite:///{server.data}/manylora.db") as database:
        assert sign_in(database, email=OPERATOR_EMAIL, password=password[1])


def test_both_processes_log_lines_for_programs(server: Running, client: OpenAI) -> None:
    lines = [line for line in server.log.read_text().splitlines() if line.startswith("{")]

    events = {json.loads(line)["event"] for line in lines}
    assert {"engine_ready", "request_settled"} <= events


def test_a_port_that_is_taken_is_told_in_one_line_before_anything_is_made(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with running(tmp_path, wait=False, port=port) as server:
            assert server.process.wait(timeout=60) == 2

    (line,) = server.log.read_text().splitlines()
    assert f"cannot listen on 127.0.0.1 port {port}" in line
    assert not (server.data / "manylora.db").exists()


def test_a_second_server_on_the_same_folder_is_refused(server: Running, tmp_path: Path) -> None:
    with running(tmp_path, wait=False, MANYLORA_DATA_DIR=str(server.data)) as second:
        assert second.process.wait(timeout=60) == 2

    (line,) = second.log.read_text().splitlines()
    assert f"another server uses {server.data}" in line
    assert server.is_ready()


def test_an_engine_that_cannot_start_ends_the_server_and_says_why(tmp_path: Path) -> None:
    with running(tmp_path, wait=False, MANYLORA_MAX_MODEL_LEN="9999") as server:
        assert server.process.wait(timeout=60) == 2

    said = server.log.read_text()
    assert "manylora: the engine cannot start: max_model_len is 9999 tokens; the model has" in said
    assert "Traceback" not in said
