"""The command line, and the one module that knows all parts: it puts them together.

Each command imports what it needs when it runs, so that a short one stays short.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from manylora.engine.errors import ModelError
from manylora.platform.command_line import with_settings
from manylora.platform.errors import DatabaseError, DemoError, PlatformError
from manylora.platform.settings import Settings, SettingsError

if TYPE_CHECKING:
    import uvicorn

    from manylora.engine.models.source import ModelSource
    from manylora.engine.supervisor import SupervisedEngine
    from manylora.platform.db import Database
    from manylora.platform.services import Services

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
schema = typer.Typer(no_args_is_help=True)
app.add_typer(schema, name="db", help="The database's schema.")
people = typer.Typer(no_args_is_help=True)
app.add_typer(people, name="operator", help="The people who sign in to /admin.")

ACCEPTED, REFUSED, USAGE_ERROR = 0, 1, 2
READY_POLL_SECONDS = 0.1
GRACE_SECONDS = 10  # for requests in flight when the server is told to stop
CANCEL_SECONDS = 10  # for what those that took longer have still to do


def main() -> None:
    """Run a command; an expected failure is one line on standard error."""
    try:
        app()
    except (SettingsError, ModelError, PlatformError, DatabaseError, DemoError) as error:
        _fail(str(error))


@app.callback()
def manylora() -> None:
    """Many LoRA adapters, one base model."""


@app.command()
@with_settings()
def serve(settings: Settings) -> None:
    """Serve adapters over one base model."""
    import uvloop

    from manylora.engine.logs import configure_logs
    from manylora.engine.models.source import resolve_model
    from manylora.platform.db import open_database
    from manylora.platform.migrate import upgrade

    configure_logs(settings.log_level)
    _make_data_dir(settings)
    with open_database(settings.database) as db:
        upgrade(db)
        source = resolve_model(settings.model, progress=_say)
        with (
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            contextlib.suppress(asyncio.CancelledError),  # told to stop while it was starting
        ):
            runner.run(_serve(settings, db, source))


async def _serve(settings: Settings, db: "Database", source: "ModelSource") -> None:
    loop, starting = asyncio.get_running_loop(), asyncio.current_task()
    assert starting is not None, "it runs as a task"
    _on_signals(lambda: loop.call_soon_threadsafe(starting.cancel))
    async with _running_engine(settings, source) as engine:
        services = _services(settings, db, engine, source)
        greeting = await _first_start(services, _base_url(settings))
        greeting_when_ready = asyncio.create_task(_greet(services, greeting))
        try:
            await _until_told_to_stop(_http_server(services))
        finally:
            greeting_when_ready.cancel()
            await asyncio.wait([greeting_when_ready])


def _http_server(services: "Services") -> "uvicorn.Server":
    import uvicorn

    from manylora.platform.app import create_app
    from manylora.web.app import mount

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
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    return uvicorn.Server(config)


async def _until_told_to_stop(server: "uvicorn.Server") -> None:
    """Serve, and return when all that was in flight has its usage row."""
    from manylora.platform.generation import all_settled

    # uvicorn heeds these signals while it serves, and raises them anew when it has ended.
    _on_signals(lambda: None)
    await server.serve()
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
async def _running_engine(
    settings: Settings, source: "ModelSource"
) -> AsyncIterator["SupervisedEngine"]:
    """The engine process; it loads in the background, while the HTTP server answers already."""
    from manylora.engine.supervisor import SupervisedEngine

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
    settings: Settings, db: "Database", engine: "SupervisedEngine", source: "ModelSource"
) -> "Services":
    from manylora.engine.text.processor import TextProcessor
    from manylora.platform.adapter_check import ChildProcessCheck
    from manylora.platform.base_models import register_base_model
    from manylora.platform.registry import AdapterRegistry
    from manylora.platform.services import Services
    from manylora.platform.storage import AdapterStore

    name = settings.served_model_name or source.name
    with db.write() as session:
        base = register_base_model(session, name=name, digest=source.digest)
    store = AdapterStore(settings.adapters_dir)
    store.prepare()
    max_lora_rank = settings.engine_config().max_lora_rank
    check = ChildProcessCheck(source.folder, max_lora_rank=max_lora_rank)
    registry = AdapterRegistry(db, engine, store, check, base, settings.max_upload_bytes)
    text = TextProcessor.from_folder(source.folder)
    return Services(settings, db, engine, text, base, registry)


async def _first_start(services: "Services", base_url: str) -> str:
    """Seed what a first start needs; what to tell the operator about it."""
    from anyio.to_thread import run_sync

    from manylora.platform.demo import OPERATOR_EMAIL, first_operator, how_to_begin, seed_demo

    password = await run_sync(first_operator, services.db)
    if password is not None:  # said at once: what follows may fail, and nothing can tell it again
        _say(f"manylora made the operator {OPERATOR_EMAIL}   {password}   (shown this once)")
    if services.settings.demo:
        return how_to_begin(await seed_demo(services, base_url, password))
    return f"  admin   {base_url}/admin"


async def _greet(services: "Services", greeting: str) -> None:
    """Say how to begin, once requests are served."""
    from manylora.engine.errors import EngineUnavailableError

    while True:
        try:
            await services.engine.info()
            break
        except EngineUnavailableError:
            await asyncio.sleep(READY_POLL_SECONDS)
    _say(f"manylora serves {services.base_model.name}")
    _say(greeting)


@app.command()
def check_adapter(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a PEFT adapter's folder")],
    model: Annotated[str, typer.Option(help="the base model, as `serve` takes it")],
    max_lora_rank: Annotated[int, typer.Option(min=1, help="highest rank accepted")] = 64,
    memory_limit_bytes: Annotated[int | None, typer.Option(min=1, hidden=True)] = None,
) -> None:
    """Say as JSON what an upload would be told; exit 0 accepted, 1 refused, 2 usage."""
    from manylora.engine.adapter_check import check_adapter as check
    from manylora.engine.models.source import resolve_model

    if not folder.is_dir():
        _fail(f"there is no folder {folder}")
    if memory_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    model_folder = Path(model) if Path(model).is_dir() else resolve_model(model).folder
    found = check(folder, model_folder, max_lora_rank=max_lora_rank)
    typer.echo(json.dumps(found))
    raise typer.Exit(ACCEPTED if found["accepted"] else REFUSED)


@schema.command("upgrade")
@with_settings("data_dir", "database_url")
def upgrade_schema(settings: Settings) -> None:
    """Bring the database to this version's schema."""
    from manylora.platform.db import open_database
    from manylora.platform.migrate import current, upgrade

    _make_data_dir(settings)
    with open_database(settings.database) as db:
        upgrade(db)
        _say(current(db) or "empty")


@schema.command("current")
@with_settings("data_dir", "database_url")
def current_schema(settings: Settings) -> None:
    """Print the revision that the database is at."""
    from manylora.platform.db import open_database
    from manylora.platform.migrate import current

    with open_database(settings.database) as db:
        _say(current(db) or "empty")


@people.command("reset-password")
@with_settings("data_dir", "database_url")
def reset_operators_password(
    settings: Settings, email: Annotated[str, typer.Argument(metavar="EMAIL")]
) -> None:
    """Print a new password for an operator, who is signed out everywhere."""
    from manylora.platform.db import open_database
    from manylora.platform.operators import reset_password

    with open_database(settings.database) as db:
        with db.write() as session:
            password = reset_password(session, email)
        _say(password)


def _make_data_dir(settings: Settings) -> None:
    """For this user's eyes only, as is all that will be made in it."""
    os.umask(0o077)
    folder = settings.data_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"data_dir: cannot make {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SettingsError(f"data_dir: cannot write in {folder}")


def _say(line: str) -> None:
    typer.echo(line)
    sys.stdout.flush()


def _fail(message: str) -> NoReturn:
    typer.echo(f"manylora: {message}", err=True)
    raise SystemExit(USAGE_ERROR)


if __name__ == "__main__":
    main()
