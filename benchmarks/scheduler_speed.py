"""How many steps a second the scheduler alone can plan: the very classes that serve, no model.

A fake runner gives every sampling sequence a token; finished sequences are replaced at once, so
that the queue and the running list stay full. Loads no torch. See README.md.
"""

import argparse
import cProfile
import itertools
import pstats
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from report import RESULTS, facts_line, machine_facts, markdown_table, write

from manylora.engine.api import AdapterRef, FinishReason, Request, SamplingParams
from manylora.engine.blocks import BlockPool
from manylora.engine.policy import FairByTenant
from manylora.engine.scheduler import Scheduler
from manylora.engine.sequence import Sequence as EngineSequence
from manylora.engine.slots import AdapterSlots

BLOCK_SIZE = 16
TENANTS = 10
ADAPTERS = 16  # each tenant's requests use several of them; all find a slot
SHARED_PROMPT, OWN_PROMPT = 64, 64  # tokens, the first shared by a tenant and adapter
OUTPUT = (64, 192)  # tokens
TOKENS_PER_SEAT = 4  # of the step budget: enough to keep every seat taken
NUM_WAITING = 200


@dataclass(frozen=True, slots=True)
class Case:
    num_running: int
    prefix_caching: bool


class Simulation:
    """A scheduler under a steady load."""

    def __init__(self, case: Case) -> None:
        longest = SHARED_PROMPT + OWN_PROMPT + OUTPUT[1]
        self.scheduler = Scheduler(
            BlockPool(
                case.num_running * (longest // BLOCK_SIZE + 1),
                BLOCK_SIZE,
                prefix_caching=case.prefix_caching,
            ),
            AdapterSlots(ADAPTERS),
            policy=FairByTenant(),
            max_num_seqs=case.num_running,
            max_num_batched_tokens=TOKENS_PER_SEAT * case.num_running,
            base_digest="base",
            kv_dtype="bfloat16",
            adapter_ready=lambda digest: True,
        )
        self._num_running = case.num_running
        self.scheduler_seconds = 0.0  # of this thread's processor time
        self.num_tokens = 0
        self.profile: cProfile.Profile | None = None
        self._arrivals = _arrivals()

    def fill(self) -> None:
        """Step until the running list is full, then over the first departures."""
        self._top_up()
        while len(self.scheduler.running) < self._num_running:
            self.step()
        for _ in range(OUTPUT[0]):
            self.step()

    def step(self) -> None:
        with self._counted():
            batch = self.scheduler.schedule()
            self.scheduler.advance(batch)
        self.num_tokens += batch.num_tokens
        done = []
        for entry in batch.entries:
            sequence = entry.sequence
            if sequence.num_computed_tokens == sequence.num_tokens:
                sequence.token_ids.append(0)
                if sequence.num_output_tokens == sequence.request.params.max_tokens:
                    done.append(sequence)
        for sequence in done:
            sequence.finish(FinishReason.LENGTH)
        with self._counted():
            for sequence in done:
                self.scheduler.remove(sequence)
        self._top_up()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """What is done inside is the scheduler's."""
        if self.profile is not None:
            self.profile.enable()
        began = time.thread_time()
        yield
        self.scheduler_seconds += time.thread_time() - began
        if self.profile is not None:
            self.profile.disable()

    def _top_up(self) -> None:
        missing = NUM_WAITING - len(self.scheduler.waiting)
        arrivals = list(itertools.islice(self._arrivals, max(0, missing)))
        with self._counted():
            for sequence in arrivals:
                self.scheduler.add(sequence)


def _arrivals() -> Iterator[EngineSequence]:
    """Requests without end, of the same random lengths in every run."""
    draw = random.Random(0)
    for number in itertools.count():
        tenant, adapter = draw.randrange(TENANTS), draw.randrange(ADAPTERS)
        own = [draw.randrange(1000) for _ in range(OWN_PROMPT)]
        prompt = [tenant] * SHARED_PROMPT + own
        yield EngineSequence(
            request=Request(
                request_id=str(number),
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(max_tokens=draw.randint(*OUTPUT)),
                tenant=f"tenant-{tenant}",
                adapter=AdapterRef(f"adapter-{adapter}"),
            ),
            token_ids=prompt,
        )


def measure(case: Case, *, num_steps: int, rounds: int, num_functions: int) -> dict[str, Any]:
    """Steps a second of one case, and where the time goes, measured once more with a profile."""
    simulation = Simulation(case)
    simulation.fill()
    speeds = []
    for _ in range(rounds):
        simulation.scheduler_seconds, simulation.num_tokens = 0.0, 0
        for _ in range(num_steps):
            simulation.step()
        speeds.append(num_steps / simulation.scheduler_seconds)
    simulation.profile = cProfile.Profile(time.thread_time)
    for _ in range(num_steps):
        simulation.step()
    return {
        "running": case.num_running,
        "prefix_caching": case.prefix_caching,
        "steps_per_second": round(median(speeds), 1),
        "steps_per_second_of_each_round": [round(speed, 1) for speed in speeds],
        "milliseconds_per_step": round(1000 / median(speeds), 3),
        "tokens_per_step": round(simulation.num_tokens / num_steps, 1),
        "hot_spots": _hot_spots(simulation.profile, num_functions),
    }


def _hot_spots(profile: cProfile.Profile, count: int) -> list[dict[str, Any]]:
    """The functions with the most own time; the profiler makes small ones look larger."""
    stats = pstats.Stats(profile).get_stats_profile()
    total = sum(function.tottime for function in stats.func_profiles.values())
    functions = sorted(stats.func_profiles.items(), key=lambda item: -item[1].tottime)
    return [
        {
            "function": f"{Path(function.file_name).name}:{function.line_number} {name}",
            "own_share": round(function.tottime / total, 3),
            "share_with_callees": round(function.cumtime / total, 3),
            "calls": function.ncalls,
        }
        for name, function in functions[:count]
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[32, 256, 1000])
    parser.add_argument("--steps", type=int, default=300, help="steps of one round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the median is reported")
    parser.add_argument("--functions", type=int, default=12, help="how many hot spots to list")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the files")
    options = parser.parse_args(arguments)
    cases = [Case(running, caching) for running in options.running for caching in (True, False)]
    measured = [
        measure(
            case,
            num_steps=options.steps,
            rounds=options.rounds,
            num_functions=options.functions,
        )
        for case in cases
    ]
    facts = machine_facts()
    table = f"{facts_line(facts)}\n\n{_speed_table(measured)}\n\n{_hot_table(measured[-2:])}"
    write(options.results, "scheduler_speed", facts | {"cases": measured}, table)


def _speed_table(measured: Sequence[dict[str, Any]]) -> str:
    head = ("running", "prefix caching", "steps/s", "ms a step", "tokens a step")
    rows = [
        (
            str(one["running"]),
            "on" if one["prefix_caching"] else "off",
            f"{one['steps_per_second']:g}",
            f"{one['milliseconds_per_step']:g}",
            f"{one['tokens_per_step']:g}",
        )
        for one in measured
    ]
    return markdown_table(head, rows)


def _hot_table(measured: Sequence[dict[str, Any]]) -> str:
    """Where the time of the largest cases goes."""
    head = ("running", "caching", "function", "own time", "with callees", "calls")
    rows = [
        (
            str(one["running"]),
            "on" if one["prefix_caching"] else "off",
            f"`{spot['function']}`",
            f"{spot['own_share']:.1%}",
            f"{spot['share_with_callees']:.1%}",
            str(spot["calls"]),
        )
        for one in measured
        for spot in one["hot_spots"]
    ]
    return markdown_table(head, rows)


if __name__ == "__main__":
    main()
