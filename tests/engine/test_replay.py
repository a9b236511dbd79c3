"""A recorded run comes out step by step as it was, and what was changed in it is found."""

import copy
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manylora.engine.api import EngineStats
from manylora.engine.errors import RecordingError
from manylora.engine.replay import replay
from support.recorded import (
    RecordedScheduler,
    lines_of,
    make_header,
    record_model,
    write_lines,
)

POLICIES = ("fair", "fcfs", "priority")
ADAPTERS = ("x", "y", "z")


@pytest.fixture(scope="module", params=POLICIES)
def recorded(
    request: pytest.FixtureRequest,
    tiny_model: Path,
    tiny_adapters: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, EngineStats]:
    path = tmp_path_factory.mktemp("recorded") / "steps.jsonl"
    stats = record_model(path, tiny_model, tiny_adapters, scheduling_policy=request.param)
    return path, stats


def test_a_run_of_the_model_is_replayed_step_by_step(recorded: tuple[Path, EngineStats]) -> None:
    path, stats = recorded

    found = replay(path)

    assert found.difference is None
    assert not found.is_torn
    assert found.num_steps == stats.num_steps
    assert found.num_requests == 36


def test_the_recording_tells_what_the_engine_counted(recorded: tuple[Path, EngineStats]) -> None:
    path, stats = recorded
    lines = lines_of(path)
    steps = [line for line in lines if line["line"] == "step"]

    first_starts: dict[str, int] = {}
    for step in steps:
        for name, _, cached in step.get("started", []):
            first_starts.setdefault(name, cached)

    assert stats.num_preemptions > 0
    assert sum(len(step.get("preempted", [])) for step in steps) == stats.num_preemptions
    assert sum(first_starts.values()) == stats.prefix_hit_tokens > 0
    assert sum(rows[2] for step in steps for rows in step["rows"]) == stats.step_tokens
    assert sum(len(step.get("fills", [])) for step in steps) == stats.slot_fills
    assert Counter(line.get("reason") for line in lines)["abort"] > 0
    assert sum(step.get("evicted_blocks", 0) for step in steps) > 0
    assert all(step["seconds"] > 0 for step in steps)


def test_a_run_without_prefix_caching_is_replayed_too(
    tiny_model: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "off.jsonl"
    record_model(path, tiny_model, tiny_adapters, enable_prefix_caching=False)

    assert replay(path).difference is None
    assert any(line.get("blocks") for line in lines_of(path) if line["line"] == "step")


Lines = list[dict[str, Any]]


def change_rows(lines: Lines) -> int:
    """One token less in the last row of a step in the middle; that step's line number."""
    steps = [i for i, line in enumerate(lines) if line["line"] == "step"]
    index = steps[len(steps) // 2]
    lines[index]["rows"][-1][2] += 1
    return index + 1


def drop_a_step(lines: Lines) -> int:
    index = [i for i, line in enumerate(lines) if line["line"] == "step"][10]
    del lines[index]
    return index + 1


def forge_a_hit(lines: Lines) -> int:
    index = next(i for i, line in enumerate(lines) if any(s[2] for s in line.get("started", [])))
    lines[index]["started"][0][1] += 4
    return index + 1


def unname_a_block(lines: Lines) -> int:
    index = next(i for i, line in enumerate(lines) if line["line"] == "added" and "blocks" in line)
    lines[index]["blocks"].pop()
    return index + 1


def remove_a_stranger(lines: Lines) -> int:
    index = next(i for i, line in enumerate(lines) if line["line"] == "removed")
    lines[index]["request_id"] = "stranger"
    return index + 1


def lengthen_an_answer(lines: Lines) -> int:
    index = next(i for i, line in enumerate(lines) if line.get("reason") == "length")
    lines[index]["output_tokens"] += 1
    return index + 1


def swap_preempted(lines: Lines) -> int:
    index = next(i for i, line in enumerate(lines) if line.get("preempted"))
    lines[index]["preempted"][0][1] += 1
    return index + 1


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (change_rows, ": recorded r"),
        (forge_a_hit, "the tokens found in the cache"),
        (swap_preempted, "who was preempted, and the blocks that were short"),
        (lengthen_an_answer, "output tokens; replayed: with"),
    ],
)
def test_a_tampered_line_is_found_and_named(
    recorded: tuple[Path, EngineStats], tmp_path: Path, tamper: Any, words: str
) -> None:
    lines = lines_of(recorded[0])
    number = tamper(lines)

    found = replay(write_lines(tmp_path / "tampered.jsonl", lines))

    assert found.difference is not None
    assert found.difference.startswith(f"line {number}: ")
    assert words in found.difference


def test_a_missing_step_is_found(recorded: tuple[Path, EngineStats], tmp_path: Path) -> None:
    lines = lines_of(recorded[0])
    drop_a_step(lines)

    assert replay(write_lines(tmp_path / "short.jsonl", lines)).difference is not None


@pytest.mark.parametrize(
    "name", ["block_size", "num_kv_blocks", "max_num_seqs", "max_num_batched_tokens", "max_loras"]
)
@pytest.mark.parametrize("size", [0, -1, 10**11])
def test_a_damaged_size_is_named_and_nothing_is_tried_with_it(
    recorded: tuple[Path, EngineStats], tmp_path: Path, name: str, size: int
) -> None:
    lines = lines_of(recorded[0])
    lines[0]["engine"][name] = size

    with pytest.raises(RecordingError, match=f"line 1: {name} {size} is not between"):
        replay(write_lines(tmp_path / "damaged.jsonl", lines))


