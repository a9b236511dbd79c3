"""Preempts on purpose, lets the engine say why, and tries each remedy that it names.

    python examples/preemption_lab.py

The scheduler, the block pool and the log line are those that serve; only the model is fake, so
that all of it takes a second and is the same every time. docs/preemption.md reads the output.
"""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace

from structlog.testing import capture_logs

from manylora.engine.api import EngineInfo, Remedies, Request, SamplingParams
from manylora.engine.blocks import BlockPool
from manylora.engine.counters import Counters
from manylora.engine.policy import FairByTenant
from manylora.engine.preemptions import PreemptionLog
from manylora.engine.schedule import ScheduledBatch
from manylora.engine.scheduler import Scheduler
from manylora.engine.simulation import Arrival, Served, Simulation, StepCost
from manylora.engine.slots import AdapterSlots

NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 12, 100, 80
STEP_COST = StepCost(step=0.02, token=0.0005)  # seconds
ENGINE = EngineInfo(
    model="fake",
    model_digest="fake",
    dtype="float32",
    device="cpu",
    kernels="none",
    max_model_len=2048,
    block_size=16,
    num_kv_blocks=100,
    max_num_seqs=12,
    max_num_batched_tokens=256,
    max_loras=1,
    max_lora_rank=1,
)


@dataclass(frozen=True)
class Run:
    """What came of the latest burst, and what the first log line said."""

    served: list[Served]
    recomputed_tokens: int
    explanation: str
    remedies: Remedies | None

    def row(self) -> str:
        first_token = max(one.seconds_to_first_token for one in self.served)
        total = max(one.ended - one.arrived for one in self.served)
        num_preemptions = sum(one.num_preemptions for one in self.served)
        counts = f"{num_preemptions:11} {self.recomputed_tokens:15}"
        return f"{counts} {first_token:10.1f} s {total:9.1f} s"


def main() -> None:
    before = run(ENGINE)
    print(
        f"{NUM_REQUESTS} requests at once, {PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} output "
        f"tokens each; {ENGINE.num_kv_blocks} KV blocks of {ENGINE.block_size} tokens.\n"
        "The engine's first line about it:\n"
    )
    print(textwrap.fill(before.explanation, 96, initial_indent="  ", subsequent_indent="  "))
    print(f"\n{'':30}preemptions  computed twice  first token  whole answer")
    print(f"{'as it is':30}{before.row()}")
    assert before.remedies is not None
    for what, changed in remedied(before.remedies):
        print(f"{what:30}{run(changed).row()}")
    print(f"{'as it is, the second time':30}{run(ENGINE, bursts=2).row()}")


def remedied(found: Remedies) -> Iterator[tuple[str, EngineInfo]]:
    """The engine with each remedy alone."""
    blocks = found.num_kv_blocks
    yield f"(1) num_kv_blocks {blocks}", replace(ENGINE, num_kv_blocks=blocks)
    if (seqs := found.max_num_seqs) is not None:
        yield f"(2) max_num_seqs {seqs}", replace(ENGINE, max_num_seqs=seqs)
    if (tokens := found.max_num_batched_tokens) is not None:
        changed = replace(ENGINE, max_num_batched_tokens=tokens)
        yield f"(3) max_num_batched_tokens {tokens}", changed
    # Half the bytes for a token: the same memory holds twice the blocks.
    twice = 2 * ENGINE.num_kv_blocks
    yield "(4) dtype bfloat16", replace(ENGINE, dtype="bfloat16", num_kv_blocks=twice)
    if (length := found.max_model_len) is not None:
        yield f"(4) max_model_len {length}", replace(ENGINE, max_model_len=length)


def run(engine: EngineInfo, *, bursts: int = 1) -> Run:
    """Serve the requests; with two bursts, as many again a minute later."""
    scheduler = new_scheduler(engine)
    log, counters = PreemptionLog(engine), Counters()
    arrivals = [arrival(number, engine) for number in range(bursts * NUM_REQUESTS)]
    last = arrivals[-1].at

    def note(batch: ScheduledBatch) -> None:
        if simulation.now >= last:
            counters.scheduled(batch)
        log.tell(batch.preempted, scheduler, simulation.now)

    simulation = Simulation(scheduler, STEP_COST, on_step=note)
    with capture_logs() as lines:
        served = [one for one in simulation.run(arrivals) if one.arrived == last]
    explanation = lines[0]["explanation"] if lines else ""
    return Run(served, counters.recomputed_tokens, explanation, log.remedies)


def new_scheduler(engine: EngineInfo) -> Scheduler:
    """What `build.py` makes of the same numbers, with the default policy."""
    return Scheduler(
        BlockPool(engine.num_kv_blocks, engine.block_size, prefix_caching=True),
        AdapterSlots(engine.max_loras),
        policy=FairByTenant(),
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        base_digest=engine.model_digest,
        kv_dtype=engine.dtype,
        adapter_ready=lambda digest: True,
    )


def arrival(number: int, engine: EngineInfo) -> Arrival:
    """A request that shares no prefix with another, and ends where the context does."""
    request = Request(
        request_id=f"r{number}",
        prompt_token_ids=(number,) * PROMPT_TOKENS,
        params=SamplingParams(max_tokens=OUTPUT_TOKENS),
        tenant="acme",
    )
    length = min(OUTPUT_TOKENS, engine.max_model_len - PROMPT_TOKENS)
    return Arrival(60.0 * (number // NUM_REQUESTS), request, length)


if __name__ == "__main__":
    main()
