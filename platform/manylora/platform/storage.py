"""Adapter files by digest. A folder appears whole or not at all, and no client names a path."""

import errno
import os
import secrets
import shutil
from pathlib import Path
from typing import BinaryIO, Protocol

import anyio

from manylora.platform.errors import InvalidInputError, StorageFullError, TooLargeError

REQUIRED_FILES = ("adapter_config.json", "adapter_model.safetensors")
OPTIONAL_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
)
IGNORED_FILES = ("README.md", ".gitattributes", "training_args.bin")
_CHUNK_BYTES = 1 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class UploadedFile(Protocol):
    """A file as a form brings it; Starlette's `UploadFile` is one."""

    @property
    def filename(self) -> str | None: ...

    async def read(self, size: int = -1) -> bytes: ...


class LocalFile:
    """A file on this machine, in an upload's place. Opened when first read, closed at its end."""

    def __init__(self, path: Path) -> None:
        self.filename = path.name
        self._path = path
        self._file: BinaryIO | None = None

    async def read(self, size: int = -1) -> bytes:
        """The next bytes."""
        if self._file is None:
            self._file = self._path.open("rb")
        chunk = await anyio.to_thread.run_sync(self._file.read, size)
        if not chunk:
            self._file.close()
        return chunk


class AdapterStore:
    """The folder `<root>/<digest>/` of each checked adapter; the engine reads it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._staging = root / ".staging"

    def new_staging(self) -> Path:
        """An empty folder for one upload. Whoever takes it publishes or discards it."""
        folder = self._staging / secrets.token_hex(16)
        folder.mkdir(parents=True)
        return folder

    def publish(self, staged: Path, digest: str) -> int:
        """Make a staged folder the adapter of this digest; bytes kept.

        The same digest has the same weights, so what is there already stays.
        """
        assert digest.isalnum(), "a digest is hex"
        target = self._root / digest
        if not target.exists():
            _sync_folder(staged)
            staged.rename(target)
            _sync_folder(self._root)
        return sum(file.stat().st_size for file in target.iterdir())

    def discard(self, staged: Path) -> None:
        """Drop what was staged; may repeat."""
        shutil.rmtree(staged, ignore_errors=True)

    def delete(self, digest: str) -> None:
        """Remove an adapter's files; may repeat."""
        assert digest.isalnum(), "a digest is hex"
        shutil.rmtree(self._root / digest, ignore_errors=True)

    def clear_staging(self) -> None:
        """Drop what uploads left behind when the process died."""
        shutil.rmtree(self._staging, ignore_errors=True)


async def write_files(folder: Path, files: list[UploadedFile], *, max_bytes: int) -> None:
    """Write an upload's files under their known names.

    Raises:
        InvalidInputError: a file is unknown, missing or given twice.
        TooLargeError: all together they exceed `max_bytes`.
        StorageFullError: the disk is full.
    """
    names = [_known_name(file.filename) for file in files]
    wanted = [(name, file) for name, file in zip(names, files, strict=True) if name]
    _check_names([name for name, _ in wanted])
    left = max_bytes
    for name, file in wanted:
        try:
            left -= await _write_file(folder / name, file, left)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise StorageFullError("there is no room to keep this upload") from error
            raise


def _known_name(filename: str | None) -> str | None:
    """The file's name in the store; None for one that training leaves and serving ignores."""
    if filename in REQUIRED_FILES or filename in OPTIONAL_FILES:
        return filename
    if filename in IGNORED_FILES:
        return None
    known = ", ".join(REQUIRED_FILES + OPTIONAL_FILES)
    raise InvalidInputError(f"files: only these are taken: {known}", param="files")


def _check_names(names: list[str]) -> None:
    for name in sorted(set(names)):
        if names.count(name) > 1:
            raise InvalidInputError(f"files: {name} is given twice", param="files")
    for name in REQUIRED_FILES:
        if name not in names:
            raise InvalidInputError(f"files: {name} is missing", param="files")


async def _write_file(path: Path, file: UploadedFile, max_bytes: int) -> int:
    size = 0
    with path.open("xb") as target:
        while chunk := await file.read(_CHUNK_BYTES):
            size += len(chunk)
            if size > max_bytes:
                raise TooLargeError("the upload is larger than the server takes", param="files")
            await anyio.to_thread.run_sync(target.write, chunk)
        target.flush()
        await anyio.to_thread.run_sync(os.fsync, target.fileno())
    return size


def _sync_folder(folder: Path) -> None:
    """Make renames in it durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
