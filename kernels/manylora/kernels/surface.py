"""The op surface: what a backend offers, and the opaque layouts that it alone looks into.

**Batch invariance is part of every op's contract**: a row's result has the same bits whatever
other rows share the call, however a prompt is cut into calls, and wherever its blocks lie.

The dtype of weights, KV and adapters is the model's; the residual stream and everything that is
accumulated is `accumulator_dtype(model dtype)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Site = tuple[int, str]
"""A fused linear layer: (layer index, "qkv" | "o" | "gate_up" | "down")."""


Activation = Literal["silu", "gelu_tanh"]
"""x * sigmoid(x), or the tanh form of gelu (Hendrycks and Gimpel, arXiv 1606.08415)."""


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


@dataclass(frozen=True, slots=True)
class Norm:
    """`x / sqrt(mean(x²) + eps) * (weight + offset)` (Zhang and Sennrich, arXiv 1910.07467).

    The sum of weight and offset is formed in the accumulator dtype.
    """

    weight: Tensor  # model dtype; as many as are normalised together
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts see which row, for the first n rows of a step."""

    experts: Tensor  # [n, top_k] int64
    weights: Tensor  # [n, top_k] accumulator dtype


class PackedWeight(Protocol):
    """A linear layer's weight [N, M], and its bias, in the backend's own layout."""


class PackedExperts(Protocol):
    """The MLPs of a mixture of experts in the backend's own layout."""


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

    def pack_weight(self, weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
        """Take a weight [N, M] and a bias [N] into the backend's layout, once, at load."""
        ...

    def pack_experts(self, gate_up: Sequence[Tensor], down: Sequence[Tensor]) -> PackedExperts:
        """Take each expert's weights [2I, H] (gate, then up) and [H, I], once, at load."""
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

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Normalise by row.

        Args:
            x: [T, H], accumulator dtype.

        Returns:
            [T, H], model dtype.
        """
        ...

    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """`x @ weight.T + bias`: x [T, M] model dtype -> [T, N] accumulator dtype.

        A backend may round the sums to the model dtype first, as `ref` does.
        """
        ...

    def linear_add_(
        self, residual: Tensor, x: Tensor, weight: PackedWeight, site: Site, lora: LoraPlan
    ) -> None:
        """`residual += x @ weight.T + bias + lora(x)`, in place.

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
        cos_sin: Tensor | None,
        kv: KVCache,
        slot_mapping: Tensor,
        norms: tuple[Norm, Norm] | None = None,
    ) -> Tensor:
        """Project to queries, keys and values, rotate the first two, write the last two to KV.

        Rotary embedding in the half-split form of Llama (Su et al., arXiv 2104.09864).

        Args:
            x: [T, H], model dtype.
            weight: [(Q + 2K) * D, H]: queries, keys, values.
            cos_sin: [T, S] accumulator dtype, S/2 cosines then S/2 sines of each row's position;
                S is D, or less where only the first S dimensions of a head are rotated. None for
                a layer without positions.
            kv: changed at the positions of `slot_mapping` in layer `site[0]`.
            slot_mapping: [number of true rows] int64, block * block_size + offset.
            norms: of queries and of keys, before they are rotated; with weights [D] each head is
                normalised by itself, with [Q * D] and [K * D] all heads of a row together.

        Returns:
            Queries [T, Q, D], model dtype.
        """
        ...

    def attention(
        self,
        q: Tensor,
        kv: KVCache,
        layer: int,
        plan: AttentionPlan,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Causal attention of each row over its sequence's keys, grouped-query.

        Args:
            q: [T, Q, D], model dtype.
            scale: of a query times a key.
            window: how many keys a row sees, its own the last; None for all before it.
            softcap: bounds a scaled score smoothly, `softcap * tanh(score / softcap)`
                (Gemma 2, arXiv 2408.00118).

        Returns:
            [T, Q * D], model dtype; padding rows are zero.
        """
        ...

    def gated_linear_unit(
        self,
        x: Tensor,
        weight: PackedWeight,
        site: Site,
        lora: LoraPlan,
        activation: Activation,
    ) -> Tensor:
        """`activation(gate) * up` of the fused projection (Shazeer, arXiv 2002.05202).

        Args:
            x: [T, H], model dtype.
            weight: [2I, H]: gate, then up.

        Returns:
            [T, I], model dtype.
        """
        ...

    def route(
        self, x: Tensor, router: PackedWeight, top_k: int, *, renormalize: bool, num_rows: int
    ) -> Routing:
        """Choose each row's experts by the softmax of `x @ router.T`.

        Args:
            x: [T, H], model dtype.
            router: [E, H].
            renormalize: let the weights of a row sum to one.
            num_rows: how many rows, from the first, are true; padding is not routed.
        """
        ...

    def experts_add_(
        self,
        residual: Tensor,
        x: Tensor,
        experts: PackedExperts,
        routing: Routing,
        activation: Activation,
    ) -> None:
        """Add to each routed row its experts' answers, weighted, in the order of its routing.

        Args:
            residual: [T, H], accumulator dtype; changed.
            x: [T, H], model dtype.
        """
        ...

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """`cap * tanh(x / cap)`: x [T, N] accumulator dtype -> the same."""
        ...
