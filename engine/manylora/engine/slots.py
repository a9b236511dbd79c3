"""Which adapter lies in which device slot. A slot held by a running sequence never changes."""

from dataclasses import dataclass


@dataclass(slots=True)
class _Slot:
    digest: str | None = None
    holds: int = 0
    last_used: int = 0


class AdapterSlots:
    """Slots by digest, held by running sequences, refilled least recently used first."""

    def __init__(self, num_slots: int) -> None:
        self._slots = [_Slot() for _ in range(num_slots)]
        self._clock = 0

    def hold(self, digest: str) -> tuple[int, bool] | None:
        """Hold an adapter's slot for one more sequence.

        Returns:
            The slot, and whether the adapter must first be put there; None when every slot is
            held by other adapters: not now, try next step.
        """
        slot = self._resident(digest)
        fill = slot is None
        if slot is None:
            slot = self._idle()
        if slot is None:
            return None
        entry = self._slots[slot]
        entry.digest = digest
        entry.holds += 1
        return slot, fill

    def release(self, slot: int) -> None:
        """Let go of one hold; the adapter stays until its slot is needed."""
        entry = self._slots[slot]
        assert entry.holds > 0, f"slot {slot} let go more often than held"
        entry.holds -= 1
        self._clock += 1
        entry.last_used = self._clock

    def drop(self, digest: str) -> int | None:
        """Empty an adapter's slot unless a sequence holds it; the slot that was emptied."""
        slot = self._resident(digest)
        if slot is None or self._slots[slot].holds:
            return None
        self._slots[slot] = _Slot()
        return slot

    def is_resident(self, digest: str) -> bool:
        return self._resident(digest) is not None

    def digest(self, slot: int) -> str | None:
        return self._slots[slot].digest

    def holds(self, slot: int) -> int:
        return self._slots[slot].holds

    def __len__(self) -> int:
        return len(self._slots)

    def _resident(self, digest: str) -> int | None:
        return next((i for i, s in enumerate(self._slots) if s.digest == digest), None)

    def _idle(self) -> int | None:
        idle = [i for i, s in enumerate(self._slots) if s.holds == 0]
        return min(idle, key=lambda i: self._slots[i].last_used, default=None)
