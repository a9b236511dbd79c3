"""Host memory's adapters: loaded off the engine thread, least recently used out."""

import shutil
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from manylora.engine.adapters import AdapterCache, AdapterWeights, load_adapter
from manylora.engine.api import AdapterInfo
from manylora.engine.errors import AdapterError, AdapterNotFoundError
from manylora.engine.models.config import DecoderConfig


@pytest.fixture
def geometry(tiny_model: Path) -> DecoderConfig:
    return DecoderConfig.from_folder(tiny_model)


@pytest.fixture
def stored(
    geometry: DecoderConfig, tiny_adapters: dict[str, Path], tmp_path: Path
) -> dict[str, str]:
    """The digests of the tiny adapters, put into a store."""
    digests = {}
    for name, folder in tiny_adapters.items():
        digests[name] = load_adapter(folder, geometry, dtype=torch.float32, max_lora_rank=64).digest
        shutil.copytree(folder, tmp_path / digests[name])
    return digests


@pytest.fixture
def cache(geometry: DecoderConfig, tmp_path: Path) -> Iterator[AdapterCache]:
    cache = AdapterCache(
        geometry, dtype=torch.float32, max_lora_rank=64, max_adapters=2, store=tmp_path
    )
    yield cache
    cache.close()


def weights(digest: str) -> AdapterWeights:
    return AdapterWeights(digest, {}, AdapterInfo(digest=digest, report={}))


def test_an_adapter_of_the_store_is_loaded_in_the_background(
    cache: AdapterCache, stored: dict[str, str]
) -> None:
    digest = stored["mlp"]

    loading = cache.begin_load(digest)
    assert cache.begin_load(digest) is loading
    assert cache.is_loading(digest)
    wait([loading])
    assert not cache.is_loaded(digest)  # until the engine thread takes it over

    assert cache.finish_loads() == {}
    assert cache.is_loaded(digest)
    assert not cache.has_loads
    assert cache.get(digest) is loading.result() is cache.begin_load(digest).result()
    assert len(cache.get(digest).modules) == 9


@pytest.mark.parametrize(
    "digest",
    ["0" * 64, "", ".", "..", "../..", "/tmp", "x" * 300, "a\0b", "é", "\ud800"],
    ids=ascii,
)
def test_what_is_not_in_the_store_is_not_found(cache: AdapterCache, digest: str) -> None:
    with pytest.raises(AdapterNotFoundError):
        cache.begin_load(digest)

    assert not cache.has_loads


def test_an_engine_without_a_store_finds_nothing(geometry: DecoderConfig) -> None:
    cache = AdapterCache(
        geometry, dtype=torch.float32, max_lora_rank=64, max_adapters=2, store=None
    )

    with pytest.raises(AdapterNotFoundError):
        cache.begin_load("0" * 64)


def test_a_folder_that_holds_another_adapter_is_refused(
    cache: AdapterCache, stored: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / stored["mlp"]).rename(tmp_path / ("0" * 64))

    wait([cache.begin_load("0" * 64)])
    errors = cache.finish_loads()

    assert stored["mlp"] in str(errors["0" * 64])
    assert not cache.is_loaded("0" * 64)
    assert not cache.is_loaded(stored["mlp"])


def test_a_damaged_adapter_is_an_error_of_its_own_and_may_be_tried_again(
    cache: AdapterCache, stored: dict[str, str], tmp_path: Path
) -> None:
    config = tmp_path / stored["mlp"] / "adapter_config.json"
    good = config.read_bytes()
    config.write_bytes(b"{")

    wait([cache.begin_load(stored["mlp"]), cache.begin_load(stored["all"])])
    errors = cache.finish_loads()
    config.write_bytes(good)
    wait([cache.begin_load(stored["mlp"])])

    assert errors.keys() == {stored["mlp"]}
    assert isinstance(errors[stored["mlp"]], AdapterError)
    assert cache.finish_loads() == {}
    assert cache.is_loaded(stored["mlp"])
    assert cache.is_loaded(stored["all"])


def test_the_least_recently_used_makes_room(cache: AdapterCache, stored: dict[str, str]) -> None:
    for digest in "ab":
        cache.put(weights(digest))
    cache.get("a")

    cache.make_ready([stored["mlp"]])

    assert cache.digests == ("a",)
    assert cache.is_loading(stored["mlp"])


def test_no_more_than_fits_is_loaded_and_the_first_needed_comes_first(
    cache: AdapterCache, stored: dict[str, str]
) -> None:
    """However many requests wait, each for another adapter, host memory stays bounded."""
    first, second, third = stored.values()
    cache.put(weights("idle"))

    for _ in range(3):
        cache.make_ready([first, second, third])
        wait([cache.begin_load(first), cache.begin_load(second)])
        cache.finish_loads()

    assert set(cache.digests) == {first, second}
    assert not cache.has_loads


def test_what_is_needed_is_not_evicted(cache: AdapterCache, stored: dict[str, str]) -> None:
    for digest in "ab":
        cache.put(weights(digest))

    cache.make_ready(["a", "b", stored["mlp"]])

    assert cache.digests == ("a", "b")
    assert not cache.has_loads


def test_an_adapter_whose_files_are_gone_is_an_error_of_its_own(
    cache: AdapterCache, stored: dict[str, str], tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / stored["mlp"])

    cache.make_ready([stored["mlp"]])
    wait([cache.begin_load(stored["mlp"])])

    assert "gone" in str(cache.finish_loads()[stored["mlp"]])


def test_numbers_that_do_not_fit_the_models_dtype_are_refused(
    geometry: DecoderConfig, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_adapters["mlp"], tmp_path / "copy"))
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    tensors[name][0, 0] = 1e6
    save_file(tensors, file)

    load_adapter(folder, geometry, dtype=torch.bfloat16, max_lora_rank=64)
    with pytest.raises(AdapterError, match=name):
        load_adapter(folder, geometry, dtype=torch.float16, max_lora_rank=64)


def test_a_dropped_adapter_is_gone_and_may_be_dropped_again(cache: AdapterCache) -> None:
    cache.put(weights("a"))

    cache.drop("a")
    cache.drop("a")

    assert cache.digests == ()


def test_the_weights_outlive_their_file(
    geometry: DecoderConfig, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_adapters["mlp"], tmp_path / "copy"))
    loaded = load_adapter(folder, geometry, dtype=torch.float32, max_lora_rank=64)
    (folder / "adapter_model.safetensors").write_bytes(b"")

    kept = load_adapter(tiny_adapters["mlp"], geometry, dtype=torch.float32, max_lora_rank=64)

    for path, lora in kept.modules.items():
        assert loaded.modules[path].a.equal(lora.a)
        assert loaded.modules[path].b.equal(lora.b)
