"""The dependencies that are declared, explained and pinned are the same."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXPLAINED = re.compile(r"^\| `(?P<name>[\w.-]+)` \|", re.MULTILINE)
PINNED = re.compile(r"^(?P<name>[\w.-]+)==", re.MULTILINE)
EXTRAS_NOT_IN_CI = ("cuda", "scale")


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
