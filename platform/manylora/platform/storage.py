"""Adapter files by digest. A folder appears whole or not at all, and no client names a path."""

import errno
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol

import anyio

from manylora.platform.errors import (
    InvalidInputError,
    StorageFullError,
    TooLargeError,
    legible,
)

REQUIRED_FILES = ("adapter_config.json", "adapter_model.safetensors")
IGNORED_FILES = (  # training leaves them beside; nothing reads them, so they are not kept
    ".gitattributes",
    "README.md",
    "added_tokens.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "training_args.bin",
)
_PICKLES = (".bin", ".pt", ".pth")
_CHUNK_BYTES = 1 << 20
_STAGING_SECONDS = 24 * 3600  # no upload takes longer
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

    def prepare(self) -> None:
        """At a start: drop what died processes left, and let uploads spool in this folder.

        The system's folder for temporary files may be small, or memory. What is younger than a
        day may be in the works of another process that shares the folder.
        """
        self._staging.mkdir(parents=True, exist_ok=True)
        for left in self._staging.iterdir():
            with suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > _STAGING_SECONDS:
                    self.discard(left)
        tempfile.tempdir = str(self._staging)

    def new_staging(self) -> Path:
        """An empty folder for one upload. Whoever takes it publishes or discards it."""
        folder = self._new_name()
        folder.mkdir()
        return folder

    def publish(self, staged: Path, digest: str) -> int:
        """Make a staged folder the adapter of this digest; bytes kept.

        The same digest has the same weights, so what is there already stays, if it is whole.
        """
        target = self._folder(digest)
        files = [target / name for name in REQUIRED_FILES]
        if not all(file.is_file() for file in files):
            left = self.withdraw(digest)
            if left is not None:
                self.discard(left)
            _sync_folder(staged)
            staged.rename(target)
            _sync_folder(self._root)
        return sum(file.stat().st_size for file in files)

    def withdraw(self, digest: str) -> Path | None:
        """Take an adapter's files away at once; the caller discards them. None: it has none."""
        away = self._new_name()
        try:
            return self._folder(digest).rename(away)
        except FileNotFoundError:
            return None

    def discard(self, staged: Path) -> None:
        """Drop what was staged or withdrawn; may repeat."""
        shutil.rmtree(staged, ignore_errors=True)

    def _new_name(self) -> Path:
        self._staging.mkdir(parents=True, exist_ok=True)
        return self._staging / secrets.token_hex(16)

    def _folder(self, digest: str) -> Path:
        assert digest.isalnum(), "a digest is hex"
        return self._root / digest


@contextmanager
def full_disk_told() -> Iterator[None]:
    """Tell a full disk from other failures to write.

    Raises:
        StorageFullError
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise StorageFullError("there is no room to keep this upload") from error
        raise


async def write_files(
    folder: Path, files: Sequence[UploadedFile], *, max_bytes: int
) -> tuple[str, ...]:
    """Write an upload's files under their known names; the names of those that are not kept.

    Raises:
        InvalidInputError: a file is unknown, missing, empty or given twice.
        TooLargeError: all together they exceed `max_bytes`.
    """
    names = [_known_name(file.filename) for file in files]
    _check_names(names)
    left = max_bytes
    for name, file in zip(names, files, strict=True):
        if name in REQUIRED_FILES:
            left -= await _write_file(folder / name, file, left)
    return tuple(sorted(name for name in names if name in IGNORED_FILES))


def _known_name(filename: str | None) -> str:
    if filename in REQUIRED_FILES or filename in IGNORED_FILES:
        return filename
    refused = legible((filename or "a file without a name").rpartition("/")[2])
    if refused.endswith(_PICKLES):
        advice = "save the adapter as safetensors (peft: save_pretrained does)"
    else:
        advice = "only these are taken: " + ", ".join(REQUIRED_FILES + IGNORED_FILES)
    raise InvalidInputError(f"{refused} is not taken: {advice}", param="files")


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
    if size == 0:
        raise InvalidInputError(f"files: {path.name} is empty", param="files")
    return size


def _sync_folder(folder: Path) -> None:
    """Make renames in it durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
