"""The check runs in a child process, and whatever happens there is an answer here."""

import asyncio
import sys
from pathlib import Path

import pytest

from manylora.platform import adapter_check
from manylora.platform.adapter_check import CheckResult, ChildProcessCheck
from manylora.platform.errors import CheckFailedError


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
    "program",
    [
        "import os; os.abort()",
        "import os; os.kill(os.getpid(), 9)",  # as the kernel does where memory runs out
        "import sys; sys.exit(2)",  # the model's folder is not there
        "raise ValueError",  # Python exits with 1, which otherwise means refused
        "print('what?')",
    ],
)
def test_a_child_that_dies_is_not_the_uploaders_fault(
    monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    with pytest.raises(CheckFailedError):
        run(monkeypatch, program)


def test_the_child_knows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MANYLORA_ADMIN_TOKEN", "MANYLORA_DATABASE_URL", "HF_TOKEN"):
        monkeypatch.setenv(name, "secret")
    program = (
        "import json, os\n"
        "print(json.dumps(dict(accepted=True, digest=None, reasons=[], report=dict(os.environ))))"
    )

    assert "secret" not in run(monkeypatch, program).report.values()


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
