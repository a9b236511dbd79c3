"""Platform tests run on both databases; each test finds its tables empty."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from manylora.platform.db import Database, sqlite_url
from manylora.platform.migrate import upgrade
from manylora.platform.models import Base
from support.app import TestBed, make_testbed
from support.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]

BOTH = ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]


@pytest.fixture(scope="module", params=BOTH)
def migrated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Database]:
    """A database at head, for this test module."""
    if request.param == "postgresql":
        database = Database(request.getfixturevalue("postgres_url"))
    else:
        database = Database(sqlite_url(tmp_path_factory.mktemp("db") / "test.db"))
    upgrade(database)
    yield database
    database.close()


@pytest.fixture
def db(migrated: Database) -> Iterator[Database]:
    """The same, emptied after each test."""
    yield migrated
    with migrated.engine.execution_options(writer=True).begin() as connection:
        for table in reversed(Base.metadata.sorted_tables):
            connection.execute(table.delete())


@pytest.fixture
def bed(db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TestBed:
    """The application with two tenants."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)  # no test pulls the plug
    return make_testbed(db, tmp_path)
