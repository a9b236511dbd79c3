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
        self._resident: dict[str, int] = {}  # slot by digest
        self._clock = 0

    def hold(self, digest: str) -> tuple[int, bool] | None:
        """Hold an adapter's slot for one more sequence.

        Returns:
            The slot, and whether the adapter must first be put there; None when every slot is
            held by other adapters: not now, try next step.
        """
        slot = self._resident.get(digest)
        fill = slot is None
        if slot is None:
            slot = self._idle()
        if slot is None:
            return None
        if fill:
            self._put(slot, digest)
        self._slots[slot].holds += 1
        return slot, fill

    def can_hold(self, digest: str) -> bool:
        """Whether `hold` would find a slot."""
        return digest in self._resident or self._idle() is not None

    def release(self, slot: int) -> None:
        """Let go of one hold; the adapter stays until its slot is needed."""
        entry = self._slots[slot]
        assert entry.holds > 0, f"slot {slot} let go more often than held"
        entry.holds -= 1
        self._clock += 1
        entry.last_used = self._clock

    def drop(self, digest: str) -> int | None:
        """Empty an adapter's slot unless a sequence holds it; the slot that was emptied."""
        slot = self._resident.get(digest)
        if slot is None or self._slots[slot].holds:
            return None
        del self._resident[digest]
        self._slots[slot] = _Slot()
        return slot

    def is_resident(self, digest: str) -> bool:
        return digest in self._resident

    def digest(self, slot: int) -> str | None:
        return self._slots[slot].digest

    def holds(self, slot: int) -> int:
        return self._slots[slot].holds

    def __len__(self) -> int:
        return len(self._slots)

    def _put(self, slot: int, digest: str) -> None:
        before = self._slots[slot].digest
        if before is not None:
            del self._resident[before]
        self._slots[slot].digest = digest
        self._resident[digest] = slot

    def _idle(self) -> int | None:
        idle = [i for i, s in enumerate(self._slots) if s.holds == 0]
        return min(idle, key=lambda i: self._slots[i].last_used, default=None)
