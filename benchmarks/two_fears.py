"""Does a long prompt hurt those who are reading, and does a full KV cache hurt everyone?

Runs the scenarios of `scenarios.py` on the true model in this process, and writes what it found
to `results/`. See README.md.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import structlog
from report import (
    RESULTS,
    Finding,
    findings_as_json,
    findings_table,
    load_average,
    machine_facts,
    write,
)
from scenarios import (
    ConversationSizes,
    KvPressureSizes,
    LongPromptSizes,
    SharedPrefixSizes,
    Start,
    conversation,
    kv_pressure,
    long_prompt,
    shared_prefix,
)
from traffic import CLOCKS, Traffic

from manylora.engine.api import EngineInfo
from manylora.engine.build import build_engine
from manylora.engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Scenario:
    run: Callable[[Start, Any], Finding]
    sizes: Any
    quick: Any  # sizes that show only that it runs


SCENARIOS = {
    "long_prompt": Scenario(
        long_prompt,
        LongPromptSizes(),
        LongPromptSizes(rounds=1, streams=2, stream_prompt=8, long_prompt=200, quiet_steps=4),
    ),
    "kv_pressure": Scenario(
        kv_pressure,
        KvPressureSizes(),
        KvPressureSizes(sequences=4, requests=8, prompt=(8, 24), output=(16, 48)),
    ),
    "shared_prefix": Scenario(
        shared_prefix,
        SharedPrefixSizes(),
        SharedPrefixSizes(adapters=2, shared=100, own=20, rank=4),
    ),
    "conversation": Scenario(
        conversation,
        ConversationSizes(),
        ConversationSizes(rounds=2, turns=3, message=20, answer=8),
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    # One line for each preemption is for operators; here they are counted.
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    names = [options.only] if options.only else list(SCENARIOS)
    engines: list[EngineInfo] = []

    def start(**scenario_options: Any) -> Traffic:
        values = scenario_options | dict(options.set)
        core = build_engine(EngineConfig(model=options.model, **values))
        engines.append(core.info)
        return Traffic(core, clock=CLOCKS[options.clock])

    findings = [_run(SCENARIOS[name], start, options) for name in names]
    facts = machine_facts() | {
        "model": engines[0].model,
        "dtype": engines[0].dtype,
        "kernels": engines[0].kernels,
        "clock": options.clock,
        "options": [f"{name}={value}" for name, value in options.set],
    }
    result = facts | {
        "quick": options.quick,
        "engines": [asdict(info) for info in engines],
        "findings": findings_as_json(findings),
    }
    write(options.results, options.name, result, findings_table(findings, facts))


def _run(scenario: Scenario, start: Start, options: argparse.Namespace) -> Finding:
    sizes = replace(scenario.quick if options.quick else scenario.sizes, **dict(options.size))
    before = load_average()
    finding = scenario.run(start, sizes)
    return replace(finding, sizes=asdict(sizes), load_average=(before, load_average()))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(SCENARIOS), help="run one scenario; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only shows that it runs")
    parser.add_argument("--model", default="demo")
    parser.add_argument(
        "--set", type=_pair, action="append", default=[], metavar="OPTION=VALUE",
        help="an engine option, as max_num_batched_tokens=128; over the scenario's own",
    )  # fmt: skip
    parser.add_argument(
        "--size", type=_pair, action="append", default=[], metavar="NAME=VALUE",
        help="a size of the scenario of --only, as rounds=1",
    )  # fmt: skip
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall",
        help="cpu: processor seconds of the engine's thread, for a busy machine and threads=1",
    )  # fmt: skip
    parser.add_argument("--name", help="of the files; default: two_fears or the scenario's")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the files")
    options = parser.parse_args(arguments)
    if options.clock == "cpu" and dict(options.set).get("threads") != 1:
        parser.error("--clock cpu counts one thread: it needs --set threads=1")
    if options.size and not options.only:
        parser.error("--size needs --only: the scenarios have different sizes")
    options.name = options.name or options.only or "two_fears"
    return options


def _pair(text: str) -> tuple[str, Any]:
    """`name=value`; the value is a number where it reads as one."""
    name, _, value = text.partition("=")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, {"true": True, "false": False}.get(value.lower(), value)


if __name__ == "__main__":
    main()
