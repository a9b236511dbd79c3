"""Puts the parts of a server together: database, engine process, HTTP surface, admin pages."""

import asyncio
import contextlib
import fcntl
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import typer
import uvicorn
from anyio.to_thread import run_sync

from manylora.engine.errors import EngineUnavailableError, ModelError
from manylora.engine.models.source import ModelSource
from manylora.engine.supervisor import SupervisedEngine
from manylora.engine.text.processor import TextProcessor
from manylora.platform.adapter_check import ChildProcessCheck
from manylora.platform.app import create_app, create_metrics_app
from manylora.platform.base_models import register_base_model
from manylora.platform.db import Database
from manylora.platform.demo import OPERATOR_EMAIL, first_operator, how_to_begin, seed_demo
from manylora.platform.generation import all_settled, count_running, stop_running
from manylora.platform.life import Life
from manylora.platform.lives import Lives
from manylora.platform.metrics import ServerMetrics
from manylora.platform.registry import AdapterRegistry
from manylora.platform.services import Services
from manylora.platform.settings import Settings, SettingsError
from manylora.platform.storage import AdapterStore
from manylora.web.app import mount

READY_POLL_SECONDS = 0.1
STOP_POLL_SECONDS = 0.05
GRACE_SECONDS = 10  # for requests in flight when the server is told to stop
CANCEL_SECONDS = 10  # for what those that took longer have still to do


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the server listens."""

    main: socket.socket
    metrics: socket.socket | None


@contextlib.contextmanager
def taken_ports(settings: Settings) -> Iterator[Ports]:
    """The ports, bound before anything is made, and not yet listened on.

    Raises:
        SettingsError: one cannot be had.
    """
    if settings.metrics_port == settings.port:
        raise SettingsError("metrics_port: must be another than port")
    with contextlib.ExitStack() as stack:
        main = stack.enter_context(_bound("port", settings.host, settings.port))
        metrics = None
        if settings.metrics_port is not None:
            where = (settings.metrics_host, settings.metrics_port)
            metrics = stack.enter_context(_bound("metrics_port", *where))
        yield Ports(main, metrics)


def _bound(setting: str, host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise SettingsError(
            f"{setting}: cannot listen on {host} port {port}: {error.strerror}"
        ) from error
    return bound


@contextlib.contextmanager
def sole_owner(settings: Settings) -> Iterator[None]:
    """Keep a second server off a data folder with SQLite, which would not know of the first.

    Raises:
        SettingsError: there is one already.
    """
    with (settings.data_dir / "lock").open("w") as lock:
        if settings.database.startswith("sqlite"):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise SettingsError(
                    f"data_dir: another server uses {settings.data_dir}; several need PostgreSQL"
                ) from error
        yield


async def serve_until_stopped(
    settings: Settings, db: Database, source: ModelSource, ports: Ports
) -> None:
    """Run the engine process and the HTTP server until a signal says to stop.

    Raises:
        ModelError: the engine cannot start.
        asyncio.CancelledError: told to stop before it served.
    """
    loop, starting = asyncio.get_running_loop(), asyncio.current_task()
    assert starting is not None, "it runs as a task"
    _on_signals(lambda: loop.call_soon_threadsafe(starting.cancel))
    async with _span_export(settings) as export, _running_engine(settings, source) as engine:
        lives = Lives(db=db, kept=settings.request_lives_kept, export=export)
        services = _services(settings, db, engine, source, lives)
        greeting = await _first_start(services, _base_url(settings))
        server = _http_server(services)
        beside = [
            asyncio.create_task(_greet(services, greeting)),
            asyncio.create_task(_stop_without(engine, server)),
            asyncio.create_task(_stop_what_outlasts(server)),
            asyncio.create_task(_serve_metrics(services, ports.metrics)),
        ]
        try:
            await _until_told_to_stop(server, ports.main)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)
        if engine.failure is not None:
            raise ModelError(f"the engine cannot start: {engine.failure}")


async def _stop_without(engine: SupervisedEngine, server: uvicorn.Server) -> None:
    await engine.wait_ended()
    server.should_exit = True


async def _stop_what_outlasts(server: uvicorn.Server) -> None:
    """End what still runs when the patience is over, each with an error that says so."""
    while not server.should_exit:  # noqa: ASYNC110 -- uvicorn has no event for it
        await asyncio.sleep(STOP_POLL_SECONDS)
    if running := count_running():
        typer.echo(f"stopping; waiting up to {GRACE_SECONDS:g} s for {running} requests")
    await asyncio.sleep(GRACE_SECONDS)
    stop_running()


class _ServerBeside(uvicorn.Server):
    """Runs in the loop of another, which has the signals."""

    # uvicorn's is a generator function under a decorator; its callers want the context manager.
    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


async def _serve_metrics(services: Services, port: socket.socket | None) -> None:
    """Answer `/metrics` on its own port, if it has one, until cancelled."""
    if port is None:
        return
    asgi = create_metrics_app(services)
    config = uvicorn.Config(
        asgi, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False
    )
    await _ServerBeside(config).serve([port])


def _http_server(services: Services) -> uvicorn.Server:
    asgi = create_app(services)
    mount(asgi)
    config = uvicorn.Config(
        asgi,
        host=services.settings.host,
        port=services.settings.port,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS + CANCEL_SECONDS,
    )
    return uvicorn.Server(config)


async def _until_told_to_stop(server: uvicorn.Server, port: socket.socket) -> None:
    """Serve, and return when all that was in flight has its usage row."""
    # uvicorn heeds these signals while it serves, and raises them anew when it has ended.
    _on_signals(lambda: None)
    await server.serve([port])
    if server.server_state.tasks:  # it cancels what outlasts its patience, and does not wait
        await asyncio.wait(server.server_state.tasks, timeout=CANCEL_SECONDS)
    await all_settled()


def _on_signals(act: Callable[[], object]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: act())


def _base_url(settings: Settings) -> str:
    """Where people on this machine reach the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)  # noqa: S104
    return f"http://{host}:{settings.port}"


