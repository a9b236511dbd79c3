"""The demo is made once, told to scripts, and found again by the next start."""

import asyncio
import json
import stat
from pathlib import Path

import pytest
from sqlalchemy import func, select

from manylora.platform import demo
from manylora.platform.db import Database
from manylora.platform.demo import (
    OPERATOR_EMAIL,
    DemoFacts,
    first_operator,
    how_to_begin,
    seed_demo,
)
from manylora.platform.errors import DemoError
from manylora.platform.keys import authenticate
from manylora.platform.models import AdapterVersion, ApiKey, Tenant, User
from manylora.platform.operators import reset_password, sign_in
from manylora.platform.services import Services
from support.app import make_services


@pytest.fixture
def services(db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Services:
    for name in ("pirate", "support", "json"):
        folder = tmp_path / "examples" / name
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text('{"r": 4}')
        (folder / "adapter_model.safetensors").write_text(name)
    monkeypatch.setattr(demo, "ADAPTERS", tmp_path / "examples")
    (tmp_path / "data").mkdir()
    return make_services(db, tmp_path / "data")


def start(services: Services, base_url: str = "http://127.0.0.1:8000") -> DemoFacts:
    password = first_operator(services.db)
    return asyncio.run(seed_demo(services, base_url, password))


def counts(db: Database) -> list[int | None]:
    with db.read() as session:
        return [
            session.scalar(select(func.count()).select_from(table))
            for table in (Tenant, ApiKey, AdapterVersion, User)
        ]


def test_the_facts_are_written_for_the_owner_and_work(services: Services) -> None:
    facts = start(services)

    path = services.settings.data_dir / "demo.json"
    assert json.loads(path.read_text()) == facts
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert facts["base_model"] == "tiny"
    assert {t["name"]: t["adapters"] for t in facts["tenants"]} == {
        "acme": ["pirate", "support"],
        "globex": ["json"],
    }
    password = facts["admin"]["password"]
    assert password is not None
    assert sign_in(services.db, email=facts["admin"]["email"], password=password)
    with services.db.read() as session:
        for tenant in facts["tenants"]:
            found = authenticate(session, tenant["key"])
            assert found is not None
            assert found[1].slug == tenant["name"]


def test_a_second_start_makes_nothing_and_tells_the_same(services: Services) -> None:
    first = start(services)
    before = counts(services.db)

    second = start(services, "http://127.0.0.1:9000")

    assert counts(services.db) == before == [2, 2, 3, 1]
    assert second == {**first, "base_url": "http://127.0.0.1:9000"}


def test_lost_facts_give_new_keys_and_keep_the_password_secret(services: Services) -> None:
    first = start(services)
    (services.settings.data_dir / "demo.json").unlink()

    second = start(services)

    assert second["admin"]["password"] is None
    assert second["tenants"][0]["key"] != first["tenants"][0]["key"]


def test_a_password_that_was_reset_is_told_no_more(services: Services) -> None:
    dead = start(services)["admin"]["password"]
    with services.db.write() as session:
        fresh = reset_password(session, OPERATOR_EMAIL)

    facts = start(services)

    assert dead is not None
    assert facts["admin"]["password"] is None
    assert json.loads((services.settings.data_dir / "demo.json").read_text()) == facts
    said = how_to_begin(facts)
    assert dead not in said
    assert fresh not in said
    assert f"as set; `manylora operator reset-password {OPERATOR_EMAIL}` makes another" in said


def test_a_password_shown_before_there_was_a_demo_is_not_told_as_nothing(
    services: Services,
) -> None:
    first_operator(services.db)

    facts = start(services)

    assert facts["admin"]["password"] is None
    assert f"reset-password {OPERATOR_EMAIL}" in how_to_begin(facts)


def test_missing_adapters_are_named(services: Services, tmp_path: Path) -> None:
    (tmp_path / "examples" / "json" / "adapter_model.safetensors").unlink()

    with pytest.raises(DemoError, match="json"):
        start(services)


def test_the_password_is_written_before_anything_can_fail(
    services: Services, tmp_path: Path
) -> None:
    missing = tmp_path / "examples" / "pirate" / "adapter_model.safetensors"
    weights = missing.read_bytes()
    missing.unlink()

    with pytest.raises(DemoError):
        start(services)

    facts = json.loads((services.settings.data_dir / "demo.json").read_text())
    admin = facts["admin"]
    assert sign_in(services.db, email=admin["email"], password=admin["password"])
    assert facts["tenants"] == []
    missing.write_bytes(weights)
    assert start(services)["admin"] == admin


def test_the_facts_are_not_written_through_a_link(services: Services, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (services.settings.data_dir / "demo.new").symlink_to(victim)

    start(services)

    assert victim.read_text() == "kept"
    assert not (services.settings.data_dir / "demo.json").is_symlink()


def test_people_are_told_all_they_need(services: Services) -> None:
    facts = start(services)

    said = how_to_begin(facts)

    for fact in (facts["admin"]["password"], *(tenant["key"] for tenant in facts["tenants"])):
        assert fact is not None
        assert fact in said


def test_the_first_operator_is_made_once(services: Services) -> None:
    password = first_operator(services.db)

    assert password is not None
    assert len(password) >= 12
    assert first_operator(services.db) is None
