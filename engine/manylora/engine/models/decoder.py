"""The decoder's forward pass over the kernels' op surface: Llama and its kin."""

from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.engine.batch import ModelInput
from manylora.engine.models.config import DecoderConfig
from manylora.engine.models.fused import FUSED, module_path
from manylora.engine.models.weights import Weights
from manylora.kernels.surface import Backend, KVCache, PackedWeight, accumulator_dtype


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
        self, config: DecoderConfig, weights: Weights, backend: Backend, max_model_len: int
    ) -> None:
        """Load every weight once.

        Raises:
            ModelError: a weight is missing, has another shape, or would not be used.
        """
        self.config = config
        self._ops = backend
        table = (config.vocab_size, config.hidden_size)
        self._embedding = weights.read("model.embed_tokens.weight", table)
        self._layers = [
            _load_layer(weights, config, index, backend) for index in range(config.num_layers)
        ]
        self._final_norm = weights.read("model.norm.weight", (config.hidden_size,))
        if config.tied_embeddings:
            weights.ignore("lm_head.weight")  # some writers keep the copy
            head = self._embedding
        else:
            head = weights.read("lm_head.weight", table)
        weights.check_all_used()
        self._head = backend.pack_weight(head)
        self.dtype = self._embedding.dtype
        self._cos_sin = rotary_table(config, max_model_len).to(
            self._embedding.device, accumulator_dtype(self.dtype)
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


def _load_layer(weights: Weights, config: DecoderConfig, index: int, backend: Backend) -> _Layer:
    shapes = config.linear_shapes()

    def norm(name: str) -> Tensor:
        return weights.read(f"{module_path(index, name)}.weight", (config.hidden_size,))

    def fused(name: str) -> PackedWeight:
        paths = [module_path(index, part) for part in FUSED[name]]
        return backend.pack_weight(
            torch.cat([weights.read(f"{path}.weight", shapes[path]) for path in paths])
        )

    return _Layer(
        attention_norm=norm("input_layernorm"),
        qkv=fused("qkv"),
        o=fused("o"),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=fused("gate_up"),
        down=fused("down"),
    )
