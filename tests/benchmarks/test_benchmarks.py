"""The benchmarks run, in sizes that measure nothing, and say what they found and on what."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.tiny_model import make_tiny_llama

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


def run(results: Path, script: str, *arguments: str | Path) -> dict[str, Any]:
    """The JSON that a benchmark wrote; its table names the same machine."""
    command = [sys.executable, f"benchmarks/{script}.py", "--results", results, *arguments]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    (table,) = results.glob("*.md")
    (file,) = results.glob("*.json")
    result: dict[str, Any] = json.loads(file.read_text())
    assert result["cores"] >= 1
    assert result["commit"] in table.read_text()
    return result


def test_the_two_fears_are_measured_scenario_by_scenario(tmp_path: Path, model: Path) -> None:
    result = run(tmp_path, "two_fears", "--quick", "--model", model, "--set", "threads=1")

    findings = {finding["scenario"]: finding for finding in result["findings"]}
    assert list(findings) == ["long_prompt", "kv_pressure", "shared_prefix", "conversation"]
    assert result["kernels"] == "ref"
    checks = {check["what"]: check for f in findings.values() for check in f["checks"]}
    assert all(check["measured"] >= 0 for check in checks.values())
    pressure = findings["kv_pressure"]["numbers"]
    assert checks["requests that came to their end"]["passed"]
    assert checks["runs whose answers are those of enough KV"]["passed"]
    assert pressure["enough"][0]["preemptions"] == 0
    assert pressure["enough"][0]["computed_tokens"] == pressure["needed_tokens"]
    assert pressure["scarce"][0]["computed_tokens"] >= pressure["needed_tokens"]
    prefix = findings["shared_prefix"]["numbers"]
    assert prefix["cached_tokens_of_misses"] == [0]
    assert prefix["cached_tokens_of_hits"] == [96]  # the whole blocks of 100 shared tokens
    loud = findings["long_prompt"]["numbers"]["loud_gap_seconds"]
    assert loud["count"] >= 2  # each stream goes on while the long prompt is computed


def test_one_scenario_can_be_run_alone_with_other_options(tmp_path: Path, model: Path) -> None:
    result = run(
        tmp_path,
        "two_fears",
        "--quick",
        *("--model", model),
        *("--only", "long_prompt"),
        *("--size", "streams=3"),
        *("--set", "threads=1"),
        *("--set", "long_prefill_token_threshold=10"),
        *("--clock", "cpu"),
    )

    (finding,) = result["findings"]
    chunks = 200 // 10
    assert finding["sizes"]["streams"] == 3
    assert finding["numbers"]["loud_gap_seconds"]["count"] == 3 * chunks


def test_a_steps_cost_is_measured_by_rows_and_context(tmp_path: Path, model: Path) -> None:
    result = run(tmp_path, "step_cost", "--quick", "--model", model, "--threads", "1")

    kinds = {(row["kind"], row["rows"], row["context"], row["adapters"]) for row in result["rows"]}
    assert kinds >= {("prefill", 64, 128, 0), ("decode", 4, 0, 4), ("decode", 4, 128, 0)}
    assert all(row["milliseconds"] > row["of_it_outside_the_model"] for row in result["rows"])


def test_the_schedulers_speed_is_measured_without_torch(tmp_path: Path) -> None:
    result = run(tmp_path, "scheduler_speed", "--running", "8", "--steps", "20", "--rounds", "2")

    assert result["torch"] is None
    assert [case["prefix_caching"] for case in result["cases"]] == [True, False]
    for case in result["cases"]:
        assert case["steps_per_second"] > 0
        assert case["tokens_per_step"] > 8
        assert len(case["steps_per_second_of_each_round"]) == 2
        assert any("schedule" in spot["function"] for spot in case["hot_spots"])
