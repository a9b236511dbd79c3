"""Weights of a Hugging Face folder, from safetensors only; every one is used, or refused."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from manylora.engine.errors import ModelError

_INDEX = "model.safetensors.index.json"
_COMPUTED = ".rotary_emb.inv_freq"  # old writers keep this table, which follows from the config


class Weights:
    """Reads tensors by name and remembers which were never asked for."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        """
        Raises:
            ModelError: there is no readable safetensors file.
        """
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._files = _files_by_tensor(folder)
        self._unused = {name for name in self._files if not name.endswith(_COMPUTED)}

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor, in the dtype and on the device of the model.

        Raises:
            ModelError: it is missing, damaged, or of another shape.
        """
        if name not in self._files:
            raise ModelError(f"{self._folder} has no tensor {name}")
        try:
            with safe_open(self._files[name], framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{self._files[name]} cannot be read: {error}") from error
        if tensor.shape != shape:
            raise ModelError(
                f"{name} has shape {list(tensor.shape)}; config.json asks for {list(shape)}"
            )
        self.ignore(name)
        return tensor.to(self._device, self._dtype)

    def ignore(self, name: str) -> None:
        """Count a tensor as used."""
        self._unused.discard(name)

    def check_all_used(self) -> None:
        """
        Raises:
            ModelError: a tensor was never asked for, so the model would not be computed exactly.
        """
        if self._unused:
            first = ", ".join(sorted(self._unused)[:3])
            raise ModelError(
                f"{self._folder} has {len(self._unused)} tensors that this decoder does not use, "
                f"such as {first}"
            )


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    index, single = folder / _INDEX, folder / "model.safetensors"
    try:
        if index.exists():
            names = json.loads(index.read_text())["weight_map"]
            return {name: folder / file for name, file in names.items()}
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ModelError(f"the weights in {folder} cannot be read: {error}") from error
