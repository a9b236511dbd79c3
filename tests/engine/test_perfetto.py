"""The exported trace keeps to the Trace Event Format, and tells what was recorded."""

import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from manylora.engine.errors import RecordingError
from manylora.engine.perfetto import write_perfetto
from support.recorded import lines_of, record_model, write_lines

Event = dict[str, Any]

# "Trace Event Format": what each kind of event must have besides what all have, and its type.
COMMON = {"name": str, "ph": str, "ts": int, "pid": int, "tid": int}
REQUIRED = {
    "X": {"cat": str, "dur": int, "args": dict},
    "C": {"args": dict},
    "i": {"cat": str, "s": str, "args": dict},
    "M": {"args": dict},
}


@pytest.fixture(scope="module")
def recording(
    tiny_model: Path, tiny_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "steps.jsonl"
    record_model(path, tiny_model, tiny_adapters, scheduling_policy="fcfs")
    return path


@pytest.fixture(scope="module")
def events(recording: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    out = tmp_path_factory.mktemp("perfetto") / "trace.json"
    count = write_perfetto(recording, out)
    trace = json.loads(out.read_text())
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert len(trace["traceEvents"]) == count
    return list(trace["traceEvents"])


def tracks(events: list[Event], *kinds: str) -> dict[tuple[Any, ...], list[Event]]:
    """Events by process and thread; counters by their name too, each being a track."""
    found = defaultdict(list)
    for event in events:
        if event["ph"] in kinds:
            name = event["name"] if event["ph"] == "C" else None
            found[event["pid"], event["tid"], name].append(event)
    return found


def test_every_event_has_what_its_kind_requires(events: list[Event]) -> None:
    for event in events:
        fields = COMMON | REQUIRED[event["ph"]]
        assert {name: type(event[name]) for name in fields} == fields, event
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
        assert event.get("s", "t") in ("g", "p", "t")
        if event["ph"] == "C":
            assert event["args"]
            assert all(type(value) is int for value in event["args"].values())


def test_the_times_of_each_track_ascend(events: list[Event]) -> None:
    for track in tracks(events, "X", "i", "C").values():
        times = [event["ts"] for event in track]
        assert times == sorted(times)


def test_the_slices_of_each_track_do_not_overlap(events: list[Event]) -> None:
    for track in tracks(events, "X").values():
        for one, next_one in pairwise(track):
            assert one["ts"] + one["dur"] <= next_one["ts"], (one, next_one)


def test_every_track_is_named_once_and_its_number_is_no_other_tracks(events: list[Event]) -> None:
    named = [(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"]
    processes = [e["pid"] for e in events if e["name"] == "process_name"]

    assert len(named) == len(set(named)) == len({thread for _, thread in named})
    assert len(processes) == len(set(processes)) == 4  # the engine and three tenants
    assert {(pid, tid) for pid, tid, _ in tracks(events, "X", "i")} == set(named)
    assert {pid for pid, _, _ in tracks(events, "X", "C", "i")} == set(processes)


def test_a_requests_track_tells_its_rows_waits_and_end(
    events: list[Event], recording: Path
) -> None:
    lines = lines_of(recording)
    steps = [line for line in lines if line["line"] == "step"]
    prompts = {x["request_id"]: x["prompt_tokens"] for x in lines if x["line"] == "added"}
    threads = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    expected: dict[int, Counter[str]] = defaultdict(Counter)
    for step in steps:
        for name, first, count, _ in step["rows"]:
            kind = "decode" if count == 1 and first >= prompts[name] else "prefill"
            expected[threads[name]][kind] += 1
        for name, _ in step.get("preempted", []):
            expected[threads[name]]["preempted"] += 1
    for name in prompts:
        expected[threads[name]]["waiting"] += 1

    told = {
        thread: Counter(event["name"] for event in track)
        for (_, thread, _), track in tracks(events, "X").items()
        if thread != threads["steps"]
    }

    assert told == expected
    began = {e["ts"] for e in events if e["tid"] == threads["steps"] and e["ph"] == "X"}
    gaps = [e for e in events if e["name"] == "preempted"]
    assert all({e["ts"], e["ts"] + e["dur"]} <= began for e in gaps)
    assert sum(names["preempted"] for names in told.values()) > 0
    ends = [e for e in events if e["ph"] == "i"]
    assert Counter(e["name"] for e in ends) == Counter(
        f"end: {line['reason']}" for line in lines if line["line"] == "removed"
    )


def test_the_steps_and_the_counters_are_the_recorded_ones(
    events: list[Event], recording: Path
) -> None:
    steps = [line for line in lines_of(recording) if line["line"] == "step"]
    slices = [e for e in events if e["ph"] == "X" and e["name"] == "step"]
    counters = {
        name: [e["args"] for e in track] for (_, _, name), track in tracks(events, "C").items()
    }

    assert [e["args"]["tokens"] for e in slices] == [sum(r[2] for r in s["rows"]) for s in steps]
    for event, step in zip(slices, steps, strict=True):
        assert abs(event["dur"] - step["seconds"] * 1e6) <= 1
    assert [c["blocks"] for c in counters["KV blocks used"]] == [
        step.get("kv_blocks_used", 0) for step in steps
    ]
    assert [c["sequences"] for c in counters["running"]] == [step["running"] for step in steps]
    waiting = [{k: v for k, v in c.items() if v} for c in counters["waiting by cause"]]
    assert waiting == [step.get("waiting", {}) for step in steps]


def test_a_request_that_was_never_added_is_told_with_its_line(
    recording: Path, tmp_path: Path
) -> None:
    lines = [line for line in lines_of(recording) if line["line"] != "added"]
    first = next(i for i, line in enumerate(lines, start=1) if line["line"] == "step")

    with pytest.raises(RecordingError, match=f"line {first}: request 'r"):
        write_perfetto(write_lines(tmp_path / "bad.jsonl", lines), tmp_path / "out.json")
