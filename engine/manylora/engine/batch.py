"""From what the scheduler chose to the tensors of one forward call."""

from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.engine.scheduler import ScheduledBatch
from manylora.kernels.surface import AttentionPlan, Backend, LoraPlan, PackedAdapter, RowSpan


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One step's rows, padded to the backend's multiple.

    T rows in all, of which the first `len(slot_mapping)` are true.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [true rows] int64: block * block size + offset in it
    logit_rows: Tensor  # [n] int64: the rows whose logits are wanted
    lora: LoraPlan
    attention: AttentionPlan


def build_model_input(
    batch: ScheduledBatch,
    adapters: list[PackedAdapter | None],
    backend: Backend,
    *,
    block_size: int,
    device: str,
    all_logits: bool = False,
) -> ModelInput:
    """Lay a batch out as rows.

    Args:
        adapters: what lies in each slot.
        all_logits: want the logits of every true row, not only of those that sample.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slot_mapping: list[int] = []
    logit_rows: list[int] = []
    spans: list[RowSpan] = []
    lora_spans: list[tuple[int, int, PackedAdapter | None]] = []
    for entry in batch.entries:
        sequence, first_row = entry.sequence, len(token_ids)
        start = sequence.num_computed_tokens
        stop = start + entry.num_tokens
        token_ids += sequence.token_ids[start:stop]
        positions += range(start, stop)
        slot_mapping += (
            sequence.block_table[p // block_size] * block_size + p % block_size
            for p in range(start, stop)
        )
        spans.append(RowSpan(first_row, entry.num_tokens, start, sequence.block_table))
        adapter = None if sequence.slot is None else adapters[sequence.slot]
        lora_spans.append((first_row, entry.num_tokens, adapter))
        if all_logits:
            logit_rows += range(first_row, first_row + entry.num_tokens)
        elif entry.samples:
            logit_rows.append(first_row + entry.num_tokens - 1)
    padding = [0] * (-len(token_ids) % backend.row_multiple)
    return ModelInput(
        token_ids=torch.tensor(token_ids + padding, device=device),
        positions=torch.tensor(positions + padding, device=device),
        slot_mapping=torch.tensor(slot_mapping, device=device),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        lora=backend.plan_lora(lora_spans),
        attention=backend.plan_attention(spans, block_size),
    )
