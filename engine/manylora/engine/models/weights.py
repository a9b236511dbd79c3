"""Weights of a Hugging Face folder, from safetensors only."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from manylora.engine.errors import ModelError


def open_weights(folder: Path, dtype: torch.dtype, device: str) -> Callable[[str], Tensor]:
    """A function from tensor name to tensor in `dtype` on a device; the files are read lazily.

    Raises:
        ModelError: there is no safetensors file, or (from the function) no such tensor.
    """
    files = _files_by_tensor(folder)

    def read(name: str) -> Tensor:
        if name not in files:
            raise ModelError(f"{folder} has no tensor {name}")
        with safe_open(files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor.to(device, dtype)

    return read


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in names.items()}
    path = folder / "model.safetensors"
    if not path.exists():
        raise ModelError(f"{folder} has no model.safetensors")
    with safe_open(path, framework="pt") as file:
        return dict.fromkeys(file.keys(), path)
