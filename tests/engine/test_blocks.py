"""The block pool against a simple model of it."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from manylora.engine.blocks import BlockPool
from manylora.engine.prefix_cache import chain_next

NUM_BLOCKS = 6
BLOCK_SIZE = 2
Prefix = tuple[str, tuple[int, ...]]  # whose it is, and all tokens up to a block's end
blocks_of_tokens = st.lists(st.integers(0, 1), max_size=5)


def prefixes(tenant: str, block_tokens: list[int]) -> list[Prefix]:
    return [(tenant, tuple(block_tokens[: i + 1])) for i in range(len(block_tokens))]


def hashes(tenant: str, block_tokens: list[int]) -> list[bytes]:
    """A block's tokens are all the same number, to keep the test's tries few."""
    found = [tenant.encode()]
    for token in block_tokens:
        found.append(chain_next(found[-1], [token] * BLOCK_SIZE))
    return found[1:]


class BlockPoolMachine(RuleBasedStateMachine):
    """Sequences come, share prefixes and go; the model knows who holds what, and what is where."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE, prefix_caching=True)
        self.sequences: list[tuple[list[int], list[Prefix]]] = []  # blocks, what they are to hold
        self.content: dict[int, Prefix] = {}  # what lies in each block that was remembered
        self.next_to_go: list[int] = list(range(NUM_BLOCKS))  # free blocks, first to go first

    @rule(tenant=st.sampled_from("ab"), block_tokens=blocks_of_tokens, tail=st.booleans())
    def start(self, tenant: str, block_tokens: list[int], tail: bool) -> None:
        known = {prefix: block for block, prefix in self.content.items()}
        wanted = prefixes(tenant, block_tokens)
        cached = self.pool.find_prefix(hashes(tenant, block_tokens))

        expected: list[int] = []
        for prefix in wanted:
            if prefix not in known:
                break
            expected.append(known[prefix])
        assert cached == expected  # all of its chain, no block of another's
        assert self.pool.count_free(cached) == sum(block in self.next_to_go for block in cached)

        self.pool.hold(cached)
        self.next_to_go = [block for block in self.next_to_go if block not in cached]
        self._allocate(cached, wanted, len(wanted) - len(cached) + tail)

    def _allocate(self, cached: list[int], wanted: list[Prefix], count: int) -> None:
        new = self.pool.allocate(count)
        if count > len(self.next_to_go):
            assert new is None
            self._let_go(cached)
            return
        assert new == self.next_to_go[:count]  # least recently freed first, tails before heads
        del self.next_to_go[:count]
        for block in new:
            self.content.pop(block, None)
        self.sequences.append((cached + new, wanted))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """A sequence has computed all its full blocks, and lets them be found."""
        blocks, wanted = data.draw(st.sampled_from(self.sequences))
        tenant = wanted[0][0] if wanted else "a"
        chain = hashes(tenant, list(wanted[-1][1]) if wanted else [])
        for block, block_hash, prefix in zip(blocks, chain, wanted, strict=False):
            self.pool.remember(block, block_hash, tenant)
            if prefix not in self.content.values():
                self.content[block] = prefix

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        self._let_go(self.sequences.pop(index)[0])

    def _let_go(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        held = {block for others, _ in self.sequences for block in others}
        for block in reversed([block for block in blocks if block not in held]):
            if block in self.content:
                self.next_to_go.append(block)
            else:
                self.next_to_go.insert(0, block)  # nothing is lost with it

    @invariant()
    def blocks_are_free_or_held(self) -> None:
        held = [block for blocks, _ in self.sequences for block in blocks]
        assert self.pool.num_used == len(set(held))
        assert self.pool.num_free == len(self.next_to_go)
        for block in set(held):
            holders = [w for blocks, w in self.sequences if block in blocks]
            assert len(holders) == 1 or block in self.content

    def teardown(self) -> None:
        while self.sequences:
            self._let_go(self.sequences.pop()[0])
        assert self.pool.num_used == 0


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_pool_without_prefix_caching_finds_nothing() -> None:
    pool = BlockPool(2, BLOCK_SIZE, prefix_caching=False)
    chain = hashes("a", [0])
    blocks = pool.allocate(1)
    assert blocks is not None

    pool.remember(blocks[0], chain[0], "a")

    assert pool.find_prefix(chain) == []
