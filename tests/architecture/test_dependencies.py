"""The dependencies that are imported, declared, explained and pinned are the same."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXPLAINED = re.compile(r"^\| `(?P<name>[\w.-]+)` \|", re.MULTILINE)
PINNED = re.compile(r"^(?P<name>[\w.-]+)==", re.MULTILINE)
SOURCE_ROOTS = ("platform", "engine", "kernels", "web", "migrations")
COMES_WITH = {  # a part of the declared one that has its own name
    "markupsafe": "jinja2",
    "pydantic_core": "pydantic",
    "starlette": "fastapi",
    "uvloop": "uvicorn",
}
EXTRAS_NOT_IN_CI = ("cuda", "scale")
EXTRAS_TO_DEVELOP = ("dev", "train")


def name_of(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name, requirement
    return name.group().lower().replace("_", "-")


def declared(*, leaving_out: tuple[str, ...] = ()) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    groups = [project["dependencies"]] + [
        extras[extra] for extra in extras if extra not in leaving_out
    ]
    return {name_of(requirement) for group in groups for requirement in group} - {"manylora"}


def test_each_declared_dependency_is_explained_and_no_other() -> None:
    explained = EXPLAINED.findall((ROOT / "docs" / "dependencies.md").read_text())

    assert len(explained) == len(set(explained))
    assert set(explained) == declared()


def test_each_dependency_that_ci_installs_is_pinned() -> None:
    pinned = {name_of(name) for name in PINNED.findall((ROOT / "constraints.txt").read_text())}

    assert declared(leaving_out=EXTRAS_NOT_IN_CI) - pinned == set()


def imported_modules() -> Iterator[str]:
    """The first part of each name that our own code imports."""
    for folder in SOURCE_ROOTS:
        for path in (ROOT / folder / "manylora").rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    yield from (alias.name.partition(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module:
                    yield node.module.partition(".")[0]


def test_each_package_that_the_code_imports_is_declared() -> None:
    third_party = set(imported_modules()) - set(sys.stdlib_module_names) - {"manylora"}
    distributions = packages_distributions()

    def comes_from(module: str) -> set[str]:
        names = distributions.get(module, [module])
        return {name_of(COMES_WITH.get(module, name)) for name in names}

    run_time = declared(leaving_out=EXTRAS_TO_DEVELOP)
    assert {module for module in third_party if not comes_from(module) & run_time} == set()
