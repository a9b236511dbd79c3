"""Counts the steps; where there is a file, records what each did and all that led to it."""

import hashlib
import secrets
from collections import Counter
from collections.abc import Iterable

from manylora.engine.api import FinishReason
from manylora.engine.recording import (
    IDENTITY_BYTES,
    AdapterGone,
    AdapterReady,
    Added,
    PreemptedRecord,
    PrefixForgotten,
    Removed,
    RowsRecord,
    SlotEmptied,
    StartedRecord,
    StepRecord,
)
from manylora.engine.schedule import ScheduledBatch
from manylora.engine.scheduler import Scheduler
from manylora.engine.sequence import Sequence
from manylora.engine.trace_file import TraceFile


class StepTrace:
    """The engine's steps from the first. Times in seconds of the engine's clock."""

    def __init__(self, scheduler: Scheduler, file: TraceFile | None = None) -> None:
        """
        Args:
            file: where all steps are recorded, and what the scheduler is told between them,
                until it is full. Without one the steps are only counted.
        """
        self._scheduler = scheduler
        self._file = file
        self._key = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)
        self._current: StepRecord | None = None  # of the step that runs now
        self._ready: set[str] = set()
        self._num_evicted = 0
        self.num_steps = 0

    def add(self, batch: ScheduledBatch, now: float) -> None:
        """A step began at `now`; its tokens are not yet counted as computed."""
        if self._file is None:
            self.num_steps += 1
            return
        self._current = self.describe(batch, now)
        self._current.blocks = self._filled(batch)
        self._file.write(self._current)

    def describe(self, batch: ScheduledBatch, now: float) -> StepRecord:
        """The same, as its record says it, without identities; whether there is a file or not."""
        scheduler, evicted = self._scheduler, self._scheduler.blocks.num_evicted
        record = StepRecord(
            step=self.num_steps,
            at=_rounded(now),
            rows=tuple(
                RowsRecord(s.request_id, s.num_computed_tokens, entry.num_tokens, s.slot)
                for entry in batch.entries
                for s in (entry.sequence,)
            ),
            fills=batch.fills,
            preempted=tuple(
                PreemptedRecord(p.sequence.request_id, p.blocks_short) for p in batch.preempted
            ),
            started=tuple(
                StartedRecord(s.request_id, s.num_computed_tokens, s.num_cached_tokens)
                for s in batch.started
            ),
            evicted_blocks=evicted - self._num_evicted,
            kv_blocks_used=scheduler.blocks.num_used,
            running=len(scheduler.running),
            waiting=Counter(s.wait_cause for s in scheduler.waiting),
        )
        self._num_evicted = evicted
        self.num_steps += 1
        return record

    def end_step(self, now: float, *, is_last: bool) -> None:
        """The step, if there was one, has ended; `is_last`: nothing is left to do."""
        if self._current is not None:
            self._current.seconds = _rounded(now - self._current.at)
            self._current = None
        if self._file is not None and (is_last or self._file.is_due(now)):
            self.flush(now)

    def flush(self, now: float) -> None:
        """Write what is kept back, before the engine waits for work."""
        if self._file is not None:
            self._file.flush(now)
            if not self._file.is_open:
                self._file = None  # what it would not take is not made for it

    def close(self) -> None:
        """Write all that is recorded."""
        if self._file is not None:
            self._file.close()
            self._file = None

    # -- what the scheduler is told, recorded only where there is a file

    def added(self, sequence: Sequence, now: float) -> None:
        """A sequence joined the queue."""
        if self._file is None:
            return
        request = sequence.request
        self._file.write(
            Added(
                request_id=request.request_id,
                at=_rounded(now),
                tenant=request.tenant,
                adapter=sequence.digest,
                prompt_tokens=sequence.num_prompt_tokens,
                max_tokens=request.params.max_tokens,
                weight=request.weight,
                priority=request.priority,
                salted=request.cache_salt is not None,
                prompt_logprobs=request.params.prompt_logprobs is not None,
                blocks=self._identities(sequence, 0, self._num_prompt_blocks(sequence)),
            )
        )

    def removed(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """A sequence left the scheduler."""
        if self._file is not None:
            count = sequence.num_output_tokens
            self._file.write(Removed(sequence.request_id, _rounded(now), reason, count))

    def ready(self, digests: Iterable[str], now: float) -> None:
        """These adapters are in host memory, and no others."""
        if self._file is None:
            return
        ready, at = set(digests), _rounded(now)
        for digest in sorted(ready - self._ready):
            self._file.write(AdapterReady(digest, at))
        for digest in sorted(self._ready - ready):
            self._file.write(AdapterGone(digest, at))
        self._ready = ready

    def slot_emptied(self, slot: int, digest: str, now: float) -> None:
        """An adapter's slot was emptied, not for another adapter."""
        if self._file is not None:
            self._file.write(SlotEmptied(slot, digest, _rounded(now)))

    def prefix_forgotten(self, sequence: Sequence, now: float) -> None:
        """A sequence's blocks are found no more."""
        if self._file is not None:
            self._file.write(PrefixForgotten(sequence.request_id, _rounded(now)))

    # -- who a block is

    def _num_prompt_blocks(self, sequence: Sequence) -> int:
        return sequence.num_prompt_tokens // self._scheduler.blocks.block_size

    def _filled(self, batch: ScheduledBatch) -> dict[str, tuple[bytes, ...]]:
        """The output blocks that this step fills for the first time."""
        size, filled = self._scheduler.blocks.block_size, {}
        for entry in batch.entries:
            sequence, first = entry.sequence, entry.sequence.num_computed_tokens
            after = (first + entry.num_tokens) // size
            if after == first // size:
                continue
            before = max(first, sequence.num_once_computed) // size
            before = max(before, self._num_prompt_blocks(sequence))
            if after > before:
                filled[sequence.request_id] = self._identities(sequence, before, after)
        return filled

    def _identities(self, sequence: Sequence, start: int, stop: int) -> tuple[bytes, ...]:
        """Of the cache's keys, made anew with a key of this trace: where tenants share prefixes,
        the cache's own have no secret in them, and guesses at a prompt could be tried on them."""
        keys = self._scheduler.prefixes.hashes(sequence, stop)[start:stop]
        return tuple(
            hashlib.blake2b(key, digest_size=IDENTITY_BYTES, key=self._key).digest() for key in keys
        )


def _rounded(seconds: float) -> float:
    return round(seconds, 6)
