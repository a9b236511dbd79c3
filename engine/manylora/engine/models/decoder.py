"""The decoder's forward pass over the kernels' op surface, whatever the family."""

import torch
from torch import Tensor

from manylora.engine.batch import ModelInput
from manylora.engine.models.config import DecoderConfig
from manylora.engine.models.layer_weights import LayerWeights, load_layer, load_norm
from manylora.engine.models.rope import rotary_table
from manylora.engine.models.weights import Weights
from manylora.kernels.surface import Backend, KVCache, Norm, accumulator_dtype


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
        self._facts = config.architecture
        table = (config.vocab_size, config.hidden_size)
        self._embedding = weights.read("model.embed_tokens.weight", table)
        self._layers = [
            load_layer(weights, config, index, backend) for index in range(config.num_layers)
        ]
        self._final_norm = load_norm(weights, config, "model.norm", config.hidden_size)
        if config.tied_embeddings:
            weights.ignore("lm_head.weight")  # some writers keep the copy
            head = self._embedding
        else:
            head = weights.read("lm_head.weight", table)
        weights.check_all_used()
        self._head = backend.pack_weight(head)
        self.dtype = self._embedding.dtype
        scale = self._facts.embedding_scale
        rounded = torch.tensor(scale, dtype=self.dtype).item()
        self._embedding_scale = rounded if self._facts.embedding_scale_rounds else scale
        ropes = {layer.rope for layer in self._facts.layers if layer.rope is not None}
        tables = {rope: rotary_table(rope, max_model_len) for rope in ropes}
        where = (self._embedding.device, accumulator_dtype(self.dtype))
        self._rotary = {rope: table.to(*where) for rope, table in tables.items()}

    def forward(self, batch: ModelInput, kv: KVCache) -> Tensor:
        """Run one step; `kv` gains the keys and values of every true row.

        Returns:
            Logits [len(batch.logit_rows), V] in the accumulator dtype.
        """
        cos_sin = {rope: table[batch.positions] for rope, table in self._rotary.items()}
        residual = self._embedding[batch.token_ids].to(accumulator_dtype(self.dtype))
        if self._embedding_scale != 1.0:
            residual *= self._embedding_scale
        for index, layer in enumerate(self._layers):
            rope = self._facts.layers[index].rope
            turns = None if rope is None else cos_sin[rope]
            self._attention_add_(residual, index, layer, batch, kv, turns)
            self._mlp_add_(residual, index, layer, batch)
        return self._logits(residual, batch.logit_rows)

    def _attention_add_(
        self,
        residual: Tensor,
        index: int,
        layer: LayerWeights,
        batch: ModelInput,
        kv: KVCache,
        cos_sin: Tensor | None,
    ) -> None:
        ops, lora = self._ops, batch.lora
        x = self._input(residual, layer.before_attention)
        q = ops.qkv_rope_write_kv(
            x, layer.qkv, (index, "qkv"), lora, cos_sin, kv, batch.slot_mapping, layer.qk_norms
        )
        x = ops.attention(
            q,
            kv,
            index,
            batch.attention,
            scale=self._facts.attention_scale or self.config.head_size**-0.5,
            window=self._facts.layers[index].window,
            softcap=self._facts.attention_softcap,
        )
        update = self._update_of(residual, layer.after_attention)
        ops.linear_add_(update, x, layer.o, (index, "o"), lora)
        self._join_(residual, update, layer.after_attention)

    def _mlp_add_(
        self, residual: Tensor, index: int, layer: LayerWeights, batch: ModelInput
    ) -> None:
        ops, lora, activation = self._ops, batch.lora, self._facts.activation
        x = self._input(residual, layer.before_mlp)
        update = self._update_of(residual, layer.after_mlp)
        if layer.mlp is not None:
            x = ops.gated_linear_unit(x, layer.mlp.gate_up, (index, "gate_up"), lora, activation)
            ops.linear_add_(update, x, layer.mlp.down, (index, "down"), lora)
        if layer.sparse is not None:
            facts = self._facts.experts
            assert facts is not None
            routing = ops.route(
                x,
                layer.sparse.router,
                facts.top_k,
                renormalize=facts.renormalize,
                num_rows=len(batch.slot_mapping),
            )
            ops.experts_add_(update, x, layer.sparse.experts, routing, activation)
        self._join_(residual, update, layer.after_mlp)

    def _input(self, residual: Tensor, norm: Norm | None) -> Tensor:
        """What attention or MLP sees of the residual stream, in the model's dtype."""
        return residual.to(self.dtype) if norm is None else self._ops.rms_norm(residual, norm)

    def _update_of(self, residual: Tensor, norm: Norm | None) -> Tensor:
        """Where an update gathers: in the residual stream itself if nothing comes between."""
        if norm is None and self._facts.residual_scale == 1.0:
            return residual
        return torch.zeros_like(residual)

    def _join_(self, residual: Tensor, update: Tensor, norm: Norm | None) -> None:
        if update is residual:
            return
        if norm is not None:
            update = self._ops.rms_norm(update, norm).to(residual.dtype)
        residual += update * self._facts.residual_scale

    def _logits(self, residual: Tensor, rows: Tensor) -> Tensor:
        """Only the rows that need them: the vocabulary is the largest product of a step."""
        multiple = self._ops.row_multiple
        padded = residual.new_zeros(-(-len(rows) // multiple) * multiple, residual.shape[1])
        padded[: len(rows)] = residual[rows]
        logits = self._ops.linear(self._ops.rms_norm(padded, self._final_norm), self._head)
        if self._facts.logits_divisor != 1.0:
            logits = logits / self._facts.logits_divisor
        if self._facts.logits_softcap is not None:
            logits = self._ops.softcap(logits, self._facts.logits_softcap)
        return logits[: len(rows)]
