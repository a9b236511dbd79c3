"""Rotary tables are transformers' own numbers, and a length-dependent scaling is fixed and said."""

from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoConfig, AutoModelForCausalLM

from manylora.engine.errors import InvalidRequestError, ModelError
from manylora.engine.models.config import DecoderConfig
from manylora.engine.models.rope import rotary_table
from manylora.engine.models.rope_config import Rope
from support.engine import largest_error, make_llm, prompt_logits
from support.oracle import load_oracle, oracle_logits
from support.tiny_families import make_tiny_family
from support.tiny_model import SIZES

TRAINED = 64  # positions
LONG, SHORT = 300, 60
DYNAMIC = {"rope_type": "dynamic", "factor": 5.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0],
    "original_max_position_embeddings": TRAINED,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}

VARIANTS: list[tuple[str, dict[str, Any], int]] = [
    ("llama", {"rope_type": "default", "rope_theta": 77.0}, LONG),
    ("llama", {"rope_type": "linear", "factor": 3.0}, LONG),
    ("llama", LLAMA3, LONG),
    ("llama", YARN, LONG),
    ("llama", YARN | {"beta_fast": 8, "beta_slow": 2, "truncate": False}, LONG),
    ("llama", YARN | {"original_max_position_embeddings": 4096}, LONG),
    ("llama", YARN | {"original_max_position_embeddings": 4}, LONG),  # a ramp without a length
    ("llama", YARN | {"attention_factor": 0.7}, LONG),
    ("llama", YARN | {"mscale": 0.8, "mscale_all_dim": 0.4}, LONG),
    ("llama", DYNAMIC, LONG),
    ("llama", DYNAMIC, SHORT),
    ("phi3", LONGROPE, LONG),
    ("phi3", LONGROPE, SHORT),
    ("phi3", LONGROPE | {"attention_factor": 1.3}, LONG),
    ("qwen3", LONGROPE | {"factor": 2.5}, LONG),
]


def kind(value: object) -> str:
    """A short name of a test's parameter."""
    return (
        str(value["rope_type"]) if isinstance(value, dict) and "rope_type" in value else str(value)
    )


variants = pytest.mark.parametrize(("model_type", "rope", "length"), VARIANTS, ids=kind)


def values(rope: dict[str, Any]) -> dict[str, Any]:
    """Config values for a model trained to `TRAINED` positions, or stretched to more."""
    stretched = "original_max_position_embeddings" in rope
    own = {"rope_theta": 10_000.0} | rope
    if rope["rope_type"] != "longrope":
        return {"rope_parameters": own, "max_position_embeddings": 512 if stretched else TRAINED}
    return {
        "rope_parameters": own,
        "original_max_position_embeddings": TRAINED,
        "max_position_embeddings": 512,
        "partial_rotary_factor": 1.0,
    }


def only_rope(config: DecoderConfig) -> Rope:
    (rope,) = {layer.rope for layer in config.architecture.layers}
    assert rope is not None
    return rope


@variants
def test_a_table_has_the_bits_of_transformers(
    model_type: str, rope: dict[str, Any], length: int
) -> None:
    head = {"head_dim": 16} if model_type == "qwen3" else {}
    config = AutoConfig.for_model(model_type, **(SIZES | {"pad_token_id": 0} | head | values(rope)))
    with torch.device("cpu"):
        rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb
    cos, sin = rotary(torch.zeros(1), torch.arange(length).unsqueeze(0))

    table = rotary_table(only_rope(DecoderConfig.from_dict(config.to_dict())), length)

    half = table.shape[1] // 2
    assert torch.equal(table[:, :half], cos[0, :, :half])
    assert torch.equal(table[:, half:], sin[0, :, :half])


