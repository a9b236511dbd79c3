"""PEFT folders: what peft would apply is what we read, and all else is refused by name."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from manylora.engine.adapter_check import check_adapter
from manylora.engine.adapter_format import read_adapter
from manylora.engine.adapters import load_adapter
from manylora.engine.errors import AdapterError
from manylora.engine.models.config import DecoderConfig
from support.tiny_model import make_tiny_llama

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tiny_model: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def geometry(tiny_model: Path) -> DecoderConfig:
    return DecoderConfig.from_folder(tiny_model)


@pytest.fixture
def save(base: LlamaForCausalLM, tmp_path: Path) -> Callable[..., PeftModel]:
    """Make a random adapter with peft, save it in `tmp_path`, and give peft's own model of it."""

    def make(**config: Any) -> PeftModel:
        values = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, **config}
        model = get_peft_model(copy.deepcopy(base), LoraConfig(**values))
        model.save_pretrained(tmp_path, save_embedding_layers=False)
        return model

    return make


def reasons(folder: Path, geometry: DecoderConfig, max_lora_rank: int = 64) -> str:
    with pytest.raises(AdapterError) as caught:
        read_adapter(folder, geometry, max_lora_rank=max_lora_rank)
    return "\n".join(caught.value.reasons)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None], **config: Any) -> None:
    """Change the tensors and the config of an adapter."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    raw = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(raw | config))


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj", "down_proj"], "use_rslora": True},
        {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2, "mlp.up_proj": 8}},
        {"target_modules": ["q_proj"], "alpha_pattern": {"layers.1.self_attn.q_proj": 32}},
        {"target_modules": ["q_proj"], "alpha_pattern": {"self.attn.q.proj": 32}},
        {"target_modules": ["q_proj", "o_proj"], "alpha_pattern": {"proj": 32, "o_proj": 5}},
        {
            "target_modules": "all-linear",
            "use_rslora": True,
            "rank_pattern": {"1.mlp.gate_proj": 3, "gate_proj": 9},
            "alpha_pattern": {"gate_proj": 2.5},
        },
        {"target_modules": ["k_proj"], "layers_to_transform": [0, 2], "layers_pattern": "layers"},
        {
            "target_modules": "all-linear",
            "exclude_modules": ["q_proj", "model.layers.1.mlp.up_proj"],
        },
        {"target_modules": r".*\.[02]\.(self_attn\.o|mlp\.down)_proj"},
        {"target_modules": ["model.layers.1.self_attn.v_proj", "layers.2.mlp.gate_proj"]},
        {"target_modules": ["up_proj"], "fan_in_fan_out": True},
    ],
    ids=str,
)
def test_modules_ranks_and_updates_are_those_of_peft(
    save: Callable[..., PeftModel], tmp_path: Path, geometry: DecoderConfig, config: dict[str, Any]
) -> None:
    model = save(**config)
    theirs = {
        name.removeprefix("base_model.model."): layer
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }

    file = read_adapter(tmp_path, geometry, max_lora_rank=64)
    matrices = load_adapter(tmp_path, geometry, dtype=torch.float64, max_lora_rank=64).modules

    assert {m.path: (m.rank, m.scale) for m in file.modules} == {
        name: (layer.r["default"], layer.scaling["default"]) for name, layer in theirs.items()
    }
    assert matrices.keys() == theirs.keys()
    for path, lora in matrices.items():
        expected = theirs[path].get_delta_weight("default")
        torch.testing.assert_close((lora.scale * lora.b @ lora.a).float(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_read_as_stored(
    save: Callable[..., PeftModel], tmp_path: Path, geometry: DecoderConfig, dtype: torch.dtype
) -> None:
    save(target_modules=["q_proj"])
    rewrite(tmp_path, lambda t: t.update({n: x.to(dtype) for n, x in t.items()}))

    weights = load_adapter(tmp_path, geometry, dtype=dtype, max_lora_rank=64)

    stored = load_file(tmp_path / WEIGHTS)
    for path, lora in weights.modules.items():
        assert torch.equal(lora.a, stored[f"base_model.model.{path}.lora_A.weight"])
        assert torch.equal(lora.b, stored[f"base_model.model.{path}.lora_B.weight"])
        assert lora.a.dtype == dtype


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "use_dora is set"),
        ({"lora_bias": True}, "lora_bias is set"),
        ({"bias": "all"}, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens.lora_embedding_A"),
        ({"target_modules": ["q_proj", "lm_head"]}, "base_model.model.lm_head.lora_A.weight"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices is set"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_applied_is_refused_by_name(
    save: Callable[..., PeftModel],
    tmp_path: Path,
    geometry: DecoderConfig,
    config: dict[str, Any],
    said: str,
) -> None:
    save(**{"target_modules": ["q_proj"], **config})

    assert said in reasons(tmp_path, geometry)


@pytest.mark.parametrize(
    ("hidden", "named"),
    [
        ({"use_dora": True}, f"{Q0}.lora_magnitude_vector"),
        ({"lora_bias": True}, f"{Q0}.lora_B.bias"),
        ({"modules_to_save": ["lm_head"]}, "base_model.model.lm_head.weight"),
    ],
    ids=str,
)
def test_the_tensors_tell_what_the_config_hides(
    save: Callable[..., PeftModel],
    tmp_path: Path,
    geometry: DecoderConfig,
    hidden: dict[str, Any],
    named: str,
) -> None:
    save(target_modules=["q_proj"], **hidden)
    rewrite(tmp_path, lambda t: None, **dict.fromkeys(hidden))

    assert named in reasons(tmp_path, geometry)


def set_nan(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q0}.lora_B.weight"][3, 1] = float("nan")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{Q0}.lora_B.weight"), "layers.0.self_attn.q_proj: lora_B is missing"),
        (lambda t: t.pop(f"{Q0}.lora_A.weight"), "layers.0.self_attn.q_proj: lora_A is missing"),
        (set_nan, f"{Q0}.lora_B.weight contains NaN"),
        (lambda t: t.clear(), "adapts no module"),
        (lambda t: t.update({f"{Q0}.lora_A.weight": torch.ones(4, 96).double()}), "dtype 'F64'"),
        (lambda t: t.update({f"{Q0}.lora_A.weight": torch.ones(4, 96).long()}), "dtype 'I64'"),
        (lambda t: t.update(extra=torch.ones(1, 1)), "extra: the base model has no such"),
        (
            lambda t: t.update({f"{Q0}.lora_A.default.weight": torch.ones(4, 96)}),
            f"{Q0}.lora_A.default.weight: the base model has no such",
        ),
        (
            lambda t: t.update(
                {
                    "base_model.model.model.layers.3.mlp.up_proj.lora_A.weight": t[
                        f"{Q0}.lora_A.weight"
                    ].clone()
                }
            ),
            "layers.3.mlp.up_proj.lora_A.weight: the base model has no such",
        ),
        (
            lambda t: t.update({f"{Q0}.lora_A.weight": torch.ones(5, 96)}),
            "q_proj: adapter_config.json gives it rank 4; its weights have rank 5",
        ),
        (
            lambda t: t.update({f"{Q0}.lora_A.weight": torch.ones(96, 4)}),
            "q_proj: lora_A and lora_B have shapes [96, 4] and [96, 4]",
        ),
    ],
    ids=[
        "no B",
        "no A",
        "NaN",
        "none",
        "F64",
        "I64",
        "extra",
        "name",
        "layer",
        "rank",
        "transposed",
    ],
)
def test_changed_tensors_are_refused_by_name(
    save: Callable[..., PeftModel],
    tmp_path: Path,
    geometry: DecoderConfig,
    change: Callable[[dict[str, Tensor]], None],
    said: str,
) -> None:
    save(target_modules=["q_proj"])
    rewrite(tmp_path, change)

    assert said in reasons(tmp_path, geometry)


def test_an_adapter_of_another_base_is_refused(
    save: Callable[..., PeftModel], tmp_path: Path
) -> None:
    save(target_modules=["q_proj"])
    other = make_tiny_llama(tmp_path / "other", hidden_size=48, num_hidden_layers=2)

    said = reasons(tmp_path, DecoderConfig.from_folder(other))

    assert "layers.0.self_attn.q_proj and 1 more: lora_A and lora_B have shapes [4, 96]" in said
    assert "asks for 48 columns and 48 rows" in said
    assert "layers.2.self_attn.q_proj.lora_A.weight and 1 more: the base model has no such" in said


def test_a_rank_above_the_servers_is_refused_with_both(
    save: Callable[..., PeftModel], tmp_path: Path, geometry: DecoderConfig
) -> None:
    save(target_modules=["q_proj"], rank_pattern={"1.self_attn.q_proj": 9})

    assert read_adapter(tmp_path, geometry, max_lora_rank=9).report()["rank"] == 9
    assert reasons(tmp_path, geometry, max_lora_rank=8) == (
        "model.layers.1.self_attn.q_proj: rank 9 is above this server's --max-lora-rank 8"
    )


def test_weights_and_config_that_are_missing_are_refused_by_name(
    save: Callable[..., PeftModel], tmp_path: Path, geometry: DecoderConfig
) -> None:
    save(target_modules=["q_proj"])
    (tmp_path / WEIGHTS).unlink()

    assert WEIGHTS in reasons(tmp_path, geometry)

    (tmp_path / CONFIG).unlink()

    assert CONFIG in reasons(tmp_path, geometry)


def digest(folder: Path, geometry: DecoderConfig) -> str:
    return read_adapter(folder, geometry, max_lora_rank=64).digest


def test_the_digest_does_not_see_what_is_not_computed(
    save: Callable[..., PeftModel], tmp_path: Path, geometry: DecoderConfig
) -> None:
    save(target_modules=["q_proj", "v_proj"])
    before = digest(tmp_path, geometry)

    tensors = load_file(tmp_path / WEIGHTS)
    backwards = {name: tensors[name] for name in reversed(tensors)}
    save_by_hand(tmp_path / WEIGHTS, backwards, {"format": "pt", "who": "me"})
    rewrite_config = {"base_model_name_or_path": "elsewhere", "lora_dropout": 0.5, "revision": "x"}
    raw = json.loads((tmp_path / CONFIG).read_text())
    # The same scale, said otherwise.
    said = {"alpha_pattern": {"q_proj": 6, "v_proj": 6}, "lora_alpha": 99}
    (tmp_path / CONFIG).write_text(
        json.dumps(dict(reversed((raw | rewrite_config | said).items())))
    )

    assert digest(tmp_path, geometry) == before


def save_by_hand(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """The library sorts tensors by name; this keeps the order given."""
    header: dict[str, Any] = {}
    data = b""
    for name, tensor in tensors.items():
        content = tensor.numpy().tobytes()
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": offsets}
        data += content
    encoded = json.dumps(header | {"__metadata__": metadata}).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def flip_last_bit(tensors: dict[str, Tensor]) -> None:
    bits = tensors[f"{Q0}.lora_B.weight"].view(torch.int32)
    bits[-1, -1] ^= 1


def move_to_k(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[name.replace("layers.0.self_attn.v_proj", "layers.0.self_attn.k_proj")] = (
            tensors.pop(name)
        )


def round_trip_dtype(tensors: dict[str, Tensor]) -> None:
    for name in tensors:
        tensors[name] = tensors[name].bfloat16()


@pytest.mark.parametrize(
    ("change", "config"),
    [
        (flip_last_bit, {}),
        (move_to_k, {"target_modules": ["k_proj", "q_proj", "v_proj"]}),
        (round_trip_dtype, {}),
        (lambda t: t.popitem() and t.popitem(), {}),
        (lambda t: None, {"lora_alpha": 6.0000001}),
        (lambda t: None, {"use_rslora": True}),
        (lambda t: None, {"alpha_pattern": {"2.self_attn.v_proj": 7}}),
    ],
    ids=["a bit", "a path", "dtype", "a module less", "alpha", "rslora", "pattern"],
)
def test_the_digest_sees_all_that_is_computed(
    save: Callable[..., PeftModel],
    tmp_path: Path,
    geometry: DecoderConfig,
    change: Callable[[dict[str, Tensor]], None],
    config: dict[str, Any],
) -> None:
    save(target_modules=["v_proj", "q_proj"])
    before = digest(tmp_path, geometry)

    rewrite(tmp_path, change, **config)

    assert digest(tmp_path, geometry) != before


def test_the_report_says_what_will_be_applied(
    save: Callable[..., PeftModel], tmp_path: Path, tiny_model: Path, geometry: DecoderConfig
) -> None:
    model = save(target_modules=["q_proj", "down_proj"])
    stored = load_file(tmp_path / WEIGHTS)

    checked = check_adapter(tmp_path, tiny_model, max_lora_rank=64)

    report = checked["report"]
    assert checked["accepted"]
    assert checked["reasons"] == []
    assert checked["digest"] == report["digest"] == digest(tmp_path, geometry)
    assert report["targets"] == ["down_proj", "q_proj"]
    assert len(report["modules"]) == 6
    assert report["dtypes"] == ["F32"]
    assert report["parameters"] == sum(tensor.numel() for tensor in stored.values())
    assert report["size_bytes"] == 4 * report["parameters"]
    assert report["base_model_name_or_path"] == model.peft_config["default"].base_model_name_or_path
    json.dumps(report)


def test_a_refused_upload_is_told_every_reason(
    save: Callable[..., PeftModel], tmp_path: Path, tiny_model: Path
) -> None:
    save(target_modules=["q_proj", "lm_head"])

    checked = check_adapter(tmp_path, tiny_model, max_lora_rank=2)

    assert not checked["accepted"]
    assert checked["digest"] is None
    assert [reason.partition(": ")[0] for reason in checked["reasons"]] == [
        "base_model.model.lm_head.lora_A.weight and 1 more",
        "model.layers.0.self_attn.q_proj and 2 more",
    ]
