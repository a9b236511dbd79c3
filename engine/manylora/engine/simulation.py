"""Runs the scheduler that serves, with its blocks and slots, in virtual time; the model is fake.

100,000 steps take seconds, and what they show of fairness, preemption and cache hits is true of
the engine, whose scheduler knows neither model nor clock.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from manylora.engine.api import FinishReason, Request, TokenLogprob
from manylora.engine.schedule import ScheduledBatch
from manylora.engine.scheduler import Scheduler
from manylora.engine.sequence import Sequence

NO_LOGPROB = TokenLogprob(0, 0.0)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes at a time (seconds) and will produce so many tokens."""

    at: float
    request: Request
    num_output_tokens: int
    # Of its full blocks, the prompt's and then the output's, where the tokens are not known.
    block_hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Served:
    """How one request fared. Times in seconds."""

    request: Request
    arrived: float
    first_token: float
    ended: float
    num_cached_tokens: int
    num_preemptions: int

    @property
    def seconds_to_first_token(self) -> float:
        return self.first_token - self.arrived


@dataclass(frozen=True, slots=True)
class StepCost:
    """The time of a step: a part of its own, and one for each token (seconds)."""

    step: float
    token: float

    def __call__(self, batch: ScheduledBatch) -> float:
        return self.step + self.token * batch.num_tokens


def compute(batch: ScheduledBatch, scheduler: Scheduler) -> list[Sequence]:
    """Count a step's tokens as computed, as if by a model; the sequences that sample now."""
    sampling = [entry.sequence for entry in batch.entries if entry.samples]
    scheduler.advance(batch)
    for entry in batch.entries:
        sequence = entry.sequence
        if sequence.lacks_prompt_logprobs:
            known = min(sequence.num_computed_tokens, sequence.num_prompt_tokens - 1)
            sequence.prompt_logprobs += [NO_LOGPROB] * (known - len(sequence.prompt_logprobs))
    return sampling


@dataclass(slots=True)
class _Running:
    sequence: Sequence
    arrival: Arrival
    first_token: float = 0.0


@dataclass(slots=True)
class Simulation:
    """Takes steps while there is work; `now` is the virtual time in seconds."""

    scheduler: Scheduler
    seconds_of: Callable[[ScheduledBatch], float]
    on_step: Callable[[ScheduledBatch], None] = lambda batch: None
    now: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0  # computed, what is computed twice counted twice
    num_preemptions: int = 0
    served: list[Served] = field(default_factory=list)
    _alive: dict[str, _Running] = field(default_factory=dict)

    def run(self, arrivals: Iterable[Arrival], *, until: float = float("inf")) -> list[Served]:
        """Serve all of them, or until a time; those that ended, in that order."""
        coming = sorted(arrivals, key=lambda arrival: arrival.at)[::-1]
        while (coming or self._alive) and self.now < until:
            if not self._alive:
                self.now = max(self.now, coming[-1].at)
            while coming and coming[-1].at <= self.now:
                self._add(coming.pop())
            self.step()
        return self.served

    def step(self) -> ScheduledBatch:
        """One step of the scheduler, and what the model would make of it."""
        batch = self.scheduler.schedule()
        self.on_step(batch)
        self.num_steps += 1
        self.num_tokens += batch.num_tokens
        self.num_preemptions += len(batch.preempted)
        self.now += self.seconds_of(batch)
        for sequence in compute(batch, self.scheduler):
            self._sample(sequence)
        return batch

    def _add(self, arrival: Arrival) -> None:
        sequence = Sequence(
            request=arrival.request,
            token_ids=list(arrival.request.prompt_token_ids),
            block_hashes=list(arrival.block_hashes),
            arrival_step=self.num_steps,
        )
        self._alive[sequence.request_id] = _Running(sequence, arrival)
        self.scheduler.add(sequence)

    def _sample(self, sequence: Sequence) -> None:
        """A token that nobody else's sequence has, so that only prompts are shared."""
        running = self._alive[sequence.request_id]
        if sequence.num_output_tokens == 0:
            running.first_token = self.now
        sequence.token_ids.append(sequence.order << 20 | sequence.num_output_tokens)
        if sequence.num_output_tokens == running.arrival.num_output_tokens:
            sequence.finish(FinishReason.LENGTH)
            self.scheduler.remove(sequence)
            self.served.append(self._fate(self._alive.pop(sequence.request_id)))

    def _fate(self, running: _Running) -> Served:
        sequence = running.sequence
        return Served(
            request=sequence.request,
            arrived=running.arrival.at,
            first_token=running.first_token,
            ended=self.now,
            num_cached_tokens=sequence.num_cached_tokens,
            num_preemptions=sequence.num_preemptions,
        )
