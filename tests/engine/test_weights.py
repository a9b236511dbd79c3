"""A base model is computed exactly, or refused with the tensor or field named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from manylora.engine.errors import ModelError
from support.engine import make_llm

Q = "model.layers.0.self_attn.q_proj"
FILE = "model.safetensors"


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


def add_bias(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q}.bias"] = torch.zeros(96)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (add_bias, r"1 tensors .*q_proj\.bias"),
        (lambda t: t.pop(f"{Q}.weight"), rf"no tensor {Q}\.weight"),
        (lambda t: t.update({f"{Q}.weight": torch.zeros(95, 96)}), r"shape \[95, 96\]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(95)}), r"model\.norm\.weight"),
    ],
    ids=["one too many", "one too few", "another shape", "a norm's shape"],
)
def test_weights_that_are_not_the_configs_are_refused(
    copy: Path, change: Callable[[dict[str, Tensor]], object], said: str
) -> None:
    rewrite(copy, change)

    with pytest.raises(ModelError, match=said):
        make_llm(copy)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 1}, "tensors that this decoder does not use"),
        ({"num_key_value_heads": 3}, "k_proj"),
        ({"vocab_size": 300}, "embed_tokens"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"head_dim": 17}, "odd head size"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "rope_theta"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ],
    ids=str,
)
def test_a_config_that_is_not_the_weights_is_refused(
    copy: Path, change: dict[str, object], said: str
) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))

    with pytest.raises(ModelError, match=said):
        make_llm(copy)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"], ids=repr)
def test_a_damaged_config_is_refused_by_name(copy: Path, content: bytes) -> None:
    (copy / "config.json").write_bytes(content)

    with pytest.raises(ModelError, match=r"config\.json"):
        make_llm(copy)


@pytest.mark.parametrize("name", [FILE, "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [b"", b"{}", b"garbage" * 100], ids=["empty", "object", "junk"])
def test_damaged_weights_are_refused_by_name(copy: Path, name: str, content: bytes) -> None:
    (copy / name).write_bytes(content)

    with pytest.raises(ModelError, match="cannot be read"):
        make_llm(copy)


def test_a_tied_heads_copy_is_no_weight_too_many(copy: Path) -> None:
    rewrite(
        copy,
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    )

    with make_llm(copy) as llm:
        assert llm.generate([1, 2])[0].outputs[0].token_ids
