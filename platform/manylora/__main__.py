"""The command line.

Each command imports what it needs when it runs, so that a short one stays short.
"""

import asyncio
import contextlib
import json
import os
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from manylora.engine.errors import ModelError, RecordingError
from manylora.platform.command_line import named_folders, spread_lora_modules, with_settings
from manylora.platform.errors import DatabaseError, DemoError, PlatformError
from manylora.platform.settings import Settings, SettingsError, offline_settings

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
EXPECTED = (SettingsError, ModelError, RecordingError, PlatformError, DatabaseError, DemoError)


def main() -> None:
    """Run a command; an expected failure is one line on standard error."""
    try:
        app(spread_lora_modules(sys.argv[1:]))
    except EXPECTED as error:
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


@app.command()
@with_settings(*offline_settings())
def generate(
    settings: Settings,
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="JSONL: an object a line")],
    output: Annotated[
        Path, typer.Option(metavar="OUT", help="JSONL of answers; a run that was stopped goes on")
    ],
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH ...", help="adapters that lines may call by name"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="of lines that say nothing, as the next")] = 16,
    temperature: Annotated[float, typer.Option(help="0: greedy")] = 1.0,
    top_p: Annotated[float, typer.Option(help="1: no limit")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 or -1: no limit")] = 0,
) -> None:
    """Answer prompts from a file; exit 0 all answered, 1 some lines had errors, 2 usage."""
    adapters = named_folders(lora_modules or [])
    from manylora.engine.logs import configure_logs
    from manylora.generate.run import generate_file

    configure_logs(settings.log_level)
    done = generate_file(
        source,
        output,
        settings.engine_config(max_num_waiting=sys.maxsize),
        defaults={
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
        },
        adapters=adapters,
    )
    found = f", {done.num_found} of them by earlier runs" if done.num_found else ""
    said = f"{done.num_answers} lines answered, {done.num_errors} with errors{found}"
    typer.echo(said, err=True)
    raise typer.Exit(1 if done.num_errors else 0)


_RECORDING = typer.Argument(metavar="FILE", help="what `--step-trace` wrote")


@app.command("replay")
def replay_recording(
    file: Annotated[Path, _RECORDING],
    perfetto: Annotated[Path | None, typer.Option(help="write a Perfetto trace there too")] = None,
) -> None:
    """Take recorded steps again; exit 0 all came out alike, 1 one differs, 2 unreadable."""
    from manylora.engine.perfetto import write_perfetto
    from manylora.engine.replay import replay

    found = replay(file)
    if perfetto is not None:
        try:
            _say(f"wrote {write_perfetto(file, perfetto)} events to {perfetto}")
        except OSError as error:
            _fail(f"cannot write {perfetto}: {error.strerror}")
    _say(str(found))
    raise typer.Exit(ACCEPTED if found.difference is None else REFUSED)


@app.command("advise")
def advise_on_recording(
    file: Annotated[Path, _RECORDING],
    as_json: Annotated[bool, typer.Option("--json", help="all numbers, as JSON")] = False,
) -> None:
    """Say what prefix caching would give recorded traffic, or gives, by tenant and adapter."""
    from manylora.engine.advice_text import advice_text
    from manylora.engine.advise import advise

    advice = advise(file)
    _say(json.dumps(asdict(advice)) if as_json else advice_text(advice))


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
