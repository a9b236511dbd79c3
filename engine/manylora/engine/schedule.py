"""What the scheduler says: which tokens a step computes, who started and who had to give way."""

from dataclasses import dataclass, field
from typing import NamedTuple

from manylora.engine.lifecycle import WaitCause
from manylora.engine.sequence import Sequence


def is_prefill(first_position: int, num_tokens: int, num_prompt_tokens: int) -> bool:
    """Whether rows compute known tokens of a prompt, or once more what a preemption lost; else
    they are one decode's."""
    return num_tokens > 1 or first_position < num_prompt_tokens


class ScheduledSequence(NamedTuple):  # a step has hundreds: this kind is made the fastest
    """Compute the next `num_tokens` of this sequence's known tokens."""

    sequence: Sequence
    num_tokens: int

    @property
    def positions(self) -> range:
        """The positions to compute."""
        start = self.sequence.num_computed_tokens
        return range(start, start + self.num_tokens)

    @property
    def is_prefill(self) -> bool:
        """Whether its rows are a chunk of a prefill, not a decode's."""
        sequence = self.sequence
        return is_prefill(sequence.num_computed_tokens, self.num_tokens, sequence.num_prompt_tokens)

    @property
    def samples(self) -> bool:
        """Whether the last row's logits choose a new token."""
        return self.num_tokens == self.sequence.num_tokens_left

    @property
    def logit_positions(self) -> range:
        """The positions whose logits are wanted: the last one when it samples, and those before
        the prompt tokens whose log-probabilities are still to be told."""
        start, stop = self.positions.start, self.positions.stop
        if self.sequence.lacks_prompt_logprobs:
            return range(max(start, len(self.sequence.prompt_logprobs)), stop)
        return range(stop - self.samples, stop)


@dataclass(frozen=True, slots=True)
class Preemption:
    """A sequence that gave back its blocks, its seat and its slot."""

    sequence: Sequence
    blocks_short: int  # blocks that were missing; 0: it made room for `for_tenant`
    for_tenant: str
    num_lost_tokens: int  # computed before


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step: what is computed, and which slots are filled before."""

    entries: tuple[ScheduledSequence, ...]
    fills: tuple[tuple[int, str], ...]  # (slot, digest)
    preempted: tuple[Preemption, ...]
    started: tuple[Sequence, ...]  # admitted in this step, for the first time or again

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)


@dataclass(slots=True)
class Step:
    """A step while it is being chosen."""

    budget: int
    tokens: dict[Sequence, int] = field(default_factory=dict)
    fills: list[tuple[int, str]] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    slotless: set[str] = field(default_factory=set)  # tenants that found no slot to take
    considered: set[Sequence] = field(default_factory=set)  # for admission
    stop: WaitCause | None = None  # why nobody else is admitted

    def give(self, sequence: Sequence, count: int) -> None:
        self.tokens[sequence] = count
        self.budget -= count

    def take_back(self, sequence: Sequence) -> None:
        self.budget += self.tokens.pop(sequence, 0)

    def batch(self) -> ScheduledBatch:
        return ScheduledBatch(
            tuple(ScheduledSequence(sequence, count) for sequence, count in self.tokens.items()),
            tuple(self.fills),
            tuple(self.preempted),
            tuple(self.started),
        )
