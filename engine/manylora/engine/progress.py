"""A progress bar on standard error for runs that last: requests done, tokens a second."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

SHOWN_AFTER_SECONDS = 2.0  # when nobody asked for the bar


class ProgressBar:
    """Counts what finished and what was generated while the block runs."""

    def __init__(
        self, total: int, *, shown: bool | None, what: str = "requests", says_end: bool = False
    ) -> None:
        """
        Args:
            total: how many there are in all.
            shown: None shows the bar only at a terminal, and only once the run has lasted a while.
            what: they are called.
            says_end: where there is no terminal for a bar, a last line says how far it came.
        """
        self._total = total
        self._what = what
        self._wanted = sys.stderr.isatty() if shown is None else shown
        self._says_end = says_end and not sys.stderr.isatty()
        self._started = time.monotonic()
        self._shown_from = self._started + (SHOWN_AFTER_SECONDS if shown is None else 0.0)
        self._num_done = 0
        self._num_tokens = 0
        self._bar: Progress | None = None

    def add(self, *, done: int = 0, tokens: int = 0) -> None:
        """Count what one step finished and generated."""
        self._num_done += done
        self._num_tokens += tokens
        now = time.monotonic()
        if not self._wanted or now < self._shown_from:
            return
        if self._bar is None:
            self._bar = self._new_bar()
            self._bar.start()
        self._bar.update(TaskID(0), completed=self._num_done, rate=self._rate(now))

    def _rate(self, now: float) -> float:
        """Tokens a second."""
        return self._num_tokens / max(now - self._started, 1e-9)

    def _new_bar(self) -> Progress:
        bar = Progress(
            MofNCompleteColumn(),
            TextColumn(self._what),
            BarColumn(),
            TextColumn("{task.fields[rate]:.0f} tokens/s"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            redirect_stdout=False,  # what the caller prints is no part of the bar
        )
        bar.add_task("", total=self._total, rate=0.0)
        return bar

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._says_end:
            rate = self._rate(time.monotonic())
            done = f"{self._num_done}/{self._total} {self._what}, {rate:.0f} tokens/s"
            sys.stderr.write(f"{done}\n")
