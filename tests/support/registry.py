"""Short words for what tests do with adapters and look at in the store."""

import asyncio
from pathlib import Path

from manylora.platform.adapters import AdapterView, Upload, find_adapter_named
from support.app import TestBed, adapter_files


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


def remove(bed: TestBed, name: str, slug: str = "acme") -> None:
    asyncio.run(bed.services.adapters.delete(view(bed, name, slug).adapter.id))


def folder_of(bed: TestBed, digest: str) -> Path:
    return bed.services.settings.adapters_dir / digest
