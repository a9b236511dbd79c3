"""A real server as a process of its own, for tests from outside."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    port: int,
    log: Path,
    patience_seconds: float = 120,
) -> Iterator[str]:
    """Starts `command` from the venv, waits for /ready, yields the base URL, and stops it.

    Nothing of our own `MANYLORA_…` variables reaches it but what `environment` says.

    Raises:
        AssertionError: it ended or was not ready in time; the message has the end of its log.
    """
    inherited = {name: value for name, value in os.environ.items() if "MANYLORA" not in name}
    path = f"{PROGRAMS}{os.pathsep}{inherited.get('PATH', '')}"
    base = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**inherited, "PATH": path, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            executable=PROGRAMS / command[0],
        )
    try:
        _wait_until_ready(process, base, log, patience_seconds)
        yield base
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(
    process: subprocess.Popen[bytes], base: str, log: Path, patience_seconds: float
) -> None:
    deadline = time.monotonic() + patience_seconds
    while not _is_ready(base):
        ended = process.poll()
        said = log.read_text(errors="replace")[-4000:]
        assert ended is None, f"the server ended with {ended}:\n{said}"
        assert time.monotonic() < deadline, f"not ready in {patience_seconds} s:\n{said}"
        time.sleep(0.1)


def _is_ready(base: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
