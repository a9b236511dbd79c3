"""Requests on an engine in this process, with the time of each of their tokens."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from manylora.engine.api import AdapterRef, Request, SamplingParams
from manylora.engine.core import EngineCore
from manylora.engine.schedule import ScheduledBatch

CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}  # seconds


@dataclass(slots=True)
class Timeline:
    """What became of one request. Times are the traffic's clock, in seconds."""

    submitted: float
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def first_token_seconds(self) -> float:
        return self.token_times[0] - self.submitted

    def gaps(self, start: float, stop: float) -> list[float]:
        """The inter-token times that end after `start` and not after `stop`."""
        pairs = zip(self.token_times, self.token_times[1:], strict=False)
        return [after - before for before, after in pairs if start < after <= stop]


class Traffic:
    """Drives one engine core, step by step, in the caller's thread."""

    def __init__(
        self, core: EngineCore, *, clock: Callable[[], float] = time.perf_counter, seed: int = 0
    ) -> None:
        self.core = core
        self.clock = clock
        self.timelines: dict[str, Timeline] = {}
        self.computed_tokens = 0
        self.num_steps = 0
        self.model_seconds = 0.0  # inside the runner; the rest is scheduling and sampling
        self._random = random.Random(seed)
        self._run_model = core.runner.run
        # The method of this one runner: the engine itself must not know that it is timed.
        core.runner.run = self._timed_run  # type: ignore[method-assign]

    def random_tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self.core.text.vocab_size) for _ in range(count)]

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        adapter: AdapterRef | None = None,
        submitted: float | None = None,
    ) -> Timeline:
        """Queue a greedy request of exactly `max_tokens` tokens.

        Args:
            submitted: when the client sent it, if that was before now.
        """
        params = SamplingParams(temperature=0, max_tokens=max_tokens, min_tokens=max_tokens)
        timeline = Timeline(self.clock() if submitted is None else submitted)
        self.timelines[name] = timeline
        self.core.add(
            Request(
                request_id=name,
                prompt_token_ids=tuple(prompt),
                params=params,
                tenant="benchmark",
                adapter=adapter,
            )
        )
        return timeline

    def step(self) -> None:
        outputs = self.core.step()
        now = self.clock()
        self.num_steps += 1
        for output in outputs:
            timeline = self.timelines[output.request_id]
            timeline.token_times += [now] * len(output.token_ids)
            timeline.token_ids += output.token_ids
            timeline.text += output.text
            timeline.num_prompt_tokens = output.num_prompt_tokens
            timeline.num_cached_tokens = output.num_cached_tokens

    def step_until_first_token(self, timeline: Timeline) -> float:
        """Seconds from its submission to its first token."""
        while not timeline.token_times:
            self.step()
        return timeline.first_token_seconds

    def finish(self) -> None:
        """Step until nothing is left to do."""
        while self.core.has_work:
            self.step()

    def abort_all(self) -> None:
        for name in self.timelines:
            self.core.abort(name)

    def _timed_run(self, batch: ScheduledBatch, **options: Any) -> Tensor:
        began = self.clock()
        logits = self._run_model(batch, **options)
        self.model_seconds += self.clock() - began
        self.computed_tokens += batch.num_tokens
        return logits
