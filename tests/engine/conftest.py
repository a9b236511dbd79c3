"""Tiny models and adapters shared by the engine's tests.

The kernels are imported first of all: they set oneMKL's mode, which counts at its first call.
"""

import shutil
from pathlib import Path

import manylora.kernels  # isort: skip  # noqa: F401 -- sets oneMKL up
import pytest
import torch

from manylora.engine.adapter_format import read_adapter
from manylora.engine.config import EngineConfig
from manylora.engine.models.config import DecoderConfig
from support.clients import DAMAGED, Store, engine_config
from support.tiny_model import ADAPTER_SHAPES, make_adapter, make_tiny_llama


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny products are slower on two threads than on one."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder for each of `ADAPTER_SHAPES`."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(tiny_model, folder / name, seed=seed, **shape)
        for seed, (name, shape) in enumerate(ADAPTER_SHAPES.items(), start=1)
    }


@pytest.fixture(scope="session")
def store(
    tiny_model: Path, tiny_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Store:
    """The tiny adapters by digest, and one whose weights are damaged."""
    folder = tmp_path_factory.mktemp("store")
    geometry = DecoderConfig.from_folder(tiny_model)
    digests = {}
    for name, adapter in tiny_adapters.items():
        digests[name] = read_adapter(adapter, geometry, max_lora_rank=64).digest
        shutil.copytree(adapter, folder / digests[name])
    damaged = shutil.copytree(tiny_adapters["mlp"], folder / DAMAGED)
    weights = damaged / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    return Store(folder, digests)


@pytest.fixture(scope="session")
def config(tiny_model: Path, store: Store) -> EngineConfig:
    return engine_config(tiny_model, store.folder)
