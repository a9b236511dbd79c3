"""The engine thread: takes adds, aborts and questions between steps, and posts outputs."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import structlog

from manylora.engine.api import RequestOutput
from manylora.engine.core import EngineCore
from manylora.engine.errors import EngineUnavailableError

logger = structlog.get_logger(__name__)
T = TypeVar("T")

LOADING_POLL_SECONDS = 0.002  # while the only work is an adapter on its way from disk


class EngineThread:
    """Runs an `EngineCore` on a thread of its own, which alone touches it."""

    def __init__(
        self,
        core: EngineCore,
        *,
        on_outputs: Callable[[Sequence[RequestOutput]], None],
        on_death: Callable[[], None],
    ) -> None:
        """
        Args:
            on_outputs: called on the engine thread with all that a step produced.
            on_death: called on the engine thread after a step failed; no step follows.
        """
        self._core = core
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_dead = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[EngineCore], T]) -> Future[T]:
        """Run a function on the engine thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(self._living_core())
            except Exception as error:  # noqa: BLE001 -- handed to whoever waits for the future
                future.set_exception(error)
            else:
                future.set_result(result)

        self._inbox.put(run)
        if self._is_dead:
            self._answer_rest()
        return future

    def stop(self) -> None:
        """Stop after the step that runs now, and wait for it."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._take_calls():
                self._step()
        except Exception:
            running = [s.request_id for s in self._core.scheduler.running]
            logger.exception("engine_step_failed", running=running)
            self._on_death()
        finally:
            self._is_dead = True
            self._answer_rest()
            self._core.close()

    def _living_core(self) -> EngineCore:
        if self._is_dead:
            raise EngineUnavailableError("the engine has stopped")
        return self._core

    def _answer_rest(self) -> None:
        """Refuse the calls that no step will follow; from any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._inbox.get_nowait()
                if call is not None:
                    call()

    def _take_calls(self) -> bool:
        """Run all that waits, or wait for the first when idle; False to stop."""
        wait = not self._core.has_work
        if wait:
            self._core.flush_trace()
        while True:
            try:
                call = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()
            wait = False

    def _step(self) -> None:
        if not self._core.has_work:
            return
        num_steps = self._core.trace.num_steps
        outputs = self._core.step()
        if outputs:
            self._on_outputs(outputs)
        elif self._core.trace.num_steps == num_steps:
            time.sleep(LOADING_POLL_SECONDS)
