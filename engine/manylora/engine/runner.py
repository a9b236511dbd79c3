"""Owns the device: weights, KV cache and adapter slots. Runs one step."""

import torch
from torch import Tensor

from manylora.engine.adapters import AdapterWeights
from manylora.engine.batch import build_model_input
from manylora.engine.models.config import DecoderConfig
from manylora.engine.models.decoder import Decoder
from manylora.engine.models.fused import fuse_adapter
from manylora.engine.models.weights import Weights
from manylora.engine.schedule import ScheduledBatch
from manylora.kernels import load_backend
from manylora.kernels.surface import KVShape, PackedAdapter


class ModelRunner:
    """The model on its device, with the KV cache and one packed adapter in each slot."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        *,
        device: str,
        block_size: int,
        num_kv_blocks: int,
        max_model_len: int,
        num_slots: int,
    ) -> None:
        self.backend = load_backend(device)
        self.model = Decoder(config, weights, self.backend, max_model_len)
        self._device = device
        self._block_size = block_size
        self.kv = self.backend.new_kv_cache(
            kv_shape(config, block_size), num_kv_blocks, self.model.dtype
        )
        self._slots: list[PackedAdapter | None] = [None] * num_slots
        self._slot_digests: list[str | None] = [None] * num_slots

    def fill_slot(self, slot: int, adapter: AdapterWeights) -> None:
        """Replace a slot's content whole."""
        sites = fuse_adapter(adapter.modules, self.model.config)
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
            Logits [n, V] on the host, a row for each of the entries' `logit_positions` (or each
            position), in the order of the batch.
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


def kv_shape(config: DecoderConfig, block_size: int) -> KVShape:
    """The geometry of a model's KV cache."""
    return KVShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        block_size=block_size,
    )
