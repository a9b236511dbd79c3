"""The wheel carries everything that the source tree serves from, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = ("platform", "engine", "kernels", "web", "migrations")
NOT_SHIPPED = shutil.ignore_patterns("__pycache__", "*.pyc")
HTMX = "manylora/web/static/htmx.min.js"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, with a stand-in for htmx, which is fetched and git-ignored."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in SOURCE_ROOTS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=NOT_SHIPPED)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, copy)
    (copy / "web" / HTMX).write_text("// stands for htmx")
    return copy


@pytest.fixture(scope="module")
def shipped(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        folder,
        tree,
    ]
    subprocess.run(pip, check=True, stdin=subprocess.DEVNULL)
    [wheel] = folder.glob("*.whl")
    return {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}


def test_the_wheel_holds_every_file_of_the_source_roots_and_no_other(
    tree: Path, shipped: set[str]
) -> None:
    sources = {
        path.relative_to(tree / folder).as_posix()
        for folder in SOURCE_ROOTS
        for path in (tree / folder / "manylora").rglob("*")
        if path.is_file()
    }

    package = {name for name in shipped if ".dist-info/" not in name}

    assert package == sources


def test_the_wheel_holds_what_is_not_python(shipped: set[str]) -> None:
    assert HTMX in shipped
    assert "manylora/migrations/script.py.mako" in shipped
    assert [name for name in shipped if name.startswith("manylora/web/templates/")]
    assert [name for name in shipped if name.endswith("licenses/LICENSE")]
