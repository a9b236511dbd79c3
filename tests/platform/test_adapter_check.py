"""The check runs in a child process, and whatever happens there is an answer here."""

import asyncio
import sys
from pathlib import Path

import pytest

from manylora.platform import adapter_check
from manylora.platform.adapter_check import CheckResult, ChildProcessCheck


def run(monkeypatch: pytest.MonkeyPatch, program: str) -> CheckResult:
    """What the parent makes of a child that does this."""
    monkeypatch.setattr(
        ChildProcessCheck, "_command", lambda _self, _folder: [sys.executable, "-c", program]
    )

    async def check() -> CheckResult:
        return await ChildProcessCheck(Path("model"), max_lora_rank=8)(Path("folder"))

    return asyncio.run(check())


def test_what_the_child_says_is_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    said = '{"accepted": true, "digest": "ab", "reasons": [], "report": {"rank": 4}}'

    assert run(monkeypatch, f"print('{said}')") == CheckResult(True, "ab", (), {"rank": 4})


def test_a_refusal_of_any_size_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import json, sys\n"
        "reasons = ['x' * 100_000] * 1000\n"
        "print(json.dumps(dict(accepted=False, digest=None, reasons=reasons, report={})))\n"
        "sys.exit(1)"
    )

    result = run(monkeypatch, program)

    assert not result.accepted
    assert sum(map(len, result.reasons)) < 10_000


@pytest.mark.parametrize(
    # Python exits with 1 after an error, which otherwise means refused.
    "program",
    ["import os; os.abort()", "import sys; sys.exit(2)", "raise ValueError"],
)
def test_a_child_that_dies_refuses(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    result = run(monkeypatch, program)

    assert not result.accepted
    assert "limits" in result.reasons[0]


def test_a_child_that_takes_too_long_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(adapter_check, "TIMEOUT_SECONDS", 1.0)
    noted = tmp_path / "pid"
    program = f"import os, pathlib, time; pathlib.Path('{noted}').write_text(str(os.getpid()))"

    result = run(monkeypatch, program + "; time.sleep(60)")

    assert not result.accepted
    assert "longer" in result.reasons[0]
    assert not Path(f"/proc/{noted.read_text()}").exists()
