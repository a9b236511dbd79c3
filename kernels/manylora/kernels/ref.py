"""The `ref` backend: plain torch, the meaning of each op, the oracle and the fallback anywhere.

torch's own matrix product is not batch invariant: `F.linear` gives a row other bits at one row
than at two. Here every call that mixes numbers of a row has one fixed shape: products and
elementwise functions run on tiles of `ROW_TILE` rows, attention as `ref_attention.py` says. Zeros
pad what is missing.

What is left to the libraries below torch is that a row's bits do not depend on where in a tile it
stands. oneMKL promises that, whatever the threads and the alignment, only in its strict
reproducible mode, which `kernels/__init__.py` switches on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.kernels.ref_attention import ReferenceAttentionPlan, attention, plan_attention
from manylora.kernels.surface import (
    KVShape,
    LoraSlice,
    RowSpan,
    Site,
    accumulator_dtype,
)

ROW_TILE = 32  # rows of one product


@dataclass(frozen=True, slots=True)
class ReferenceWeight:
    """[N, M], as it is."""

    weight: Tensor


@dataclass(frozen=True, slots=True)
class ReferenceAdapter:
    """The slices of each site, as they are."""

    sites: dict[Site, list[LoraSlice]]

    @property
    def size_bytes(self) -> int:
        return sum(s.a.nbytes + s.b.nbytes for slices in self.sites.values() for s in slices)


@dataclass(frozen=True, slots=True)
class ReferenceLoraPlan:
    """Each adapter of the step with its rows [n] int64."""

    segments: tuple[tuple[ReferenceAdapter, Tensor], ...]


class ReferenceKVCache:
    """Keys and values, each [layers, blocks, block size, K, D]."""

    def __init__(self, shape: KVShape, num_blocks: int, dtype: torch.dtype, device: str) -> None:
        size = (
            shape.num_layers,
            num_blocks,
            shape.block_size,
            shape.num_kv_heads,
            shape.head_size,
        )
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros(size, dtype=dtype, device=device)

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[1]


class ReferenceBackend:
    """See `surface.Backend` for every op's contract."""

    name = "ref"
    row_multiple = ROW_TILE

    def __init__(self, device: str) -> None:
        self._device = device

    def pack_weight(self, weight: Tensor) -> ReferenceWeight:
        return ReferenceWeight(weight.to(self._device).contiguous())

    def pack_adapter(self, sites: dict[Site, list[LoraSlice]]) -> ReferenceAdapter:
        return ReferenceAdapter(
            {
                site: [
                    LoraSlice(s.start, s.a.to(self._device), s.b.to(self._device), s.scale)
                    for s in slices
                ]
                for site, slices in sites.items()
            }
        )

    def new_kv_cache(self, shape: KVShape, num_blocks: int, dtype: torch.dtype) -> ReferenceKVCache:
        return ReferenceKVCache(shape, num_blocks, dtype, self._device)

    def plan_lora(
        self, spans: Sequence[tuple[int, int, ReferenceAdapter | None]]
    ) -> ReferenceLoraPlan:
        rows: dict[int, list[int]] = {}
        adapters: dict[int, ReferenceAdapter] = {}
        for first, count, adapter in spans:
            if adapter is not None:
                adapters[id(adapter)] = adapter
                rows.setdefault(id(adapter), []).extend(range(first, first + count))
        return ReferenceLoraPlan(
            tuple(
                (adapters[key], torch.tensor(index, device=self._device))
                for key, index in rows.items()
            )
        )

    def plan_attention(self, spans: Sequence[RowSpan], block_size: int) -> ReferenceAttentionPlan:
        return plan_attention(spans, block_size, self._device)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = weight.to(x.dtype)

        def norm(tile: Tensor) -> Tensor:
            mean_square = tile.square().mean(dim=-1, keepdim=True)
            return (tile * torch.rsqrt(mean_square + eps) * scale).to(weight.dtype)

        return _by_row_tile(norm, x)

    def linear(self, x: Tensor, weight: ReferenceWeight) -> Tensor:
        return _product(x, weight.weight).to(accumulator_dtype(x.dtype))

    def linear_add_(
        self,
        residual: Tensor,
        x: Tensor,
        weight: ReferenceWeight,
        site: Site,
        lora: ReferenceLoraPlan,
    ) -> None:
        residual += self._adapted_linear(x, weight, site, lora)

    def qkv_rope_write_kv(
        self,
        x: Tensor,
        weight: ReferenceWeight,
        site: Site,
        lora: ReferenceLoraPlan,
        cos_sin: Tensor,
        kv: ReferenceKVCache,
        slot_mapping: Tensor,
    ) -> Tensor:
        layer = site[0]
        kv_heads, head_size = kv.keys.shape[-2:]
        heads = self._adapted_linear(x, weight, site, lora).view(len(x), -1, head_size)
        cos, sin = (part.unsqueeze(1) for part in cos_sin.chunk(2, dim=-1))
        first, second = heads[:, : -2 * kv_heads], heads[:, -2 * kv_heads : -kv_heads]
        q = _rotate(first, cos, sin).to(x.dtype)
        k = _rotate(second, cos, sin).to(x.dtype)
        v = heads[:, -kv_heads:].to(x.dtype)
        true_rows = len(slot_mapping)
        kv.keys[layer].view(-1, kv_heads, head_size)[slot_mapping] = k[:true_rows]
        kv.values[layer].view(-1, kv_heads, head_size)[slot_mapping] = v[:true_rows]
        return q

    def attention(
        self, q: Tensor, kv: ReferenceKVCache, layer: int, plan: ReferenceAttentionPlan
    ) -> Tensor:
        return attention(q, kv.keys[layer], kv.values[layer], plan)

    def gate_up_silu_mul(
        self, x: Tensor, weight: ReferenceWeight, site: Site, lora: ReferenceLoraPlan
    ) -> Tensor:
        def silu_mul(tile: Tensor) -> Tensor:
            gate, up = tile.chunk(2, dim=-1)
            return (F.silu(gate) * up).to(x.dtype)

        return _by_row_tile(silu_mul, self._adapted_linear(x, weight, site, lora))

    def _adapted_linear(
        self, x: Tensor, weight: ReferenceWeight, site: Site, lora: ReferenceLoraPlan
    ) -> Tensor:
        """`x @ weight.T` plus each row's low-rank update; [T, N] in the accumulator dtype."""
        y = self.linear(x, weight)
        for adapter, rows in lora.segments:
            slices = adapter.sites.get(site)
            if slices is None:
                continue
            padded = -(-len(rows) // ROW_TILE) * ROW_TILE
            own = x.new_zeros(padded, x.shape[1])
            own[: len(rows)] = x[rows]
            for piece in slices:
                update = _product(_product(own, piece.a), piece.b)[: len(rows)]
                stop = piece.start + piece.b.shape[0]
                y[rows, piece.start : stop] += piece.scale * update.to(y.dtype)
        return y


def _by_row_tile(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    assert x.shape[0] % ROW_TILE == 0
    return torch.cat([function(tile) for tile in torch.split(x, ROW_TILE)])


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return _by_row_tile(lambda tile: F.linear(tile, weight), x)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
