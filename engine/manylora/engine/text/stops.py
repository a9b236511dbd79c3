"""Stop strings over streamed text: what may be shown, and when to end."""

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string to be completed, however the text is cut into chunks.

    Text that may be the start of a stop string is held back until that is decided. When two stop
    strings are completed by the same character, the one that began first wins.
    """

    def __init__(self, stops: Sequence[str], *, shown: bool = False) -> None:
        """
        Args:
            shown: the stop string belongs to the text, so that nothing has to be held back.
        """
        self._stops = tuple(stops)
        self._shown = shown
        self._open = ""  # the end of the text so far that may be the start of a stop string

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Take the next chunk.

        Args:
            may_stop: whether a stop string that this chunk completes counts.

        Returns:
            The text that is safe to show, and the stop string now completed, if any. What follows
            it is dropped, and it too unless shown; nothing may be pushed after it.
        """
        seen = self._open + text
        given = len(self._open) if self._shown else 0
        completed = self._first_completed(seen) if may_stop else None
        if completed is not None:
            start, stop = completed
            self._open = ""
            return seen[given : start + len(stop) if self._shown else start], stop
        safe = len(seen) - self._open_length(seen)
        self._open = seen[safe:]
        return seen[given : len(seen) if self._shown else safe], None

    def flush(self) -> str:
        """What was held back, once no more text will come."""
        held, self._open = self._open, ""
        return "" if self._shown else held

    def _first_completed(self, seen: str) -> tuple[int, str] | None:
        """The start of the stop string that the new text completes first, and the string."""
        found = []
        for stop in self._stops:
            start = seen.find(stop, max(0, len(self._open) - len(stop) + 1))
            if start >= 0:
                found.append((start, stop))
        return min(found, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)

    def _open_length(self, seen: str) -> int:
        """Length of the longest end of `seen` that begins a stop string."""
        for stop in self._stops:
            assert stop, "SamplingParams refuses empty stop strings"
        longest = max((len(stop) for stop in self._stops), default=0)
        for length in range(min(longest - 1, len(seen)), 0, -1):
            tail = seen[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
