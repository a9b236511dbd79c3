"""The database: one `Database` for SQLite (WAL) and PostgreSQL, with readers and writers apart.

On SQLite every writer begins with `BEGIN IMMEDIATE`: a deferred transaction that first reads and
then writes fails with "database is locked" under concurrency, whatever the busy timeout.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.orm import DeclarativeBase, Session, sessionmaker

from manylora.platform.errors import DatabaseError

BUSY_TIMEOUT_MS = 30_000
_URL_FORM = "database_url: write it as sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME"


def sqlite_url(path: Path) -> str:
    return f"sqlite:///{path}"


class Database:
    """Hands out sessions. `read()` and `write()` each are one transaction."""

    def __init__(self, url: str) -> None:
        """Nothing is connected to yet.

        Raises:
            DatabaseError: this is not the URL of a SQLite or PostgreSQL database.
        """
        self.engine = _create_engine(url)
        self._readers = sessionmaker(self.engine, expire_on_commit=False)
        self._writers = sessionmaker(
            self.engine.execution_options(writer=True), expire_on_commit=False
        )

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session for looking only; what is changed in it is not kept."""
        with self._readers() as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session whose changes are committed at the end, or rolled back on an error."""
        with self._writers.begin() as session:
            yield session

    def close(self) -> None:
        self.engine.dispose()


@contextmanager
def open_database(url: str) -> Iterator[Database]:
    """A database for as long as a command runs.

    Raises:
        DatabaseError: it cannot be reached, or it failed and nobody else dealt with that.
    """
    database = Database(url)
    try:
        yield database
    except DBAPIError as error:
        place = database.engine.url.render_as_string(hide_password=True)
        reason = str(error.orig).partition("\n")[0]
        raise DatabaseError(f"the database {place} does not answer: {reason}") from error
    finally:
        database.close()


def insert_if_new(session: Session, table: type[DeclarativeBase], **values: Any) -> None:
    """Insert a row, or nothing where one with the same unique columns is there already."""
    dialect = session.get_bind().dialect.name
    insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    session.execute(insert(table).values(values).on_conflict_do_nothing())


def _create_engine(url: str) -> Engine:
    if url.startswith("postgresql://"):  # what people paste; we ship psycopg 3
        url = url.replace("postgresql://", "postgresql+psycopg://", 1)
    try:
        # Parameters are emails, password and key hashes: they are kept out of errors and logs.
        engine = create_engine(url, pool_pre_ping=True, hide_parameters=True)
    except (ArgumentError, ImportError, ValueError) as error:  # ValueError: the port is no number
        raise DatabaseError(_URL_FORM) from error
    if engine.dialect.name not in ("sqlite", "postgresql"):
        raise DatabaseError(_URL_FORM)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _on_sqlite_connect)
        event.listen(engine, "begin", _on_sqlite_begin)
    return engine


def _on_sqlite_connect(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves, see `_on_sqlite_begin`
    for pragma in (
        "journal_mode=WAL",
        "synchronous=NORMAL",
        "foreign_keys=ON",
        f"busy_timeout={BUSY_TIMEOUT_MS}",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _on_sqlite_begin(connection: Connection) -> None:
    writer = connection.get_execution_options().get("writer", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writer else "BEGIN")
