"""Operators sign in, stay signed in while they work, and are out when they should be."""

import hashlib
import time

import pytest
from sqlalchemy import select

from manylora.platform import operators
from manylora.platform.db import Database
from manylora.platform.errors import ConflictError, InvalidInputError, NotFoundError
from manylora.platform.models import Session, User
from manylora.platform.operators import (
    create_operator,
    reset_password,
    sign_in,
    sign_out,
    signed_in_user,
)

EMAIL, PASSWORD = "ada@example.org", "correct horse battery"
HOUR_US = 3600 * 1_000_000


class Clock:
    """The time that `operators` sees, moved by the test."""

    def __init__(self) -> None:
        self.now = time.time_ns() // 1000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(operators, "now_us", clock)
    return clock


@pytest.fixture
def database(db: Database, clock: Clock) -> Database:
    with db.write() as session:
        create_operator(session, email="Ada@Example.org", password=PASSWORD)
    return db


def enter(database: Database) -> str:
    token = sign_in(database, email=EMAIL, password=PASSWORD)
    assert token is not None
    return token


def is_in(database: Database, token: str) -> bool:
    with database.write() as session:
        return signed_in_user(session, token) is not None


def test_the_right_password_opens_a_session_whatever_the_case_of_the_email(database):
    token = sign_in(database, email=" ADA@example.org ", password=PASSWORD)

    assert token is not None
    with database.read() as session:
        assert signed_in_user(session, token).email == EMAIL
        assert session.scalar(select(User)).last_login_at is not None


@pytest.mark.parametrize(
    ("email", "password"),
    [
        (EMAIL, "correct horse batterz"),
        (EMAIL, ""),
        (EMAIL, PASSWORD + "\0"),
        ("nobody@example.org", PASSWORD),
        ("ada@example.org\0", PASSWORD),
        ("' OR 1=1 --", PASSWORD),
        ("a" * 300 + "@example.org", PASSWORD),
    ],
)
def test_anything_else_opens_none(database, email, password):
    assert sign_in(database, email=email, password=password) is None
    with database.read() as session:
        assert session.scalar(select(Session)) is None


def test_a_huge_password_is_refused_without_being_hashed(database, monkeypatch):
    monkeypatch.setattr(operators, "_verify", lambda *_: pytest.fail("it was hashed"))

    assert sign_in(database, email=EMAIL, password="a" * 200_000) is None


def test_an_unknown_name_costs_one_hash_like_a_known_one(database, monkeypatch):
    hashed = []
    monkeypatch.setattr(operators, "_verify", lambda *given: bool(hashed.append(given)))

    sign_in(database, email="nobody@example.org", password="x")
    sign_in(database, email=EMAIL, password="x")

    assert len(hashed) == 2
    assert all(stored.startswith("$argon2id$") for stored, _ in hashed)


def test_the_database_holds_neither_password_nor_token(database):
    token = enter(database)

    with database.read() as session:
        stored = session.scalar(select(Session))
        user = session.scalar(select(User))
    assert stored.token_hash == hashlib.sha256(token.encode()).digest()
    assert user.password_hash.startswith("$argon2id$")
    assert PASSWORD not in user.password_hash


def test_each_sign_in_has_its_own_long_token(database):
    first, second = enter(database), enter(database)

    assert first != second
    assert len(first) == 43  # 256 bits in base64


@pytest.mark.parametrize("token", ["", "x", "\udcff", "a" * 43])
def test_a_made_up_token_is_nobody(database, token):
    enter(database)

    assert not is_in(database, token)


def test_a_session_that_lies_idle_ends(database, clock):
    token = enter(database)

    clock.now += 8 * HOUR_US

    assert not is_in(database, token)


def test_work_keeps_a_session_open_until_its_fixed_age(database, clock):
    token = enter(database)
    started = clock.now

    while clock.now < started + 7 * 24 * HOUR_US - 4 * HOUR_US:
        clock.now += 4 * HOUR_US
        if clock.now < started + 7 * 24 * HOUR_US:
            assert is_in(database, token)
    clock.now = started + 7 * 24 * HOUR_US

    assert not is_in(database, token)


def test_looking_through_a_reader_does_not_keep_a_session_open(database, clock):
    token = enter(database)

    clock.now += 7 * HOUR_US
    with database.read() as session:
        assert signed_in_user(session, token) is not None
    clock.now += 2 * HOUR_US

    assert not is_in(database, token)


def test_signing_out_ends_this_session_and_no_other(database):
    left, kept = enter(database), enter(database)

    with database.write() as session:
        sign_out(session, left)
        sign_out(session, "never was")

    assert not is_in(database, left)
    assert is_in(database, kept)


@pytest.mark.parametrize("change", [{"status": "disabled"}, {"is_operator": False}])
def test_who_may_no_longer_operate_is_out_at_once(database, change):
    token = enter(database)

    with database.write() as session:
        user = session.scalar(select(User))
        for name, value in change.items():
            setattr(user, name, value)

    assert not is_in(database, token)
    assert sign_in(database, email=EMAIL, password=PASSWORD) is None


@pytest.mark.parametrize(
    ("email", "password", "param"),
    [
        ("no-at-sign", PASSWORD, "email"),
        ("@host", PASSWORD, "email"),
        ("name@", PASSWORD, "email"),
        ("two\nlines@host", PASSWORD, "email"),
        ("a" * 250 + "@host", PASSWORD, "email"),
        ("b@example.org", "short", "password"),
        ("b@example.org", "x" * 1025, "password"),
    ],
)
def test_an_operator_that_could_not_sign_in_is_not_made(database, email, password, param):
    with database.write() as session, pytest.raises(InvalidInputError) as refusal:
        create_operator(session, email=email, password=password)

    assert refusal.value.param == param


def test_an_email_is_an_operator_once(database):
    with database.write() as session, pytest.raises(ConflictError) as refusal:
        create_operator(session, email="ADA@EXAMPLE.ORG", password=PASSWORD)

    assert refusal.value.param == "email"


def test_a_reset_password_takes_the_place_of_the_old_one_and_ends_every_session(database):
    token = enter(database)

    with database.write() as session:
        password = reset_password(session, " ADA@example.org ")

    assert not is_in(database, token)
    assert sign_in(database, email=EMAIL, password=PASSWORD) is None
    assert sign_in(database, email=EMAIL, password=password) is not None


def test_nobodys_password_is_not_reset(database):
    with database.write() as session, pytest.raises(NotFoundError):
        reset_password(session, "nobody@example.org")


def test_signing_in_writes_nothing_else(database, monkeypatch):
    """Somebody disables the operator while the password is being checked."""
    verify = operators._verify

    def disabled_meanwhile(stored: str, given: str) -> bool:
        with database.write() as session:
            session.scalar(select(User)).status = "disabled"
        return verify(stored, given)

    monkeypatch.setattr(operators, "_verify", disabled_meanwhile)

    token = enter(database)

    with database.read() as session:
        assert session.scalar(select(User)).status == "disabled"
    assert not is_in(database, token)
