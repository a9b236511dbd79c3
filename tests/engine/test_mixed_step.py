"""One forward call really holds several adapters, a prefill chunk and a decode."""

from itertools import accumulate
from pathlib import Path

from manylora.engine import SamplingParams
from manylora.engine.api import STEP_TOKEN_BOUNDS, Request
from manylora.engine.recording import Recording, RowsRecord, StepRecord
from support.engine import make_llm

LENGTHS = {"short": 3, "middling": 5, "long": 60}  # of the prompts, each on an adapter of its own


def steps_of(recording: Path) -> list[StepRecord]:
    return [event for _, event in Recording(recording) if isinstance(event, StepRecord)]


def is_prefill(rows: RowsRecord) -> bool:
    return rows.first_position < LENGTHS[rows.request_id]


def test_one_step_holds_three_adapters_a_prefill_chunk_and_a_decode(
    tiny_model: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    path = tmp_path / "steps.jsonl"
    with make_llm(tiny_model, max_num_batched_tokens=16, step_trace=str(path)) as llm:
        adapters = [llm.load_adapter(folder) for folder in tiny_adapters.values()]
        for name, adapter, length in zip(LENGTHS, adapters, LENGTHS.values(), strict=True):
            llm.core.add(
                Request(
                    request_id=name,
                    prompt_token_ids=tuple(range(length)),
                    params=params,
                    tenant="t",
                    adapter=adapter.ref,
                )
            )
        while llm.core.has_work:
            llm.core.step()

    mixed = [
        step
        for step in steps_of(path)
        if {rows.request_id for rows in step.rows} == set(LENGTHS)
        and any(is_prefill(rows) and rows.num_tokens > 1 for rows in step.rows)
        and any(not is_prefill(rows) for rows in step.rows)
    ]

    assert mixed
    assert all(sum(rows.num_tokens for rows in step.rows) <= 16 for step in mixed)
    assert len({rows.slot for rows in mixed[0].rows}) == 3


def test_steps_are_counted_by_their_tokens(tiny_model: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    path = tmp_path / "steps.jsonl"
    with make_llm(tiny_model, max_num_batched_tokens=64, step_trace=str(path)) as llm:
        llm.generate([[1] * 7, [2] * 40, [3] * 90], params)
        stats = llm.stats()
    sizes = [step.num_tokens for step in steps_of(path)]

    at_most = [sum(size <= bound for size in sizes) for bound in (*STEP_TOKEN_BOUNDS, max(sizes))]
    assert list(accumulate(stats.steps_by_tokens)) == at_most
    assert stats.num_steps == len(sizes) > len(set(sizes)) > 2
    assert stats.step_tokens == sum(sizes)
