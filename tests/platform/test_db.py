"""Writers wait for one another instead of failing, and readers keep nothing."""

import threading
from pathlib import Path

import pytest
from sqlalchemy.exc import IntegrityError

from manylora.platform.db import Database, open_database, sqlite_url
from manylora.platform.errors import DatabaseError
from manylora.platform.migrate import upgrade
from manylora.platform.models import User
from manylora.platform.operators import create_operator
from manylora.platform.tenants import create_tenant, find_tenant

WRITERS, ROUNDS = 6, 20


def test_none_of_many_that_read_and_then_write_is_lost(tmp_path: Path) -> None:
    """On SQLite a deferred transaction would fail here at once with "database is locked"."""
    database = Database(sqlite_url(tmp_path / "test.db"))
    upgrade(database)
    with database.write() as session:
        create_tenant(session, slug="counter", name="0")
    faults: list[BaseException] = []

    def count() -> None:
        try:
            for _ in range(ROUNDS):
                with database.write() as session:
                    tenant = find_tenant(session, "counter")
                    assert tenant is not None
                    tenant.name = str(int(tenant.name) + 1)
        except BaseException as fault:  # noqa: BLE001 -- a thread's fault must reach the test
            faults.append(fault)

    threads = [threading.Thread(target=count) for _ in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert faults == []
    with database.read() as session:
        tenant = find_tenant(session, "counter")
        assert tenant is not None
        assert int(tenant.name) == WRITERS * ROUNDS
    database.close()


def test_what_a_reader_changes_is_not_kept(db: Database) -> None:
    with db.read() as session:
        create_tenant(session, slug="acme")

    with db.read() as session:
        assert find_tenant(session, "acme") is None


def test_what_a_failed_writer_changed_is_not_kept(db: Database) -> None:
    class Failure(Exception):
        """Something goes wrong after the change."""

    def write_and_fail() -> None:
        with db.write() as session:
            create_tenant(session, slug="acme")
            raise Failure

    with pytest.raises(Failure):
        write_and_fail()

    with db.read() as session:
        assert find_tenant(session, "acme") is None


def test_an_error_does_not_tell_what_was_to_be_written(db: Database) -> None:
    with db.write() as session:
        create_operator(session, email="ada@example.org", password="correct horse battery")

    with pytest.raises(IntegrityError) as caught, db.write() as session:
        session.add(User(id="usr_1", email="ada@example.org", password_hash="SECRET", created_at=0))

    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["nonsense", "", "mysql://x/y", "postgresql://h:port/x", "postgresql+asyncpg://x/y"]
)
def test_what_is_no_url_of_ours_is_refused(url: str) -> None:
    with pytest.raises(DatabaseError, match=r"^database_url"):
        Database(url)


@pytest.mark.parametrize(
    "url", ["sqlite:////nowhere/x.db", "postgresql://ada:SECRET@127.0.0.1:1/nowhere"]
)
def test_a_database_out_of_reach_is_one_line_without_the_password(url: str) -> None:
    with pytest.raises(DatabaseError) as caught, open_database(url) as database:
        upgrade(database)

    said = str(caught.value)
    assert "nowhere" in said
    assert "\n" not in said
    assert "SECRET" not in said


def test_a_plain_postgresql_url_uses_the_driver_that_we_ship() -> None:
    database = Database("postgresql://user@127.0.0.1:1/nowhere")

    assert database.engine.dialect.driver == "psycopg"
