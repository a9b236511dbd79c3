"""What is written of the steps, when, how much, and what becomes of a disk that is full."""

import json
import re
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from manylora.engine import SamplingParams
from manylora.engine.api import AdapterInfo, FinishReason
from manylora.engine.errors import InvalidRequestError
from manylora.engine.recording import Added, Removed
from manylora.engine.replay import replay
from manylora.engine.trace_file import TraceFile
from support.engine import GREEDY, make_llm
from support.recorded import RecordedScheduler, lines_of, make_header

FULL_DEVICE = Path("/dev/full")
ONE_LINE = Removed("r", 100.0, FinishReason.STOP, 1)
TEXT = "The quick brown fox jumps over the lazy dog, and nobody may read of it."


def test_lines_are_kept_back_for_a_second_at_most(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    file = TraceFile(path, make_header(), max_bytes=1 << 20)

    file.write(ONE_LINE)
    assert not file.is_due(100.9)
    assert file.is_due(101.0)
    assert path.read_bytes() == b""
    file.flush(101.0)
    assert [line["line"] for line in lines_of(path)] == ["header", "removed"]
    assert not file.is_due(200.0)


def test_the_rest_is_written_when_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    file = TraceFile(path, make_header(), max_bytes=1 << 20)
    file.write(ONE_LINE)
    file.close()
    file.write(ONE_LINE)
    file.close()

    assert [line["line"] for line in lines_of(path)] == ["header", "removed"]


def test_a_full_file_ends_with_a_whole_line_and_one_warning(tmp_path: Path) -> None:
    path, limit = tmp_path / "steps.jsonl", 4000
    with capture_logs() as logs:
        engine = RecordedScheduler(path, make_header(), max_bytes=limit)
        for _ in range(40):
            engine.add("a", None, 9, 5)
        engine.finish(adapters=set())

    assert limit - 300 < path.stat().st_size <= limit
    assert path.read_bytes().endswith(b"\n")
    assert [log["event"] for log in logs] == ["step_trace_full"]
    assert replay(path).difference is None


def test_nothing_is_made_for_a_file_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = make_header(enable_prefix_caching=False, max_num_seqs=1)  # who would hash, else
    engine = RecordedScheduler(tmp_path / "steps.jsonl", header, max_bytes=1000)
    with capture_logs() as logs:
        for _ in range(2000):
            if not engine.alive:
                engine.add("a", None, 9, 5)
            engine.step()
    assert [log["event"] for log in logs] == ["step_trace_full"]

    no_record_may_be_made(monkeypatch)
    num_steps = engine.trace.num_steps
    engine.add("a", None, 9, 5)
    late = engine.alive[f"r{engine.num_added - 1}"]
    engine.finish(adapters=set())

    assert engine.trace.num_steps > num_steps
    assert late.num_output_tokens == 5
    assert late.block_hashes == []


def test_without_a_file_steps_are_only_counted(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_record_may_be_made(monkeypatch)
    with make_llm(tiny_model) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        llm.generate([[1, 2, 3]], params)

        assert llm.stats().num_steps == 3


def no_record_may_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("StepRecord", "RowsRecord", "Added", "Removed"):
        monkeypatch.delattr(f"manylora.engine.trace.{name}")


def test_a_full_disk_stops_the_recording_and_nothing_else() -> None:
    if not FULL_DEVICE.exists():
        pytest.skip("/dev/full is not there: a system without it")
    with capture_logs() as logs:
        engine = RecordedScheduler(FULL_DEVICE, make_header())
        for _ in range(5):
            engine.add("a", None, 9, 5)
            for _ in range(400):
                engine.step()
        engine.finish(adapters=set())

    assert [(log["event"], log["log_level"]) for log in logs] == [("step_trace_failed", "warning")]
    assert logs[0]["reason"] == "No space left on device"


def test_an_earlier_recording_gets_another_name(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text("of the engine that died")

    TraceFile(path, make_header(), max_bytes=1 << 20).close()

    assert (tmp_path / "steps.jsonl.previous").read_text() == "of the engine that died"
    assert lines_of(path)[0]["line"] == "header"


def test_only_this_user_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    TraceFile(path, make_header(), max_bytes=1 << 20).close()

    assert path.stat().st_mode & 0o777 == 0o600


def test_where_it_cannot_be_written_the_engine_says_so(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot write") as caught:
        make_llm(tiny_model, step_trace=str(tmp_path / "no" / "steps.jsonl"))

    assert caught.value.param == "step_trace"


def test_neither_text_nor_token_ids_are_in_it(tiny_model: Path, tmp_path: Path) -> None:
    """Nothing that was said can be read from it, nor tried: a second run has other identities."""
    identities = []
    for name in ("one", "other"):
        path = tmp_path / f"{name}.jsonl"
        options = {"step_trace": str(path), "block_size": 4, "share_base_prefixes": True}
        with make_llm(tiny_model, **options) as llm:
            prompt = llm.core.text.encode(TEXT)
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            output = llm.generate([prompt, prompt[:21]], params)[0].outputs[0]
        text = path.read_text()
        for run in (prompt[:3], output.token_ids[:3]):
            assert re.search(r",\s*".join(map(str, run)), text) is None
        assert not any(word in text for word in TEXT.split() if len(word) > 3)
        assert json.dumps(output.text)[1:-1] not in text
        added = [line["blocks"] for line in lines_of(path) if line["line"] == "added"]
        assert added[0][:5] == added[1]
        identities.append(added[0])

    assert not set(identities[0]) & set(identities[1])


def test_an_idle_engine_has_written_all(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with make_llm(tiny_model, step_trace=str(path)) as llm:
        llm.generate([[1, 2, 3]], GREEDY)

        kinds = [line["line"] for line in lines_of(path)]

    assert kinds == ["header", "added", "step", "removed"]


def test_a_step_that_fails_is_the_last_line(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "steps.jsonl"

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the device is gone")

    with make_llm(tiny_model, step_trace=str(path)) as llm:
        monkeypatch.setattr(llm.core.runner, "run", fail)
        with pytest.raises(RuntimeError):
            llm.generate([[1, 2, 3]], GREEDY)

    kinds = [line["line"] for line in lines_of(path)]
    assert kinds == ["header", "added", "step", "removed"]
    assert "seconds" not in lines_of(path)[2]
    assert replay(path).difference is None


def test_an_adapter_that_comes_and_goes_is_recorded(
    tiny_model: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "steps.jsonl"
    with make_llm(tiny_model, step_trace=str(path)) as llm:
        adapter: AdapterInfo = llm.load_adapter(tiny_adapters["mlp"])
        llm.generate([[1, 2, 3]], GREEDY, adapter=adapter)
        llm.unload_adapter(adapter)
        llm.generate([[1, 2, 3]], GREEDY)

    of_it = [line["line"] for line in lines_of(path) if line.get("digest") == adapter.digest]
    assert of_it == ["adapter_ready", "slot_emptied", "adapter_gone"]
    assert replay(path).difference is None


def test_numbers_that_are_not_finite_are_replayed(tiny_model: Path, tmp_path: Path) -> None:
    """The blocks of a request that went wrong are found no more, in the replay as in the run."""
    path, prompt = tmp_path / "steps.jsonl", list(range(40))
    with make_llm(tiny_model, step_trace=str(path)) as llm:
        run = llm.core.runner.run
        llm.core.runner.run = lambda batch: run(batch) * float("nan")  # type: ignore[assignment, method-assign]
        [failed] = llm.generate([prompt], GREEDY)
        llm.core.runner.run = run  # type: ignore[method-assign]
        [good] = llm.generate([prompt], GREEDY)

    assert failed.outputs[0].finish_reason is FinishReason.ERROR
    assert good.num_cached_tokens == 0
    assert "prefix_forgotten" in [line["line"] for line in lines_of(path)]
    assert replay(path).difference is None


def test_defaults_are_left_out_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    file = TraceFile(path, make_header(), max_bytes=1 << 20)
    file.write(Added(request_id="r", at=100.0, tenant="a", prompt_tokens=3, max_tokens=2))
    file.close()

    assert set(lines_of(path)[1]) == {
        *("line", "request_id", "at", "tenant", "prompt_tokens", "max_tokens")
    }
    assert replay(path).num_requests == 1
