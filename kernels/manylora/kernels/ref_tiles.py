"""The `ref` backend's unit of work: one fixed number of rows, and what is computed on them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.kernels.surface import Activation, Norm

ROW_TILE = 32  # rows of one call


def by_row_tile(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The function of every `ROW_TILE` rows, one tile at a time; T is a multiple of it."""
    assert x.shape[0] % ROW_TILE == 0
    return torch.cat([function(tile) for tile in torch.split(x, ROW_TILE)])


def padded(rows: Tensor) -> Tensor:
    """The rows [n, M] and as many of zeros as fill the last tile."""
    whole = rows.new_zeros(-(-len(rows) // ROW_TILE) * ROW_TILE, rows.shape[1])
    whole[: len(rows)] = rows
    return whole


def product(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`, in the dtype of both."""
    return by_row_tile(lambda tile: F.linear(tile, weight), x)


def normalized(tile: Tensor, norm: Norm) -> Tensor:
    """The norm over the last dimension, in the accumulator dtype."""
    mean_square = tile.square().mean(dim=-1, keepdim=True)
    scale = norm.weight.to(tile.dtype) + norm.offset
    return tile * torch.rsqrt(mean_square + norm.eps) * scale


def gated(tile: Tensor, activation: Activation) -> Tensor:
    """`activation(gate) * up` of gate and up side by side."""
    gate, up = tile.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh") * up


def capped(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)`; the caller sees to a fixed shape."""
    return torch.tanh(x / cap) * cap
