"""Writers wait for one another instead of failing, and readers keep nothing."""

import threading
from pathlib import Path

import pytest

from manylora.platform.db import Database, sqlite_url
from manylora.platform.migrate import upgrade
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


def test_a_plain_postgresql_url_uses_the_driver_that_we_ship() -> None:
    database = Database("postgresql://user@127.0.0.1:1/nowhere")

    assert database.engine.dialect.driver == "psycopg"
