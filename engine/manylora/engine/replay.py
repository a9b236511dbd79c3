"""Takes a recorded step trace's steps once more, on any CPU, and says where they come out other.

The scheduler, blocks, slots and policy are those that serve; the model's tokens are taken as given.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import msgspec

from manylora.engine.api import FinishReason
from manylora.engine.errors import InvalidRequestError
from manylora.engine.recording import (
    AdapterGone,
    AdapterReady,
    Added,
    Event,
    Header,
    PrefixForgotten,
    Recording,
    Removed,
    RowsRecord,
    SlotEmptied,
    StepRecord,
)
from manylora.engine.schedule import ScheduledBatch
from manylora.engine.sequence import Sequence
from manylora.engine.simulation import compute
from manylora.engine.trace import StepTrace

_COMPARED = {
    "step": "its number (a line is missing, or there twice)",
    "preempted": "who was preempted, and the blocks that were short",
    "started": "who started, the tokens found in the cache, and those of them that count as cached",
    "fills": "the slots filled, with which adapters",
    "evicted_blocks": "the cached blocks evicted",
    "kv_blocks_used": "the KV blocks in use",
    "running": "the sequences running",
    "waiting": "the sequences waiting, by cause",
}
"""What of a step must come out alike besides its rows, in the order in which it comes about."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay found."""

    num_steps: int  # compared, the one that differs too
    num_requests: int
    difference: str | None  # the first, in words
    is_torn: bool  # the recording ends within a line

    def __str__(self) -> str:
        lines = [f"compared {self.num_steps} steps of {self.num_requests} requests"]
        if self.is_torn:
            lines.append("the recording ends in the middle of a line: replayed up to there")
        lines.append(self.difference or "each step came out as it was recorded")
        return "\n".join(lines)


def replay(path: Path) -> Replayed:
    """Compare every recorded step with what the scheduler does now, until one differs.

    Raises:
        RecordingError: a line cannot be read, or tells of what cannot be; its number is said.
    """
    recording = Recording(path)
    replayer = Replayer(recording.header)
    difference = None
    for number, event in recording:
        try:
            found = replayer.take(event)
        except (ImpossibleEventError, InvalidRequestError) as error:
            raise recording.error(number, error) from error
        if found is not None:
            difference = f"line {number}: {found}"
            break
    num_steps = replayer.trace.num_steps
    return Replayed(num_steps, replayer.num_requests, difference, recording.is_torn)


class ImpossibleEventError(Exception):
    """An event that cannot follow those before it."""


class Replayer:
    """Tells a scheduler what the recorded one was told, and looks whether it does the same."""

    def __init__(self, header: Header) -> None:
        self.scheduler = header.scheduler(adapter_ready=lambda digest: digest in self._ready)
        self.trace = StepTrace(self.scheduler)
        self.num_requests = 0
        self._ready: set[str] = set()
        self._sequences: dict[str, Sequence] = {}

    def take(self, event: Event) -> str | None:
        """Do what an event says; how a step or an end differs from the recorded one, in words.

        Raises:
            ImpossibleEventError, InvalidRequestError: no engine can have recorded this here.
        """
        match event:
            case StepRecord():
                return self._step(event)
            case Removed():
                return self._remove(event)
            case Added():
                self._add(event)
            case AdapterReady(digest):
                self._ready.add(digest)
            case AdapterGone(digest):
                self._ready.discard(digest)
            case SlotEmptied(slot, digest):
                if self.scheduler.slots.drop(digest) != slot:
                    return f"adapter {digest} left slot {slot}; replayed: it does not lie there"
            case PrefixForgotten(request_id):
                self.scheduler.prefixes.forget(self._sequence(request_id))
        return None

    def _add(self, event: Added) -> None:
        if event.request_id in self._sequences:
            raise ImpossibleEventError(f"request {event.request_id} is there already")
        request = event.request()
        hashes = list(event.blocks)
        sequence = Sequence(
            request=request, token_ids=list(request.prompt_token_ids), block_hashes=hashes
        )
        self._check_identities(sequence, event.prompt_tokens)
        self._sequences[event.request_id] = sequence
        self.num_requests += 1
        self.scheduler.add(sequence)

    def _remove(self, event: Removed) -> str | None:
        sequence = self._sequence(event.request_id)
        if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            sequence.finish(event.reason)
        self.scheduler.remove(sequence)
        del self._sequences[event.request_id]
        count = sequence.num_output_tokens
        # One that ends in an error may have got no token in its last step.
        if count != event.output_tokens and event.reason is not FinishReason.ERROR:
            return (
                f"request {event.request_id} ended with {event.output_tokens} output tokens; "
                f"replayed: with {count}"
            )
        return None

    def _step(self, recorded: StepRecord) -> str | None:
        batch = self.scheduler.schedule()
        difference = _difference(recorded, self.trace.describe(batch, recorded.at))
        if difference is None and recorded.seconds is not None:
            self._advance(batch, recorded)
        return difference

    def _advance(self, batch: ScheduledBatch, recorded: StepRecord) -> None:
        """Count the tokens as computed; who samples gets a token, which one does not matter."""
        for request_id, blocks in recorded.blocks.items():
            self._sequence(request_id).block_hashes += blocks
        for entry in batch.entries:
            self._check_identities(entry.sequence, entry.positions.stop)
        for sequence in compute(batch, self.scheduler):
            sequence.token_ids.append(0)

    def _check_identities(self, sequence: Sequence, num_tokens: int) -> None:
        """What is unknown would be hashed, and these tokens are none."""
        if len(sequence.block_hashes) < num_tokens // self.scheduler.blocks.block_size:
            raise ImpossibleEventError(f"full blocks of {sequence.request_id} are not named")

    def _sequence(self, request_id: str) -> Sequence:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            raise ImpossibleEventError(f"request {request_id} is not there")
        return sequence


def _difference(recorded: StepRecord, replayed: StepRecord) -> str | None:
    """Where two steps first differ, in words; times and identities are not compared."""
    for name, what in _COMPARED.items():
        one, other = getattr(recorded, name), getattr(replayed, name)
        if one != other:
            return (
                f"step {recorded.step} differs in {what}: recorded {_plain(one)}, "
                f"replayed {_plain(other)}"
            )
    for number, (rows, others) in enumerate(zip_longest(recorded.rows, replayed.rows), start=1):
        if rows != others:
            return (
                f"step {recorded.step} differs in row {number}: recorded {_rows(rows)}, "
                f"replayed {_rows(others)}"
            )
    return None


def _rows(rows: RowsRecord | None) -> str:
    if rows is None:
        return "nothing"
    slot = "the base" if rows.slot is None else f"slot {rows.slot}"
    positions = f"positions {rows.first_position} to {rows.first_position + rows.num_tokens - 1}"
    return f"{rows.request_id} at {positions} on {slot}"


def _plain(value: object) -> str:
    """Numbers as they are, records as their values in brackets."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items()) or "none"
    if isinstance(value, Iterable):
        return " ".join(str(msgspec.to_builtins(item)) for item in value) or "none"
    return str(value)
