"""The traffic in a recorded step trace: who asked for how much, and how long its steps took."""

from dataclasses import dataclass, field
from pathlib import Path

from manylora.engine.recording import Added, Event, Header, Recording, Removed, StepRecord
from manylora.engine.schedule import ScheduledBatch
from manylora.engine.simulation import Arrival, StepCost


@dataclass(slots=True)
class RecordedRequest:
    """One request, as far as the recording goes."""

    added: Added
    at: float  # when it came; one of those that woke the engine comes with the first of them
    blocks: list[bytes]  # identities of its full blocks, the prompt's and then the output's
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    has_started: bool = False

    @property
    def num_output_tokens(self) -> int:
        """Tokens that were sampled: the first by the prompt's last row."""
        return max(0, self.num_computed_tokens - self.added.prompt_tokens + 1)

    def arrival(self) -> Arrival:
        """The same for a simulation. One that was left before its first token gets that one."""
        return Arrival(
            at=self.at,
            request=self.added.request(),
            num_output_tokens=max(1, self.num_output_tokens),
            block_hashes=tuple(self.blocks),
        )


@dataclass(slots=True)
class RecordedStep:
    """When a step began (seconds), and how long it was until the next one could."""

    began: float
    num_tokens: int
    seconds: float  # its own; 0: it failed
    pace: float  # with what came between it and the next, unless the engine was idle then


@dataclass(frozen=True, slots=True)
class Traffic:
    """All requests that started, and all steps."""

    header: Header
    requests: tuple[RecordedRequest, ...]
    steps: tuple[RecordedStep, ...]
    cost: StepCost  # fitted to the steps


class Pace:
    """The time of a simulation's steps: what its tokens cost by the fit, as much faster or later
    as the recorded step of the same number was. The recorded steps get their recorded times."""

    def __init__(self, traffic: Traffic) -> None:
        self._cost = traffic.cost
        self._steps = iter(traffic.steps)

    def __call__(self, batch: ScheduledBatch) -> float:
        cost, recorded = self._cost(batch), next(self._steps, None)
        if recorded is None:
            return cost
        expected = self._cost.step + self._cost.token * recorded.num_tokens
        if recorded.pace >= expected:
            return cost + recorded.pace - expected
        return cost * recorded.pace / expected


def read_traffic(path: Path) -> Traffic:
    """
    Raises:
        RecordingError: the file cannot be read, or names a request that is not there.
    """
    recording = Recording(path)
    reader = _Reader()
    for number, event in recording:
        try:
            reader.take(event)
        except KeyError as error:
            raise recording.error(number, f"request {error} is not there") from error
    return Traffic(
        recording.header, tuple(reader.started), tuple(reader.steps), fit_cost(reader.steps)
    )


@dataclass(slots=True)
class _Reader:
    started: list[RecordedRequest] = field(default_factory=list)
    steps: list[RecordedStep] = field(default_factory=list)
    _alive: dict[str, RecordedRequest] = field(default_factory=dict)
    _woken: float | None = None  # when work came, while no step has followed
    _was_idle: bool = True  # since the latest step
    _ended: float = 0.0  # the latest step

    def take(self, event: Event) -> None:
        match event:
            case Added():
                self._add(event)
            case Removed():
                del self._alive[event.request_id]
                self._was_idle |= not self._alive
            case StepRecord():
                self._step(event)

    def _add(self, event: Added) -> None:
        if not self._alive:  # it may have come while the step ran that ended the last of them
            self._woken = max(event.at, self._ended)
        at = event.at if self._woken is None else min(event.at, self._woken)
        self._alive[event.request_id] = RecordedRequest(event, at, list(event.blocks))

    def _step(self, event: StepRecord) -> None:
        began = event.at if self._woken is None else self._woken
        if self.steps and not self._was_idle:
            self.steps[-1].pace = began - self.steps[-1].began
        seconds = event.seconds or 0.0
        pace = event.at + seconds - began
        self.steps.append(RecordedStep(began, event.num_tokens, seconds, pace))
        self._woken, self._was_idle, self._ended = None, False, event.at + seconds
        for start in event.started:
            request = self._alive[start.request_id]
            request.num_cached_tokens = start.cached_tokens
            if not request.has_started:
                request.has_started = True
                self.started.append(request)
        for rows in event.rows:
            request = self._alive[rows.request_id]
            end = rows.first_position + rows.num_tokens
            request.num_computed_tokens = max(request.num_computed_tokens, end)
        for request_id, blocks in event.blocks.items():
            self._alive[request_id].blocks += blocks


def fit_cost(steps: list[RecordedStep]) -> StepCost:
    """Least squares of seconds = a + b · tokens over the steps that ended; neither is negative."""
    ended = [step for step in steps if step.seconds]
    if not ended:
        return StepCost(0.0, 0.0)
    count = len(ended)
    tokens = sum(step.num_tokens for step in ended) / count
    seconds = sum(step.seconds for step in ended) / count
    spread = sum((step.num_tokens - tokens) ** 2 for step in ended)
    both = sum((step.num_tokens - tokens) * (step.seconds - seconds) for step in ended)
    slope = max(0.0, both / spread) if spread else 0.0
    if slope * tokens <= seconds:
        return StepCost(seconds - slope * tokens, slope)
    squares = sum(step.num_tokens**2 for step in ended)
    return StepCost(0.0, sum(step.num_tokens * step.seconds for step in ended) / squares)
