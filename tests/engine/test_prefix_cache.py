"""Who may use whose cached blocks: content, tenant and salt decide, and nothing else."""

from hypothesis import example, given
from hypothesis import strategies as st

from manylora.engine.api import AdapterRef, Request, SamplingParams
from manylora.engine.blocks import BlockPool
from manylora.engine.prefix_cache import PrefixCache, chain_next, chain_root, tenant_secret
from manylora.engine.sequence import Sequence

PROMPT = [1, 2, 3, 4, 5]


def sequence(tenant: str, *, adapter: str | None = None, salt: str | None = None) -> Sequence:
    request = Request(
        request_id="r",
        prompt_token_ids=tuple(PROMPT),
        params=SamplingParams(),
        tenant=tenant,
        adapter=None if adapter is None else AdapterRef(adapter),
        cache_salt=salt,
    )
    return Sequence(request=request, token_ids=list(PROMPT))


def cache_with(computed: Sequence, *, share: bool = False) -> tuple[PrefixCache, BlockPool]:
    """A cache in which a sequence has left its prompt's full blocks."""
    blocks = BlockPool(8, 2, prefix_caching=True)
    cache = PrefixCache(
        blocks, base_digest="b", kv_dtype="float32", secret=b"secret", share_base_prefixes=share
    )
    taken = blocks.allocate(3)
    assert taken is not None
    computed.block_table = taken
    computed.num_computed_tokens = len(PROMPT)
    cache.remember(computed, 0)
    return cache, blocks


def test_a_tenants_own_prefix_is_found_and_nobody_elses() -> None:
    cache, _ = cache_with(sequence("a", adapter="x"))

    assert len(cache.find(sequence("a", adapter="x"))) == 2
    assert cache.find(sequence("b", adapter="x")) == []
    assert cache.find(sequence("a", adapter="y")) == []
    assert cache.find(sequence("a")) == []


def test_a_salt_narrows_whose_prefix_is_found() -> None:
    cache, _ = cache_with(sequence("a", salt="one"))

    assert len(cache.find(sequence("a", salt="one"))) == 2
    assert cache.find(sequence("a", salt="two")) == []
    assert cache.find(sequence("a", salt="")) == []
    assert cache.find(sequence("a")) == []


def test_the_base_models_prefixes_are_shared_only_where_the_operator_says_so() -> None:
    shared, blocks = cache_with(sequence("a"), share=True)
    adapted, _ = cache_with(sequence("a", adapter="x"), share=True)

    found = shared.find(sequence("b"))
    assert len(found) == 2
    assert blocks.count_owned(found, "b") == 0  # found, but not reported as the tenant's own
    assert shared.find(sequence("b", salt="own")) == []
    assert adapted.find(sequence("b", adapter="x")) == []


def test_a_tenants_secret_needs_the_engines() -> None:
    assert tenant_secret(b"one", "a") != tenant_secret(b"other", "a")
    assert tenant_secret(b"one", "a") != tenant_secret(b"one", "b")


tricky = st.text(max_size=6) | st.sampled_from(
    ["", "base", "adapter", "tenant", "a\0", "\0a", "kv", "float32", "model", "ab", "a"]
)
Part = str | bytes | None
PARTS: dict[str, Part] = {
    "owner": b"a",
    "salt": None,
    "base_digest": "b",
    "adapter_digest": None,
    "kv_dtype": "float32",
}
owners = st.fixed_dictionaries(
    {
        "owner": st.none() | tricky.map(str.encode),
        "salt": st.none() | tricky,
        "base_digest": tricky,
        "adapter_digest": st.none() | tricky,
        "kv_dtype": tricky,
    }
)


@given(one=owners, other=owners, changed=st.sets(st.sampled_from(sorted(PARTS)), max_size=2))
@example(one=PARTS, other=PARTS | {"adapter_digest": ""}, changed={"adapter_digest"})
@example(one=PARTS, other=PARTS | {"salt": ""}, changed={"salt"})
@example(one=PARTS, other=PARTS | {"owner": None}, changed={"owner"})
def test_chains_of_other_owners_have_other_roots(
    one: dict[str, Part], other: dict[str, Part], changed: set[str]
) -> None:
    other = one | {name: other[name] for name in changed}

    # Drawn as one dictionary: its values have the types of several parameters. So below.
    assert (chain_root(**one) == chain_root(**other)) == (one == other)  # type: ignore[arg-type]


@given(one=owners, data=st.data())
def test_moving_text_from_one_part_to_the_next_changes_the_root(
    one: dict[str, Part], data: st.DataObject
) -> None:
    first, second = str(one["adapter_digest"] or ""), str(one["base_digest"])
    joined = first + second
    cut = data.draw(st.integers(0, len(joined)))
    one = one | {"adapter_digest": first}
    other = one | {"adapter_digest": joined[:cut], "base_digest": joined[cut:]}

    assert (chain_root(**one) == chain_root(**other)) == (cut == len(first))  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 1 << 40), max_size=4), st.lists(st.integers(0, 3), max_size=4))
def test_other_tokens_have_another_hash(one: list[int], other: list[int]) -> None:
    assert (chain_next(b"parent", one) == chain_next(b"parent", other)) == (one == other)
