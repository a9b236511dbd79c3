"""From what the scheduler chose to the tensors of one forward call."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.engine.schedule import ScheduledBatch, ScheduledSequence
from manylora.kernels.surface import AttentionPlan, Backend, LoraPlan, PackedAdapter, RowSpan


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One step's rows, padded to the backend's multiple.

    T rows in all, of which the first `len(slot_mapping)` are true.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [true rows] int64: block * block size + offset in it
    logit_rows: Tensor  # [n] int64: the rows whose logits are wanted, in order
    lora: LoraPlan
    attention: AttentionPlan


def build_model_input(
    batch: ScheduledBatch,
    adapters: Sequence[PackedAdapter | None],
    backend: Backend,
    *,
    block_size: int,
    device: str,
    all_logits: bool = False,
) -> ModelInput:
    """Lay a batch out as rows, sequence after sequence.

    Args:
        adapters: what lies in each slot.
        all_logits: want the logits of every true row, not only of each entry's
            `logit_positions`.
    """
    rows = [(entry.sequence, p) for entry in batch.entries for p in entry.positions]
    spans = _spans(batch)
    logit_rows = [
        span.first_row + position - span.first_position
        for span, entry in zip(spans, batch.entries, strict=True)
        for position in entry.logit_positions
    ]
    padding = [0] * (-len(rows) % backend.row_multiple)

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return ModelInput(
        token_ids=tensor([s.token_ids[p] for s, p in rows] + padding),
        positions=tensor([p for _, p in rows] + padding),
        slot_mapping=tensor(
            [s.block_table[p // block_size] * block_size + p % block_size for s, p in rows]
        ),
        logit_rows=tensor(list(range(len(rows))) if all_logits else logit_rows),
        lora=backend.plan_lora(
            [
                (span.first_row, span.num_rows, _adapter_of(entry, adapters))
                for span, entry in zip(spans, batch.entries, strict=True)
            ]
        ),
        attention=backend.plan_attention(spans, block_size),
    )


def _spans(batch: ScheduledBatch) -> list[RowSpan]:
    """Where each sequence's rows stand."""
    spans, first_row = [], 0
    for entry in batch.entries:
        positions, table = entry.positions, entry.sequence.block_table
        spans.append(RowSpan(first_row, len(positions), positions.start, table))
        first_row += len(positions)
    return spans


def _adapter_of(
    entry: ScheduledSequence, adapters: Sequence[PackedAdapter | None]
) -> PackedAdapter | None:
    slot = entry.sequence.slot
    return None if slot is None else adapters[slot]
