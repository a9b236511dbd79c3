"""Each remedy that a preemption's line names does what it says when the same traffic comes."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from manylora.engine.api import EngineInfo, Remedies
from manylora.engine.preemptions import PreemptionLog
from manylora.engine.remedies import as_options
from manylora.engine.schedule import Preemption, ScheduledBatch
from manylora.engine.sequence import Sequence
from manylora.engine.simulation import Arrival, Simulation
from support.simulated import arrival, make_scheduler

LONGEST_PROMPT = 200
Traffic = Callable[[], list[Arrival]]
OPTIONS: dict[str, Any] = {
    "num_kv_blocks": 100,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "max_model_len": 2048,
}


def burst() -> list[Arrival]:
    """Alike, all at once, and no more than the seats."""
    return [arrival(0, "a", prompt=100, output=160) for _ in range(12)]


def queue() -> list[Arrival]:
    """More than the seats, of many lengths."""
    rng = random.Random(1)
    return [
        arrival(0, "a", prompt=rng.randint(20, LONGEST_PROMPT), output=rng.randint(100, 400))
        for _ in range(40)
    ]


def trickle() -> list[Arrival]:
    """One after the other, so that they overlap at different ages. A step is a second."""
    return [arrival(12.0 * i, "a", prompt=60, output=240) for i in range(40)]


TRAFFIC = pytest.mark.parametrize("traffic", [burst, queue, trickle])


class Watched:
    """One run of the traffic, with the log line's own remedies at each preemption."""

    def __init__(self, traffic: Traffic, **changed: int) -> None:
        values = OPTIONS | changed
        longest = values.pop("max_model_len")
        scheduler = make_scheduler(policy="fcfs", **values)
        self.log = PreemptionLog(engine_info(**(OPTIONS | changed)))
        self.simulation = Simulation(scheduler, lambda batch: 1.0, on_step=self._watch)
        self.sequence: Sequence | None = None  # the latest to run
        with capture_logs() as self.lines:
            self.simulation.run([_cut(arrival, longest) for arrival in traffic()])
        self.num_short = self.log.count

    @property
    def remedies(self) -> Remedies:
        assert self.log.remedies is not None
        return self.log.remedies

    def _watch(self, batch: ScheduledBatch) -> None:
        self.log.tell(batch.preempted, self.simulation.scheduler, self.simulation.now)
        for entry in batch.entries:
            sequence = self.sequence = entry.sequence
            done = sequence.num_output_tokens + entry.samples
            if done == sequence.request.params.max_tokens:
                self.log.ended(sequence)


def _cut(one: Arrival, max_model_len: int) -> Arrival:
    """As the engine ends a sequence at the longest length."""
    left = max_model_len - len(one.request.prompt_token_ids)
    return Arrival(one.at, one.request, min(one.num_output_tokens, left))


def engine_info(**options: int) -> EngineInfo:
    return EngineInfo(
        model="m",
        model_digest="d",
        dtype="float32",
        device="cpu",
        kernels="ref",
        block_size=16,
        max_loras=8,
        max_lora_rank=64,
        **options,
    )


def least_blocks(traffic: Traffic) -> int:
    return next(n for n in range(100, 999, 4) if Watched(traffic, num_kv_blocks=n).num_short == 0)


@TRAFFIC
def test_the_number_of_kv_blocks_it_names_is_enough_and_no_fifth_too_many(traffic: Traffic) -> None:
    advised = Watched(traffic).remedies.num_kv_blocks

    least = least_blocks(traffic)
    assert least / 1.2 <= advised <= 1.2 * least
    if traffic is not queue:  # whose lengths are a matter of luck
        assert advised >= least


