"""Uploads become versions, whole or not at all; what is deleted goes but for what others use."""

import asyncio
from pathlib import Path

import pytest

from manylora.platform.adapters import Upload, find_adapter_named
from manylora.platform.base_models import register_base_model
from manylora.platform.db import Database
from manylora.platform.errors import (
    AdapterRefusedError,
    ConflictError,
    InvalidInputError,
    NotFoundError,
)
from support.app import MemoryFile, TestBed, adapter_files, make_services
from support.fake_engine import FakeEngine
from support.registry import remove, staged, stored, upload, view


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

    remove(bed, "same")
    assert theirs.version.digest in stored(bed)
    assert bed.engine.unloaded == []

    remove(bed, "same", "globex")
    assert theirs.version.digest not in stored(bed)
    assert bed.engine.unloaded == [theirs.version.digest]


def test_a_deleted_name_is_free_again(bed: TestBed) -> None:
    old = upload(bed, "mine", b"1")
    remove(bed, "mine")
    new = upload(bed, "mine", b"1")

    assert new.version.number == 1
    assert new.adapter.id != old.adapter.id
    assert new.version.digest in stored(bed)


def test_a_version_that_came_meanwhile_goes_with_its_adapter(bed: TestBed) -> None:
    first = upload(bed, "mine", b"1")
    second = upload(bed, "mine", b"2")

    asyncio.run(bed.services.adapters.delete(first.adapter.id))

    assert not {first.version.digest, second.version.digest} & stored(bed)
    assert set(bed.engine.unloaded) == {first.version.digest, second.version.digest}


def test_what_is_deleted_already_is_not_there(bed: TestBed) -> None:
    gone = upload(bed, "mine", b"1").adapter.id
    asyncio.run(bed.services.adapters.delete(gone))
    new = upload(bed, "mine", b"1")

    for adapter_id in (gone, "adp_nothing"):
        with pytest.raises(NotFoundError):
            asyncio.run(bed.services.adapters.delete(adapter_id))

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
