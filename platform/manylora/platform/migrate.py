"""Brings a database to this version's schema, safely when several processes start at once."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from manylora.platform.db import Database
from manylora.platform.errors import DatabaseError

_LOCK = 0x6D616E796C6F7261  # PostgreSQL's advisory lock: "manylora"


class SchemaAheadError(DatabaseError):
    """The database was made by a newer version of manylora, which this one cannot read."""


def upgrade(database: Database) -> None:
    """Run the revisions that are missing, all in one transaction that excludes other starters.

    Raises:
        SchemaAheadError: the database knows a revision that this version does not.
        DatabaseError: a revision left rows that refer to nothing; nothing is changed.
    """
    with _schema_transaction(database) as connection:
        config = migration_config(connection)
        if _is_at_head(config, connection):
            return
        command.upgrade(config, "head")
        if connection.dialect.name == "sqlite":
            _check_references(connection)


@contextmanager
def _schema_transaction(database: Database) -> Iterator[Connection]:
    with database.engine.execution_options(writer=True).connect() as connection:
        if connection.dialect.name == "postgresql":
            with connection.begin():
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
                yield connection
            return
        # SQLite changes a table by making it anew, which references to it would forbid: they are
        # checked afterwards instead. https://www.sqlite.org/lang_altertable.html#otheralter
        _enforce_references(connection, enforce=False)
        try:
            with connection.begin():  # BEGIN IMMEDIATE, the lock itself
                yield connection
        finally:
            _enforce_references(connection, enforce=True)


def _enforce_references(connection: Connection, *, enforce: bool) -> None:
    """Not by SQLAlchemy, which would begin a transaction, and within one this does nothing."""
    raw = connection.connection.dbapi_connection
    assert raw is not None, "it is connected"
    raw.cursor().execute(f"PRAGMA foreign_keys={'ON' if enforce else 'OFF'}")


def _check_references(connection: Connection) -> None:
    broken = connection.execute(text("PRAGMA foreign_key_check")).first()
    if broken is not None:
        raise DatabaseError(f"the new schema would break a row of {broken[0]}; nothing is changed")


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


def _is_at_head(config: Config, connection: Connection) -> bool:
    scripts = ScriptDirectory.from_config(config)
    revision = MigrationContext.configure(connection).get_current_revision()
    if revision is not None and revision not in {s.revision for s in scripts.walk_revisions()}:
        raise SchemaAheadError(
            f"the database is at revision {revision}, which this version does not know; "
            "start the version that made it, or a newer one"
        )
    return revision == scripts.get_current_head()
