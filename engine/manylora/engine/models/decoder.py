"""The decoder's forward pass over the kernels' op surface: Llama and its kin."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.engine.batch import ModelInput
from manylora.engine.models.config import DecoderConfig
from manylora.kernels.surface import Backend, KVCache, KVShape, PackedWeight, accumulator_dtype

ReadTensor = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: PackedWeight
    o: PackedWeight
    mlp_norm: Tensor
    gate_up: PackedWeight
    down: PackedWeight


class Decoder:
    """All weights, in the layout that the backend asked for, and the order of the ops."""

    def __init__(
        self, config: DecoderConfig, read: ReadTensor, backend: Backend, max_model_len: int
    ) -> None:
        """Load every weight once.

        Args:
            read: from a Hugging Face tensor name to the tensor, in the model's dtype and on its device.
        """
        self.config = config
        self._ops = backend
        self._embedding = read("model.embed_tokens.weight")
        self._layers = [_load_layer(read, index, backend) for index in range(config.num_layers)]
        self._final_norm = read("model.norm.weight")
        head = self._embedding if config.tied_embeddings else read("lm_head.weight")
        self._head = backend.pack_weight(head)
        self.dtype = self._embedding.dtype
        self._cos_sin = rotary_table(config, max_model_len).to(
            self._embedding.device, accumulator_dtype(self.dtype)
        )

    def kv_shape(self, block_size: int) -> KVShape:
        return KVShape(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_size=self.config.head_size,
            block_size=block_size,
        )

    def forward(self, batch: ModelInput, kv: KVCache) -> Tensor:
        """Run one step; `kv` gains the keys and values of every true row.

        Returns:
            Logits [len(batch.logit_rows), V] in the accumulator dtype.
        """
        ops, eps = self._ops, self.config.norm_eps
        lora = batch.lora
        cos_sin = self._cos_sin[batch.positions]
        residual = self._embedding[batch.token_ids].to(accumulator_dtype(self.dtype))
        for index, layer in enumerate(self._layers):
            x = ops.rms_norm(residual, layer.attention_norm, eps)
            q = ops.qkv_rope_write_kv(
                x, layer.qkv, (index, "qkv"), lora, cos_sin, kv, batch.slot_mapping
            )
            x = ops.attention(q, kv, index, batch.attention)
            ops.linear_add_(residual, x, layer.o, (index, "o"), lora)
            x = ops.rms_norm(residual, layer.mlp_norm, eps)
            x = ops.gate_up_silu_mul(x, layer.gate_up, (index, "gate_up"), lora)
            ops.linear_add_(residual, x, layer.down, (index, "down"), lora)
        return self._logits(residual, batch.logit_rows)

    def _logits(self, residual: Tensor, rows: Tensor) -> Tensor:
        """Only the rows that need them: the vocabulary is the largest product of a step."""
        multiple = self._ops.row_multiple
        padded = residual.new_zeros(-(-len(rows) // multiple) * multiple, residual.shape[1])
        padded[: len(rows)] = residual[rows]
        x = self._ops.rms_norm(padded, self._final_norm, self.config.norm_eps)
        return self._ops.linear(x, self._head)[: len(rows)]


def rotary_table(config: DecoderConfig, num_positions: int) -> Tensor:
    """[positions, D] float32: D/2 cosines, then D/2 sines, of each position.

    Angles are formed in float32, as transformers forms them in every dtype.
    """
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    frequencies = 1.0 / (config.rope_theta**exponents)
    angles = torch.arange(num_positions, dtype=torch.float32).outer(frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _load_layer(read: ReadTensor, index: int, backend: Backend) -> _Layer:
    def part(name: str) -> Tensor:
        return read(f"model.layers.{index}.{name}.weight")

    def fused(*names: str) -> PackedWeight:
        return backend.pack_weight(torch.cat([part(name) for name in names]))

    return _Layer(
        attention_norm=part("input_layernorm"),
        qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        o=fused("self_attn.o_proj"),
        mlp_norm=part("post_attention_layernorm"),
        gate_up=fused("mlp.gate_proj", "mlp.up_proj"),
        down=fused("mlp.down_proj"),
    )
