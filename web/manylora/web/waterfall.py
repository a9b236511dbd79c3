"""A life as rows of a waterfall: what happened in each interval, where it begins and ends."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from manylora.engine.lifecycle import StageName, WaitCause

WAIT, WORK, PASS = "wait", "work", "pass"

# What an interval is whose end is this stage, and what has happened by then.
_STAGES = {
    StageName.RECEIVED: (PASS, "its head was read"),
    StageName.TOKENISED: (WORK, "key checked, body read, prompt tokenised"),
    StageName.QUEUED: (PASS, "handed over to the engine"),
    StageName.ADAPTER_READY: (WAIT, "its adapter is in host memory"),
    StageName.SCHEDULED: (WAIT, "chosen for a step for the first time"),
    StageName.PREFILL_CHUNK: (WORK, "prompt tokens computed"),
    StageName.FIRST_TOKEN: (WORK, "first token chosen"),
    StageName.PREEMPTED: (WORK, "its KV blocks were given back"),
    StageName.RESUMED: (WAIT, "chosen again after a preemption"),
    StageName.LAST_TOKEN: (WORK, "last token chosen"),
    StageName.DETOKENISED: (WORK, "its text is complete"),
    StageName.SENT: (PASS, "last byte handed to the socket"),
}
# In words that are true while it waits and afterwards.
CAUSES = {
    WaitCause.STEP: "came while a step was running",
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
    """A row for each stage, from the end of the one before to its own."""
    return [_stage_row(stage) for stage in life["stages"]]


def _stage_row(stage: Mapping[str, Any]) -> Row:
    kind, meaning = _STAGES[StageName(stage["name"])]
    if "tokens" in stage:
        meaning = f"{stage['tokens']:,} {meaning}"
    length = stage["since_previous_us"]
    name = stage["name"].replace("_", " ")
    return Row(name, meaning, kind, stage["at_us"] - length, length, stage["component"])


def wait_rows(life: Mapping[str, Any]) -> Iterator[Row]:
    """A row for each cause of waiting, the longest first, laid end to end."""
    start = 0
    for cause, length in sorted(life["queue"]["by_cause"].items(), key=lambda wait: -wait[1]):
        if length:
            yield Row(cause.replace("_", " "), CAUSES[WaitCause(cause)], WAIT, start, length)
            start += length
