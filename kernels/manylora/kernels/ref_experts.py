"""Mixture of experts of the `ref` backend: each expert's rows, in tiles of a fixed size."""

from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.kernels.ref_tiles import by_row_tile, gated, padded, product
from manylora.kernels.surface import Activation, Routing, accumulator_dtype


@dataclass(frozen=True, slots=True)
class ReferenceExperts:
    """Each expert's [2I, H] and [H, I], as they are."""

    gate_up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]


def route(logits: Tensor, top_k: int, *, renormalize: bool, num_rows: int) -> Routing:
    """The most probable experts of each row.

    Args:
        logits: [T, E], accumulator dtype.
    """
    shares = by_row_tile(lambda tile: tile.softmax(dim=-1), logits)[:num_rows]
    weights, experts = shares.topk(top_k, dim=-1)
    if renormalize:
        weights = weights / _sum_in_order(weights)
    return Routing(experts, weights)


def experts_add_(
    residual: Tensor, x: Tensor, experts: ReferenceExperts, routing: Routing, activation: Activation
) -> None:
    """See `surface.Backend.experts_add_`."""
    answers = residual.new_empty(*routing.experts.shape, residual.shape[1])
    for expert in sorted(set(routing.experts.flatten().tolist())):
        rows, places = torch.where(routing.experts == expert)
        y = product(padded(x[rows]), experts.gate_up[expert]).to(accumulator_dtype(x.dtype))
        y = by_row_tile(lambda tile: gated(tile, activation).to(x.dtype), y)
        y = product(y, experts.down[expert])[: len(rows)]
        answers[rows, places] = y.to(residual.dtype)
    for answer, share in zip(answers.unbind(1), routing.weights.unbind(1), strict=True):
        residual[: len(share)] += share.unsqueeze(1) * answer


def _sum_in_order(weights: Tensor) -> Tensor:
    """[n, 1]: the sum of each row, its terms added from the first to the last."""
    columns = weights.unsqueeze(2).unbind(1)
    return sum(columns[1:], columns[0])
