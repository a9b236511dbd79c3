"""Owns the device: weights, KV cache and adapter slots. Runs one step."""

import torch
from torch import Tensor

from manylora.engine.adapters import AdapterWeights
from manylora.engine.batch import build_model_input
from manylora.engine.models.config import DecoderConfig
from manylora.engine.models.decoder import Decoder, ReadTensor
from manylora.engine.scheduler import ScheduledBatch
from manylora.kernels import load_backend
from manylora.kernels.surface import LoraSlice, PackedAdapter, Site


class ModelRunner:
    """The model on its device, with the KV cache and one packed adapter in each slot."""

    def __init__(
        self,
        config: DecoderConfig,
        read: ReadTensor,
        *,
        device: str,
        block_size: int,
        num_kv_blocks: int | None,
        kv_cache_memory_bytes: int,
        max_model_len: int,
        num_slots: int,
    ) -> None:
        self.backend = load_backend(device)
        self.model = Decoder(config, read, self.backend, max_model_len)
        self._device = device
        self._block_size = block_size
        shape = self.model.kv_shape(block_size)
        if num_kv_blocks is None:
            num_kv_blocks = max(1, kv_cache_memory_bytes // shape.bytes_per_block(self.model.dtype))
        self.kv = self.backend.new_kv_cache(shape, num_kv_blocks, self.model.dtype)
        self._slots: list[PackedAdapter | None] = [None] * num_slots
        self._slot_digests: list[str | None] = [None] * num_slots

    def fill_slot(self, slot: int, adapter: AdapterWeights) -> None:
        """Replace a slot's content whole."""
        sites = fuse_adapter(adapter, self.model.config, self.model.dtype)
        self._slots[slot] = self.backend.pack_adapter(sites)
        self._slot_digests[slot] = adapter.digest

    def empty_slot(self, slot: int) -> None:
        self._slots[slot] = None
        self._slot_digests[slot] = None

    def slot_bytes(self, slot: int) -> int:
        adapter = self._slots[slot]
        return 0 if adapter is None else adapter.size_bytes

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch, *, all_logits: bool = False) -> Tensor:
        """Compute a step.

        Returns:
            Logits [n, V] on the host, a row for each entry that samples (or each row), in the
            order of the batch.
        """
        for entry in batch.entries:
            sequence = entry.sequence
            held = None if sequence.slot is None else self._slot_digests[sequence.slot]
            assert held == sequence.digest, f"slot {sequence.slot} holds another adapter"
        model_input = build_model_input(
            batch,
            self._slots,
            self.backend,
            block_size=self._block_size,
            device=self._device,
            all_logits=all_logits,
        )
        return self.model.forward(model_input, self.kv).cpu()


_SITES = {
    "self_attn.q_proj": "qkv",
    "self_attn.k_proj": "qkv",
    "self_attn.v_proj": "qkv",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate_up",
    "mlp.up_proj": "gate_up",
    "mlp.down_proj": "down",
}


def fuse_adapter(
    adapter: AdapterWeights, config: DecoderConfig, dtype: torch.dtype
) -> dict[Site, list[LoraSlice]]:
    """Each adapted module as a slice of the fused linear layer that it is part of."""
    shapes = config.linear_shapes()
    sites: dict[Site, list[LoraSlice]] = {}
    for layer in range(config.num_layers):
        start_of: dict[str, int] = {}
        for module, name in _SITES.items():
            path = f"model.layers.{layer}.{module}"
            start = start_of.get(name, 0)
            start_of[name] = start + shapes[path][0]
            if (lora := adapter.modules.get(path)) is not None:
                piece = LoraSlice(start, lora.a.to(dtype), lora.b.to(dtype), lora.scale)
                sites.setdefault((layer, name), []).append(piece)
    return sites
