"""The Makefile's targets, as far as they can be looked at without installing anything."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the Makefile and what its rules depend on, and no .venv."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "web/fetch_static.py"):
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, target)
    return tmp_path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", *arguments]
    plain = {"PATH": os.environ["PATH"]}  # none of the variables that the Makefile reads
    return subprocess.run(
        command, cwd=folder, env=plain, capture_output=True, text=True, check=False
    )


def installed(clone: Path) -> None:
    """Leaves the marks of a finished `make serve`, newer than what they depend on."""
    marks = (".venv/bin/python", ".venv/installed", "web/manylora/web/static/htmx.min.js")
    for name in marks:
        target = clone / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()


def test_make_alone_lists_every_target(clone: Path) -> None:
    targets = re.findall(r"^\.PHONY: (\S+)$", (clone / "Makefile").read_text(), re.MULTILINE)

    listed = re.findall(r"^  make (\S+)", make(clone).stdout, re.MULTILINE)

    assert listed == targets
    assert {"serve", "test", "check", "clean"} <= set(listed)


def test_it_says_what_it_downloads_and_how_much_before_it_does(clone: Path) -> None:
    planned = make(clone, "-n", "serve").stdout

    assert re.search(r"pip downloads about \d+ MB", planned)
    assert planned.index("pip downloads about") < planned.index("-m pip install")


def test_a_second_start_installs_nothing(clone: Path) -> None:
    installed(clone)

    planned = make(clone, "-n", "serve", "HOST=0.0.0.0", "PORT=9000", "DATA_DIR=/srv/x").stdout

    [command] = planned.splitlines()
    assert command.startswith("exec .venv/bin/manylora serve --demo ")
    assert '--host "0.0.0.0" --port "9000" --data-dir "/srv/x"' in command


def test_changed_dependencies_are_installed_at_the_next_start(clone: Path) -> None:
    installed(clone)
    later = (clone / ".venv" / "installed").stat().st_mtime + 10
    subprocess.run(["touch", "-d", f"@{later}", clone / "constraints.txt"], check=True)

    assert "-m pip install" in make(clone, "-n", "serve").stdout


def test_the_index_for_pytorch_is_handed_to_pip(clone: Path) -> None:
    index = "https://example.invalid/whl/cpu"

    planned = make(clone, "-n", "serve", f"TORCH_INDEX_URL={index}").stdout

    assert f"--extra-index-url {index}" in planned
    assert "--extra-index-url" not in make(clone, "-n", "serve").stdout


def test_an_old_python_is_refused_with_a_sentence(clone: Path) -> None:
    old = clone / "python3.8"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)

    result = make(clone, "serve", f"PYTHON={old}")

    assert result.returncode != 0
    assert "is older than Python 3.11, which manylora needs" in result.stderr
    assert not (clone / ".venv").exists()
