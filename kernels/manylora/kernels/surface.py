"""The op surface: what a backend offers, and the opaque layouts that it alone looks into.

**Batch invariance is part of every op's contract**: a row's result has the same bits whatever
other rows share the call, however a prompt is cut into calls, and wherever its blocks lie.

The dtype of weights, KV and adapters is the model's; the residual stream and everything that is
accumulated is `accumulator_dtype(model dtype)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Site = tuple[int, str]
"""A fused linear layer: (layer index, "qkv" | "o" | "gate_up" | "down")."""


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class LoraSlice:
    """One adapted module as a slice of a fused linear layer's output features.

    The update of rows [start, start + N) is `scale * (b @ (a @ x))`: a [R, M], b [N, R].
    """

    start: int
    a: Tensor
    b: Tensor
    scale: float


class PackedWeight(Protocol):
    """A linear layer's weight [N, M] in the backend's own layout."""


class PackedAdapter(Protocol):
    """An adapter's matrices in the backend's own layout: what a slot holds."""

    @property
    def size_bytes(self) -> int: ...


class LoraPlan(Protocol):
    """Which rows of this step use which adapter, in the backend's own form."""


class KVCache(Protocol):
    """Paged keys and values of all layers; only whole blocks have a meaning outside."""

    @property
    def num_blocks(self) -> int: ...


class AttentionPlan(Protocol):
    """Where each row's keys lie in this step, in the backend's own form."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """The geometry of a KV cache."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int  # positions in one block

    def bytes_per_block(self, dtype: torch.dtype) -> int:
        """Bytes of one block: keys and values of every layer."""
        values = self.num_layers * self.block_size * self.num_kv_heads * self.head_size
        return 2 * values * dtype.itemsize


@dataclass(frozen=True, slots=True)
class RowSpan:
    """The rows [first_row, first_row + num_rows) belong to one sequence.

    They are its positions [first_position, first_position + num_rows); its keys lie in
    `block_table` in order of position.
    """

    first_row: int
    num_rows: int
    first_position: int
    block_table: Sequence[int]


class Backend(Protocol):
    """One implementation of every op."""

    name: str
    row_multiple: int  # T is padded to a multiple of it

    def pack_weight(self, weight: Tensor) -> PackedWeight:
        """Take a weight [N, M] into the backend's layout, once, at load."""
        ...

    def pack_adapter(self, sites: dict[Site, list[LoraSlice]]) -> PackedAdapter:
        """Take an adapter's matrices into the backend's layout, true ranks, nothing padded."""
        ...

    def new_kv_cache(self, shape: KVShape, num_blocks: int, dtype: torch.dtype) -> KVCache:
        """A KV cache of `num_blocks` blocks."""
        ...

    def plan_lora(self, spans: Sequence[tuple[int, int, PackedAdapter | None]]) -> LoraPlan:
        """Plan a step from (first row, number of rows, adapter or none for the base)."""
        ...

    def plan_attention(self, spans: Sequence[RowSpan], block_size: int) -> AttentionPlan:
        """Plan a step's attention from its sequences."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x²) + eps) * weight` by row (Zhang and Sennrich, arXiv 1910.07467).

        Args:
            x: [T, H], accumulator dtype.
            weight: [H], model dtype.

        Returns:
            [T, H], model dtype.
        """
        ...

    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """`x @ weight.T`: x [T, M] model dtype -> [T, N] accumulator dtype.

        A backend may round the sums to the model dtype first, as `ref` does.
        """
        ...

    def linear_add_(
        self, residual: Tensor, x: Tensor, weight: PackedWeight, site: Site, lora: LoraPlan
    ) -> None:
        """`residual += x @ weight.T + lora(x)`, in place.

        Args:
            residual: [T, N], accumulator dtype; changed.
            x: [T, M], model dtype.
        """
        ...

    def qkv_rope_write_kv(
        self,
        x: Tensor,
        weight: PackedWeight,
        site: Site,
        lora: LoraPlan,
        cos_sin: Tensor,
        kv: KVCache,
        slot_mapping: Tensor,
    ) -> Tensor:
        """Project to queries, keys and values, rotate the first two, write the last two to KV.

        Rotary embedding in the half-split form of Llama (Su et al., arXiv 2104.09864).

        Args:
            x: [T, H], model dtype.
            weight: [(Q + 2K) * D, H]: queries, keys, values.
            cos_sin: [T, D] accumulator dtype, D/2 cosines then D/2 sines of each row's position.
            kv: changed at the positions of `slot_mapping` in layer `site[0]`.
            slot_mapping: [number of true rows] int64, block * block_size + offset.

        Returns:
            Queries [T, Q, D], model dtype.
        """
        ...

    def attention(self, q: Tensor, kv: KVCache, layer: int, plan: AttentionPlan) -> Tensor:
        """Causal attention of each row over its sequence's keys, grouped-query.

        Args:
            q: [T, Q, D], model dtype.

        Returns:
            [T, Q * D], model dtype; padding rows are zero.
        """
        ...

    def gate_up_silu_mul(
        self, x: Tensor, weight: PackedWeight, site: Site, lora: LoraPlan
    ) -> Tensor:
        """`silu(gate) * up` of the fused projection (Shazeer, arXiv 2002.05202).

        Args:
            x: [T, H], model dtype.
            weight: [2I, H]: gate, then up.

        Returns:
            [T, I], model dtype.
        """
        ...
