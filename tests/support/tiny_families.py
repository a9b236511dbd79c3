"""A tiny config of every supported family, each with what sets it apart switched on.

Windows are shorter than the prompts of the tests, caps and multipliers are strong, so that an
error in any of them is far above the tolerance.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.tiny_model import make_tiny_model

WINDOW = 24
_WINDOWED = {"sliding_window": WINDOW}
_GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 11, "final_logit_softcapping": 4.0, **_WINDOWED}

TINY_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "mistral": _WINDOWED,
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, **_WINDOWED},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **_WINDOWED},
    "qwen3": {"head_dim": 24, "attention_bias": True},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "phi3": {"partial_rotary_factor": 0.5, **_WINDOWED},
    "gemma2": {"attn_logit_softcapping": 1.5, **_GEMMA},
    "gemma3_text": {"sliding_window_pattern": 2, **_GEMMA},
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 3.5,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.3,
        "logits_scaling": 2.5,
    },
}


def make_tiny_family(folder: Path, model_type: str, **config: Any) -> Path:
    """A random model of that family, saved as a Hugging Face folder in float32."""
    return make_tiny_model(
        folder, model_type, **({"pad_token_id": 0} | TINY_FAMILIES[model_type] | config)
    )
