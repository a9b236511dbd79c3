"""The command line, and the one module that knows all parts: it puts them together.

Each command imports what it needs when it runs, so that a short one stays short.
"""

import asyncio
import contextlib
import json
import resource
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from manylora.engine.errors import ModelError
from manylora.platform.command_line import with_settings
from manylora.platform.errors import DemoError, PlatformError
from manylora.platform.settings import Settings, SettingsError

if TYPE_CHECKING:
    from manylora.engine.models.source import ModelSource
    from manylora.engine.supervisor import SupervisedEngine
    from manylora.platform.db import Database
    from manylora.platform.demo import DemoFacts
    from manylora.platform.services import Services

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
schema = typer.Typer(no_args_is_help=True)
app.add_typer(schema, name="db", help="The database's schema.")

ACCEPTED, REFUSED, USAGE_ERROR = 0, 1, 2
READY_POLL_SECONDS = 0.1
GRACE_SECONDS = 10  # for requests in flight when the server is told to stop


def main() -> None:
    """Run a command; an expected failure is one line on standard error."""
    try:
        app()
    except (SettingsError, ModelError, PlatformError, DemoError) as error:
        _fail(str(error))


@app.callback()
def manylora() -> None:
    """Many LoRA adapters, one base model."""


@app.command()
@with_settings()
def serve(settings: Settings) -> None:
    """Serve adapters over one base model."""
    import uvloop

    from manylora.engine.models.source import resolve_model
    from manylora.platform.db import Database
    from manylora.platform.logs import configure_logs
    from manylora.platform.migrate import SchemaAheadError, upgrade

    configure_logs(settings.log_level)
    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    source = resolve_model(settings.model, progress=_say)
    db = Database(settings.database)
    try:
        upgrade(db)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, db, source))
    except SchemaAheadError as error:
        _fail(str(error))
    finally:
        db.close()


async def _serve(settings: Settings, db: "Database", source: "ModelSource") -> None:
    import uvicorn

    from manylora.platform.app import create_app
    from manylora.web.app import mount

    async with _running_engine(settings, source) as engine:
        services = _services(settings, db, engine, source)
        greeting = await _first_start(services, _base_url(settings))
        asgi = create_app(services)
        mount(asgi)
        config = uvicorn.Config(
            asgi,
            host=settings.host,
            port=settings.port,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        greeting_when_ready = asyncio.create_task(_greet(services, greeting))
        try:
            await uvicorn.Server(config).serve()
        finally:
            greeting_when_ready.cancel()
            await asyncio.wait([greeting_when_ready])


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
        engine = SupervisedEngine(config, Path(run_dir))
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
    store.clear_staging()
    max_lora_rank = settings.engine_config().max_lora_rank
    check = ChildProcessCheck(source.folder, max_lora_rank=max_lora_rank)
    registry = AdapterRegistry(db, engine, store, check, base, settings.max_upload_bytes)
    text = TextProcessor.from_folder(source.folder)
    return Services(settings, db, engine, text, base, registry)


async def _first_start(services: "Services", base_url: str) -> str:
    """Seed what a first start needs; what to tell the operator about it."""
    from anyio.to_thread import run_sync

    from manylora.platform.demo import OPERATOR_EMAIL, first_operator, seed_demo

    if services.settings.demo:
        return _demo_text(await seed_demo(services, base_url))
    password = await run_sync(first_operator, services.db)
    if password is None:
        return f"  admin   {base_url}/admin"
    return f"  admin   {base_url}/admin   {OPERATOR_EMAIL}   {password}   (shown this once)"


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


def _demo_text(facts: "DemoFacts") -> str:
    base_url, admin, first = facts["base_url"], facts["admin"], facts["tenants"][0]
    tenants = [
        f"  tenant  {tenant['name']:8} key {tenant['key']}  "
        f"adapters: {', '.join(tenant['adapters'])}"
        for tenant in facts["tenants"]
    ]
    body = {
        "model": first["adapters"][0],
        "messages": [{"role": "user", "content": "How do I boil an egg?"}],
        "max_tokens": 64,
        "temperature": 0,
    }
    lines = [
        f"  admin   {base_url}/admin   {admin['email']}   {admin['password'] or ''}",
        *tenants,
        "try it:",
        f"  curl {base_url}/v1/chat/completions \\",
        f"    -H 'Authorization: Bearer {first['key']}' \\",
        f"    -H 'Content-Type: application/json' -d '{json.dumps(body)}'",
    ]
    return "\n".join(lines)


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
    from manylora.platform.db import Database
    from manylora.platform.migrate import SchemaAheadError, current, upgrade

    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    db = Database(settings.database)
    try:
        upgrade(db)
        _say(current(db) or "empty")
    except SchemaAheadError as error:
        _fail(str(error))
    finally:
        db.close()


@schema.command("current")
@with_settings("data_dir", "database_url")
def current_schema(settings: Settings) -> None:
    """Print the revision that the database is at."""
    from manylora.platform.db import Database
    from manylora.platform.migrate import current

    db = Database(settings.database)
    try:
        _say(current(db) or "empty")
    finally:
        db.close()


def _say(line: str) -> None:
    typer.echo(line)
    sys.stdout.flush()


def _fail(message: str) -> NoReturn:
    typer.echo(f"manylora: {message}", err=True)
    raise SystemExit(USAGE_ERROR)


if __name__ == "__main__":
    main()
