"""Paged KV blocks: reference counts and what is cached. Numbers only; the KV lies in the runner.

A full block is known by a hash (`prefix_cache.py`). A block that nobody holds stays cached until it
is needed: the least recently freed goes first, and a sequence's tail before its head.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Which blocks are held how often, and which free ones still hold a known prefix."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._owners: list[str] = [""] * num_blocks  # the tenant that computed a cached block
        self._cached: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.num_evicted = 0  # cached blocks given to somebody else

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def find_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """The longest run of cached blocks from the start of a chain; none is held yet."""
        blocks = []
        for block_hash in hashes:
            block = self._cached.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_free(self, blocks: Sequence[int]) -> int:
        """How many of these cached blocks nobody holds: holding them uses up free ones."""
        return sum(self._references[block] == 0 for block in blocks)

    def count_released(self, tables: Iterable[Sequence[int]], *, kept: Sequence[int]) -> int:
        """How many blocks would be free if these were let go, besides those to be kept."""
        holds = Counter(block for table in tables for block in table)
        for block in kept:
            holds.pop(block, None)
        return sum(self._references[block] == count for block, count in holds.items())

    def hold(self, blocks: Sequence[int]) -> None:
        """Hold cached blocks once more; free ones leave the free list."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks of unknown content, or None when there are not so many."""
        if count > self.num_free:
            return None
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if self._hashes[block] is not None:
                self.forget(block)
                self.num_evicted += 1
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks, given head first."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} let go more often than held"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def remember(self, block: int, block_hash: bytes, owner: str) -> None:
        """Let a computed full block be found. The first block of a hash keeps it."""
        if self.prefix_caching and self._hashes[block] is None and block_hash not in self._cached:
            self._hashes[block] = block_hash
            self._owners[block] = owner
            self._cached[block_hash] = block

    def count_owned(self, blocks: Sequence[int], owner: str) -> int:
        """How many of these cached blocks this tenant computed itself."""
        return sum(self._owners[block] == owner for block in blocks)

    def forget(self, block: int) -> None:
        """Let a block be found no more; who holds it keeps it."""
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._cached[block_hash]
            self._hashes[block] = None
