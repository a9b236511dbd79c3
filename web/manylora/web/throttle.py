"""How often somebody may try a wrong password."""

import threading
import time
from collections import deque
from collections.abc import Callable

MAX_FAILURES = 10  # from one address for one name
MAX_FAILURES_OF_ADDRESS = 100  # from one address for any names
WINDOW_SECONDS = 300.0
MAX_TRACKED = 10_000


class SignInThrottle:
    """Counts failed sign-ins in a sliding window, in this process's memory.

    Counting by name alone would let a stranger lock an operator out, so names count together
    with the address that tries them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: dict[tuple[str, str | None], deque[float]] = {}
        self._lock = threading.Lock()

    def wait_seconds(self, address: str, name: str) -> float:
        """How long this address has to wait before it may try this name; 0: go ahead."""
        with self._lock:
            return max(
                self._wait((address, name), MAX_FAILURES),
                self._wait((address, None), MAX_FAILURES_OF_ADDRESS),
            )

    def failed(self, address: str, name: str) -> None:
        with self._lock:
            if len(self._failures) >= MAX_TRACKED:
                self._forget_old()
            for key in ((address, name), (address, None)):
                self._failures.setdefault(key, deque(maxlen=MAX_FAILURES_OF_ADDRESS)).append(
                    self._clock()
                )

    def _wait(self, key: tuple[str, str | None], allowed: int) -> float:
        times = self._failures.get(key)
        if times is None or len(times) < allowed:
            return 0.0
        return max(0.0, times[-allowed] + WINDOW_SECONDS - self._clock())

    def _forget_old(self) -> None:
        oldest = self._clock() - WINDOW_SECONDS
        self._failures = {key: times for key, times in self._failures.items() if times[-1] > oldest}
