"""Writes a step trace's lines to a file: kept back for a second at most, and never too many."""

import os
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import msgspec
import structlog

from manylora.engine.recording import Event, Header

logger = structlog.get_logger(__name__)

KEPT_SECONDS = 1.0
PREVIOUS_SUFFIX = ".previous"


class TraceFile:
    """Belongs to the engine's thread. When the file is full or cannot be written, a log line says
    so, and what follows is not recorded; nothing else comes of it."""

    def __init__(self, path: Path, header: Header, *, max_bytes: int) -> None:
        """Begin a file that only this user may read; one that is there gets another name.

        Raises:
            OSError: it cannot be written.
        """
        if path.is_file():
            path.replace(path.with_name(path.name + PREVIOUS_SUFFIX))
        self._path = path
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._encoder = msgspec.json.Encoder()
        self._kept: list[Header | Event] = [header]
        self._flushed = header.at
        self.is_open = True
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self._file = os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)

    def write(self, event: Event) -> None:
        """Keep a line for the next flush; until then it may still change."""
        if self.is_open:
            self._kept.append(event)

    def is_due(self, now: float) -> bool:
        """Whether something has been kept back for long enough."""
        return bool(self._kept) and now - self._flushed >= KEPT_SECONDS

    def flush(self, now: float) -> None:
        """Write what was kept back, as far as there is room for it."""
        self._flushed = now
        lines = [self._encoder.encode(event) + b"\n" for event in self._kept]
        self._kept.clear()
        is_full = self._num_bytes + sum(map(len, lines)) > self._max_bytes
        text = b"".join(self._fitting(lines) if is_full else lines)
        self._num_bytes += len(text)
        try:
            while text:
                text = text[self._file.write(text) :]
        except OSError as error:
            self._stop()
            logger.warning("step_trace_failed", file=str(self._path), reason=error.strerror)
            return
        if is_full:
            self._stop()
            logger.warning("step_trace_full", file=str(self._path), bytes=self._num_bytes)

    def close(self) -> None:
        """Write the rest; what comes later is not recorded."""
        if self.is_open:
            self.flush(self._flushed)
            self._stop()

    def _fitting(self, lines: list[bytes]) -> list[bytes]:
        ends = accumulate(map(len, lines), initial=self._num_bytes)
        next(ends)
        return [line for line, end in zip(lines, ends, strict=True) if end <= self._max_bytes]

    def _stop(self) -> None:
        self.is_open = False
        self._kept.clear()
        with suppress(OSError):
            self._file.close()
