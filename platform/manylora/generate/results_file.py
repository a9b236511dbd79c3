"""The output: one whole line for each input line that is finished, in finishing order."""

import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from manylora.platform.settings import SettingsError

FLUSH_LINES = 32
FLUSH_SECONDS = 1.0
_DIGEST_BYTES = 16


class FinishedLines:
    """The digest of each input line that is finished. In one piece: there may be millions."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self.count = 0

    def add(self, index: int, digest: bytes) -> None:
        start, end = index * _DIGEST_BYTES, (index + 1) * _DIGEST_BYTES
        self._digests.extend(bytes(max(0, end - len(self._digests))))
        self._digests[start:end] = digest
        self.count += 1

    def get(self, index: int) -> bytes | None:
        start, end = index * _DIGEST_BYTES, (index + 1) * _DIGEST_BYTES
        digest = bytes(self._digests[start:end])
        return digest if any(digest) else None


class ResultsFile:
    """Appends whole lines, in small batches that are on the disk before the next is begun.

    A process that is killed leaves whole lines and perhaps the torn beginning of one, which is
    cut off when the file is opened again.
    """

    def __init__(self, path: Path, *, most_lines: int) -> None:
        """
        Args:
            most_lines: how many lines the input can have at most.

        Raises:
            SettingsError: it cannot be written, another run writes it, or it holds something else.
        """
        self.path = path
        self.finished = FinishedLines()
        self.num_errors = 0
        self._pending: list[bytes] = []
        self._flushed_at = time.monotonic()
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise SettingsError(f"output: cannot write {path}: {error.strerror}") from error
        try:
            self._be_alone()
            self._read(most_lines)
        except SettingsError:
            self._file.close()
            raise

    def adapter_digest(self, index: int) -> str | None:
        """Of the adapter that answered a line, read from the file again."""
        with self.path.open("rb") as file:
            for line in file:
                result = json.loads(line)
                if result["index"] == index:
                    digest: str | None = result.get("adapter_digest")
                    return digest
        return None

    def append(self, line: Mapping[str, Any]) -> None:
        """Take a line; it is on the disk after the next `flush`."""
        self.num_errors += "error" in line
        # The standard library's writer: an id may be a whole number of any size.
        text = json.dumps(line, ensure_ascii=False, default=dataclasses.asdict)
        self._pending.append(text.encode() + b"\n")

    def flush_if_due(self) -> None:
        waited = time.monotonic() - self._flushed_at
        if self._pending and (len(self._pending) >= FLUSH_LINES or waited >= FLUSH_SECONDS):
            self.flush()

    def flush(self) -> None:
        """Bring what is pending onto the disk."""
        rest = memoryview(b"".join(self._pending))
        self._pending.clear()
        while rest:
            rest = rest[self._file.write(rest) :]
        os.fsync(self._file.fileno())
        self._flushed_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.flush()
        finally:
            self._file.close()

    def _be_alone(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SettingsError(f"output: another run is writing {self.path}") from error

    def _read(self, most_lines: int) -> None:
        """Note what is finished, and cut off a torn last line."""
        whole_bytes = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                self._note(line, number, most_lines)
                whole_bytes += len(line)
        os.ftruncate(self._file.fileno(), whole_bytes)

    def _note(self, line: bytes, number: int, most_lines: int) -> None:
        try:
            result = json.loads(line)
            index, digest = result["index"], bytes.fromhex(result["digest"])
            fits = type(index) is int and 0 <= index < most_lines and len(digest) == _DIGEST_BYTES
        except (ValueError, KeyError, TypeError):
            fits = False
        if not fits:
            raise SettingsError(f"output: line {number} of {self.path} is no answer to this input")
        if self.finished.get(index) is not None:
            raise SettingsError(f"output: line {number} of {self.path} answers a line once more")
        self.finished.add(index, digest)
        self.num_errors += "error" in result
