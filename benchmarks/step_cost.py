"""What a step costs: its rows, how much they look back on, and what is not the model.

The figures behind the scenarios of `two_fears.py`: see README.md.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from random_adapters import load_random_adapters
from report import RESULTS, facts_line, machine_facts, markdown_table, write
from traffic import CLOCKS, Traffic

from manylora.engine.api import AdapterRef
from manylora.engine.build import build_engine
from manylora.engine.config import EngineConfig

BLOCK_SIZE = 16
ADAPTER_RANK = 16
MOST_ROWS = 256


@dataclass(frozen=True, slots=True)
class Sizes:
    contexts: tuple[int, ...] = (0, 1024, 4096)  # tokens already in the KV cache, whole blocks
    prefill_rows: tuple[int, ...] = (8, 32, 64, 128, 256)
    decodes: tuple[int, ...] = (1, 8, 16, 32)
    repeats: int = 5


QUICK = Sizes(contexts=(0, 128), prefill_rows=(8, 64), decodes=(1, 4), repeats=1)


class StepCost:
    """Steps of one kind, one after the other, on one engine."""

    def __init__(self, traffic: Traffic, adapters: Sequence[AdapterRef], repeats: int) -> None:
        self._traffic = traffic
        self._adapters = adapters
        self._repeats = repeats

    def measure(self, context: int, sizes: Sizes) -> list[dict[str, Any]]:
        """Every kind of step after a prefix of `context` tokens, cached beforehand."""
        prefix = self._traffic.random_tokens(context)
        if prefix:
            self._traffic.submit(f"prefix-{context}", prefix, 1)
            self._traffic.finish()
        rows = [self._prefill(prefix, count) for count in sizes.prefill_rows]
        rows += [self._decode(prefix, [None] * count) for count in sizes.decodes]
        if not prefix:  # adapters share no prefix: each would have to compute it
            rows.append(self._decode(prefix, self._adapters))
        return rows

    def _prefill(self, prefix: list[int], num_rows: int) -> dict[str, Any]:
        """One sequence's rows in one step. A prefix of whole blocks is found, so none is its."""
        steps = []
        for number in range(self._repeats):
            own = self._traffic.random_tokens(num_rows)
            name = f"prefill-{len(prefix)}-{num_rows}-{number}"
            self._traffic.submit(name, prefix + own, 1)
            steps.append(self._step())
        return _row("prefill", num_rows, len(prefix), 0, steps)

    def _decode(self, prefix: list[int], adapters: Sequence[AdapterRef | None]) -> dict[str, Any]:
        """Several sequences' next tokens; each of `adapters` has one sequence."""
        others = len({adapter for adapter in adapters if adapter is not None})
        timelines = [
            self._traffic.submit(
                f"decode-{len(prefix)}-{len(adapters)}-{others}-{number}",
                prefix + self._traffic.random_tokens(1),
                self._repeats + 2 * len(adapters),
                adapter=adapter,
            )
            for number, adapter in enumerate(adapters)
        ]
        for timeline in timelines:
            self._traffic.step_until_first_token(timeline)
        steps = [self._step() for _ in range(self._repeats)]
        self._traffic.abort_all()
        return _row("decode", len(adapters), len(prefix), others, steps)

    def _step(self) -> tuple[float, float]:
        """Seconds of one step, and of the model in it."""
        traffic = self._traffic
        began, model_began = traffic.clock(), traffic.model_seconds
        traffic.step()
        return traffic.clock() - began, traffic.model_seconds - model_began


def _row(
    kind: str, rows: int, context: int, adapters: int, steps: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    return {
        "kind": kind,
        "rows": rows,
        "context": context,
        "adapters": adapters,
        "milliseconds": round(1000 * median(step for step, _ in steps), 2),
        "of_it_outside_the_model": round(1000 * median(s - model for s, model in steps), 2),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only shows that it runs")
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's")
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="cpu: this thread's processor seconds"
    )
    parser.add_argument("--name", default="step_cost", help="of the files")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the files")
    options = parser.parse_args(arguments)
    if options.clock == "cpu" and options.threads != 1:
        parser.error("--clock cpu counts one thread: it needs --threads 1")
    sizes = QUICK if options.quick else Sizes()
    traffic, adapters = _start(options, sizes)
    cost = StepCost(traffic, adapters, sizes.repeats)
    rows = [row for context in sizes.contexts for row in cost.measure(context, sizes)]
    traffic.core.close()
    info = traffic.core.info
    facts = machine_facts() | {
        "model": info.model,
        "dtype": info.dtype,
        "kernels": info.kernels,
        "clock": options.clock,
    }
    head = ("step", "rows", "context", "adapters", "ms", "of it outside the model")
    table = markdown_table(head, [[str(value) for value in row.values()] for row in rows])
    write(options.results, options.name, facts | {"rows": rows}, f"{facts_line(facts)}\n\n{table}")


def _start(options: argparse.Namespace, sizes: Sizes) -> tuple[Traffic, list[AdapterRef]]:
    num_adapters = min(8, max(sizes.decodes))
    core = build_engine(
        EngineConfig(
            model=options.model,
            threads=options.threads,
            num_kv_blocks=(sum(sizes.contexts) + 64 * MOST_ROWS) // BLOCK_SIZE,
            max_num_batched_tokens=MOST_ROWS,
            max_loras=num_adapters,
        )
    )
    adapters = load_random_adapters(core, num_adapters, ADAPTER_RANK)
    return Traffic(core, clock=CLOCKS[options.clock]), adapters


if __name__ == "__main__":
    main()