@TRAFFIC
def test_the_number_of_sequences_it_names_fits_and_is_no_fifth_too_few(traffic: Traffic) -> None:
    advised = Watched(traffic).remedies.max_num_seqs

    assert advised is not None
    assert Watched(traffic, max_num_seqs=advised).num_short == 0
    most = max(n for n in range(1, 16) if Watched(traffic, max_num_seqs=n).num_short == 0)
    assert advised >= most - max(1, most // 5)


@TRAFFIC
def test_the_context_length_it_names_fits(traffic: Traffic) -> None:
    advised = Watched(traffic).remedies.max_model_len

    if advised is None:  # shorter than the longest prompt, it would send requests away
        assert Watched(traffic, max_model_len=LONGEST_PROMPT + 1).num_short > 0
    else:
        assert Watched(traffic, max_model_len=advised).num_short == 0
        assert Watched(traffic, max_model_len=round(1.25 * advised)).num_short > 0


@TRAFFIC
def test_the_kv_bytes_it_names_make_room_for_the_blocks_that_are_missing(traffic: Traffic) -> None:
    found = Watched(traffic).remedies

    as_many = round(OPTIONS["num_kv_blocks"] / found.kv_bytes_factor)
    assert as_many == pytest.approx(found.num_kv_blocks, rel=0.01)


@TRAFFIC
def test_a_step_size_is_named_only_where_it_helps(traffic: Traffic) -> None:
    advised = Watched(traffic).remedies.max_num_batched_tokens

    if advised is not None:
        assert Watched(traffic, max_num_batched_tokens=advised).num_short == 0
    else:
        smallest = OPTIONS["max_num_seqs"]
        assert Watched(traffic, max_num_batched_tokens=smallest).num_short > 0


def test_the_line_says_who_by_how_much_and_how_often_in_plain_words() -> None:
    run = Watched(burst)

    first, found = run.lines[0], run.remedies
    assert first["event"] == "sequence_preempted"
    assert first["blocks_short"] >= 1
    assert (first["times_this_request"], first["times_in_all"]) == (1, 1)
    who = f"Request {first['request_id']} of tenant a"
    assert f"{who} gave its KV blocks back" in first["explanation"]
    last = run.lines[-1]["explanation"]
    assert f"--num-kv-blocks {found.num_kv_blocks} (now 100)" in last
    assert f"--max-num-seqs {found.max_num_seqs} (now 16)" in last
    assert f"--max-model-len {found.max_model_len} (now 2048)" in last
    assert "--max-num-batched-tokens" in last


def test_a_dtype_is_advised_only_where_its_bytes_suffice() -> None:
    def advised(now: str, factor: float) -> str:
        found = replace(Watched(burst).remedies, kv_bytes_factor=factor)
        options = as_options(found, replace(engine_info(**OPTIONS), dtype=now))
        return str(next(advice.value for advice in options if advice.option == "--dtype"))

    # Not float32 again.
    assert advised("float32", 1.0) == "bfloat16 with --num-kv-blocks 200 in the same memory"
    assert advised("float64", 0.5) == "float32 with --num-kv-blocks 200 in the same memory"
    assert advised("float64", 0.49) == "bfloat16 with --num-kv-blocks 400 in the same memory"
    assert advised("float32", 0.49) == "None"
    assert advised("bfloat16", 0.99) == "None"


def test_a_place_given_up_for_another_tenant_does_not_hide_a_shortage() -> None:
    run = Watched(burst)
    assert run.sequence is not None
    shortage = Preemption(run.sequence, blocks_short=1, for_tenant="a", num_lost_tokens=9)
    polite = replace(shortage, blocks_short=0, for_tenant="b")

    with capture_logs() as lines:
        for now in (1000.0, 1002.0, 1004.0):
            run.log.tell([polite, shortage], run.simulation.scheduler, now)

    assert [line["log_level"] for line in lines] == ["info", "warning"] * 3


def test_a_storm_of_preemptions_is_counted_and_not_told_one_by_one() -> None:
    run = Watched(burst)
    assert run.sequence is not None
    shortage = Preemption(run.sequence, blocks_short=1, for_tenant="a", num_lost_tokens=9)

    with capture_logs() as lines:
        run.log.tell([shortage] * 5, run.simulation.scheduler, 1000.0)
        run.log.tell([shortage] * 4, run.simulation.scheduler, 1000.9)
        run.log.tell([shortage], run.simulation.scheduler, 1001.1)

    assert [line["untold_before"] for line in lines] == [0, 8]
    assert lines[1]["times_in_all"] == lines[0]["times_in_all"] + 9
