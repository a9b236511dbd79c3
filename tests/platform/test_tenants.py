"""Tenants have a slug of their own, also when two are made at one moment."""

import threading

import pytest

from manylora.platform.db import Database
from manylora.platform.errors import ConflictError, InvalidInputError
from manylora.platform.models import Tenant
from manylora.platform.tenants import create_tenant, find_tenant, list_tenants, suspend


def test_a_tenant_is_found_by_id_and_by_slug(db: Database) -> None:
    with db.write() as session:
        made = create_tenant(session, slug="acme")
        create_tenant(session, slug="globex", name="  Globex & Söhne ")

    with db.read() as session:
        by_id, by_slug = find_tenant(session, made.id), find_tenant(session, "acme")
        other = find_tenant(session, "globex")
        assert by_id is by_slug
        assert by_id is not None
        assert (by_id.name, by_id.status) == ("acme", "active")
        assert other is not None
        assert other.name == "Globex & Söhne"
        assert [tenant.slug for tenant in list_tenants(session)] == ["acme", "globex"]


@pytest.mark.parametrize("name", ["", "nosuch", "ACME", "acme\0", "%", "' OR 1=1 --"])
def test_nothing_else_finds_it(db: Database, name: str) -> None:
    with db.write() as session:
        create_tenant(session, slug="acme")

    with db.read() as session:
        assert find_tenant(session, name) is None


@pytest.mark.parametrize(
    "slug", ["", "-a", "a-", "A", "a_b", "a.b", "a b", "a" * 65, "á", "a\n", "a\0"]
)
def test_a_bad_slug_is_refused(db: Database, slug: str) -> None:
    with db.write() as session, pytest.raises(InvalidInputError) as caught:
        create_tenant(session, slug=slug)

    assert caught.value.param == "slug"


def test_a_change_is_kept(db: Database) -> None:
    with db.write() as session:
        tenant = create_tenant(session, slug="acme")
    with db.write() as session:
        suspend(session, tenant)

    with db.read() as session:
        found = find_tenant(session, "acme")
        assert found is not None
        assert found.status == "suspended"


def test_suspending_writes_nothing_else(db: Database) -> None:
    """The row in hand may be old: what others have written since stays."""
    with db.write() as session:
        old = create_tenant(session, slug="acme", name="old")
    with db.write() as session:
        session.get_one(Tenant, old.id).name = "new"

    with db.write() as session:
        suspended = suspend(session, old)

    assert (suspended.name, suspended.status) == ("new", "suspended")
    with db.read() as session:
        assert session.get_one(Tenant, old.id).name == "new"


def test_one_of_many_at_once_gets_the_slug(db: Database) -> None:
    together = threading.Barrier(6)
    outcomes: list[str] = []

    def make() -> None:
        together.wait()
        try:
            with db.write() as session:
                create_tenant(session, slug="acme")
            outcomes.append("made")
        except ConflictError:
            outcomes.append("taken")

    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(outcomes) == ["made", *["taken"] * 5]
