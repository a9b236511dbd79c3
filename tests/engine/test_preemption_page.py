"""docs/preemption.md shows what its script prints, and in it each remedy does what it says."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "preemption.md").read_text()
ROW = re.compile(r"^(\(\d\) \w+|as it is\S*) .*? +(\d+) +(\d+) +([\d.]+) s +([\d.]+) s$", re.M)


def run_lab() -> str:
    script = ROOT / "examples" / "preemption_lab.py"
    return subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True
    ).stdout


def test_the_page_shows_what_the_script_prints() -> None:
    shown = re.search(r"```text\n(.+?)```", PAGE, re.DOTALL)

    assert shown is not None
    assert shown[1] == run_lab()


def test_each_remedy_alone_does_away_with_the_preemptions() -> None:
    before, *remedied, again = ROW.findall(run_lab())

    assert int(before[1]) > 0
    assert int(before[2]) > 0
    assert [row[0] for row in remedied] == [
        "(1) num_kv_blocks",
        "(2) max_num_seqs",
        "(3) max_num_batched_tokens",
        "(4) dtype",
        "(4) max_model_len",
    ]
    assert {row[1:3] for row in [*remedied, again]} == {("0", "0")}
