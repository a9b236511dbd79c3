"""One decoder layer's weights, read by their names and packed by the backend."""

from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.engine.models.config import DecoderConfig, module_path
from manylora.engine.models.weights import Weights
from manylora.kernels.surface import Backend, Norm, PackedExperts, PackedWeight


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: PackedWeight
    down: PackedWeight


@dataclass(frozen=True, slots=True)
class SparseMlp:
    router: PackedWeight
    experts: PackedExperts


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer has a dense MLP or a sparse one; a norm is None where its family has none."""

    before_attention: Norm | None
    qkv: PackedWeight
    qk_norms: tuple[Norm, Norm] | None
    o: PackedWeight
    after_attention: Norm | None
    before_mlp: Norm | None
    mlp: Mlp | None
    sparse: SparseMlp | None
    after_mlp: Norm | None


def load_layer(
    weights: Weights, config: DecoderConfig, index: int, backend: Backend
) -> LayerWeights:
    """
    Raises:
        ModelError: a weight is missing or has another shape.
    """
    names = config.architecture.norms

    def norm(name: str | None) -> Norm | None:
        if name is None:
            return None
        return load_norm(weights, config, module_path(index, name), config.hidden_size)

    def fused(name: str) -> PackedWeight:
        return _load_fused(weights, config, index, name, backend)

    sparse = config.architecture.layers[index].sparse
    return LayerWeights(
        before_attention=norm(names.before_attention),
        qkv=fused("qkv"),
        qk_norms=_load_qk_norms(weights, config, index),
        o=fused("o"),
        after_attention=norm(names.after_attention),
        before_mlp=norm(names.before_mlp),
        mlp=None if sparse else Mlp(fused("gate_up"), fused("down")),
        sparse=_load_experts(weights, config, index, backend) if sparse else None,
        after_mlp=norm(names.after_mlp),
    )


def load_norm(weights: Weights, config: DecoderConfig, path: str, size: int) -> Norm:
    """
    Raises:
        ModelError: its weight is missing or has another shape.
    """
    weight = weights.read(f"{path}.weight", (size,))
    return Norm(weight, config.norm_eps, config.architecture.norm_offset)


def _load_fused(
    weights: Weights, config: DecoderConfig, index: int, name: str, backend: Backend
) -> PackedWeight:
    shapes = config.fused_shapes(index)[name]
    paths = {module_path(index, module): shape for module, shape in shapes.items()}
    weight = [weights.read(f"{path}.weight", shape) for path, shape in paths.items()]
    bias: Tensor | None = None
    if name in config.architecture.biased:
        bias = torch.cat([weights.read(f"{path}.bias", shape[:1]) for path, shape in paths.items()])
    return backend.pack_weight(torch.cat(weight), bias)


def _load_qk_norms(weights: Weights, config: DecoderConfig, index: int) -> tuple[Norm, Norm] | None:
    if config.architecture.qk_norm is None:
        return None
    together = config.architecture.qk_norm == "projection"
    q, k = (
        load_norm(
            weights,
            config,
            module_path(index, f"self_attn.{name}"),
            config.head_size * (heads if together else 1),
        )
        for name, heads in (("q_norm", config.num_heads), ("k_norm", config.num_kv_heads))
    )
    return q, k


def _load_experts(
    weights: Weights, config: DecoderConfig, index: int, backend: Backend
) -> SparseMlp:
    facts = config.architecture.experts
    assert facts is not None
    hidden, inner = config.hidden_size, facts.intermediate_size

    def read(module: str, expert: int, shape: tuple[int, int]) -> Tensor:
        return weights.read(f"{module_path(index, module.format(expert))}.weight", shape)

    router = read(facts.router, 0, (facts.count, hidden))
    gate_up = [
        torch.cat([read(module, expert, (inner, hidden)) for module in (facts.gate, facts.up)])
        for expert in range(facts.count)
    ]
    down = [read(facts.down, expert, (hidden, inner)) for expert in range(facts.count)]
    return SparseMlp(backend.pack_weight(router), backend.pack_experts(gate_up, down))
