"""The command line.

Each command imports what it needs when it runs, so that a short one stays short.
"""

import asyncio
import contextlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from manylora.engine.errors import ModelError
from manylora.platform.command_line import with_settings
from manylora.platform.errors import DatabaseError, DemoError, PlatformError
from manylora.platform.settings import Settings, SettingsError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
schema = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(schema, name="db", help="The database's schema.")
people = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(people, name="operator", help="The people who sign in to /admin.")

ACCEPTED, REFUSED, USAGE_ERROR = 0, 1, 2


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
    from manylora.serve import serve_until_stopped, sole_owner, taken_ports

    configure_logs(settings.log_level)
    _make_data_dir(settings)
    with (
        taken_ports(settings) as ports,
        sole_owner(settings),
        open_database(settings.database) as db,
    ):
        upgrade(db)
        source = resolve_model(settings.model, progress=_say)
        with (
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            contextlib.suppress(asyncio.CancelledError),  # told to stop while it was starting
        ):
            runner.run(serve_until_stopped(settings, db, source, ports))


@app.command()
def check_adapter(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a PEFT adapter's folder")],
    model: Annotated[str, typer.Option(help="the base model, as `serve` takes it")] = "demo",
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
