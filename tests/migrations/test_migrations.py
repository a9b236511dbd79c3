"""The revisions make the tables that the models describe, on both databases."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, text
from sqlalchemy.exc import IntegrityError

from manylora.platform import migrate
from manylora.platform.db import Database, sqlite_url
from manylora.platform.errors import DatabaseError
from manylora.platform.keys import issue_key, list_keys
from manylora.platform.migrate import SchemaAheadError, current, migration_config, upgrade
from manylora.platform.models import Base
from manylora.platform.tenants import create_tenant, find_tenant
from support.postgres import fresh_database, postgres_server

__all__ = ["postgres_server"]

HEAD = "0002_request_lives"
BOTH = ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]


@pytest.fixture(params=BOTH)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield sqlite_url(tmp_path / "test.db")
        return
    with fresh_database(request.getfixturevalue("postgres_server")) as found:
        yield found


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    database = Database(url)
    yield database
    database.close()


def test_head_is_what_the_models_say(database: Database) -> None:
    upgrade(database)

    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_checks_and_names_are_those_of_the_models(database: Database) -> None:
    """Autogenerate does not compare CHECK constraints, so their names are compared here."""
    upgrade(database)

    inspector = inspect(database.engine)
    for table in Base.metadata.sorted_tables:
        found = {check["name"] for check in inspector.get_check_constraints(table.name)}
        assert found == {
            str(constraint.name)
            for constraint in table.constraints
            if type(constraint).__name__ == "CheckConstraint"
        }


def test_a_second_upgrade_changes_nothing(database: Database) -> None:
    assert current(database) is None
    upgrade(database)
    first = current(database)

    upgrade(database)

    assert current(database) == first == HEAD


def test_down_leaves_nothing_and_up_again_works(database: Database) -> None:
    upgrade(database)
    with database.engine.execution_options(writer=True).begin() as connection:
        command.downgrade(migration_config(connection), "base")

    assert set(inspect(database.engine).get_table_names()) <= {"alembic_version"}
    upgrade(database)
    assert "tenants" in inspect(database.engine).get_table_names()


def test_a_newer_schema_is_refused_and_left_alone(database: Database) -> None:
    upgrade(database)
    with database.engine.execution_options(writer=True).begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999_future'"))

    with pytest.raises(SchemaAheadError, match="9999_future"):
        upgrade(database)

    assert current(database) == "9999_future"


@pytest.fixture
def add_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts one more revision after ours."""
    scripts = tmp_path / "scripts"
    shutil.copytree(migrate._scripts(), scripts)
    monkeypatch.setattr(migrate, "_scripts", lambda: scripts)

    def add(body: str) -> None:
        head = f'revision = "9998_next"\ndown_revision = "{HEAD}"\n'
        lines = f"import sqlalchemy as sa\nfrom alembic import op\n{head}def upgrade():\n{body}"
        (scripts / "versions" / "9998_next.py").write_text(lines)

    return add


def with_a_key(database: Database) -> None:
    """A tenant, and a row that refers to it."""
    upgrade(database)
    with database.write() as session:
        tenant = create_tenant(session, slug="acme")
        issue_key(session, tenant.id, name="a")


def test_a_revision_may_make_a_table_anew_that_rows_refer_to(
    database: Database, add_revision: Callable[[str], None]
) -> None:
    with_a_key(database)
    add_revision(
        '    with op.batch_alter_table("tenants", recreate="auto") as table:\n'
        '        table.alter_column("name", type_=sa.String(100), existing_type=sa.String(200))\n'
    )

    upgrade(database)

    assert current(database) == "9998_next"
    with database.read() as session:
        [key] = list_keys(session)
        assert find_tenant(session, key.tenant_id) is not None
    with pytest.raises(IntegrityError), database.write() as session:
        session.execute(text("DELETE FROM tenants"))  # references hold again


def test_a_revision_that_breaks_a_reference_changes_nothing(
    database: Database, add_revision: Callable[[str], None]
) -> None:
    with_a_key(database)
    add_revision('    op.execute("DELETE FROM tenants")\n')

    with pytest.raises((DatabaseError, IntegrityError)):
        upgrade(database)

    assert current(database) == HEAD
    with database.read() as session:
        assert find_tenant(session, "acme") is not None


def test_several_starters_at_once_all_find_the_schema(url: str) -> None:
    faults: list[BaseException] = []
    together = threading.Barrier(4)

    def start() -> None:
        database = Database(url)
        try:
            together.wait()
            upgrade(database)
        except BaseException as fault:  # noqa: BLE001 -- a thread's fault must reach the test
            faults.append(fault)
        finally:
            database.close()

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert faults == []
    database = Database(url)
    assert current(database) == HEAD
    database.close()
