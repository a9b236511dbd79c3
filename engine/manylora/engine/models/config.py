"""The geometry of a decoder, read from a Hugging Face `config.json`. Loads no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manylora.engine.errors import ModelError
from manylora.engine.models.architecture import Architecture
from manylora.engine.models.families import FAMILIES, Family, head_size
from manylora.engine.models.fields import Fields

SUPPORTED = tuple(FAMILIES)
_DTYPES = {name: name for name in ("bfloat16", "float16", "float32", "float64")}
_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}


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
    max_positions: int  # that it was made for
    reachable_positions: int  # with its rope scaling, when asked for
    norm_eps: float
    tied_embeddings: bool
    dtype: str  # the dtype of the files: bfloat16, float16, float32 or float64
    architecture: Architecture

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
        try:
            return cls._read(raw)
        except OverflowError as error:
            raise ModelError(f"config.json: a number is too large: {error}") from error

    @classmethod
    def _read(cls, raw: dict[str, Any]) -> "DecoderConfig":
        family = _family(raw.get("model_type"))
        f = Fields(raw, {**_DEFAULTS, **family.defaults})
        f.refuse_if_set("quantization_config")
        _check_heads(f)
        architecture = family.read(f)
        return cls(
            model_type=f.value("model_type"),
            vocab_size=f.size("vocab_size"),
            hidden_size=f.size("hidden_size"),
            intermediate_size=f.size("intermediate_size"),
            num_layers=f.size("num_hidden_layers"),
            num_heads=f.size("num_attention_heads"),
            num_kv_heads=_num_kv_heads(f),
            head_size=head_size(f),
            max_positions=f.size("max_position_embeddings"),
            reachable_positions=_reachable_positions(f, architecture),
            norm_eps=f.number("rms_norm_eps"),
            tied_embeddings=f.flag("tie_word_embeddings"),
            dtype=_dtype(f),
            architecture=architecture,
        )

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Every linear layer's (output, input) features by its Hugging Face module path.

        The router and the experts of a mixture are not among them.
        """
        return {
            module_path(layer, module): shape
            for layer in range(self.num_layers)
            for parts in self.fused_shapes(layer).values()
            for module, shape in parts.items()
        }

    def fused_shapes(self, layer: int) -> dict[str, dict[str, tuple[int, int]]]:
        """The layers that are computed as one, each with its modules' (output, input) features.

        The modules stand in the order of the fused layer's outputs.
        """
        q, kv = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        hidden, inner = self.hidden_size, self.intermediate_size
        outputs = {"qkv": (q, kv, kv), "o": (hidden,), "gate_up": (inner, inner), "down": (hidden,)}
        inputs = {"qkv": hidden, "o": q, "gate_up": hidden, "down": inner}
        shapes = {}
        for name, modules in self.architecture.modules.items():
            if self.architecture.layers[layer].sparse and name in ("gate_up", "down"):
                continue
            sizes = outputs[name] if len(modules) == len(outputs[name]) else (sum(outputs[name]),)
            shapes[name] = {
                module: (size, inputs[name]) for module, size in zip(modules, sizes, strict=True)
            }
        return shapes


def module_path(layer: int, module: str) -> str:
    """A module of a layer by its path in the model."""
    return f"model.layers.{layer}.{module}"


def _family(model_type: object) -> Family:
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(
            f"model_type {model_type!r} is not supported; supported: {', '.join(SUPPORTED)}"
        )
    return FAMILIES[model_type]


def _reachable_positions(f: Fields, architecture: Architecture) -> int:
    positions = f.size("max_position_embeddings")
    ropes = [layer.rope for layer in architecture.layers if layer.rope is not None]
    return max([positions, *(rope.max_positions(positions) for rope in ropes)])


def _num_kv_heads(f: Fields) -> int:
    return f.optional_size("num_key_value_heads") or f.size("num_attention_heads")


def _check_heads(f: Fields) -> None:
    if head_size(f) < 1:
        raise f.error("hidden_size", "is less than num_attention_heads: heads of size 0")
    if head_size(f) % 2:
        raise ModelError("config.json: an odd head size cannot be rotated by pairs")
    if f.size("num_attention_heads") % _num_kv_heads(f):
        raise f.error("num_key_value_heads", "does not divide num_attention_heads")


def _dtype(f: Fields) -> str:
    name = "dtype" if f.has("dtype") else "torch_dtype"
    return f.choice(name, _DTYPES) if f.has(name) else "float32"