def test_a_prompt_of_impossible_length_is_named(
    recorded: tuple[Path, EngineStats], tmp_path: Path
) -> None:
    lines = lines_of(recorded[0])
    number = next(i for i, line in enumerate(lines) if line["line"] == "added")
    lines[number]["prompt_tokens"] = 10**12

    with pytest.raises(RecordingError, match=f"line {number + 1}: prompt_tokens"):
        replay(write_lines(tmp_path / "damaged.jsonl", lines))


@pytest.mark.parametrize("tamper", [unname_a_block, remove_a_stranger])
def test_a_line_that_no_engine_can_have_written_cannot_be_read(
    recorded: tuple[Path, EngineStats], tmp_path: Path, tamper: Any
) -> None:
    lines = lines_of(recorded[0])
    number = tamper(lines)

    with pytest.raises(RecordingError, match=f"line {number}: "):
        replay(write_lines(tmp_path / "tampered.jsonl", lines))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "other.jsonl is not a step trace"),
        (b"\x00\xff\n", "is not a step trace"),
        (b'{\n  "traceEvents": []\n}\n', "is not a step trace"),
        (b'{"line":5}\n', "is not a step trace"),
        (b'{"object":"list"}', "is not a step trace"),
        (b'{"line":"added"}\n', "is not a step trace"),
        (b'{"line":"header"}\n', "line 1: Object missing required field `at`"),
    ],
)
def test_what_is_no_recording_cannot_be_read(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_bytes(text)

    with pytest.raises(RecordingError, match=message):
        replay(path)


def test_a_missing_file_and_another_format_are_told(
    recorded: tuple[Path, EngineStats], tmp_path: Path
) -> None:
    with pytest.raises(RecordingError, match="No such file"):
        replay(tmp_path / "nosuch")
    lines = copy.deepcopy(lines_of(recorded[0]))
    lines[0]["format"] = 99
    with pytest.raises(RecordingError, match="its format is 99"):
        replay(write_lines(tmp_path / "later.jsonl", lines))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_recording_cut_at_any_byte_is_replayed_up_to_there(
    recorded: tuple[Path, EngineStats], data: st.DataObject
) -> None:
    whole = recorded[0].read_bytes()
    header = whole.index(b"\n") + 1
    cut = data.draw(st.integers(header, len(whole)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cut.jsonl"
        path.write_bytes(whole[:cut])

        found = replay(path)

    assert found.difference is None
    assert found.is_torn == (not whole[:cut].endswith(b"\n"))
    assert found.num_steps == whole[:cut].count(b'\n{"line":"step"') - (
        found.is_torn and whole[:cut].splitlines()[-1].startswith(b'{"line":"step"')
    )


arrivals = st.tuples(
    st.sampled_from("abc"),
    st.none() | st.sampled_from(ADAPTERS),
    st.integers(1, 40),
    st.integers(1, 20),
    st.fixed_dictionaries(
        {
            "weight": st.sampled_from([1.0, 3.0]),
            "priority": st.integers(0, 2),
            "cache_salt": st.sampled_from([None, None, "s"]),
            "prompt_logprobs": st.sampled_from([None, None, 1]),
        }
    ),
)
happenings = st.one_of(
    st.tuples(st.just("add"), arrivals),
    st.tuples(st.just("add"), arrivals),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("fail"), st.integers(0, 30)),
    st.tuples(st.just("ready"), st.sets(st.sampled_from(ADAPTERS))),
    st.tuples(st.just("drop"), st.sampled_from(ADAPTERS)),
)
headers = st.builds(
    make_header,
    scheduling_policy=st.sampled_from(POLICIES),
    enable_prefix_caching=st.booleans(),
    share_base_prefixes=st.booleans(),
    long_prefill_token_threshold=st.sampled_from([0, 3]),
    num_kv_blocks=st.integers(5, 24),
    max_num_seqs=st.integers(1, 6),
    max_loras=st.integers(1, 3),
)


@settings(max_examples=100, deadline=None)
@given(header=headers, traffic=st.lists(happenings, min_size=40, max_size=80))
def test_any_traffic_is_replayed_to_the_same_schedule(header: Any, traffic: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.jsonl"
        engine = RecordedScheduler(path, header)
        engine.ready = set(ADAPTERS)
        for what, value in traffic:
            alive = list(engine.alive.values())
            match what:
                case "add":
                    engine.add(*value[:4], **value[4])
                case "step":
                    for _ in range(value):
                        engine.step()
                case "abort" if alive:
                    engine.abort(alive[value % len(alive)])
                case "fail" if alive and alive[value % len(alive)].num_computed_tokens:
                    engine.fail(alive[value % len(alive)])
                case "ready":
                    engine.ready = value
                case "drop":
                    engine.drop(value)
        engine.finish(adapters=set(ADAPTERS))

        found = replay(path)
        steps = [line for line in lines_of(path) if line["line"] == "step"]

    assert found.difference is None
    assert found.num_steps == engine.trace.num_steps
    evicted = sum(step.get("evicted_blocks", 0) for step in steps)
    assert evicted == engine.scheduler.blocks.num_evicted
    assert found.num_requests == engine.num_added
