"""Each recording in `recordings/` is replayed to the same schedule. See docs/replay.md."""

from pathlib import Path

import pytest

from manylora.engine.replay import replay
from support.recorded import lines_of

RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*.jsonl"))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_a_recording_is_replayed_to_the_same_schedule(path: Path) -> None:
    found = replay(path)

    assert found.difference is None
    assert not found.is_torn
    assert found.num_steps > 0


def test_the_crowd_is_one_that_preempts_evicts_and_hits() -> None:
    """`PYTHONPATH=tests python -m support.recorded FILE fcfs` records it anew."""
    [path] = [path for path in RECORDINGS if path.stem == "crowd"]
    steps = [line for line in lines_of(path) if line["line"] == "step"]

    assert any(step.get("preempted") for step in steps)
    assert any(step.get("evicted_blocks") for step in steps)
    assert any(cached for step in steps for _, _, cached in step.get("started", []))
    assert any("adapter_slot" in step.get("waiting", {}) for step in steps)
