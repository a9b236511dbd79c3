"""Which decoders are supported: what the `config.json` of each `model_type` means.

The facts are those of transformers' modelling code, the defaults those of its configuration
classes. What is not said here is refused by name. Loads no torch.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from manylora.engine.models.architecture import (
    FUSED,
    POST_NORM,
    SANDWICH_NORM,
    Activation,
    Architecture,
    Experts,
    Layer,
)
from manylora.engine.models.fields import Fields
from manylora.engine.models.rope_config import Rope, read_rope
from manylora.engine.models.windows import (
    Windows,
    last_windows,
    no_windows,
    one_window,
    windows_by_layer_type,
)

ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Family:
    """How a config becomes an architecture, and what its absent fields mean."""

    read: Callable[[Fields], Architecture]
    defaults: Mapping[str, Any] = field(default_factory=dict)


def head_size(f: Fields) -> int:
    """Features of one attention head."""
    return f.optional_size("head_dim") or f.size("hidden_size") // f.size("num_attention_heads")


def _decoder(
    f: Fields,
    windows: Windows | None = None,
    *,
    ropes: Sequence[Rope | None] | None = None,
    activation: str = "hidden_act",
) -> Architecture:
    """Llama's, but for what is said: layers see every key and rotate alike."""
    if windows is None:
        windows = no_windows(f)
    if ropes is None:
        ropes = [read_rope(f, head_size(f))] * len(windows)
    layers = tuple(Layer(window, rope) for window, rope in zip(windows, ropes, strict=True))
    return Architecture(layers=layers, activation=f.choice(activation, ACTIVATIONS))


def _llama(f: Fields) -> Architecture:
    return replace(_decoder(f), biased=_attention_bias(f) | _mlp_bias(f))


def _mistral(f: Fields) -> Architecture:
    return _decoder(f, one_window(f))


def _mixtral(f: Fields) -> Architecture:
    experts = Experts(
        count=f.size("num_local_experts"),
        top_k=f.size("num_experts_per_tok"),
        intermediate_size=f.size("intermediate_size"),
        renormalize=True,
        router="block_sparse_moe.gate",
        gate="block_sparse_moe.experts.{}.w1",
        up="block_sparse_moe.experts.{}.w3",
        down="block_sparse_moe.experts.{}.w2",
    )
    return _with_experts(f, _decoder(f, one_window(f)), experts)


def _qwen2(f: Fields) -> Architecture:
    return replace(_decoder(f, last_windows(f)), biased=frozenset({"qkv"}))


def _qwen3(f: Fields) -> Architecture:
    return replace(_decoder(f, last_windows(f)), biased=_attention_bias(f), qk_norm="head")


def _qwen3_moe(f: Fields) -> Architecture:
    experts = Experts(
        count=f.size("num_local_experts" if f.has("num_local_experts") else "num_experts"),
        top_k=f.size("num_experts_per_tok"),
        intermediate_size=f.size("moe_intermediate_size"),
        renormalize=f.flag("norm_topk_prob"),
        router="mlp.gate",
        gate="mlp.experts.{}.gate_proj",
        up="mlp.experts.{}.up_proj",
        down="mlp.experts.{}.down_proj",
    )
    windows, step = one_window(f, used=f.flag("use_sliding_window")), f.size("decoder_sparse_step")
    dense = {i for i in range(len(windows)) if (i + 1) % step} | f.indices("mlp_only_layers")
    plain = replace(_decoder(f, windows), biased=_attention_bias(f), qk_norm="head")
    return _with_experts(f, plain, experts, dense)


def _smollm3(f: Fields) -> Architecture:
    count = f.size("num_hidden_layers")
    if f.has("no_rope_layers"):
        rotates = [bool(item) for item in f.items("no_rope_layers", count)]  # 1 means with rope
    else:
        rotates = [bool((i + 1) % f.size("no_rope_layer_interval")) for i in range(count)]
    used = f.flag("use_sliding_window") and f.has("sliding_window")
    windows = windows_by_layer_type(f, [used and not turns for turns in rotates], used=used)
    rope = read_rope(f, head_size(f))
    plain = _decoder(f, windows, ropes=[rope if turns else None for turns in rotates])
    return replace(plain, biased=_attention_bias(f) | _mlp_bias(f))


def _phi3(f: Fields) -> Architecture:
    rope = read_rope(f, head_size(f), types=("default", "longrope"), partial=True)
    windows = one_window(f)
    return replace(_decoder(f, windows, ropes=[rope] * len(windows)), modules=FUSED)


