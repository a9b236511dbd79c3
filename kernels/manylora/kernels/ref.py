"""The `ref` backend: plain torch, the meaning of each op, the oracle and the fallback anywhere.

torch's own matrix product is not batch invariant: `F.linear` gives a row other bits at one row
than at two. Here every call that mixes numbers of a row has one fixed shape: products and
elementwise functions run on tiles of `ROW_TILE` rows, attention as `ref_attention.py` says. Zeros
pad what is missing.

What is left to the libraries below torch is that a row's bits do not depend on where in a tile it
stands. oneMKL promises that, whatever the threads and the alignment, only in its strict
reproducible mode, which `kernels/__init__.py` switches on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.kernels.ref_attention import (
    ReferenceAttentionPlan,
    ScoreRule,
    attention,
    plan_attention,
)
from manylora.kernels.ref_experts import ReferenceExperts, experts_add_, route
from manylora.kernels.ref_tiles import (
    ROW_TILE,
    by_row_tile,
    capped,
    gated,
    normalized,
    padded,
    product,
)
from manylora.kernels.surface import (
    Activation,
    KVShape,
    LoraSlice,
    Norm,
    Routing,
    RowSpan,
    Site,
    accumulator_dtype,
)


@dataclass(frozen=True, slots=True)
class ReferenceWeight:
    """[N, M] and [N], as they are."""

    weight: Tensor
    bias: Tensor | None


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

    def pack_weight(self, weight: Tensor, bias: Tensor | None = None) -> ReferenceWeight:
        return ReferenceWeight(
            weight.to(self._device).contiguous(), None if bias is None else bias.to(self._device)
        )

    def pack_experts(self, gate_up: Sequence[Tensor], down: Sequence[Tensor]) -> ReferenceExperts:
        return ReferenceExperts(
            tuple(weight.to(self._device).contiguous() for weight in gate_up),
            tuple(weight.to(self._device).contiguous() for weight in down),
        )

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

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        return by_row_tile(lambda tile: normalized(tile, norm).to(norm.weight.dtype), x)

    def linear(self, x: Tensor, weight: ReferenceWeight) -> Tensor:
        y = product(x, weight.weight).to(accumulator_dtype(x.dtype))
        return y if weight.bias is None else y + weight.bias

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
        cos_sin: Tensor | None,
        kv: ReferenceKVCache,
        slot_mapping: Tensor,
        norms: tuple[Norm, Norm] | None = None,
    ) -> Tensor:
        layer = site[0]
        kv_heads, head_size = kv.keys.shape[-2:]
        heads = self._adapted_linear(x, weight, site, lora).view(len(x), -1, head_size)
        q, k = heads[:, : -2 * kv_heads], heads[:, -2 * kv_heads : -kv_heads]
        if norms is not None:
            q, k = _norm_heads(q, norms[0]), _norm_heads(k, norms[1])
        if cos_sin is not None:
            q, k = _rotate(q, cos_sin), _rotate(k, cos_sin)
        v = heads[:, -kv_heads:]
        true_rows = len(slot_mapping)
        kv.keys[layer].view(-1, kv_heads, head_size)[slot_mapping] = k[:true_rows].to(x.dtype)
        kv.values[layer].view(-1, kv_heads, head_size)[slot_mapping] = v[:true_rows].to(x.dtype)
        return q.to(x.dtype)

    def attention(
        self,
        q: Tensor,
        kv: ReferenceKVCache,
        layer: int,
        plan: ReferenceAttentionPlan,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        rule = ScoreRule(scale, window, softcap)
        return attention(q, kv.keys[layer], kv.values[layer], plan, rule)

    def gated_linear_unit(
        self,
        x: Tensor,
        weight: ReferenceWeight,
        site: Site,
        lora: ReferenceLoraPlan,
        activation: Activation,
    ) -> Tensor:
        y = self._adapted_linear(x, weight, site, lora)
        return by_row_tile(lambda tile: gated(tile, activation).to(x.dtype), y)

    def route(
        self, x: Tensor, router: ReferenceWeight, top_k: int, *, renormalize: bool, num_rows: int
    ) -> Routing:
        return route(self.linear(x, router), top_k, renormalize=renormalize, num_rows=num_rows)

    def experts_add_(
        self,
        residual: Tensor,
        x: Tensor,
        experts: ReferenceExperts,
        routing: Routing,
        activation: Activation,
    ) -> None:
        experts_add_(residual, x, experts, routing, activation)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return by_row_tile(lambda tile: capped(tile, cap), x)

    def _adapted_linear(
        self, x: Tensor, weight: ReferenceWeight, site: Site, lora: ReferenceLoraPlan
    ) -> Tensor:
        """`x @ weight.T` plus each row's low-rank update; [T, N] in the accumulator dtype."""
        y = self.linear(x, weight)
        for adapter, rows in lora.segments:
            slices = adapter.sites.get(site)
            if slices is None:
                continue
            own = padded(x[rows])
            for piece in slices:
                update = product(product(own, piece.a), piece.b)[: len(rows)]
                stop = piece.start + piece.b.shape[0]
                y[rows, piece.start : stop] += piece.scale * update.to(y.dtype)
        return y


def _norm_heads(heads: Tensor, norm: Norm) -> Tensor:
    """Each head [T, n, D] by itself, or all of a row together, as many as the norm has weights."""
    together = heads if len(norm.weight) == heads.shape[-1] else heads.flatten(1)
    return by_row_tile(lambda tile: normalized(tile, norm), together).view_as(heads)


def _rotate(heads: Tensor, cos_sin: Tensor) -> Tensor:
    size = cos_sin.shape[-1]
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = heads[..., :size].chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, heads[..., size:]), dim=-1)
