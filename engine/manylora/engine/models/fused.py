"""Which linear layers are computed as one, and where each stands in it. One table for all."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from manylora.engine.models.config import DecoderConfig
from manylora.kernels.surface import LoraSlice, Site

FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The modules of each fused layer, in the order of their output features."""


class Lora(Protocol):
    """`scale * (b @ (a @ x))`: a [R, in], b [out, R]."""

    @property
    def a(self) -> Tensor: ...
    @property
    def b(self) -> Tensor: ...
    @property
    def scale(self) -> float: ...


def module_path(layer: int, module: str) -> str:
    return f"model.layers.{layer}.{module}"


def fuse_adapter(modules: Mapping[str, Lora], config: DecoderConfig) -> dict[Site, list[LoraSlice]]:
    """Each adapted module, by its path, as a slice of the fused layer that it is part of."""
    shapes = config.linear_shapes()
    sites: dict[Site, list[LoraSlice]] = {}
    for layer in range(config.num_layers):
        for name, parts in FUSED.items():
            start = 0
            for part in parts:
                path = module_path(layer, part)
                if (lora := modules.get(path)) is not None:
                    piece = LoraSlice(start, lora.a, lora.b, lora.scale)
                    sites.setdefault((layer, name), []).append(piece)
                start += shapes[path][0]
    return sites
