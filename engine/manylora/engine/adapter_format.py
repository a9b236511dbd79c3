"""Reads a PEFT LoRA folder: exact, or refused with every reason. Loads no torch.

The weights decide what is adapted, the config decides how. The file layout is PEFT's
(`adapter_config.json`, `adapter_model.safetensors`); the tensor file is read by hand after the
safetensors format document, so that no header is trusted before it is checked.
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manylora.engine.adapter_config import AdapterConfig
from manylora.engine.errors import AdapterError
from manylora.engine.models.config import DecoderConfig
from manylora.engine.safetensors_file import SafetensorsFile, TensorEntry

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
DIGEST_FORMAT = b"manylora-adapter-1"
_PREFIX = "base_model.model."
_NO_SUCH_LAYER = "the base model has no such linear layer"


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """One adapted linear layer: `y += scale * (B @ (A @ x))`, A [rank, in], B [out, rank]."""

    path: str
    rank: int
    scale: float
    a: TensorEntry
    b: TensorEntry


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A checked adapter: what will be applied, and the open weights."""

    digest: str
    modules: tuple[AdapterModule, ...]
    weights: SafetensorsFile
    ignored_config: tuple[str, ...]  # fields that say nothing about what is computed
    base_model: str | None  # the base it says it was trained for

    def report(self) -> dict[str, Any]:
        """The coverage report: every module with rank and scale, and what was not used."""
        return {
            "digest": self.digest,
            "modules": [{"path": m.path, "rank": m.rank, "scale": m.scale} for m in self.modules],
            "targets": sorted({m.path.rsplit(".", 1)[-1] for m in self.modules}),
            "rank": max(m.rank for m in self.modules),
            "dtypes": sorted({e.dtype for m in self.modules for e in (m.a, m.b)}),
            "parameters": sum(math.prod(e.shape) for m in self.modules for e in (m.a, m.b)),
            "size_bytes": sum(e.num_bytes for m in self.modules for e in (m.a, m.b)),
            "ignored_config": list(self.ignored_config),
            "base_model_name_or_path": self.base_model,
        }


def read_adapter(
    folder: Path, config: DecoderConfig, *, max_lora_rank: int, was_checked: bool = False
) -> AdapterFile:
    """Check a PEFT folder against a model's geometry.

    Args:
        was_checked: it was accepted before, so that its author's regular expression, which may
            take for ever, is not run again.

    Raises:
        AdapterError: it would not be applied exactly; every reason is given.
    """
    settings = AdapterConfig.read(folder / CONFIG_FILE)
    weights = SafetensorsFile.read(folder / WEIGHTS_FILE)
    modules, problems = _match_modules(weights, settings, config.linear_shapes())
    for module in modules:
        if module.rank > max_lora_rank:
            problem = f"rank {module.rank} is above this server's --max-lora-rank {max_lora_rank}"
            problems.append((module.path, problem))
        if not was_checked and not settings.targets(module.path):
            problems.append((module.path, "has weights, but target_modules does not name it"))
    if not modules and not problems:
        problems.append((WEIGHTS_FILE, "adapts no module of the base model"))
    reasons = _grouped(problems)
    reasons = reasons or _not_finite(weights, modules)
    if reasons:
        raise AdapterError(reasons)
    return AdapterFile(
        digest=_digest(weights, modules),
        modules=tuple(modules),
        weights=weights,
        ignored_config=settings.ignored,
        base_model=settings.base_model,
    )


def _not_finite(weights: SafetensorsFile, modules: list[AdapterModule]) -> list[str]:
    return [
        f"{entry.name} contains NaN or infinity"
        for module in modules
        for entry in (module.a, module.b)
        if not weights.is_finite(entry)
    ]


def _grouped(problems: list[tuple[str, str]]) -> list[str]:
    """One reason for each problem, however many modules or tensors have it."""
    by_problem: dict[str, list[str]] = {}
    for name, problem in problems:
        by_problem.setdefault(problem, []).append(name)
    return [
        f"{names[0]}: {problem}"
        if len(names) == 1
        else f"{names[0]} and {len(names) - 1} more: {problem}"
        for problem, names in by_problem.items()
    ]


def _match_modules(
    weights: SafetensorsFile, settings: AdapterConfig, shapes: dict[str, tuple[int, int]]
) -> tuple[list[AdapterModule], list[tuple[str, str]]]:
    """Pair A and B tensors by module.

    Returns:
        The modules, and (name, problem) of each that would not be applied exactly.
    """
    pairs: dict[str, dict[str, TensorEntry]] = {}
    problems = []
    for entry in weights.entries:
        path, part = _split_name(entry.name)
        if part is None or path not in shapes:
            expert = ".experts." in entry.name
            why = "adapters of experts are not supported" if expert else _NO_SUCH_LAYER
            problems.append((entry.name, why))
        else:
            pairs.setdefault(path, {})[part] = entry
    modules = []
    for path in sorted(pairs):
        problem = _pair_problem(pairs[path], shapes[path], settings.rank(path))
        if problem:
            problems.append((path, problem))
            continue
        a, b = pairs[path]["A"], pairs[path]["B"]
        modules.append(AdapterModule(path, a.shape[0], settings.scale(path), a, b))
    return modules, problems


def _split_name(name: str) -> tuple[str, str | None]:
    """A tensor name of PEFT as (module path, "A" or "B"), or (name, None)."""
    for part in ("A", "B"):
        suffix = f".lora_{part}.weight"
        if name.startswith(_PREFIX) and name.endswith(suffix):
            return name[len(_PREFIX) : -len(suffix)], part
    return name, None


def _pair_problem(pair: dict[str, TensorEntry], shape: tuple[int, int], rank: int) -> str | None:
    for part in ("A", "B"):
        if part not in pair:
            return f"lora_{part} is missing"
    a, b = pair["A"].shape, pair["B"].shape
    out_features, in_features = shape
    if (a[1], b[0]) != (in_features, out_features):
        return (
            f"lora_A and lora_B have shapes {list(a)} and {list(b)}; the base model asks for "
            f"{in_features} columns and {out_features} rows"
        )
    if (a[0], b[1]) != (rank, rank):
        return f"adapter_config.json gives it rank {rank}; its weights have rank {a[0]}"
    return None


def _digest(weights: SafetensorsFile, modules: list[AdapterModule]) -> str:
    """SHA-256 of what is computed: each module's path, scale and tensors, length-prefixed."""
    state = hashlib.sha256(DIGEST_FORMAT)
    for piece in _canonical(weights, modules):
        state.update(struct.pack("<Q", len(piece)))
        state.update(piece)
    return state.hexdigest()


def _canonical(
    weights: SafetensorsFile, modules: list[AdapterModule]
) -> Iterator[bytes | memoryview]:
    for module in modules:
        yield module.path.encode()
        yield struct.pack("<d", module.scale)
        for entry in (module.a, module.b):
            yield json.dumps([entry.dtype, *entry.shape]).encode()
            yield weights.data(entry)
