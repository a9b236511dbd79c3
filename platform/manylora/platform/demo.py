"""The demo: two tenants with small adapters, so that the first minute shows the point."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from anyio.to_thread import run_sync
from sqlalchemy import exists, select
from sqlalchemy.exc import IntegrityError

from manylora.platform.adapters import find_adapter_named
from manylora.platform.db import Database
from manylora.platform.errors import ConflictError, DemoError
from manylora.platform.keys import authenticate, issue_key
from manylora.platform.models import User
from manylora.platform.operators import create_operator, new_password, operator_of
from manylora.platform.services import Services
from manylora.platform.storage import REQUIRED_FILES, LocalFile
from manylora.platform.tenants import create_tenant, find_tenant

OPERATOR_EMAIL = "admin@localhost"
TENANTS = {"acme": ("pirate", "support"), "globex": ("json",)}
ADAPTERS = Path(__file__).parents[3] / "examples" / "adapters"


class Admin(TypedDict):
    email: str
    password: str | None  # None: it was set, or shown, where the demo did not learn of it


class DemoTenant(TypedDict):
    name: str  # its slug
    key: str
    adapters: list[str]


class DemoFacts(TypedDict):
    """What `DATA_DIR/demo.json` says, for scripts."""

    base_url: str
    admin: Admin
    base_model: str
    tenants: list[DemoTenant]


async def seed_demo(services: Services, base_url: str, password: str | None = None) -> DemoFacts:
    """Make what is missing of the demo, and write its facts to `DATA_DIR/demo.json`.

    Args:
        password: the first operator's, if it was made at this start. It is written at once:
            what follows may fail, and nothing can tell it again.

    Raises:
        DemoError: the demo adapters are not here.
        AdapterRefusedError: they do not fit the base model.
    """
    path = services.settings.data_dir / "demo.json"
    known = _read_facts(path)
    password = password or await run_sync(_known_password, services.db, known)
    facts = DemoFacts(
        base_url=base_url,
        admin={"email": OPERATOR_EMAIL, "password": password},
        base_model=services.base_model.name,
        tenants=known["tenants"] if known else [],
    )
    _write_facts(path, facts)
    facts["tenants"] = [
        await _seed_tenant(services, slug, adapters, _known_key(known, slug))
        for slug, adapters in TENANTS.items()
    ]
    _write_facts(path, facts)
    return facts


def how_to_begin(facts: DemoFacts) -> str:
    """What people at a terminal are told, with a request to paste."""
    base_url, admin, first = facts["base_url"], facts["admin"], facts["tenants"][0]
    tenants = [
        f"  tenant  {tenant['name']:8} key {tenant['key']}  "
        f"adapters: {', '.join(tenant['adapters'])}"
        for tenant in facts["tenants"]
    ]
    body = {
        "model": first["adapters"][0],
        "messages": [{"role": "user", "content": "How do I boil an egg?"}],
        "max_tokens": 64,
        "temperature": 0,
    }
    lines = [
        f"  admin   {base_url}/admin   {admin['email']}   {_said_password(admin)}",
        *tenants,
        "try it:",
        f"  curl {base_url}/v1/chat/completions \\",
        f"    -H 'Authorization: Bearer {first['key']}' \\",
        f"    -H 'Content-Type: application/json' -d '{json.dumps(body)}'",
    ]
    return "\n".join(lines)


def first_operator(db: Database) -> str | None:
    """Make the first operator of an installation; its one-time password, None if there is one."""
    password = new_password()
    try:
        with db.write() as session:
            if session.scalar(select(exists().where(User.is_operator))):
                return None
            create_operator(session, email=OPERATOR_EMAIL, password=password)
    except (ConflictError, IntegrityError):  # another process is starting at this moment
        return None
    return password


async def _seed_tenant(
    services: Services, slug: str, adapters: tuple[str, ...], key: str | None
) -> DemoTenant:
    tenant_id, valid_key = await run_sync(_tenant_and_key, services.db, slug, key)
    for name in adapters:
        if not await run_sync(_has_adapter, services.db, tenant_id, name):
            await services.adapters.upload(tenant_id, name, list(_files(name)))
    return {"name": slug, "key": valid_key, "adapters": list(adapters)}


def _tenant_and_key(db: Database, slug: str, key: str | None) -> tuple[str, str]:
    """The tenant's id and a key that works: the one known from before where it still does."""
    with db.write() as session:
        tenant = find_tenant(session, slug) or create_tenant(
            session, slug=slug, name=slug.capitalize()
        )
        if key is None or authenticate(session, key) is None:
            _, key = issue_key(session, tenant.id, name="demo", scopes=("infer", "manage"))
        return tenant.id, key


def _has_adapter(db: Database, tenant_id: str, name: str) -> bool:
    with db.read() as session:
        return find_adapter_named(session, tenant_id, name) is not None


def _files(name: str) -> Iterator[LocalFile]:
    for filename in REQUIRED_FILES:
        path = ADAPTERS / name / filename
        if not path.is_file():
            raise DemoError(f"the demo adapter {name} is not here: {path} is missing")
        yield LocalFile(path)


def _known_password(db: Database, known: DemoFacts | None) -> str | None:
    """The first operator's password, unless another was set since it was written down."""
    password = known["admin"]["password"] if known else None
    if password is None or operator_of(db, email=OPERATOR_EMAIL, password=password) is None:
        return None
    return password


def _said_password(admin: Admin) -> str:
    if admin["password"] is not None:
        return admin["password"]
    return f"password: as set; `manylora operator reset-password {admin['email']}` makes another"


def _known_key(known: DemoFacts | None, slug: str) -> str | None:
    tenants = known["tenants"] if known else []
    return next((tenant["key"] for tenant in tenants if tenant["name"] == slug), None)


def _read_facts(path: Path) -> DemoFacts | None:
    if not path.exists():
        return None
    facts: DemoFacts = json.loads(path.read_bytes())
    return facts


def _write_facts(path: Path, facts: DemoFacts) -> None:
    """Whole or not at all, and for the owner's eyes only: it has secrets."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)  # of a start that was interrupted
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(facts, file, indent=2)
        file.write("\n")
    new.rename(path)
