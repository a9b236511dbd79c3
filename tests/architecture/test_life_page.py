"""docs/life-of-a-request.md leaves no stage, cause or setting out, and names what there is."""

import importlib.util
import json
import re
from pathlib import Path

from manylora.engine.lifecycle import StageName, WaitCause
from manylora.platform.settings import all_options
from support.life import assert_whole

PAGE = (Path(__file__).parents[2] / "docs" / "life-of-a-request.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (.+) \|$", re.MULTILINE)


def test_each_stage_and_each_cause_has_its_row() -> None:
    assert [name for name, _ in ROW.findall(PAGE)] == [*StageName, *WaitCause]


def test_the_modules_exist() -> None:
    named = re.findall(r"`(?:manylora\.)?((?:platform|engine)\.[\w.]+)`", PAGE)
    modules = {f"manylora.{name}" for name in named}

    assert len(modules) > 12
    assert {name for name in modules if importlib.util.find_spec(name) is None} == set()


def test_the_options_exist() -> None:
    named = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z-]+)", PAGE)}

    assert named <= set(all_options())


def test_the_answer_that_it_shows_is_a_whole_life() -> None:
    answer = re.search(r"```json\n(.+?)```", PAGE, re.DOTALL)
    assert answer is not None

    assert_whole(json.loads(answer[1]))
