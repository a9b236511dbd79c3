"""A real PostgreSQL for tests: one server a session, one database for each who asks.

`initdb` and `pg_ctl` are taken from PATH or Debian's folder. The server refuses to run as root,
so then it runs as the user `postgres`. It listens on a free loopback port and forgets durability.
"""

import functools
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

USER = "manylora"


@functools.cache
def programs() -> Path | None:
    """The folder of `initdb` and `pg_ctl`; None: not on this machine."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    on_path = shutil.which("pg_ctl")
    candidates = [*debian, *([Path(on_path).parent] if on_path else [])]
    return next((folder for folder in candidates if (folder / "initdb").exists()), None)


@contextmanager
def running_postgres() -> Iterator[str]:
    """A server; yields the URL of its maintenance database. Skips where there are no programs."""
    folder = programs()
    if folder is None:
        pytest.skip("PostgreSQL's initdb and pg_ctl are not on this machine")
    with tempfile.TemporaryDirectory(prefix="manylora-pg-") as home:
        if os.geteuid() == 0:
            shutil.chown(home, "postgres", "postgres")
        data, port = Path(home) / "data", _free_port()
        _run(folder / "initdb", "-D", data, "-U", USER, "-A", "trust", "-E", "UTF8", "-N")
        options = f"-p {port} -h 127.0.0.1 -k {home} -F -c full_page_writes=off"
        _run(folder / "pg_ctl", "-D", data, "-w", "-o", options, "-l", f"{home}/log", "start")
        try:
            yield f"postgresql://{USER}@127.0.0.1:{port}/postgres"
        finally:
            _run(folder / "pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")


@contextmanager
def fresh_database(server_url: str) -> Iterator[str]:
    """An empty database on a running server, dropped afterwards; yields its URL."""
    name = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[call-overload]
        try:
            yield server_url.rpartition("/")[0] + f"/{name}"
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")  # type: ignore[call-overload]


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a running server's maintenance database."""
    with running_postgres() as url:
        yield url


@pytest.fixture(scope="module")
def postgres_url(postgres_server: str) -> Iterator[str]:
    """The URL of an empty database of this test module's own."""
    with fresh_database(postgres_server) as url:
        yield url


def _run(*command: object) -> None:
    as_postgres = pwd.getpwnam("postgres").pw_uid if os.geteuid() == 0 else None
    subprocess.run(
        [str(part) for part in command],
        user=as_postgres,
        cwd="/",
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=60,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
