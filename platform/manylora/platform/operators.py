"""Operators: the people who sign in to `/admin`, and their sessions.

A session is an opaque 256-bit token in a cookie; the database keeps its SHA-256. It ends at
sign-out, when it was idle too long, and at a fixed age whatever happened in between.
"""

import hashlib
import secrets

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from sqlalchemy import select, update
from sqlalchemy.orm import Session as DbSession

from manylora.platform.db import Database
from manylora.platform.errors import ConflictError, InvalidInputError, NotFoundError
from manylora.platform.ids import new_id, now_us
from manylora.platform.models import Session, User

IDLE_US = 8 * 3600 * 1_000_000
ABSOLUTE_US = 7 * 24 * 3600 * 1_000_000
SLIDE_EVERY_US = 5 * 60 * 1_000_000  # the idle expiry is written at most this often
MIN_PASSWORD_CHARS = 12
MAX_PASSWORD_BYTES = 1024  # checked before the hash is computed
MAX_EMAIL_CHARS = 254

# OWASP ASVS 5.0 appendix C: at t=2, at least 19 MiB.
_HASHER = PasswordHasher(time_cost=2, memory_cost=19 * 1024, parallelism=1)
_NOBODY = _HASHER.hash(secrets.token_urlsafe(32))  # so that an unknown user costs the same


def create_operator(session: DbSession, *, email: str, password: str) -> User:
    """Add a person who may sign in to `/admin`.

    Raises:
        InvalidInputError: the email or the password will not do; `param` says which.
        ConflictError: the email is an operator's already.
    """
    email = email.strip().lower()
    local, _, domain = email.partition("@")
    if not (local and domain and email.isprintable() and len(email) <= MAX_EMAIL_CHARS):
        raise InvalidInputError("email must look like name@host", param="email")
    if len(password) < MIN_PASSWORD_CHARS or len(password.encode()) > MAX_PASSWORD_BYTES:
        raise InvalidInputError(
            f"password must have at least {MIN_PASSWORD_CHARS} characters "
            f"and at most {MAX_PASSWORD_BYTES} bytes",
            param="password",
        )
    if session.scalar(select(User.id).where(User.email == email)) is not None:
        raise ConflictError(f"{email} is already an operator", param="email")
    user = User(
        id=new_id("usr"),
        email=email,
        password_hash=_HASHER.hash(password),
        is_operator=True,
        status="active",
        created_at=now_us(),
    )
    session.add(user)
    session.flush()
    return user


def reset_password(session: DbSession, email: str) -> str:
    """A new password for an operator, who is signed out everywhere.

    Raises:
        NotFoundError: there is no such operator.
    """
    password = new_password()
    user = session.scalar(select(User).where(User.email == email.strip().lower()))
    if user is None:
        raise NotFoundError("there is no operator of this email", param="email")
    user.password_hash = _HASHER.hash(password)
    live = (Session.user_id == user.id) & Session.revoked_at.is_(None)
    session.execute(update(Session).where(live).values(revoked_at=now_us()))
    return password


def new_password() -> str:
    """A password of 96 random bits, to be shown once."""
    return secrets.token_urlsafe(12)


def sign_in(database: Database, *, email: str, password: str) -> str | None:
    """Start a session and return its token, or None: who or what was wrong is not told.

    The password is checked through a reader, so that nobody waits for the hash with the write
    lock held.
    """
    user = operator_of(database, email=email, password=password)
    if user is None:
        return None
    with database.write() as session:
        return _start_session(session, user)


def operator_of(database: Database, *, email: str, password: str) -> User | None:
    """The operator whom the email and the password would sign in."""
    if len(email) > MAX_EMAIL_CHARS or len(password.encode()) > MAX_PASSWORD_BYTES:
        return None
    if "\0" in email:  # PostgreSQL refuses the statement
        return None
    with database.read() as session:
        user = session.scalar(select(User).where(User.email == email.strip().lower()))
    matches = _verify(user.password_hash if user else _NOBODY, password)
    return user if user is not None and matches and _may_operate(user) else None


def _start_session(session: DbSession, user: User) -> str:
    now = now_us()
    token = secrets.token_urlsafe(32)
    session.add(
        Session(
            token_hash=_hash(token),
            user_id=user.id,
            created_at=now,
            idle_expires_at=now + IDLE_US,
            absolute_expires_at=now + ABSOLUTE_US,
        )
    )
    session.execute(update(User).where(User.id == user.id).values(last_login_at=now))
    return token


def signed_in_user(session: DbSession, token: str) -> User | None:
    """The operator of a live session.

    The idle expiry slides when the session given here is committed, so a page that refreshes
    itself is no activity if it looks through a reader.
    """
    found = _live_session(session, token)
    if found is None:
        return None
    user = session.get(User, found.user_id)
    if user is None or not _may_operate(user):
        return None
    slid = now_us() + IDLE_US
    if slid - found.idle_expires_at >= SLIDE_EVERY_US:
        found.idle_expires_at = slid
    return user


def sign_out(session: DbSession, token: str) -> None:
    """End a session; one that is over already stays so."""
    found = _live_session(session, token)
    if found is not None:
        found.revoked_at = now_us()


def _live_session(session: DbSession, token: str) -> Session | None:
    found = session.get(Session, _hash(token))
    if found is None or found.revoked_at is not None:
        return None
    now = now_us()
    return found if now < min(found.idle_expires_at, found.absolute_expires_at) else None


def _may_operate(user: User) -> bool:
    return user.is_operator and user.status == "active"


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _verify(password_hash: str, password: str) -> bool:
    try:
        return _HASHER.verify(password_hash, password)
    except (VerificationError, InvalidHashError):
        return False
