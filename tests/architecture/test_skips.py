"""What `tests/conftest.py` lets pass in silence, run on small suites of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SUITE = """
import pytest

@pytest.mark.nightly
def test_long(): raise AssertionError("a nightly test ran")

@pytest.mark.browser
def test_browser(): pytest.skip("no chromium here")

def test_other(): pytest.skip("no moon tonight")
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_suite.py").write_text(SUITE)
    markers = "markers =\n    nightly: long\n    browser: needs chromium\n"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{markers}")
    return tmp_path


def run(suite: Path, *arguments: str, ci: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "MANYLORA_CI"}
    if ci:
        environment["MANYLORA_CI"] = "1"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command, cwd=suite, env=environment, capture_output=True, text=True, check=False
    )


def test_skips_pass_and_are_listed_with_their_reasons(suite: Path) -> None:
    result = run(suite)

    assert result.returncode == 0, result.stdout
    assert "    1  no chromium here" in result.stdout
    assert "    1  no moon tonight" in result.stdout


def test_a_skipped_browser_test_fails_in_continuous_integration(suite: Path) -> None:
    result = run(suite, ci=True)

    assert result.returncode == 1
    assert "browser tests must run here; skipped: no chromium here" in result.stdout
    assert "1 failed, 1 skipped, 1 deselected" in result.stdout


def test_a_module_that_skips_itself_fails_in_continuous_integration(suite: Path) -> None:
    (suite / "test_suite.py").write_text(
        "import pytest\npytest.skip('not today', allow_module_level=True)\n"
    )

    assert run(suite, ci=True).returncode != 0
    assert "a whole module may not skip itself here: not today" in run(suite, ci=True).stdout


def test_nightly_tests_run_when_asked_for(suite: Path) -> None:
    asked = run(suite, "-m", "nightly")
    by_name = run(suite, "test_suite.py::test_long")

    assert "a nightly test ran" in asked.stdout
    assert "a nightly test ran" in by_name.stdout
