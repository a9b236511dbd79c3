"""What the documentation points at is there: files, tests, names, options, headings."""

import re
from pathlib import Path

import pytest

from manylora.platform.settings import all_options

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]
ENGINE = ROOT / "engine" / "manylora" / "engine"
ENGINE_PAGES = [ROOT / "docs" / name for name in ("engine.md", "preemption.md")]

each_engine_page = pytest.mark.parametrize("page", ENGINE_PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)

    assert broken == []


@each_engine_page
def test_the_files_and_tests_that_it_names_exist(page: Path) -> None:
    text = page.read_text()
    sources = {path.name for folder in ("engine", "tests", "examples") for path in files(folder)}

    assert set(re.findall(r"\b(\w+\.py)\b", text)) - sources == set()
    tests = "".join(path.read_text() for path in files("tests"))
    named = set(re.findall(r"\btest_\w+\b(?!\.py)", text))
    assert {name for name in named if f"def {name}(" not in tests} == set()


@each_engine_page
def test_the_classes_and_functions_that_it_names_exist(page: Path) -> None:
    code = "".join(path.read_text() for path in ENGINE.rglob("*.py"))
    methods = re.findall(r"`([A-Z]\w+)\.(\w+)`", page.read_text())

    assert len(methods) > 0
    assert {(owner, name) for owner, name in methods if f"class {owner}" not in code} == set()
    assert {
        name for _, name in methods if not re.search(rf"(def {name}\(|^    {name}: )", code, re.M)
    } == set()


@each_engine_page
def test_the_options_that_it_names_exist(page: Path) -> None:
    named = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z-]+)", page.read_text())}

    assert named <= set(all_options())


def files(folder: str) -> list[Path]:
    return list((ROOT / folder).rglob("*.py"))
