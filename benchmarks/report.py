"""What a benchmark found and on which machine, as JSON and as a table in Markdown."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

RESULTS = Path(__file__).parent / "results"
ISA_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
)


@dataclass(frozen=True, slots=True)
class Check:
    """One target, and what was measured against it."""

    what: str
    measured: float
    bound: Literal["at most", "at least"]
    target: float

    @property
    def passed(self) -> bool:
        if self.bound == "at most":
            return self.measured <= self.target
        return self.measured >= self.target


@dataclass(frozen=True, slots=True)
class Finding:
    """One scenario's checks, and the raw numbers to argue with."""

    scenario: str
    measures: str  # in words
    checks: tuple[Check, ...]
    numbers: Mapping[str, Any]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    load_average: tuple[float, ...] = ()  # over the last minute, before and after


def machine_facts() -> dict[str, Any]:
    """The processor, its instruction sets, the programs' versions, the commit and the time."""
    cpu = _cpu_info()
    flags = cpu.get("flags", "").split()
    torch = sys.modules.get("torch")
    return {
        "cpu": cpu.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
        "python": platform.python_version(),
        "torch": None if torch is None else torch.__version__,
        "threads": None if torch is None else torch.get_num_threads(),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": load_average(),
    }


def load_average() -> float:
    """Runnable processes over the last minute, this one among them."""
    return round(os.getloadavg()[0], 2)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Count, mean, and percentiles by nearest rank."""
    return {
        "count": len(values),
        "mean": round(sum(values) / len(values), 5),
        "p50": round(percentile(values, 50), 5),
        "p90": round(percentile(values, 90), 5),
        "p99": round(percentile(values, 99), 5),
        "max": round(max(values), 5),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


def write(folder: Path, name: str, result: Mapping[str, Any], table: str) -> None:
    """`name.json` with everything and `name.md` with the table."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=2, ensure_ascii=False)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(table + "\n", encoding="utf-8")
    print(table)


def findings_as_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [
        asdict(finding)
        | {"checks": [asdict(check) | {"passed": check.passed} for check in finding.checks]}
        for finding in findings
    ]


def findings_table(findings: Sequence[Finding], facts: Mapping[str, Any]) -> str:
    rows = [
        (
            finding.scenario,
            check.what,
            f"{check.bound} {check.target:g}",
            f"{check.measured:.3g}",
            "yes" if check.passed else "**no**",
        )
        for finding in findings
        for check in finding.checks
    ]
    head = ("scenario", "measured", "target", "value", "met")
    return f"{facts_line(facts)}\n\n{markdown_table(head, rows)}"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def facts_line(facts: Mapping[str, Any]) -> str:
    """The machine's and the engine's facts in a sentence."""
    shown = {name: value for name, value in facts.items() if value not in (None, [])}
    return "; ".join(
        f"{name} {' '.join(value) if isinstance(value, list) else value}"
        for name, value in shown.items()
    )


def _cpu_info() -> dict[str, str]:
    """The first processor's entries of /proc/cpuinfo; empty where there is no such file."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text().split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    folder = Path(__file__).parent
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return result.stdout.strip()