def _gemma(f: Fields, windows: Windows, ropes: Sequence[Rope] | None = None) -> Architecture:
    f.refuse_if_set("use_bidirectional_attention")
    return replace(
        _decoder(f, windows, ropes=ropes, activation="hidden_activation"),
        biased=_attention_bias(f),
        norms=SANDWICH_NORM,
        norm_offset=1.0,
        attention_scale=f.number("query_pre_attn_scalar") ** -0.5,
        embedding_scale=f.size("hidden_size") ** 0.5,
        embedding_scale_rounds=True,
        logits_softcap=f.optional_number("final_logit_softcapping"),
    )


def _gemma2(f: Fields) -> Architecture:
    every_other = [i % 2 == 0 for i in range(f.size("num_hidden_layers"))]
    plain = _gemma(f, windows_by_layer_type(f, every_other))
    return replace(plain, attention_softcap=f.optional_number("attn_logit_softcapping"))


def _gemma3(f: Fields) -> Architecture:
    f.refuse_if_set("attn_logit_softcapping")  # transformers reads it and does not apply it
    period, count = f.size("sliding_window_pattern"), f.size("num_hidden_layers")
    windows = windows_by_layer_type(f, [(i + 1) % period != 0 for i in range(count)])
    everywhere, local = _gemma3_ropes(f)
    ropes = [everywhere if window is None else local for window in windows]
    return replace(_gemma(f, windows, ropes), qk_norm="head")


def _gemma3_ropes(f: Fields) -> tuple[Rope, Rope]:
    """For layers that see every key, and for those with a window; only the first is scaled."""
    by_type = f.section("rope_parameters")
    by_type.refuse_others(("full_attention", "sliding_attention"))
    everywhere, local = (by_type.section(f"{kind}_attention") for kind in ("full", "sliding"))
    scaled = {**everywhere.values, **f.section("rope_scaling").values}

    def rope(parameters: Mapping[str, Any], theta: str) -> Rope:
        own = {"rope_parameters": parameters, "rope_theta": f.value(theta), "rope_scaling": None}
        return read_rope(Fields({**f.values, **own}), head_size(f), types=("default", "linear"))

    return rope(scaled, "rope_theta"), rope(local.values, "rope_local_base_freq")


def _olmo2(f: Fields) -> Architecture:
    return replace(_decoder(f), biased=_attention_bias(f), norms=POST_NORM, qk_norm="projection")


def _granite(f: Fields) -> Architecture:
    return replace(
        _llama(f),
        attention_scale=f.number("attention_multiplier"),
        embedding_scale=f.number("embedding_multiplier"),
        residual_scale=f.number("residual_multiplier"),
        logits_divisor=f.number("logits_scaling"),
    )


def _attention_bias(f: Fields) -> frozenset[str]:
    return frozenset({"qkv", "o"} if f.flag("attention_bias") else ())


def _mlp_bias(f: Fields) -> frozenset[str]:
    return frozenset({"gate_up", "down"} if f.flag("mlp_bias") else ())


def _with_experts(
    f: Fields, plain: Architecture, experts: Experts, dense: Collection[int] = ()
) -> Architecture:
    if experts.top_k > experts.count:
        raise f.error("num_experts_per_tok", f"is more than the {experts.count} experts")
    layers = tuple(replace(layer, sparse=i not in dense) for i, layer in enumerate(plain.layers))
    return replace(plain, layers=layers, experts=experts)


_QWEN = {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(_llama),
    "mistral": Family(_mistral, {"num_key_value_heads": 8, "sliding_window": 4096}),
    "mixtral": Family(_mixtral, {"num_key_value_heads": 8, "rope_theta": 1e6}),
    "qwen2": Family(_qwen2, _QWEN),
    "qwen3": Family(_qwen3, {**_QWEN, "head_dim": 128}),
    "qwen3_moe": Family(
        _qwen3_moe,
        {
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "norm_topk_prob": False,
            "mlp_only_layers": None,
        },
    ),
    "smollm3": Family(
        _smollm3,
        {
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": Family(_phi3, {"original_max_position_embeddings": 4096}),
    "gemma2": Family(
        _gemma2, {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    ),
    "gemma3_text": Family(
        _gemma3,
        {
            **_GEMMA,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window_pattern": 6,
        },
    ),
    "olmo2": Family(_olmo2),
    "granite": Family(
        _granite,
        {
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
}
