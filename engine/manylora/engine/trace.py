"""What each step did, kept for the latest steps: the engine explains itself from this."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from manylora.engine.schedule import ScheduledBatch

KEPT_STEPS = 1024


@dataclass(frozen=True, slots=True)
class RowsRecord:
    """The rows of one sequence in one forward call."""

    request_id: str
    tenant: str
    digest: str | None  # the adapter; None for the base
    slot: int | None
    first_position: int
    num_tokens: int
    num_prompt_tokens: int

    @property
    def is_prefill(self) -> bool:
        """Whether any of the rows is a prompt token."""
        return self.first_position < self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One forward call."""

    step: int
    rows: tuple[RowsRecord, ...]
    fills: tuple[tuple[int, str], ...]  # (slot, digest) loaded before the call
    preempted: tuple[str, ...]  # request ids


class StepTrace:
    """The latest `KEPT_STEPS` steps, oldest first."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=KEPT_STEPS)
        self.num_steps = 0

    def add(self, batch: ScheduledBatch) -> None:
        """Record a step before its tokens are counted as computed."""
        rows = tuple(
            RowsRecord(
                request_id=entry.sequence.request_id,
                tenant=entry.sequence.request.tenant,
                digest=entry.sequence.digest,
                slot=entry.sequence.slot,
                first_position=entry.sequence.num_computed_tokens,
                num_tokens=entry.num_tokens,
                num_prompt_tokens=entry.sequence.num_prompt_tokens,
            )
            for entry in batch.entries
        )
        preempted = tuple(p.sequence.request_id for p in batch.preempted)
        self._records.append(StepRecord(self.num_steps, rows, batch.fills, preempted))
        self.num_steps += 1

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._records)
