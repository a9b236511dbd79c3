"""A model folder's geometry: what transformers builds from it, or one clear line why not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from manylora.engine.errors import ModelError
from manylora.engine.models.config import DecoderConfig


def llama(**values: Any) -> dict[str, Any]:
    sizes = {
        "vocab_size": 50,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    }
    return {"model_type": "llama", "dtype": "float32", **LlamaConfig(**(sizes | values)).to_dict()}


@pytest.mark.parametrize(
    "values", [{}, {"head_dim": 10}, {"num_key_value_heads": 1}, {"num_key_value_heads": None}]
)
def test_the_linear_layers_are_those_of_transformers(values: dict[str, Any]) -> None:
    raw = llama(**values)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**raw))
    expected = {
        name: tuple(layer.weight.shape)
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and name != "lm_head"
    }

    assert DecoderConfig.from_dict(raw).linear_shapes() == expected


def test_the_rope_base_is_found_where_either_format_keeps_it() -> None:
    old = {k: v for k, v in llama().items() if k != "rope_parameters"}
    new = llama(rope_parameters={"rope_type": "default", "rope_theta": 77.0})

    def theta(raw: dict[str, Any]) -> float:
        (rope,) = {layer.rope for layer in DecoderConfig.from_dict(raw).architecture.layers}
        assert rope is not None
        return rope.theta

    assert theta(new) == 77.0
    assert theta(old | {"rope_theta": 88.0}) == 88.0
    assert theta(old) == 10_000.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lacks 'low_freq_factor'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": None, "rope_scaling": [1]}, "rope_scaling"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": "yes"}, "attention_bias 'yes'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": "24"}, "hidden_size '24'"),
        ({"hidden_size": 0}, "hidden_size 0"),
        ({"num_hidden_layers": None}, "num_hidden_layers None"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"hidden_size": 1, "head_dim": None}, "hidden_size"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 1e308}}, "too large"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4"),
        ({"dtype": "int8", "torch_dtype": None}, "dtype 'int8'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        DecoderConfig.from_dict(llama() | change)

    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["vocab_size", "num_hidden_layers", "rms_norm_eps"])
def test_a_missing_value_is_named(name: str) -> None:
    raw = llama()
    del raw[name]

    with pytest.raises(ModelError, match=name):
        DecoderConfig.from_dict(raw)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)

    with pytest.raises(ModelError, match=r"config\.json"):
        DecoderConfig.from_folder(tmp_path)


def test_a_folder_is_read_as_its_dict(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama()))

    assert DecoderConfig.from_folder(tmp_path) == DecoderConfig.from_dict(llama())
