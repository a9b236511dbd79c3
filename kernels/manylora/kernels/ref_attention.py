"""Paged attention of the `ref` backend, in calls of one fixed shape.

Queries go in groups of `GROUP_TILES` tiles of `QUERY_TILE` rows of one sequence each, over key
chunks of one fixed length in ascending order with a running softmax (Milakov and Gimelshein,
arXiv 1805.02867). A chunk that a row may not see leaves its numbers as they are, to the bit: so a
window can skip the chunks before it, as far as no row of the group sees them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.kernels.ref_tiles import capped
from manylora.kernels.surface import RowSpan, accumulator_dtype

QUERY_TILE = 8  # query rows of one sequence in one tile
GROUP_TILES = 8  # tiles computed together
KEY_CHUNK = 128  # keys of one step, rounded up to whole blocks


@dataclass(frozen=True, slots=True)
class _TileGroup:
    """`GROUP_TILES` attention tiles; missing rows have position -1."""

    rows: Tensor  # [G, QUERY_TILE] int64 into q; 0 where missing
    positions: Tensor  # [G, QUERY_TILE] int64
    blocks: Tensor  # [G, chunks * blocks per chunk] int64; 0 where missing
    first_position: int  # the least of all true rows
    num_chunks: int


@dataclass(frozen=True, slots=True)
class ReferenceAttentionPlan:
    groups: tuple[_TileGroup, ...]
    chunk: int  # keys


def plan_attention(
    spans: Sequence[RowSpan], block_size: int, device: str
) -> ReferenceAttentionPlan:
    """Cut each sequence's rows into tiles and put these in groups."""
    blocks_per_chunk = -(-KEY_CHUNK // block_size)
    chunk = blocks_per_chunk * block_size
    tiles = [(span, offset) for span in spans for offset in range(0, span.num_rows, QUERY_TILE)]
    groups = [
        _tile_group(tiles[i : i + GROUP_TILES], chunk, blocks_per_chunk, device)
        for i in range(0, len(tiles), GROUP_TILES)
    ]
    return ReferenceAttentionPlan(tuple(groups), chunk)


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """From a query times a key to a score, and which keys count; see `surface.attention`."""

    scale: float
    window: int | None
    softcap: float | None

    def first_chunk(self, group: _TileGroup, chunk: int) -> int:
        """The first chunk that some row of the group sees."""
        if self.window is None:
            return 0
        return max(0, group.first_position - self.window + 1) // chunk

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Scores of queries that carry the scale already."""
        scores = queries @ keys.transpose(-1, -2)
        return scores if self.softcap is None else capped(scores, self.softcap)

    def visible(self, key: Tensor, position: Tensor) -> Tensor:
        """Whether a row at `position` sees `key`."""
        if self.window is None:
            return key <= position
        return (key <= position) & (key > position - self.window)


def attention(
    q: Tensor, keys: Tensor, values: Tensor, plan: ReferenceAttentionPlan, rule: ScoreRule
) -> Tensor:
    """Causal attention of one layer.

    Args:
        q: [T, Q, D].
        keys, values: [blocks, block size, K, D].

    Returns:
        [T, Q * D] in q's dtype; rows of no tile are zero.
    """
    out = torch.zeros_like(q)
    for group in plan.groups:
        result = _group_attention(q, keys, values, group, plan.chunk, rule)
        present = group.positions >= 0
        out[group.rows[present]] = result[present].to(q.dtype)
    return out.flatten(1)


def _tile_group(
    tiles: Sequence[tuple[RowSpan, int]], chunk: int, blocks_per_chunk: int, device: str
) -> _TileGroup:
    last_key = max(s.first_position + min(s.num_rows, o + QUERY_TILE) for s, o in tiles)
    first_position = min(s.first_position + o for s, o in tiles)
    num_chunks = -(-last_key // chunk)
    rows = torch.zeros(GROUP_TILES, QUERY_TILE, dtype=torch.int64)
    positions = torch.full((GROUP_TILES, QUERY_TILE), -1)
    blocks = torch.zeros(GROUP_TILES, num_chunks * blocks_per_chunk, dtype=torch.int64)
    for i, (span, offset) in enumerate(tiles):
        count = min(QUERY_TILE, span.num_rows - offset)
        rows[i, :count] = span.first_row + offset + torch.arange(count)
        positions[i, :count] = span.first_position + offset + torch.arange(count)
        table = torch.tensor(span.block_table[: blocks.shape[1]])
        blocks[i, : len(table)] = table
    return _TileGroup(
        rows.to(device), positions.to(device), blocks.to(device), first_position, num_chunks
    )


def _group_attention(
    q: Tensor, keys: Tensor, values: Tensor, group: _TileGroup, chunk: int, rule: ScoreRule
) -> Tensor:
    """Attention of one group: [G, QUERY_TILE, Q, D] in the accumulator dtype."""
    dtype = accumulator_dtype(q.dtype)
    tiles, rows = group.rows.shape
    kv_heads, size = keys.shape[-2:]
    share = q.shape[1] // kv_heads  # query heads of one KV head
    queries = q[group.rows].to(dtype).view(tiles, rows, kv_heads, share, size)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(tiles, kv_heads, share * rows, size)
    queries = queries * rule.scale
    position = group.positions.repeat(1, share).view(tiles, 1, share * rows, 1)
    last = group.positions.max(dim=1).values.view(tiles, 1, 1, 1)
    top = queries.new_full((tiles, kv_heads, share * rows, 1), -torch.inf)
    total = torch.zeros_like(top)
    sums = torch.zeros_like(queries)
    per_chunk = chunk // keys.shape[1]
    for i in range(rule.first_chunk(group, chunk), group.num_chunks):
        blocks = group.blocks[:, i * per_chunk : (i + 1) * per_chunk]
        key = torch.arange(i * chunk, (i + 1) * chunk, device=q.device)
        k = _gather(keys, blocks, dtype)
        v = _gather(values, blocks, dtype)
        # A block's unwritten positions may hold anything; zero times that must be zero.
        v = torch.where(key.view(1, 1, chunk, 1) <= last, v, 0)
        scores = rule.scores(queries, k)
        scores = torch.where(rule.visible(key, position), scores, -torch.inf)
        new_top = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        safe_top = torch.where(new_top.isinf(), 0, new_top)
        weights = torch.exp(scores - safe_top)
        decay = torch.exp(top - safe_top)
        total = total * decay + weights.sum(dim=-1, keepdim=True)
        sums = sums * decay + weights @ v
        top = new_top
    result = sums / torch.where(total == 0, 1, total)
    return result.view(tiles, kv_heads, share, rows, size).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _gather(cache: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """The blocks' keys or values as [G, K, chunk, D]."""
    return cache[blocks].flatten(1, 2).transpose(1, 2).to(dtype)
