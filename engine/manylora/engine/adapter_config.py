"""`adapter_config.json`: what it says about scale and rank, or why it is refused."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manylora.engine.errors import AdapterError

MAX_CONFIG_BYTES = 1 << 20

# Fields that choose or describe, without changing what is computed from the weights.
_NEUTRAL = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "eva_config",  # how A was initialised
        "exclude_modules",
        "fan_in_fan_out",  # PEFT itself drops it for the linear layers of these models
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "revision",
        "runtime_config",
        "task_type",
        "ensure_weight_tying",
    }
)
_USED = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "bias",
        "target_modules",
    }
)
# Initialisations that leave the base as it is. Others (PiSSA, OLoRA, CorDA, LoftQ) subtract
# from it, so their weights mean something only over that changed base.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
_LITERAL = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
MAX_PATTERN_KEYS = 4096
MAX_TARGETS = 1024
MAX_ALPHA = 1e6  # far above what anybody trains with; a product beyond it overflows

Patterns = tuple[tuple[re.Pattern[str], float], ...]


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Ranks and scales by module path."""

    default_rank: int
    default_alpha: float
    rslora: bool
    rank_patterns: Patterns
    alpha_patterns: Patterns
    target_modules: str | frozenset[str] | None  # a regular expression, names, or not said
    ignored: tuple[str, ...]
    base_model: str | None

    @classmethod
    def read(cls, path: Path) -> "AdapterConfig":
        """Read and check the file.

        Raises:
            AdapterError: it is missing, malformed, or switches on what is not applied.
        """
        raw = _read_json(path)
        reasons = [*_refusals(raw), *_malformed(raw)]
        if reasons:
            raise AdapterError(reasons)
        base_model = raw.get("base_model_name_or_path")
        targets = raw.get("target_modules")
        return cls(
            default_rank=raw["r"],
            default_alpha=raw["lora_alpha"],
            rslora=raw.get("use_rslora") or False,
            rank_patterns=_compile(raw.get("rank_pattern") or {}),
            alpha_patterns=_compile(raw.get("alpha_pattern") or {}),
            target_modules=targets
            if targets is None or isinstance(targets, str)
            else frozenset(targets),
            ignored=tuple(sorted(raw.keys() - _USED)),
            base_model=base_model if isinstance(base_model, str) else None,
        )

    def targets(self, path: str) -> bool:
        """Whether `target_modules` names a module, by PEFT's rule; not said names all."""
        match self.target_modules:
            case None:
                return True
            case str() as expression:
                all_linear = expression.lower() == "all-linear"
                return all_linear or re.fullmatch(expression, path) is not None
            case names:
                parts = path.split(".")
                return any(".".join(parts[i:]) in names for i in range(len(parts)))

    def rank(self, path: str) -> int:
        return int(_matching(self.rank_patterns, path, self.default_rank))

    def scale(self, path: str) -> float:
        """alpha / r, or alpha / sqrt(r) for rsLoRA (Kalajdzievski, arXiv 2312.03732)."""
        alpha = _matching(self.alpha_patterns, path, self.default_alpha)
        rank = self.rank(path)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _compile(pattern: Mapping[str, float]) -> Patterns:
    """PEFT's rule (`get_pattern_key`): a key fits a path's end behind a dot, or all of it.

    To PEFT a key is a regular expression, so a dot in it fits any character here too.
    """
    return tuple((re.compile(rf"(.*\.)?({key})"), value) for key, value in pattern.items())


def _matching(patterns: Patterns, path: str, default: float) -> float:
    """The value of the first pattern that fits."""
    return next((value for key, value in patterns if key.fullmatch(path)), default)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise AdapterError([f"{path.name} is missing"]) from error
    if len(content) > MAX_CONFIG_BYTES:
        raise AdapterError([f"{path.name} is larger than 1 MiB"])
    try:
        raw = json.loads(content)
        json.dumps(raw, ensure_ascii=False).encode()  # half a surrogate pair cannot be shown
    except (ValueError, RecursionError) as error:
        raise AdapterError([f"{path.name} is not JSON"]) from error
    if not isinstance(raw, dict):
        raise AdapterError([f"{path.name} is not a JSON object"])
    return raw


def _refusals(raw: dict[str, Any]) -> list[str]:
    """Fields that are switched on and not applied; an unknown one counts when it is not empty."""
    reasons = []
    if raw.get("peft_type", "LORA") != "LORA":
        reasons.append(f"peft_type {raw['peft_type']!r} is not supported; only LORA is")
    if raw.get("bias", "none") != "none":
        reasons.append(f"bias {raw['bias']!r} is not supported; only 'none' is")
    for name, value in raw.items():
        if name == "init_lora_weights":
            if not any(value is init or value == init for init in _PLAIN_INITS):
                reasons.append(f"init_lora_weights {value!r} changes the base model's weights")
        elif name not in _USED | _NEUTRAL and value not in (None, False, "", [], {}, 0):
            if name in ("qalora_group_size", "lora_ga_config"):
                continue  # parameters of variants whose own switch is looked at
            reasons.append(f"{name} is set, and is not supported")
    return reasons


def _malformed(raw: dict[str, Any]) -> list[str]:
    reasons = []
    for name, valid in (("r", _is_rank), ("lora_alpha", _is_number)):
        if name not in raw:
            reasons.append(f"{name} is missing from adapter_config.json")
        elif not valid(raw[name]):
            reasons.append(f"{name} {raw[name]!r} is not a positive number of a sensible size")
    reasons += _malformed_targets(raw.get("target_modules"))
    if not isinstance(raw.get("use_rslora") or False, bool):
        reasons.append("use_rslora is not true or false")
    for name, valid in (("rank_pattern", _is_rank), ("alpha_pattern", _is_number)):
        pattern = raw.get(name) or {}
        if not isinstance(pattern, dict):
            reasons.append(f"{name} is not an object")
            continue
        if len(pattern) > MAX_PATTERN_KEYS:
            reasons.append(f"{name} has {len(pattern)} keys, more than {MAX_PATTERN_KEYS}")
            continue
        for key, value in pattern.items():
            if not _LITERAL.fullmatch(key):
                reasons.append(f"{name}: key {key!r} is a regular expression; only names are taken")
            if not valid(value):
                reasons.append(f"{name}: {key!r} is not a positive number")
    return reasons


def _malformed_targets(targets: object) -> list[str]:
    match targets:
        case None:
            return []
        case str():
            try:
                re.compile(targets)
            except (re.error, RecursionError, OverflowError):
                return ["target_modules is not a regular expression"]
            return []
        case list() if not targets:
            return ["target_modules is empty"]
        case list() if len(targets) > MAX_TARGETS:
            return [f"target_modules has {len(targets)} entries, more than {MAX_TARGETS}"]
        case list() if all(isinstance(target, str) for target in targets):
            return []
        case _:
            return ["target_modules is neither a list of names nor a regular expression"]


def _is_rank(value: object) -> bool:
    return type(value) is int and value > 0


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= MAX_ALPHA
