"""The top-level folders stay namespace parts, so `platform` still means the standard library's."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = ("platform", "engine", "kernels", "web", "migrations")
PROGRAMS = Path(sys.executable).parent

ASKS_FOR_PLATFORM = "def test_it():\n    import platform\n    assert platform.python_version()\n"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("folder", SOURCE_ROOTS)
def test_the_outer_folders_are_no_packages(folder: str) -> None:
    assert (ROOT / folder / "manylora").is_dir()

    assert not (ROOT / folder / "__init__.py").exists()
    assert not (ROOT / folder / "manylora" / "__init__.py").exists()


@pytest.mark.parametrize("folder", SOURCE_ROOTS)
def test_every_folder_of_modules_below_them_is_a_package(folder: str) -> None:
    outer = ROOT / folder / "manylora"
    versions = ROOT / "migrations" / "manylora" / "migrations" / "versions"  # Alembic's, by path

    folders = {path.parent for path in outer.rglob("*.py")} - {outer, versions}

    assert [path for path in folders if not (path / "__init__.py").exists()] == []


def test_python_at_the_root_imports_the_standard_librarys_platform() -> None:
    result = run(sys.executable, "-c", "import platform; print(platform.__file__, platform.node())")

    assert result.returncode == 0, result.stderr
    assert str(ROOT) not in result.stdout.split()[0]


@pytest.mark.parametrize(
    "pytest_command",
    [(PROGRAMS / "pytest",), (sys.executable, "-m", "pytest")],
    ids=["pytest", "-m"],
)
def test_pytest_at_the_root_imports_the_standard_librarys_platform(
    tmp_path: Path, pytest_command: tuple[str | Path, ...]
) -> None:
    (tmp_path / "test_platform.py").write_text(ASKS_FOR_PLATFORM)

    result = run(*pytest_command, "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", tmp_path)

    assert result.returncode == 0, result.stdout
    assert "1 passed" in result.stdout


def test_the_module_and_the_command_start_at_the_root() -> None:
    by_module = run(sys.executable, "-m", "manylora", "--help")
    by_command = run(PROGRAMS / "manylora", "--help")

    assert by_module.returncode == by_command.returncode == 0, by_module.stderr
    assert "serve" in by_module.stdout
    assert "serve" in by_command.stdout
