"""`manylora replay` and `manylora advise`, run as the user runs them, without torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.recorded import RecordedScheduler, lines_of, make_header, write_lines

HEAVY = ("torch", "transformers", "triton", "peft", "sqlalchemy", "fastapi")
RUN = """
import sys
from manylora.__main__ import main
try:
    main()
finally:
    print([name for name in {heavy} if name in sys.modules], file=sys.stderr)
"""


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command; its last line on standard error lists the heavy modules that it has loaded."""
    return subprocess.run(
        [sys.executable, "-c", RUN.format(heavy=HEAVY), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=60,
    )


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "steps.jsonl"
    engine = RecordedScheduler(path, make_header(num_kv_blocks=64))
    engine.ready = {"x"}
    for number in range(12):
        engine.add("abc"[number % 3], ("x", None)[number % 2], 9 + number, 12)
        engine.step()
    engine.finish(adapters={"x"})
    return path


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_a_recording_is_replayed_in_another_process(recording: Path, hash_seed: str) -> None:
    """Nothing in it hangs on the order in which this process's sets would be walked."""
    found = run("replay", recording, PYTHONHASHSEED=hash_seed)

    assert found.returncode == 0, found.stderr
    steps = sum(line["line"] == "step" for line in lines_of(recording))
    assert found.stdout == (
        f"compared {steps} steps of 12 requests\neach step came out as it was recorded\n"
    )
    assert found.stderr == "[]\n"


def test_a_difference_is_told_and_exits_1(recording: Path, tmp_path: Path) -> None:
    lines = lines_of(recording)
    index = next(i for i, line in enumerate(lines) if line["line"] == "step")
    lines[index]["running"] += 1

    found = run("replay", write_lines(tmp_path / "changed.jsonl", lines))

    assert found.returncode == 1
    assert f"line {index + 1}: step 0 differs in the sequences running" in found.stdout


@pytest.mark.parametrize("command", ["replay", "advise"])
def test_what_cannot_be_read_is_told_and_exits_2(
    recording: Path, tmp_path: Path, command: str
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(recording.read_bytes() + b"{\n")
    number = len(lines_of(recording)) + 1

    found = run(command, broken)

    assert found.returncode == 2
    assert f"manylora: {broken}: line {number}: " in found.stderr
    assert "Traceback" not in found.stderr


def test_a_cut_recording_says_so(recording: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(recording.read_bytes()[:-10])

    found = run("replay", cut)

    assert found.returncode == 0
    assert "the recording ends in the middle of a line" in found.stdout


def test_a_perfetto_trace_is_written_beside(recording: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"

    found = run("replay", recording, "--perfetto", out)

    assert found.returncode == 0, found.stderr
    count = len(json.loads(out.read_text())["traceEvents"])
    assert f"wrote {count} events to {out}\n" in found.stdout


def test_a_perfetto_trace_that_cannot_be_written_is_told(recording: Path, tmp_path: Path) -> None:
    found = run("replay", recording, "--perfetto", tmp_path / "no" / "trace.json")

    assert found.returncode == 2
    assert "manylora: cannot write" in found.stderr
    assert "Traceback" not in found.stderr


def test_advice_is_printed_for_people_and_as_json(recording: Path) -> None:
    for_people = run("advise", recording)
    as_json = run("advise", recording, "--json")

    assert for_people.returncode == as_json.returncode == 0, for_people.stderr
    assert for_people.stderr == as_json.stderr == "[]\n"
    advice = json.loads(as_json.stdout)
    assert len(advice["groups"]) == 6
    for group in advice["groups"]:
        assert f"{100 * group['hit_rate']:.1f} %" in for_people.stdout
        assert group["tenant"] in "abc"
    assert advice["recorded_hit_rate"] == advice["hit_rate"] > 0
