"""Looking into an offline engine: the logits of every position it computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from manylora.engine import LLM, SamplingParams
from manylora.engine.api import AdapterInfo
from manylora.engine.schedule import ScheduledBatch

GREEDY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@contextmanager
def recorded_logits(llm: LLM) -> Iterator[dict[str, dict[int, Tensor]]]:
    """While open, keep the logits [V] of every row by request id and position."""
    seen: dict[str, dict[int, Tensor]] = {}
    run = llm.core.runner.run

    def run_all(batch: ScheduledBatch) -> Tensor:
        logits = run(batch, all_logits=True)
        wanted, row = [], 0
        for entry in batch.entries:
            sequence, count = entry.sequence, entry.num_tokens
            rows = logits[row : row + count]
            positions = entry.positions
            seen.setdefault(sequence.request_id, {}).update(zip(positions, rows, strict=True))
            row += count
            wanted += [rows[position - positions.start] for position in entry.logit_positions]
        return torch.stack(wanted) if wanted else logits[:0]

    llm.core.runner.run = run_all  # type: ignore[method-assign, assignment]
    try:
        yield seen
    finally:
        llm.core.runner.run = run  # type: ignore[method-assign]


def prompt_logits(
    llm: LLM, prompts: list[list[int]], adapters: list[AdapterInfo | None]
) -> list[Tensor]:
    """The logits [T, V] of every position of each prompt, all prompts in one batch."""
    with recorded_logits(llm) as seen:
        llm.generate(prompts, GREEDY, adapter=adapters)
    return [
        torch.stack([rows[position] for position in range(len(prompt))])
        for rows, prompt in zip(seen.values(), prompts, strict=True)
    ]


def largest_error(ours: Tensor, oracle: Tensor) -> float:
    """max |ours - oracle| over max |oracle|."""
    return float((ours.double() - oracle).abs().max() / oracle.abs().max())


def relative_l2(ours: Tensor, oracle: Tensor) -> float:
    """|ours - oracle| over |oracle|."""
    return float((ours.double() - oracle).norm() / oracle.norm())


def make_llm(model: Any, **options: Any) -> LLM:
    """A small float32 engine; tests name only the options that matter to them."""
    values: dict[str, Any] = {
        "dtype": "float32",
        "num_kv_blocks": 64,
        "block_size": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_loras": 4,
    }
    return LLM(model, **(values | options))
