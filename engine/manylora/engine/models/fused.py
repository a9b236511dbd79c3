"""Where each adapted module stands in the linear layer that is computed as one."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from manylora.engine.models.config import DecoderConfig, module_path
from manylora.kernels.surface import LoraSlice, Site


class Lora(Protocol):
    """`scale * (b @ (a @ x))`: a [R, in], b [out, R]."""

    @property
    def a(self) -> Tensor: ...
    @property
    def b(self) -> Tensor: ...
    @property
    def scale(self) -> float: ...


def fuse_adapter(modules: Mapping[str, Lora], config: DecoderConfig) -> dict[Site, list[LoraSlice]]:
    """Each adapted module, by its path, as a slice of the fused layer that it is part of."""
    sites: dict[Site, list[LoraSlice]] = {}
    for layer in range(config.num_layers):
        for name, parts in config.fused_shapes(layer).items():
            start = 0
            for part, (size, _) in parts.items():
                if (lora := modules.get(module_path(layer, part))) is not None:
                    piece = LoraSlice(start, lora.a, lora.b, lora.scale)
                    sites.setdefault((layer, name), []).append(piece)
                start += size
    return sites
