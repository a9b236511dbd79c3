"""What each family's config means: transformers' modules and defaults, or one line why not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from manylora.engine.errors import ModelError
from manylora.engine.models.config import DecoderConfig
from manylora.engine.models.families import FAMILIES
from support.tiny_families import TINY_FAMILIES
from support.tiny_model import SIZES

MINIMAL = {
    "vocab_size": 300,
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
DIVISORS = {"short_factor": [1.5] * 8, "long_factor": [2.5] * 8}
families = pytest.mark.parametrize("name", TINY_FAMILIES)


def tiny(name: str, **changes: Any) -> dict[str, Any]:
    """What transformers writes for a tiny family, and changes to that."""
    values = SIZES | {"pad_token_id": 0} | TINY_FAMILIES[name]
    return {"dtype": "float32", **AutoConfig.for_model(name, **values).to_dict(), **changes}


@families
def test_the_linear_layers_are_those_of_transformers(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny(name)))
    expected = {
        path: tuple(layer.weight.shape)
        for path, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and path != "lm_head"
    }

    assert DecoderConfig.from_dict(tiny(name)).linear_shapes() == expected


@families
def test_absent_fields_mean_what_they_mean_to_transformers(name: str) -> None:
    short = MINIMAL | (EXPERTS if "experts" in str(TINY_FAMILIES[name]) else {})
    full = AutoConfig.for_model(name, **short).to_dict()

    assert DecoderConfig.from_dict({"model_type": name, **short}) == DecoderConfig.from_dict(
        full | {"dtype": "float32"}
    )


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("gemma3_text", {"rope_theta": 2e6, "rope_local_base_freq": 2e4}),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("gemma3_text", {"sliding_window_pattern": 3}),
        ("phi3", {"rope_theta": 2e4, "partial_rotary_factor": 0.75}),
        ("phi3", {"rope_scaling": {"type": "longrope"} | DIVISORS}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 5}),
        ("qwen3", {"use_sliding_window": True, "num_hidden_layers": 30}),
        ("qwen3_moe", {"use_sliding_window": True, "decoder_sparse_step": 2, **EXPERTS}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 7, "no_rope_layer_interval": 3}),
        ("llama", {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ],
    ids=str,
)
def test_older_spellings_mean_what_they_mean_to_transformers(
    name: str, old: dict[str, Any]
) -> None:
    full = AutoConfig.for_model(name, **(MINIMAL | _copy(old))).to_dict()

    assert DecoderConfig.from_dict(
        {"model_type": name, **MINIMAL, **old}
    ) == DecoderConfig.from_dict(full | {"dtype": "float32"})


def _copy(values: dict[str, Any]) -> dict[str, Any]:
    """transformers changes nested values in place."""
    return {name: dict(v) if isinstance(v, dict) else v for name, v in values.items()}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("gemma3_text", {"model_type": "gemma3"}, "model_type 'gemma3'"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e6}}, "rope_theta"),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ("gemma2", {"hidden_activation": None}, "hidden_activation None"),
        ("gemma2", {"sliding_window": None}, "sliding_window None"),
        ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar -1"),
        ("mistral", {"sliding_window": 0}, "sliding_window 0"),
        ("mistral", {"sliding_window": 3.5}, "sliding_window 3.5"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("qwen2", {"use_sliding_window": False}, "layer_types"),
        ("qwen2", {"layer_types": None, "max_window_layers": "1"}, "max_window_layers '1'"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": "all"}, "no_rope_layers"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ("phi3", {"rope_parameters": {"rope_type": "su", "factor": 2.0}}, "rope_type 'su'"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.2}}, "partial_rotary_factor 0.2"),
        ("granite", {"logits_scaling": 0}, "logits_scaling 0"),
        ("granite", {"residual_multiplier": None}, "residual_multiplier None"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok 7"),
        ("qwen3_moe", {"num_local_experts": 0}, "num_local_experts 0"),
        ("qwen3_moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob 'yes'"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts None"),
    ],
    ids=str,
)
def test_what_a_family_does_not_support_is_named(
    name: str, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError) as caught:
        DecoderConfig.from_dict(tiny(name, **change))

    assert said in str(caught.value)


def test_every_supported_model_type_is_tried_here() -> None:
    assert set(TINY_FAMILIES) == set(FAMILIES)


def test_every_supported_model_type_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()

    assert {name for name in FAMILIES if f"\n| `{name}` |" not in page} == set()
