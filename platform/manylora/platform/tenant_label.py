"""Names the biggest tenants in metrics, and calls all others `other`, so that series stay few."""

OTHER = "other"
MAX_NAMED = 50
_TIMES_BIGGER = 2  # than the smallest named: so that two of a size do not take turns


class TenantLabel:
    """Who is named. A token is counted under one label only, so that no series falls.

    A tenant that outgrows the smallest named one takes its place: its own series begins then, at
    0, and the other's ends. A tenant whose slug is `other` is counted as one of the others.
    """

    def __init__(self, max_named: int = MAX_NAMED) -> None:
        self._max_named = max_named
        self._tokens: dict[str, int] = {}  # of every tenant since the start
        self._named: set[str] = set()

    def of(self, slug: str, tokens: int) -> tuple[str, str | None]:
        """The label for these tokens of a tenant, and the label that ends in favour of it."""
        if slug == OTHER:
            return OTHER, None
        self._tokens[slug] = self._tokens.get(slug, 0) + tokens
        if slug in self._named:
            return slug, None
        if len(self._named) < self._max_named:
            self._named.add(slug)
            return slug, None
        smallest = min(self._named, key=lambda name: (self._tokens[name], name))
        if self._tokens[slug] < _TIMES_BIGGER * max(1, self._tokens[smallest]):
            return OTHER, None
        self._named.remove(smallest)
        self._named.add(slug)
        return slug, smallest
