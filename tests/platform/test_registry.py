"""Uploads become versions, whole or not at all; aliases move by compare-and-set."""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import delete, event
from sqlalchemy.exc import IntegrityError

from manylora.platform import storage
from manylora.platform.adapters import AdapterView, find_adapter_named, list_adapters, move_alias
from manylora.platform.base_models import register_base_model
from manylora.platform.db import Database
from manylora.platform.errors import (
    AdapterRefusedError,
    ConflictError,
    InvalidInputError,
    StorageFullError,
    TooLargeError,
)
from manylora.platform.models import AdapterVersion
from manylora.platform.registry import Upload
from support.app import MemoryFile, TestBed, adapter_files, make_services
from support.fake_engine import FakeEngine


def upload(
    bed: TestBed, name: str, weights: bytes = b"w", *, slug: str = "acme", promote: bool = False
) -> Upload:
    return asyncio.run(
        bed.services.adapters.upload(
            bed.tenant_ids[slug], name, adapter_files(weights), promote=promote
        )
    )


def view(bed: TestBed, name: str, slug: str = "acme") -> AdapterView:
    with bed.services.db.read() as session:
        found = find_adapter_named(session, bed.tenant_ids[slug], name)
    assert found is not None
    return found


def stored(bed: TestBed) -> set[str]:
    root = bed.services.settings.adapters_dir
    return {path.name for path in root.iterdir() if path.name != ".staging"}


def staged(bed: TestBed) -> list[Path]:
    return list((bed.services.settings.adapters_dir / ".staging").iterdir())


def test_the_first_version_is_live_and_the_next_only_when_promoted(bed: TestBed) -> None:
    first = upload(bed, "mine", b"1")
    second = upload(bed, "mine", b"2")
    live_before = view(bed, "mine").live
    third = upload(bed, "mine", b"3", promote=True)

    assert [u.version.number for u in (first, second, third)] == [1, 2, 3]
    assert live_before is not None
    assert live_before.number == 1
    live = view(bed, "mine").live
    assert live is not None
    assert live.number == 3
    assert {first.version.digest, second.version.digest, third.version.digest} <= stored(bed)


def test_the_same_files_again_are_the_version_that_is_there(bed: TestBed) -> None:
    first = upload(bed, "mine", b"1")
    upload(bed, "mine", b"2", promote=True)
    again = upload(bed, "mine", b"1", promote=True)

    assert (again.created, again.version.id) == (False, first.version.id)
    assert len(view(bed, "mine").versions) == 2
    live = view(bed, "mine").live
    assert live is not None
    assert live.number == 1


def test_uploads_at_once_get_their_own_numbers(bed: TestBed) -> None:
    async def both() -> list[Upload]:
        take = bed.services.adapters.upload
        tenant = bed.tenant_ids["acme"]
        return await asyncio.gather(
            *(take(tenant, "mine", adapter_files(bytes([i]))) for i in range(5))
        )

    uploads = asyncio.run(both())

    assert sorted(u.version.number for u in uploads) == [1, 2, 3, 4, 5]


def test_two_tenants_share_files_and_nothing_else(bed: TestBed) -> None:
    mine, theirs = upload(bed, "same", b"1"), upload(bed, "same", b"1", slug="globex")

    assert mine.version.digest == theirs.version.digest
    assert mine.adapter.id != theirs.adapter.id

    asyncio.run(bed.services.adapters.delete(view(bed, "same")))
    assert theirs.version.digest in stored(bed)
    assert bed.engine.unloaded == []

    asyncio.run(bed.services.adapters.delete(view(bed, "same", "globex")))
    assert theirs.version.digest not in stored(bed)
    assert bed.engine.unloaded == [theirs.version.digest]


def test_a_deleted_name_is_free_again(bed: TestBed) -> None:
    old = upload(bed, "mine", b"1")
    asyncio.run(bed.services.adapters.delete(view(bed, "mine")))
    new = upload(bed, "mine", b"1")

    assert new.version.number == 1
    assert new.adapter.id != old.adapter.id
    assert new.version.digest in stored(bed)


def test_a_refusal_tells_every_reason_and_leaves_nothing(bed: TestBed) -> None:
    before = stored(bed)
    files = [
        MemoryFile("adapter_config.json", b"{}"),
        MemoryFile("adapter_model.safetensors", b"x"),
    ]

    with pytest.raises(AdapterRefusedError) as caught:
        asyncio.run(bed.services.adapters.upload(bed.tenant_ids["acme"], "mine", files))

    assert caught.value.reasons == ["r is missing", "nothing else is said either"]
    assert (stored(bed), staged(bed)) == (before, [])
    with bed.services.db.read() as session:
        assert find_adapter_named(session, bed.tenant_ids["acme"], "mine") is None


