"""Files are kept whole or not at all, and only those that something reads."""

import asyncio
import os
import tempfile
import time
from pathlib import Path

import pytest

from manylora.platform import storage
from manylora.platform.errors import InvalidInputError, StorageFullError, TooLargeError
from manylora.platform.storage import REQUIRED_FILES, AdapterStore
from support.app import MemoryFile, TestBed, adapter_files
from support.registry import folder_of, remove, staged, stored, upload


def test_only_the_weights_and_their_config_are_kept(bed: TestBed) -> None:
    extras = [MemoryFile("tokenizer.json", b"{}"), MemoryFile("README.md", b"hello")]
    take = bed.services.adapters.upload

    first = asyncio.run(take(bed.tenant_ids["acme"], "mine", [*adapter_files(b"1"), *extras]))
    theirs = upload(bed, "mine", b"1", slug="globex")

    assert first.ignored_files == ("README.md", "tokenizer.json")
    assert theirs.ignored_files == ()
    kept = {
        file.name: file.stat().st_size for file in folder_of(bed, first.version.digest).iterdir()
    }
    assert set(kept) == set(REQUIRED_FILES)
    assert first.version.size_bytes == theirs.version.size_bytes == sum(kept.values())


def test_an_interrupted_delete_leaves_no_half_adapter(
    bed: TestBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = upload(bed, "mine", b"1").version.digest
    with monkeypatch.context() as interrupted:
        interrupted.setattr(storage.shutil, "rmtree", lambda *_, **__: None)
        remove(bed, "mine")

    assert digest not in stored(bed)
    upload(bed, "mine", b"1")
    assert {file.name for file in folder_of(bed, digest).iterdir()} == set(REQUIRED_FILES)


def test_a_folder_that_lacks_a_file_is_replaced(bed: TestBed) -> None:
    digest = upload(bed, "mine", b"1").version.digest
    (folder_of(bed, digest) / "adapter_model.safetensors").unlink()

    upload(bed, "mine", b"1")

    assert (folder_of(bed, digest) / "adapter_model.safetensors").read_bytes() == b"1"


def test_a_start_drops_what_is_old_and_not_what_another_process_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    store = AdapterStore(tmp_path)
    left, fresh = store.new_staging(), store.new_staging()
    two_days_ago = time.time() - 2 * 86_400
    os.utime(left, (two_days_ago, two_days_ago))

    AdapterStore(tmp_path).prepare()

    assert (left.exists(), fresh.exists()) == (False, True)


def test_uploads_spool_where_they_will_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)

    AdapterStore(tmp_path).prepare()

    with tempfile.TemporaryFile() as spool:
        assert Path(f"/proc/self/fd/{spool.fileno()}").readlink().is_relative_to(tmp_path)


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


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        ("adapter_model.bin", "adapter_model.bin is not taken: save the adapter as safetensors"),
        ("w.pth", "w.pth is not taken: save the adapter as safetensors"),
        ("../a\nb.sh", "a?b.sh is not taken: only these are taken: adapter_config.json"),
        ("x" * 9999, "x... is not taken: only these"),
        (None, "a file without a name is not taken"),
    ],
)
def test_a_refused_file_is_named_and_what_to_do_is_said(
    bed: TestBed, refused: str | None, says: str
) -> None:
    files = [*adapter_files(b"1"), MemoryFile(refused, b"x")]

    with pytest.raises(InvalidInputError) as caught:
        asyncio.run(bed.services.adapters.upload(bed.tenant_ids["acme"], "mine", files))

    assert says in caught.value.message
    assert len(caught.value.message) < 500


def test_an_empty_file_is_told_to_be_empty(bed: TestBed) -> None:
    with pytest.raises(InvalidInputError, match=r"adapter_model\.safetensors is empty"):
        upload(bed, "mine", b"")

    assert staged(bed) == []


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