@contextlib.asynccontextmanager
async def _span_export(settings: Settings) -> AsyncIterator[Callable[[Life], None] | None]:
    """Where ended lives go as spans; nowhere unless an endpoint is set, and then nothing loads.

    Raises:
        SettingsError: what exports them is not installed.
    """
    if settings.otlp_traces_endpoint is None:
        yield None
        return
    try:
        from manylora.platform.spans import SpanExport
    except ModuleNotFoundError as error:
        raise SettingsError(
            "otlp_traces_endpoint: this needs packages that are not installed: "
            "pip install 'manylora[otlp]'"
        ) from error
    export = SpanExport(settings.otlp_traces_endpoint)
    try:
        yield export
    finally:
        await run_sync(export.close)


@contextlib.asynccontextmanager
async def _running_engine(
    settings: Settings, source: ModelSource
) -> AsyncIterator[SupervisedEngine]:
    """The engine process; it loads in the background, while the HTTP server answers already."""
    config = settings.engine_config(
        model=str(source.folder), adapter_store=str(settings.adapters_dir)
    )
    # Not in the data folder: the path of a Unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="manylora-") as run_dir:
        engine = SupervisedEngine(config, Path(run_dir), log_level=settings.log_level)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()


def _services(
    settings: Settings, db: Database, engine: SupervisedEngine, source: ModelSource, lives: Lives
) -> Services:
    name = settings.served_model_name or source.name
    with db.write() as session:
        base = register_base_model(session, name=name, digest=source.digest)
    store = AdapterStore(settings.adapters_dir)
    store.prepare()
    max_lora_rank = settings.engine_config().max_lora_rank
    check = ChildProcessCheck(source.folder, max_lora_rank=max_lora_rank)
    registry = AdapterRegistry(db, engine, store, check, base, settings.max_upload_bytes)
    text = TextProcessor.from_folder(source.folder)
    metrics = ServerMetrics(name)
    metrics.engine_restarts = lambda: engine.num_restarts
    return Services(settings, db, engine, text, base, registry, lives, metrics)


async def _first_start(services: Services, base_url: str) -> str:
    """Seed what a first start needs; what to tell the operator about it."""
    password = await run_sync(first_operator, services.db)
    if password is not None and not services.settings.demo:
        # Said at once: what follows may fail, and nothing tells it again. The demo writes it down.
        typer.echo(f"manylora made the operator {OPERATOR_EMAIL}   {password}   (shown this once)")
    if services.settings.demo:
        return how_to_begin(await seed_demo(services, base_url, password))
    return f"  admin   {base_url}/admin"


async def _greet(services: Services, greeting: str) -> None:
    """Say how to begin, once requests are served."""
    while True:
        try:
            await services.engine.info()
            break
        except EngineUnavailableError:
            await asyncio.sleep(READY_POLL_SECONDS)
    typer.echo(f"manylora serves {services.base_model.name}")
    typer.echo(greeting)
