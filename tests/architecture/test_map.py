"""docs/architecture.md lists every module with what its docstring says it is for."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = ("platform", "engine", "kernels", "web", "migrations")
ENTRY = re.compile(r"^- `(?P<path>[\w/]+\.py)` (?P<text>.+)$", re.MULTILINE)


def first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{path.relative_to(ROOT)} has no docstring"
    return docstring.splitlines()[0]


def test_the_map_lists_every_module_with_the_first_line_of_its_docstring() -> None:
    modules = [
        path
        for folder in SOURCE_ROOTS
        for path in (ROOT / folder / "manylora").rglob("*.py")
        if path.name != "__init__.py" or path.read_text().strip()
    ]

    listed = dict(ENTRY.findall((ROOT / "docs" / "architecture.md").read_text()))

    assert listed == {path.relative_to(ROOT).as_posix(): first_line(path) for path in modules}, (
        "`make map` writes the list anew"
    )


def test_making_the_map_anew_changes_nothing(tmp_path: Path) -> None:
    for folder in SOURCE_ROOTS:
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "static")
        )
    shutil.copytree(ROOT / "docs", tmp_path / "docs")

    subprocess.run([sys.executable, tmp_path / "docs" / "make_map.py"], check=True)

    written = (tmp_path / "docs" / "architecture.md").read_text()
    assert written == (ROOT / "docs" / "architecture.md").read_text()
