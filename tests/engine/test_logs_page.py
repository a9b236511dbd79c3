"""docs/reading-the-logs.md leaves no event and no word out, and shows lines as they are logged."""

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from manylora.engine.api import EngineInfo, EngineStats
from manylora.engine.counters import Counters, Reporter, report_start
from manylora.engine.lifecycle import WaitCause
from manylora.engine.preemptions import PreemptionLog
from manylora.engine.simulation import Simulation
from manylora.platform.settings import all_options
from support.simulated import arrival, make_scheduler

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reading-the-logs.md").read_text()
COMMON = {"event", "level", "timestamp"}
LOGGERS = {"logger", "log"}
ROW = re.compile(r"^\| `(\w+)` \| ", re.MULTILINE)
INFO = EngineInfo(
    model="m",
    model_digest="d",
    dtype="float32",
    device="cpu",
    kernels="ref",
    max_model_len=2048,
    block_size=16,
    num_kv_blocks=100,
    max_num_seqs=12,
    max_num_batched_tokens=256,
    max_loras=8,
    max_lora_rank=64,
)


def log_start() -> None:
    report_start(INFO)


def log_steady() -> None:
    Reporter(Counters(), 0.0).report(EngineStats(), 10.0)


def log_preemption() -> None:
    scheduler = make_scheduler(num_kv_blocks=100, max_num_seqs=12)
    log = PreemptionLog(INFO)
    simulation = Simulation(
        scheduler,
        lambda batch: 1.0,
        on_step=lambda batch: log.tell(batch.preempted, scheduler, simulation.now),
    )
    simulation.run([arrival(0, "a", prompt=100, output=80) for _ in range(12)])
    assert log.count > 0


def section(heading: str) -> str:
    """The page from a heading to the next of its depth."""
    return PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def shown_lines(text: str) -> Iterator[dict[str, object]]:
    for block in re.findall(r"```json\n(.+?)```", text, re.DOTALL):
        yield from map(json.loads, block.splitlines())


def logged_events() -> set[str]:
    """The first argument of every call of a logger in what the server runs."""
    sources = [*ROOT.glob("engine/**/*.py"), *ROOT.glob("platform/**/*.py")]
    sources += ROOT.glob("web/**/*.py")
    return {
        event
        for source in sources
        for node in ast.walk(ast.parse(source.read_text()))
        for event in _event(node)
    }


def _event(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id=name)), args=[ast.Constant(value=str(event))]
        ) if name in LOGGERS:
            yield event


@pytest.mark.parametrize(
    ("event", "log"),
    [
        ("engine_ready", log_start),
        ("engine_steady", log_steady),
        ("sequence_preempted", log_preemption),
    ],
)
def test_each_word_of_the_main_lines_is_explained_and_shown(
    event: str, log: Callable[[], None]
) -> None:
    with capture_logs() as lines:
        log()
    words = set(lines[0]) - {"event", "log_level"}

    text = section(f"`{event}`")
    (shown,) = shown_lines(text)
    assert lines[0]["event"] == shown["event"] == event
    assert set(shown) - COMMON == words
    assert words <= set(ROW.findall(text))


def test_every_event_is_on_the_page_and_no_other() -> None:
    rows = set(ROW.findall(section("Every other line")))

    told = {str(line["event"]) for line in shown_lines(PAGE)} | rows
    assert told == logged_events()


def test_every_word_of_every_line_that_is_shown_is_explained() -> None:
    explained = set(ROW.findall(PAGE))

    assert {word for line in shown_lines(PAGE) for word in line} <= explained


def test_every_cause_of_waiting_is_explained_once() -> None:
    text = section("`engine_steady`").split("### Why a request waits")[1]

    assert ROW.findall(text) == [str(cause) for cause in WaitCause]


def test_the_options_that_it_names_exist() -> None:
    named = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z-]+)", PAGE)}

    assert named <= set(all_options())
