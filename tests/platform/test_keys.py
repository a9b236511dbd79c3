"""Keys: well formed, kept only as a hash, in force only while they should be."""

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text

from manylora.platform import keys
from manylora.platform.db import Database
from manylora.platform.errors import InvalidInputError
from manylora.platform.ids import now_us
from manylora.platform.keys import (
    authenticate,
    find_in_force,
    is_well_formed,
    issue_key,
    list_keys,
    revoke_key,
)
from manylora.platform.models import ApiKey, Tenant
from manylora.platform.tenants import activate, create_tenant, suspend

SHAPE = re.compile(r"ml_[0-9A-Za-z]{8}_[0-9A-Za-z]{49}")


@pytest.fixture
def tenant_id(db: Database) -> str:
    with db.write() as session:
        return create_tenant(session, slug="acme").id


def test_a_key_authenticates_its_tenant(db: Database, tenant_id: str) -> None:
    with db.write() as session:
        key, secret = issue_key(session, tenant_id, name="ci", scopes=("manage", "infer"))

    with db.read() as session:
        found = authenticate(session, secret)

    assert SHAPE.fullmatch(secret)
    assert found is not None
    assert (found[0].id, found[1].slug) == (key.id, "acme")
    assert found[0].scopes == ["infer", "manage"]


def test_the_database_holds_nothing_to_sign_in_with(db: Database, tenant_id: str) -> None:
    with db.write() as session:
        _, secret = issue_key(session, tenant_id, name="ci")

    with db.read() as session:
        row = str(session.execute(text("SELECT * FROM api_keys")).one())
    assert secret not in row
    assert secret[12:-4] not in row


@given(st.integers(0, 60), st.sampled_from(string.digits + string.ascii_letters))
def test_any_one_wrong_character_fails_the_checksum(position: int, letter: str) -> None:
    secret = keys._new_secret()
    wrong = secret[:position] + letter + secret[position + 1 :]

    assert is_well_formed(wrong) == (wrong == secret)


@pytest.mark.parametrize("presented", ["", "ml_", "ml_" + "é" * 58, "sk-" + "a" * 58, "a" * 8000])
def test_what_is_no_key_is_refused_before_any_query(presented: str) -> None:
    assert authenticate(None, presented) is None  # type: ignore[arg-type] -- not reached


def test_revoked_expired_and_suspended_are_not_in_force(db: Database, tenant_id: str) -> None:
    with db.write() as session:
        revoked, revoked_secret = issue_key(session, tenant_id, name="a")
        expired, expired_secret = issue_key(session, tenant_id, name="b")
        kept, kept_secret = issue_key(session, tenant_id, name="c", expires_at=now_us() + 10**9)
        revoke_key(session, revoked)
        expired.expires_at = now_us() - 1

    with db.read() as session:
        assert authenticate(session, revoked_secret) is None
        assert authenticate(session, expired_secret) is None
        found = authenticate(session, kept_secret)
        assert found is not None
    with db.write() as session:
        tenant = suspend(session, found[1])
        assert authenticate(session, kept_secret) is None
        activate(session, tenant)
        assert authenticate(session, kept_secret) is not None
    assert kept.revoked_at is None


def test_a_key_of_a_suspended_tenant_is_still_known(db: Database, tenant_id: str) -> None:
    with db.write() as session:
        key, secret = issue_key(session, tenant_id, name="a")
        tenant = session.get_one(Tenant, tenant_id)
        suspend(session, tenant)

    with db.read() as session:
        found = find_in_force(session, secret)
    assert found is not None
    assert (found[0].id, found[1].status) == (key.id, "suspended")


def test_revoking_writes_nothing_else(db: Database, tenant_id: str) -> None:
    """The row in hand may be old: what others have written since stays."""
    with db.write() as session:
        old, _ = issue_key(session, tenant_id, name="old")
    with db.write() as session:
        session.get_one(ApiKey, old.id).name = "new"

    with db.write() as session:
        revoked = revoke_key(session, old)

    assert revoked.name == "new"
    with db.read() as session:
        assert session.get_one(ApiKey, old.id).name == "new"


def test_revoking_twice_keeps_the_first_moment(db: Database, tenant_id: str) -> None:
    with db.write() as session:
        key, _ = issue_key(session, tenant_id, name="a")
        first = revoke_key(session, key).revoked_at
    with db.write() as session:
        assert revoke_key(session, key).revoked_at == first


@pytest.mark.parametrize(
    ("given_name", "scopes", "expires_at", "param"),
    [
        ("", ("infer",), None, "name"),
        ("a\0b", ("infer",), None, "name"),
        ("a" * 201, ("infer",), None, "name"),
        ("a", (), None, "scopes"),
        ("a", ("root",), None, "scopes"),
        ("a", ("infer",), 1, "expires_at"),
    ],
)
def test_a_bad_key_is_refused_by_field(
    db: Database,
    tenant_id: str,
    given_name: str,
    scopes: tuple[str, ...],
    expires_at: int | None,
    param: str,
) -> None:
    with db.write() as session, pytest.raises(InvalidInputError) as caught:
        issue_key(session, tenant_id, name=given_name, scopes=scopes, expires_at=expires_at)

    assert caught.value.param == param


def test_last_used_is_written_at_most_once_a_minute(
    db: Database, tenant_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with db.write() as session:
        key, _ = issue_key(session, tenant_id, name="a")
        assert keys.is_stale(key)
        keys.touch_key(session, key)
    with db.read() as session:
        [key] = list_keys(session, tenant_id)

    assert not keys.is_stale(key)
    assert key.last_used_at is not None
    monkeypatch.setattr(keys, "now_us", lambda: key.last_used_at + 60_000_000)
    assert keys.is_stale(key)
