"""Logs are lines for programs, and an error's line holds no local variables."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from manylora.engine.api import EngineStats
from manylora.engine.counters import Counters, Reporter
from manylora.engine.logs import configure_logs


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("terminal", [False, True])
def test_an_error_is_told_without_what_its_variables_held(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    configure_logs("info")

    def fail(prompt: str) -> None:
        raise ZeroDivisionError(str(len(prompt)))

    try:
        fail("SEC" + "RET")
    except ZeroDivisionError as error:
        structlog.get_logger().error("it_broke", exc_info=error)

    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said
    assert "SECRET" not in said
    if not terminal:
        assert json.loads(said)["event"] == "it_broke"


def test_less_than_the_level_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("warning")

    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")

    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == ["loud"]


def test_an_engine_of_ones_own_keeps_standard_output_clean(tiny_model: Path) -> None:
    code = (
        "import sys; from manylora.engine import LLM, SamplingParams\n"
        "with LLM(sys.argv[1], dtype='float32', num_kv_blocks=8) as llm:\n"
        "    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_model)], capture_output=True, text=True, check=True
    )

    assert done.stdout == ""
    ready = json.loads(done.stderr.splitlines()[0])
    assert ready["event"] == "engine_ready"
    assert (ready["kv_blocks"], ready["full_length_requests"]) == (8, 1.0)


def test_an_idle_stretch_does_not_count_in_the_rates_of_the_steady_line() -> None:
    counters = Counters()
    reporter = Reporter(counters, 0.0)
    counters.output_tokens = 50
    assert not reporter.is_due(4.0, 5.0)
    assert not reporter.is_due(3600.0, 3601.0)
    assert not reporter.is_due(3601.0, 3605.0)
    counters.output_tokens = 150

    assert reporter.is_due(3605.0, 3610.0)
    with capture_logs() as lines:
        reporter.report(EngineStats(output_tokens=150), 3610.0)

    assert lines[0]["output_tokens_per_second"] == 10.0


def test_steps_longer_than_the_reports_interval_are_no_idle_stretches() -> None:
    reporter = Reporter(Counters(), 0.0)

    assert [reporter.is_due(12.0 * i, 12.0 * i + 12) for i in range(3)] == [True] * 3
