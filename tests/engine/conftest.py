"""Tiny models and adapters shared by the engine's tests."""

from pathlib import Path

import pytest
import torch

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
