"""What holds of every life that the API tells, whoever made it."""

import importlib.util
from itertools import pairwise
from typing import Any


def assert_whole(life: dict[str, Any], *, client_seconds: float | None = None) -> None:
    """A life whose end was sent: in order, without a gap, by modules that exist."""
    stages = life["stages"]
    assert [stages[0]["name"], stages[-1]["name"]] == ["received", "sent"]
    assert (stages[0]["at_us"], stages[0]["since_previous_us"]) == (0, 0)
    for before, after in pairwise(stages):
        assert after["since_previous_us"] == after["at_us"] - before["at_us"] >= 0, after
    assert sum(stage["since_previous_us"] for stage in stages) == life["total_us"]
    assert stages[-1]["at_us"] == life["total_us"]
    for stage in stages:
        assert importlib.util.find_spec(stage["component"]) is not None, stage
    waits = life["queue"]["by_cause"]
    assert sum(waits.values()) == life["queue"]["total_us"] <= life["total_us"]
    assert min(waits.values(), default=0) >= 0
    if client_seconds is not None:
        # The server notes the end once the socket has taken it: the client may have read it before.
        assert life["total_us"] <= (client_seconds + 0.25) * 1e6
