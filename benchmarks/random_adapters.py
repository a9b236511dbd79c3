"""Adapters of random numbers, as many as a benchmark asks for."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from manylora.engine.api import AdapterRef
from manylora.engine.core import EngineCore
from manylora.engine.models.config import DecoderConfig


def load_random_adapters(core: EngineCore, count: int, rank: int) -> list[AdapterRef]:
    """Bring adapters over every linear layer into host memory, each with other numbers."""
    with TemporaryDirectory() as folder:
        return [
            core.adapters.add_folder(
                _write_adapter(Path(folder, str(seed)), core.runner.model.config, rank, seed)
            ).ref
            for seed in range(count)
        ]


def _write_adapter(folder: Path, config: DecoderConfig, rank: int, seed: int) -> Path:
    """A PEFT folder whose updates are small enough to leave the model sane."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    shapes = config.linear_shapes()
    for path, (features_out, features_in) in shapes.items():
        for letter, shape in (("A", (rank, features_in)), ("B", (features_out, rank))):
            name = f"base_model.model.{path}.lora_{letter}.weight"
            tensors[name] = 0.02 * torch.randn(shape, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = sorted({path.rsplit(".", 1)[-1] for path in shapes})
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
