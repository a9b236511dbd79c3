"""The command killed at random moments and started again until it is done."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

NUM_LINES = 160
PATIENCE_SECONDS = 120.0


def command(source: Path, output: Path, model: Path, adapter: Path) -> list[str]:
    options = {
        "--output": output,
        "--model": model,
        "--dtype": "float32",
        "--num-kv-blocks": 128,
        "--max-num-seqs": 8,
        "--max-num-batched-tokens": 64,
        "--threads": 1,
        "--temperature": 0,
        "--log-level": "warning",
    }
    flags = [str(part) for option in options.items() for part in option]
    modules = ["--lora-modules", f"mine={adapter}", f"same={adapter}"]
    return [sys.executable, "-m", "manylora", "generate", str(source), *flags, *modules]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if "MANYLORA" not in name}
    return kept | {"OMP_NUM_THREADS": "1"}


def finish(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=PATIENCE_SECONDS,
    )


def kill_after(seconds: float, output: Path, *arguments: Any) -> None:
    """SIGKILL a run so many seconds after it wrote, or after it began when it has all written."""
    size = output.stat().st_size if output.exists() else 0
    process = subprocess.Popen(
        command(arguments[0], output, *arguments[1:]),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if output.exists() and output.stat().st_size != size:
            break
        time.sleep(0.005)
    time.sleep(seconds)
    process.kill()
    process.wait()


def lines(path: Path) -> list[str]:
    return sorted(path.read_text().splitlines())


@pytest.fixture
def source(folder: Path) -> Path:
    """Lines of many lengths, some of an adapter, some bad."""
    path = folder / "in.jsonl"
    draw = random.Random(1)
    with path.open("w") as file:
        for number in range(NUM_LINES):
            line: dict[str, Any] = {"id": f"line-{number}", "prompt": f"prompt {number}" * 3}
            line["max_tokens"] = draw.choice([1, 8, 40]) if number % 20 else 0
            if number % 3 == 0:
                line["adapter"] = draw.choice(["mine", "same"])
            file.write(json.dumps(line) + "\n")
    return path


def test_runs_killed_at_random_moments_leave_the_lines_of_one_that_was_not(
    source: Path, folder: Path, tiny_model: Path, adapter: Path
) -> None:
    seed = time.time_ns()
    draw, killed, whole = random.Random(seed), folder / "killed.jsonl", folder / "whole.jsonl"
    sizes = []

    for _ in range(3):
        kill_after(draw.uniform(0, 0.4), killed, source, tiny_model, adapter)
        if draw.random() < 0.5:  # as if it had been killed within its last write
            size = killed.stat().st_size
            os.truncate(killed, max(0, size - draw.randrange(200)))
        sizes.append(killed.read_bytes().count(b"\n"))
    ended = finish(source, killed, tiny_model, adapter)
    unhurt = finish(source, whole, tiny_model, adapter)

    assert any(0 < size < NUM_LINES for size in sizes), "no kill came in the midst of a run"
    assert len(lines(whole)) == NUM_LINES
    assert lines(killed) == lines(whole), f"seed {seed}"
    assert ended.returncode == unhurt.returncode == 1, ended.stderr
    num_errors = NUM_LINES // 20
    far, end = unhurt.stderr.splitlines()
    assert far.startswith(f"{NUM_LINES}/{NUM_LINES} lines, ")
    assert end == f"{NUM_LINES - num_errors} lines answered, {num_errors} with errors"
    assert "by earlier runs" in ended.stderr
    assert ended.stdout == ""


def test_a_run_without_bad_lines_exits_0(folder: Path, tiny_model: Path, adapter: Path) -> None:
    source = folder / "in.jsonl"
    source.write_text('{"prompt": "a"}\n')

    ended = finish(source, folder / "out.jsonl", tiny_model, adapter)

    assert ended.returncode == 0
    assert ended.stderr.startswith("1/1 lines, ")
    assert ended.stderr.endswith("\n1 lines answered, 0 with errors\n")
