"""The bar on standard error: when it is shown, what it counts, and that it leaves output alone."""

import contextlib
import re
import sys
from pathlib import Path

import pytest

from manylora.engine import LLM, SamplingParams, progress
from support.engine import make_llm

PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return make_llm(tiny_model)


def shown(capsys: pytest.CaptureFixture[str], llm: LLM, wanted: bool | None) -> str:
    llm.generate([[1, 2], [3], [4]], PARAMS, progress=wanted)
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_a_bar_that_is_asked_for_counts_requests_and_tokens(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    said = shown(capsys, llm, True)

    assert "3/3 requests" in said
    assert "tokens/s" in said


@pytest.mark.parametrize(
    ("wanted", "terminal", "lasts", "is_shown"),
    [
        (None, True, True, True),
        (None, True, False, False),
        (None, False, True, False),
        (False, True, True, False),
        (True, False, False, True),
    ],
)
def test_unasked_it_is_shown_at_a_terminal_once_the_run_lasts(
    llm: LLM,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    wanted: bool | None,
    terminal: bool,
    lasts: bool,
    is_shown: bool,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(progress, "SHOWN_AFTER_SECONDS", 0.0 if lasts else 60.0)

    assert bool(shown(capsys, llm, wanted)) == is_shown


def test_what_is_printed_meanwhile_stays_on_standard_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    with progress.ProgressBar(2, shown=True, what="lines") as bar:
        bar.add(done=1, tokens=7)
        print("an answer")  # noqa: T201
        bar.add(done=1)

    captured = capsys.readouterr()
    assert captured.out == "an answer\n"
    assert "2/2" in captured.err
    assert "lines" in captured.err


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("terminal", "says_end"), [(False, True), (True, True), (False, False)])
def test_off_a_terminal_a_last_line_says_how_far_it_came(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fails: bool,
    terminal: bool,
    says_end: bool,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    bar = progress.ProgressBar(3, shown=None, what="lines", says_end=says_end)
    with contextlib.suppress(KeyboardInterrupt), bar:
        bar.add(done=2, tokens=7)
        if fails:
            raise KeyboardInterrupt

    said = capsys.readouterr().err
    if says_end and not terminal:
        assert re.fullmatch(r"2/3 lines, \d+ tokens/s\n", said)
    else:
        assert said == ""


def test_a_run_that_fails_ends_its_bar(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the next one could not be started."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    step = llm.core.step
    steps = iter([step, step])

    with monkeypatch.context() as patch:
        patch.setattr(llm.core, "step", lambda: next(steps)())
        with pytest.raises(StopIteration):
            llm.generate([1, 2], PARAMS, progress=True)
    capsys.readouterr()

    assert "3/3" in shown(capsys, llm, True)
