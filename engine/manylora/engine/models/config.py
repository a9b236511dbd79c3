"""The geometry of a decoder, read from a Hugging Face `config.json`. Loads no torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manylora.engine.errors import ModelError

SUPPORTED = ("llama",)
_DTYPES = ("bfloat16", "float16", "float32", "float64")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What the forward pass and the adapter check need to know of a model."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    dtype: str  # the dtype of the files: bfloat16, float16, float32 or float64

    @classmethod
    def from_folder(cls, folder: Path) -> "DecoderConfig":
        """Read `config.json`.

        Raises:
            ModelError: it is missing, unreadable, or of a model that is not supported.
        """
        path = folder / "config.json"
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        if not isinstance(raw, dict):
            raise ModelError(f"{path} is not a JSON object")
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "DecoderConfig":
        """Read the values of a `config.json`.

        Raises:
            ModelError: a value is missing, or says what is not supported.
        """
        _refuse_unsupported(raw)
        try:
            _refuse_sizes(raw)
            heads = raw["num_attention_heads"]
            return cls(
                model_type=raw["model_type"],
                vocab_size=raw["vocab_size"],
                hidden_size=raw["hidden_size"],
                intermediate_size=raw["intermediate_size"],
                num_layers=raw["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=raw.get("num_key_value_heads") or heads,
                head_size=raw.get("head_dim") or raw["hidden_size"] // heads,
                max_positions=raw["max_position_embeddings"],
                norm_eps=raw["rms_norm_eps"],
                rope_theta=_rope(raw).get("rope_theta", 10_000.0),
                tied_embeddings=raw.get("tie_word_embeddings", False),
                dtype=_dtype(raw),
            )
        except KeyError as error:
            raise ModelError(f"config.json lacks {error}") from error

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Every linear layer's (output, input) features by its Hugging Face module path."""
        q = self.num_heads * self.head_size
        kv = self.num_kv_heads * self.head_size
        hidden, inner = self.hidden_size, self.intermediate_size
        one_layer = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        return {
            f"model.layers.{layer}.{module}": shape
            for layer in range(self.num_layers)
            for module, shape in one_layer.items()
        }


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of transformers 5, or the flat keys of earlier files."""
    if parameters := raw.get("rope_parameters"):
        return dict(parameters)
    scaling = raw.get("rope_scaling") or {}
    return {"rope_theta": raw.get("rope_theta", 10_000.0), **scaling}


def _refuse_sizes(raw: dict[str, Any]) -> None:
    heads = raw["num_attention_heads"]
    sizes = {name: raw[name] for name in _SIZES}
    sizes |= {name: raw[name] for name in _OPTIONAL_SIZES if raw.get(name) is not None}
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ModelError(f"config.json: {name} {value!r} is not a positive whole number")
    kv_heads = sizes.get("num_key_value_heads", heads)
    if sizes.get("head_dim", raw["hidden_size"] // heads) % 2:
        raise ModelError("config.json: an odd head size cannot be rotated by pairs")
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_key_value_heads {kv_heads} does not divide num_attention_heads"
        )


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED:
        raise ModelError(
            f"model_type {model_type!r} is not supported; supported: {', '.join(SUPPORTED)}"
        )
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(name) or {}, dict):
            raise ModelError(f"config.json: {name} is not an object")
    rope = _rope(raw)
    for name, number in (
        ("rope_theta", rope.get("rope_theta", 10_000.0)),
        ("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
    ):
        if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
            raise ModelError(f"config.json: {name} {number!r} is not a positive number")
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    for name, value, supported in (
        ("rope_type", rope_type, "default"),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 1.0),
        ("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0), 1.0),
        ("hidden_act", raw.get("hidden_act", "silu"), "silu"),
        ("attention_bias", raw.get("attention_bias", False), False),
        ("mlp_bias", raw.get("mlp_bias", False), False),
        ("quantization_config", raw.get("quantization_config"), None),
    ):
        if value != supported:
            raise ModelError(f"config.json: {name} {value!r} is not supported")
    if _dtype(raw) not in _DTYPES:
        raise ModelError(f"config.json: dtype {_dtype(raw)!r} is not one of {', '.join(_DTYPES)}")


def _dtype(raw: dict[str, Any]) -> Any:
    return raw.get("dtype") or raw.get("torch_dtype") or "float32"