@pytest.mark.parametrize(
    ("model_type", "rope", "length"),
    [
        ("llama", {"rope_type": "linear", "factor": 3.0}, 160),
        ("llama", LLAMA3, 160),
        ("llama", YARN, 160),
        ("llama", DYNAMIC, 160),
        ("llama", DYNAMIC, SHORT),
        ("phi3", LONGROPE, 160),
        ("phi3", LONGROPE, SHORT),
    ],
    ids=kind,
)
def test_a_model_has_the_oracles_logits_in_chunks(
    tmp_path: Path, model_type: str, rope: dict[str, Any], length: int
) -> None:
    """The oracle sees the longest sequence whole: then it scales as for `max_model_len`."""
    model = make_tiny_family(tmp_path / "model", model_type, **values(rope))
    prompt = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(1)).tolist()

    with make_llm(model, max_model_len=length, max_num_batched_tokens=13) as llm:
        (ours,) = prompt_logits(llm, [prompt[:-1]], [None])

    assert largest_error(ours, oracle_logits(load_oracle(model), prompt)[:-1]) <= 1e-4


@pytest.mark.parametrize(
    ("model_type", "rope", "length", "said"),
    [
        ("llama", DYNAMIC, LONG, {"rope_type": "dynamic", "max_model_len": LONG}),
        ("phi3", LONGROPE, LONG, {"rope_type": "longrope", "factors": "long_factor"}),
        ("phi3", LONGROPE, SHORT, {"rope_type": "longrope", "factors": "short_factor"}),
    ],
    ids=kind,
)
def test_what_a_scaling_was_fixed_to_is_said(
    tmp_path: Path, model_type: str, rope: dict[str, Any], length: int, said: dict[str, Any]
) -> None:
    model = make_tiny_family(tmp_path / "model", model_type, **values(rope))

    with capture_logs() as lines, make_llm(model, max_model_len=length):
        pass

    (line,) = [line for line in lines if line["event"] == "rope_scaling_fixed"]
    assert said.items() <= line.items()


@pytest.mark.parametrize(
    ("rope", "default", "most"),
    [
        ({"rope_type": "default"}, TRAINED, TRAINED),
        (DYNAMIC, TRAINED, 5 * TRAINED),
        ({"rope_type": "linear", "factor": 3.0}, TRAINED, 3 * TRAINED),
        (YARN, 512, 512),
    ],
    ids=kind,
)
def test_a_model_goes_as_far_as_its_scaling_reaches_only_when_asked(
    tmp_path: Path, rope: dict[str, Any], default: int, most: int
) -> None:
    model = make_tiny_family(tmp_path / "model", "llama", **values(rope))

    with make_llm(model) as llm:
        assert llm.core.info.max_model_len == default
    with make_llm(model, max_model_len=most) as llm:
        assert llm.core.info.max_model_len == most
    with pytest.raises(InvalidRequestError, match=f"the model has {most}"):
        make_llm(model, max_model_len=most + 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_type": "proportional", "factor": 2.0}, "rope_type 'proportional'"),
        ({"rope_type": "linear", "factor": "3"}, "factor '3'"),
        ({"rope_type": "linear", "factor": 0}, "factor 0"),
        ({"rope_type": "linear", "factor": float("inf")}, "factor inf"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate 1"),
        (YARN | {"rope_theta": 1}, "rope_theta 1"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor 1.0"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "short_factor"),
        (LONGROPE | {"long_factor": [1.0] * 7 + [None]}, r"long_factor\[7\]"),
        ({"sliding_attention": {"rope_theta": 1e4}}, "rope_parameters"),
    ],
    ids=kind,
)
def test_a_rope_that_is_not_supported_is_named(change: dict[str, Any], said: str) -> None:
    raw = SIZES | {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_parameters": change}

    with pytest.raises(ModelError, match=said):
        DecoderConfig.from_dict(dict(raw))


@pytest.mark.parametrize(
    "change",
    [{"beta_fast": 5e-324}, {"beta_fast": 1e308}],
    ids=str,
)
def test_a_rope_whose_numbers_cannot_be_computed_is_refused(change: dict[str, Any]) -> None:
    raw = SIZES | {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_parameters": YARN | change}

    def read() -> None:
        rope = DecoderConfig.from_dict(dict(raw)).architecture.layers[0].rope
        assert rope is not None
        rotary_table(rope, 64)

    with pytest.raises(ModelError, match=r"config\.json"):
        read()
