"""The biggest tenants are named in metrics, few at a time; each token is in one series."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from manylora.platform.tenant_label import OTHER, TenantLabel

MAX_NAMED = 3
TRAFFIC = st.lists(
    st.tuples(st.sampled_from([*"abcdefgh", OTHER]), st.integers(0, 50)), max_size=120
)


@given(TRAFFIC)
def test_few_are_named_and_every_token_is_in_one_series(traffic: list[tuple[str, int]]) -> None:
    names = TenantLabel(MAX_NAMED)
    series: Counter[str] = Counter()
    ended = 0
    for slug, tokens in traffic:
        label, dropped = names.of(slug, tokens)
        assert label in (slug, OTHER)
        if dropped is not None:
            ended += series.pop(dropped)
        series[label] += tokens
        assert len(set(series) - {OTHER}) <= MAX_NAMED

    assert series.total() + ended == sum(tokens for _, tokens in traffic)


def test_one_that_outgrows_the_smallest_takes_its_place() -> None:
    names = TenantLabel(2)
    names.of("big", 1000)
    names.of("small", 10)

    assert names.of("new", 19) == (OTHER, None)
    assert names.of("new", 1) == ("new", "small")
    assert names.of("new", 1) == ("new", None)
    assert names.of("small", 1) == (OTHER, None)


def test_two_of_a_size_do_not_take_turns() -> None:
    names = TenantLabel(1)
    labels = [names.of(slug, 5)[0] for slug in ["a", "b"] * 100]

    assert labels == ["a", OTHER] * 100


def test_the_biggest_are_the_ones_that_are_named_in_the_end() -> None:
    """Whoever comes first: one of the named is less than twice as big as each that is not."""
    sizes = {f"tenant-{number:03}": 2**number for number in range(20)}
    names = TenantLabel(5)
    for slug, size in sizes.items():
        names.of(slug, size)

    named = {slug for slug in sizes if names.of(slug, 0)[0] == slug}
    assert named == set(sorted(sizes, key=lambda slug: -sizes[slug])[:5])


def test_of_two_smallest_the_first_by_name_goes() -> None:
    """Not by the order of a set, which is another in each process."""
    slugs = [f"tenant-{number:02}" for number in range(30)]
    names = TenantLabel(len(slugs))
    for slug in reversed(slugs):
        names.of(slug, 5)

    assert names.of("new", 100) == ("new", "tenant-00")
