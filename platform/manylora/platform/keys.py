"""API keys: issued once, kept as SHA-256, checked on every request.

A key is `ml_` + 8 characters that name it + `_` + 32 random bytes + CRC-32, in base62. The
checksum lets a mistyped key fail before any query. A fast hash is right here: the secret has
256 bits, so that nothing can be guessed, and a slow one would be paid on every request.
"""

import hashlib
import secrets
import string
import zlib
from collections.abc import Sequence

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from manylora.platform.errors import InvalidInputError
from manylora.platform.ids import new_id, now_us
from manylora.platform.models import ApiKey, Tenant
from manylora.platform.tenants import checked_name

SCOPES = ("infer", "manage")
LAST_USED_RESOLUTION_US = 60_000_000

_ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
_NAME_LENGTH = 8
_SECRET_LENGTH = 43  # 32 bytes in base62
_CHECKSUM_LENGTH = 6  # 4 bytes in base62
_KEY_LENGTH = len("ml_") + _NAME_LENGTH + len("_") + _SECRET_LENGTH + _CHECKSUM_LENGTH


def issue_key(
    session: Session,
    tenant_id: str,
    *,
    name: str,
    scopes: Sequence[str] = ("infer",),
    expires_at: int | None = None,
) -> tuple[ApiKey, str]:
    """Make a key. The second of the pair is the secret, which is never to be had again.

    Args:
        expires_at: UTC microseconds; None: never.

    Raises:
        InvalidInputError: the name, a scope or the time cannot be used; `param` says which.
    """
    name = checked_name(name, param="name")
    _check_terms(scopes, expires_at)
    secret = _new_secret()
    key = _row_of(secret)
    key.tenant_id, key.name = tenant_id, name
    key.scopes, key.expires_at = sorted(set(scopes)), expires_at
    session.add(key)
    session.flush()
    return key, secret


def _row_of(secret: str) -> ApiKey:
    """What is kept of a secret."""
    return ApiKey(
        id=new_id("key"),
        prefix=secret.rpartition("_")[0],
        last4=secret[-4:],
        secret_hash=_hash(secret),
        revoked_at=None,
        last_used_at=None,
        created_at=now_us(),
    )


def _check_terms(scopes: Sequence[str], expires_at: int | None) -> None:
    if not scopes or any(scope not in SCOPES for scope in scopes):
        raise InvalidInputError(f"scopes must be some of: {', '.join(SCOPES)}", param="scopes")
    if expires_at is not None and expires_at <= now_us():
        raise InvalidInputError("expires_at must be in the future", param="expires_at")


def list_keys(session: Session, tenant_id: str | None = None) -> list[ApiKey]:
    """The keys of one tenant, or of all, newest first; revoked ones too."""
    query = select(ApiKey).order_by(ApiKey.created_at.desc(), ApiKey.id.desc())
    if tenant_id is not None:
        query = query.where(ApiKey.tenant_id == tenant_id)
    return list(session.scalars(query))


def find_key(session: Session, key_id: str, *, tenant_id: str | None = None) -> ApiKey | None:
    """The key of this id, within one tenant if given."""
    if "\0" in key_id:  # PostgreSQL refuses the statement
        return None
    query = select(ApiKey).where(ApiKey.id == key_id)
    if tenant_id is not None:
        query = query.where(ApiKey.tenant_id == tenant_id)
    return session.scalars(query).one_or_none()


def revoke_key(session: Session, key: ApiKey) -> ApiKey:
    """Refuse the key from now on; may repeat."""
    unrevoked = (ApiKey.id == key.id) & ApiKey.revoked_at.is_(None)
    session.execute(update(ApiKey).where(unrevoked).values(revoked_at=now_us()))
    return session.get_one(ApiKey, key.id, populate_existing=True)


def authenticate(session: Session, presented: str) -> tuple[ApiKey, Tenant] | None:
    """The key and its tenant, if both are in force now."""
    found = find_in_force(session, presented)
    return found if found is not None and found[1].status == "active" else None


def find_in_force(session: Session, presented: str) -> tuple[ApiKey, Tenant] | None:
    """The key, if it is in force now, and its tenant, which may be suspended."""
    if not is_well_formed(presented):
        return None
    query = (
        select(ApiKey, Tenant)
        .join(Tenant, Tenant.id == ApiKey.tenant_id)
        .where(ApiKey.secret_hash == _hash(presented))
    )
    row = session.execute(query).one_or_none()
    if row is None:
        return None
    key, tenant = row
    expired = key.expires_at is not None and key.expires_at <= now_us()
    return None if expired or key.revoked_at is not None else (key, tenant)


def is_stale(key: ApiKey) -> bool:
    """Whether `last_used_at` is worth writing again."""
    return key.last_used_at is None or now_us() - key.last_used_at >= LAST_USED_RESOLUTION_US


def touch_key(session: Session, key: ApiKey) -> None:
    """Note that the key was used; at most once a minute, so that requests do not wait on it."""
    session.execute(update(ApiKey).where(ApiKey.id == key.id).values(last_used_at=now_us()))


def is_well_formed(presented: str) -> bool:
    """Whether this could be a key at all, by shape and checksum."""
    if len(presented) != _KEY_LENGTH or not presented.isascii() or presented[:3] != "ml_":
        return False
    body, checksum = presented[:-_CHECKSUM_LENGTH], presented[-_CHECKSUM_LENGTH:]
    return secrets.compare_digest(checksum, _checksum(body))


def _new_secret() -> str:
    prefix = "ml_" + "".join(secrets.choice(_ALPHABET) for _ in range(_NAME_LENGTH))
    body = f"{prefix}_{_base62(int.from_bytes(secrets.token_bytes(32)), _SECRET_LENGTH)}"
    return body + _checksum(body)


def _checksum(body: str) -> str:
    return _base62(zlib.crc32(body.encode()), _CHECKSUM_LENGTH)


def _base62(number: int, length: int) -> str:
    digits = ""
    for _ in range(length):
        number, digit = divmod(number, 62)
        digits = _ALPHABET[digit] + digits
    return digits


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
