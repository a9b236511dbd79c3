"""Brings a database to this version's schema, safely when several processes start at once."""

import importlib.util
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from manylora.platform.db import Database

_LOCK = 0x6D616E796C6F7261  # PostgreSQL's advisory lock: "manylora"


class SchemaAheadError(Exception):
    """The database was made by a newer version of manylora, which this one cannot read."""


def upgrade(database: Database) -> None:
    """Run the revisions that are missing, all in one transaction that excludes other starters.

    Raises:
        SchemaAheadError: the database knows a revision that this version does not.
    """
    writing = database.engine.execution_options(writer=True)
    with writing.begin() as connection:  # on SQLite this is BEGIN IMMEDIATE, the lock itself
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        config = migration_config(connection)
        _refuse_if_ahead(config, connection)
        command.upgrade(config, "head")


def current(database: Database) -> str | None:
    """The revision that the database is at; None: it is empty."""
    with database.engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def migration_config(connection: Connection) -> Config:
    """Alembic's configuration for one connection; there is no ini file."""
    config = Config()
    config.set_main_option("script_location", str(_scripts()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _scripts() -> Path:
    spec = importlib.util.find_spec("manylora.migrations")
    assert spec is not None, "the migrations are part of the installation"
    assert spec.origin is not None, "the migrations are a package"
    return Path(spec.origin).parent


def _refuse_if_ahead(config: Config, connection: Connection) -> None:
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    revision = MigrationContext.configure(connection).get_current_revision()
    if revision is not None and revision not in known:
        raise SchemaAheadError(
            f"the database is at revision {revision}, which this version does not know; "
            "start the version that made it, or a newer one"
        )