@pytest.mark.parametrize(
    "names",
    [
        ["adapter_config.json"],
        ["adapter_model.safetensors"],
        ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"],
        ["adapter_config.json", "adapter_model.safetensors", "../../etc/passwd"],
        ["adapter_config.json", "adapter_model.safetensors", "adapter_config.json"],
        ["adapter_config.json", "adapter_model.safetensors", None],
    ],
)
def test_only_known_files_each_once_are_taken(bed: TestBed, names: list[str | None]) -> None:
    files = [MemoryFile(name, b'{"r": 1}') for name in names]

    with pytest.raises(InvalidInputError) as caught:
        asyncio.run(bed.services.adapters.upload(bed.tenant_ids["acme"], "mine", files))

    assert caught.value.param == "files"
    assert staged(bed) == []


@pytest.mark.parametrize("name", ["", "a" * 65, "A", "a/b", "..", "a@b", "а", "x ", "tiny"])
def test_a_bad_name_is_refused(bed: TestBed, name: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        upload(bed, name)

    assert caught.value.param == "name"


def test_a_name_of_another_base_is_taken(bed: TestBed) -> None:
    with bed.services.db.write() as session:
        other = register_base_model(session, name="other", digest="1" * 64)
        found = find_adapter_named(session, bed.tenant_ids["acme"], "pirate")
        assert found is not None
        found.adapter.base_model_id = other.id

    with pytest.raises(ConflictError, match="another base"):
        upload(bed, "pirate", b"new")


def test_an_upload_past_the_limit_is_given_up(bed: TestBed) -> None:
    limit = bed.services.settings.max_upload_bytes

    with pytest.raises(TooLargeError):
        upload(bed, "mine", b"x" * limit)

    assert staged(bed) == []


def test_a_full_disk_is_507_and_leaves_nothing(
    bed: TestBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(storage.errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)

    with pytest.raises(StorageFullError):
        upload(bed, "mine")

    assert staged(bed) == []


def test_an_alias_moves_only_from_where_it_was_thought_to_be(bed: TestBed) -> None:
    for weights in (b"1", b"2", b"3"):
        upload(bed, "mine", weights)

    def move(alias: str, number: int, expected: int | None = None) -> int:
        with bed.services.db.write() as session:
            found = find_adapter_named(session, bed.tenant_ids["acme"], "mine")
            assert found is not None
            return move_alias(session, found, alias, number, expected=expected).generation

    assert move("live", 2, expected=1) == 2
    with pytest.raises(ConflictError):
        move("live", 3, expected=1)
    assert move("stable", 1) == 1
    assert move("stable", 3) == 2
    with pytest.raises(InvalidInputError, match="version"):
        move("live", 4)
    with pytest.raises(InvalidInputError, match="alias"):
        move("v2", 2)
    now = view(bed, "mine")
    assert {a.alias: now.at(a.alias).number for a in now.aliases} == {"live": 2, "stable": 3}


def test_a_move_from_a_stale_view_is_a_conflict(bed: TestBed) -> None:
    for weights in (b"1", b"2", b"3"):
        upload(bed, "mine", weights)
    stale = view(bed, "mine")
    with bed.services.db.write() as session:
        move_alias(session, stale, "live", 2)

    with pytest.raises(ConflictError), bed.services.db.write() as session:
        move_alias(session, stale, "live", 3)


def test_an_alias_cannot_point_outside_its_adapter(bed: TestBed) -> None:
    """The composite foreign keys hold, whatever the code above them does."""
    mine, theirs = view(bed, "pirate"), view(bed, "json", "globex")

    with bed.services.db.write() as session:
        alias = session.merge(mine.aliases[0])
        alias.version_id = theirs.versions[0].id
        with pytest.raises(IntegrityError, match=r"(?i)foreign key"):
            session.flush()
        session.rollback()


def test_lists_take_three_statements_however_many_adapters(bed: TestBed) -> None:
    for number in range(5):
        upload(bed, f"a{number}", bytes([number]))
    statements: list[str] = []
    engine = bed.services.db.engine

    def note(_c: object, _u: object, statement: str, *_: object) -> None:
        statements.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    with bed.services.db.read() as session:
        views = list_adapters(session)
    event.remove(engine, "before_cursor_execute", note)

    assert len(views) == 8
    assert len([s for s in statements if s.startswith("SELECT")]) == 3


def test_another_base_under_a_name_in_use_is_refused(db: Database, tmp_path: Path) -> None:
    services = make_services(db, tmp_path, FakeEngine())
    with db.write() as session:
        again = register_base_model(session, name="tiny", digest="1" * 64)
    assert again.id == services.base_model.id


def test_another_base_under_adapters_is_refused(bed: TestBed) -> None:
    with (
        bed.services.db.write() as session,
        pytest.raises(ConflictError, match="served-model-name"),
    ):
        register_base_model(session, name="tiny", digest="1" * 64)


def test_versions_are_never_removed_under_their_aliases(bed: TestBed) -> None:
    with bed.services.db.write() as session:
        with pytest.raises(IntegrityError, match=r"(?i)foreign key"):
            session.execute(delete(AdapterVersion))
        session.rollback()
