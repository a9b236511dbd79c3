"""Processes that share a database and a folder keep files and rows together."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from manylora.platform.registry import AdapterRegistry
from manylora.platform.storage import AdapterStore
from support.app import TestBed, adapter_files
from support.registry import stored, upload, view


class InterruptedStore(AdapterStore):
    """Lets another process begin something just before or after files move."""

    def __init__(self, root: Path, other: Callable[[], object]) -> None:
        super().__init__(root)
        self.other = threading.Thread(target=other)

    def publish(self, staged: Path, digest: str) -> int:
        size = super().publish(staged, digest)
        self._meet()
        return size

    def withdraw(self, digest: str) -> Path | None:
        self._meet()
        return super().withdraw(digest)

    def _meet(self) -> None:
        if self.other.ident is None:
            self.other.start()
            self.other.join(0.5)  # it may have to wait for us


def in_another_process(bed: TestBed, store: AdapterStore | None = None) -> AdapterRegistry:
    """A registry that shares the database and the files, and nothing in memory."""
    ours = bed.services.adapters
    store = store or AdapterStore(bed.services.settings.adapters_dir)
    return AdapterRegistry(
        ours.db, ours.engine, store, ours.check, ours.base_model, ours.max_upload_bytes
    )


def test_files_stay_when_another_process_deletes_their_last_user_meanwhile(bed: TestBed) -> None:
    old = upload(bed, "old", b"same")
    other = in_another_process(bed)
    store = InterruptedStore(
        bed.services.settings.adapters_dir, lambda: asyncio.run(other.delete(old.adapter.id))
    )
    registry = in_another_process(bed, store)

    new = asyncio.run(registry.upload(bed.tenant_ids["globex"], "new", adapter_files(b"same")))
    store.other.join()

    assert new.version.digest in stored(bed)


def test_files_come_back_when_another_process_uploads_them_meanwhile(bed: TestBed) -> None:
    old, tenant = upload(bed, "old", b"same"), bed.tenant_ids["globex"]
    other = in_another_process(bed)
    store = InterruptedStore(
        bed.services.settings.adapters_dir,
        lambda: asyncio.run(other.upload(tenant, "new", adapter_files(b"same"))),
    )
    registry = in_another_process(bed, store)

    asyncio.run(registry.delete(old.adapter.id))
    store.other.join()

    assert view(bed, "new", "globex").live is not None
    assert old.version.digest in stored(bed)


def test_processes_that_add_a_version_at_once_get_their_own_numbers(bed: TestBed) -> None:
    tenant = bed.tenant_ids["acme"]
    other = in_another_process(bed)
    store = InterruptedStore(
        bed.services.settings.adapters_dir,
        lambda: asyncio.run(other.upload(tenant, "mine", adapter_files(b"2"))),
    )

    asyncio.run(in_another_process(bed, store).upload(tenant, "mine", adapter_files(b"1")))
    store.other.join()

    assert sorted(version.number for version in view(bed, "mine").versions) == [1, 2]
