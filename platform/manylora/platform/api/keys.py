"""`…/keys`: a tenant's API keys."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field

from manylora.platform import keys
from manylora.platform.api.auth import ManagedTenant, services_of
from manylora.platform.api.bodies import Body, Label
from manylora.platform.api.body import JsonAnswer, json_body
from manylora.platform.api.times import parse_time, to_seconds
from manylora.platform.errors import NotFoundError
from manylora.platform.models import ApiKey

router = APIRouter(prefix="/keys")


class NewKey(Body):
    """`POST …/keys`."""

    name: str
    scopes: list[Label] = Field(default=["infer"], max_length=16)
    expires_at: int | Label | None = None  # Unix seconds or ISO 8601


@router.post("")
def create_key(
    request: Request,
    tenant: ManagedTenant,
    body: Annotated[NewKey, Depends(json_body(NewKey))],
) -> Response:
    """Make a key; its secret is in this answer and never again."""
    expires = body.expires_at
    with services_of(request).db.write() as session:
        key, secret = keys.issue_key(
            session,
            tenant.id,
            name=body.name,
            scopes=body.scopes,
            expires_at=None if expires is None else parse_time(expires, param="expires_at"),
        )
    answer = key_json(key) | {"key": secret}
    return JsonAnswer(answer, 201, headers={"cache-control": "no-store"})


@router.get("")
def list_keys(request: Request, tenant: ManagedTenant) -> Response:
    """The tenant's keys, revoked ones too."""
    with services_of(request).db.read() as session:
        found = keys.list_keys(session, tenant.id)
    return JsonAnswer({"object": "list", "data": [key_json(key) for key in found]})


@router.delete("/{key_id}")
def revoke_key(request: Request, key_id: str, tenant: ManagedTenant) -> Response:
    """Refuse the key from now on."""
    with services_of(request).db.write() as session:
        key = keys.find_key(session, key_id, tenant_id=tenant.id)
        if key is None:
            raise NotFoundError("there is no such key", param="key_id")
        keys.revoke_key(session, key)
    return JsonAnswer(key_json(key))


def key_json(key: ApiKey) -> dict[str, Any]:
    """A key as the API shows it: never its secret."""
    return {
        "id": key.id,
        "object": "api_key",
        "name": key.name,
        "prefix": key.prefix,
        "redacted_value": f"{key.prefix}_…{key.last4}",
        "scopes": key.scopes,
        "created_at": to_seconds(key.created_at),
        "expires_at": to_seconds(key.expires_at),
        "last_used_at": to_seconds(key.last_used_at),
        "revoked_at": to_seconds(key.revoked_at),
    }
