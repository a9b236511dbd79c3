"""Stop strings over streamed text: what may be shown, and when to end."""

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string to be completed, however the text is cut into chunks.

    Text that may be the start of a stop string is held back until that is decided. When two stop
    strings are completed by the same character, the one that began first wins.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next chunk.

        Returns:
            The text that is safe to show, and the stop string now completed, if any. It and all
            that follows is dropped; nothing may be pushed after it.
        """
        seen = self._held + text
        first = self._first_completed(seen)
        if first is not None:
            start, stop = first
            self._held = ""
            return seen[:start], stop
        safe = len(seen) - self._open_length(seen)
        self._held = seen[safe:]
        return seen[:safe], None

    def flush(self) -> str:
        """What was held back, once no more text will come."""
        held, self._held = self._held, ""
        return held

    def _first_completed(self, seen: str) -> tuple[int, str] | None:
        found = [(start, stop) for stop in self._stops if (start := seen.find(stop)) >= 0]
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
