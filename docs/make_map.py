"""Writes the list of modules in architecture.md anew, from the modules' docstrings."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
SOURCE_ROOTS = ("platform", "web", "engine", "kernels", "migrations")
BEGIN, END = "<!-- modules: made by `make map` -->\n", "<!-- end of modules -->\n"


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    sections = [section(folder) for folder in SOURCE_ROOTS]
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(sections) + "\n" + END + after)


def section(folder: str) -> str:
    """One folder's heading and a line for each of its modules."""
    modules = sorted(
        path
        for path in (ROOT / folder / "manylora").rglob("*.py")
        if path.name != "__init__.py" or path.read_text().strip()
    )
    lines = [f"- `{path.relative_to(ROOT).as_posix()}` {purpose(path)}" for path in modules]
    return "\n".join([f"### {folder}", "", *lines, ""])


def purpose(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        raise SystemExit(f"{path.relative_to(ROOT)} has no docstring")
    return docstring.splitlines()[0]


if __name__ == "__main__":
    main()
