"""A tiny model and adapters, and an engine over it, for offline runs."""

from pathlib import Path

import manylora.kernels  # isort: skip  # noqa: F401 -- sets oneMKL up
import pytest
import torch

from manylora.engine.config import EngineConfig
from support.tiny_model import make_adapter, make_tiny_llama


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tiny_model, tmp_path_factory.mktemp("adapters") / "one")


@pytest.fixture
def config(tiny_model: Path) -> EngineConfig:
    return EngineConfig(
        model=str(tiny_model),
        dtype="float32",
        num_kv_blocks=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        threads=1,
    )


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where each test's files are, and where it runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
