"""A run that goes on has no answer that it would not give: not by another adapter or model."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manylora.engine.config import EngineConfig
from manylora.generate.run import Summary, generate_file
from manylora.platform.settings import SettingsError
from support.tiny_model import make_adapter

SOURCE, OUTPUT = Path("in.jsonl"), Path("out.jsonl")


@pytest.fixture(scope="session")
def other(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tiny_model, tmp_path_factory.mktemp("adapters") / "other", seed=2)


def write(*lines: Mapping[str, Any]) -> None:
    SOURCE.write_text("".join(json.dumps(line) + "\n" for line in lines))


def generate(config: EngineConfig, **adapters: Path) -> Summary:
    defaults = {"max_tokens": 6, "temperature": 0.0}
    return generate_file(SOURCE, OUTPUT, config, defaults=defaults, adapters=adapters)


def refusal(config: EngineConfig, **adapters: Path) -> str:
    """What a run that goes on says; the output is as it was."""
    before = OUTPUT.read_bytes()
    with pytest.raises(SettingsError) as caught:
        generate(config, **adapters)
    assert OUTPUT.read_bytes() == before
    return str(caught.value)


@pytest.fixture
def half_done(config: EngineConfig, adapter: Path) -> str:
    """Two lines of three are answered, the second by an adapter.

    Returns:
        that adapter's digest.
    """
    write({"prompt": "a"}, {"prompt": "a", "adapter": "pirate"})
    generate(config, pirate=adapter)
    write({"prompt": "a"}, {"prompt": "a", "adapter": "pirate"}, {"prompt": "b"})
    (digest,) = [
        line["adapter_digest"]
        for line in map(json.loads, OUTPUT.read_text().splitlines())
        if "adapter_digest" in line
    ]
    return str(digest)


def test_a_name_that_means_another_adapter_is_refused_with_both(
    config: EngineConfig, half_done: str, other: Path
) -> None:
    said = refusal(config, pirate=other)

    assert f"an answer by adapter {half_done} to line 2 (index 1) of in.jsonl" in said
    assert "that name now means adapter " in said
    assert half_done not in said.partition("that name now means")[2]


def test_a_folder_whose_content_changed_is_another_adapter(
    config: EngineConfig, folder: Path, adapter: Path, other: Path
) -> None:
    shutil.copytree(adapter, "mine")
    write({"prompt": "a", "adapter": "mine"})
    generate(config)
    shutil.rmtree("mine")
    shutil.copytree(other, "mine")

    assert "line 1 (index 0)" in refusal(config)


def test_a_name_that_means_nothing_any_more_is_refused(
    config: EngineConfig, half_done: str
) -> None:
    said = refusal(config)

    assert f"an answer by adapter {half_done} to line 2 (index 1)" in said
    assert "pirate is neither a folder nor a name of --lora-modules" in said


def test_an_adapter_that_cannot_be_read_any_more_is_refused(
    config: EngineConfig, half_done: str, folder: Path
) -> None:
    (folder / "empty").mkdir()

    assert "adapter_config.json is missing" in refusal(config, pirate=folder / "empty")


def test_the_same_adapter_elsewhere_is_the_same(
    config: EngineConfig, half_done: str, adapter: Path, folder: Path
) -> None:
    shutil.copytree(adapter, "moved")

    assert generate(config, pirate=folder / "moved") == Summary(3, 0, 2)


def test_an_error_was_no_adapters_and_stays_one(config: EngineConfig, adapter: Path) -> None:
    write({"prompt": "a", "adapter": "pirate"}, {"prompt": "a", "max_tokens": 0})
    generate(config)

    assert generate(config, pirate=adapter) == Summary(0, 2, 2)


def test_a_line_that_names_another_adapter_is_another_line(
    config: EngineConfig, half_done: str, adapter: Path, other: Path
) -> None:
    write({"prompt": "a"}, {"prompt": "a", "adapter": "other"})

    assert "another line 2 (index 1)" in refusal(config, pirate=adapter, other=other)


@pytest.mark.parametrize(
    "change", [{"max_model_len": 20}, {"num_kv_blocks": 1}, {"dtype": "float64"}], ids=str
)
def test_another_context_or_dtype_is_refused(
    config: EngineConfig, half_done: str, adapter: Path, change: dict[str, Any]
) -> None:
    assert "max_model_len" in refusal(replace(config, **change), pirate=adapter)


def test_a_context_that_is_said_and_the_same_goes_on(
    config: EngineConfig, half_done: str, adapter: Path
) -> None:
    assert generate(replace(config, max_model_len=512), pirate=adapter) == Summary(3, 0, 2)
