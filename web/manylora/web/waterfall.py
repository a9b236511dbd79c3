"""A life as rows of a waterfall: what happened in each interval, where it begins and ends."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from manylora.engine.lifecycle import StageName, WaitCause

WAIT, WORK, PASS = "wait", "work", "pass"

# What happened in the interval that ends with this stage, and what was true at its end.
_STAGES = {
    StageName.RECEIVED: (PASS, "received", "its head was read"),
    StageName.TOKENISED: (WORK, "prepare until tokenised", "key checked, prompt tokenised"),
    StageName.QUEUED: (PASS, "hand over until queued", "the engine has it"),
    StageName.ADAPTER_READY: (WAIT, "wait until adapter ready", "its adapter is in host memory"),
    StageName.SCHEDULED: (WAIT, "wait until scheduled", "chosen for a step for the first time"),
    StageName.PREFILL_CHUNK: (WORK, "prefill chunk", "tokens computed"),
    StageName.FIRST_TOKEN: (WORK, "sample until first token", "first token chosen"),
    StageName.PREEMPTED: (WORK, "run until preempted", "its KV blocks were given back"),
    StageName.RESUMED: (WAIT, "wait until resumed", "chosen again after its preemption"),
    StageName.LAST_TOKEN: (WORK, "decode until last token", "last token chosen"),
    StageName.DETOKENISED: (WORK, "finish until detokenised", "its text is complete"),
    StageName.SENT: (PASS, "answer until sent", "last byte handed to the socket"),
}
# In words that are true while it waits and afterwards.
CAUSES = {
    WaitCause.STEP: "arrived, and the next step was not chosen yet",
    WaitCause.ADAPTER_LOAD: "adapter on its way into host memory",
    WaitCause.ADAPTER_SLOT: "every slot held by running requests with other adapters (max_loras)",
    WaitCause.KV_BLOCKS: "too few KV blocks free (num_kv_blocks)",
    WaitCause.TOKEN_BUDGET: "the step’s tokens given out to others (max_num_batched_tokens)",
    WaitCause.SEQUENCE_LIMIT: "as many running as may (max_num_seqs)",
    WaitCause.FAIRNESS: "another tenant’s turn, by the scheduling policy",
    WaitCause.GRAMMAR: "grammar being compiled",
    WaitCause.PREEMPTED: "had given its KV blocks back, to run again later",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One interval, in microseconds from the waterfall's own beginning."""

    name: str
    meaning: str
    kind: str
    start_us: int
    length_us: int
    component: str = ""


def stage_rows(life: Mapping[str, Any]) -> list[Row]:
    """A row for each stage, from the end of the one before to its own, named by what happened."""
    return [_stage_row(stage) for stage in life["stages"]]


def _stage_row(stage: Mapping[str, Any]) -> Row:
    kind, name, meaning = _STAGES[StageName(stage["name"])]
    if "tokens" in stage:
        meaning = f"{stage['tokens']:,} {meaning}"
    length = stage["since_previous_us"]
    return Row(name, meaning, kind, stage["at_us"] - length, length, stage["component"])


def wait_rows(life: Mapping[str, Any]) -> Iterator[Row]:
    """A row for each cause of waiting, the longest first, laid end to end."""
    start = 0
    for cause, length in sorted(life["queue"]["by_cause"].items(), key=lambda wait: -wait[1]):
        if length:
            yield Row(cause.replace("_", " "), CAUSES[WaitCause(cause)], WAIT, start, length)
            start += length
