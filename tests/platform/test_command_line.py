"""The commands, run as the user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 16,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
}


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if "MANYLORA" not in name}
    return subprocess.run(
        [sys.executable, "-m", "manylora", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=kept | environment,
        timeout=60,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def test_the_schema_is_brought_up_and_told(tmp_path: Path) -> None:
    environment = {"MANYLORA_DATA_DIR": str(tmp_path / "data")}

    before = run("db", "current", "--data-dir", tmp_path)
    upgraded = run("db", "upgrade", **environment)
    current = run("db", "current", **environment)

    assert before.stdout == "empty\n"
    assert upgraded.stdout == current.stdout == "0001_foundation\n"


def test_a_refused_adapter_exits_1_with_reasons_as_json(tmp_path: Path, model: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"rubbish")

    found = run("check-adapter", adapter, "--model", model)

    said = json.loads(found.stdout)
    assert found.returncode == 1
    assert said["accepted"] is False
    assert said["reasons"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["check-adapter", "/nosuch", "--model", "/nosuch"],
        ["check-adapter", "/"],
        ["check-adapter", "/", "--model", "/"],
        ["serve", "--port", "x"],
        ["serve", "--nosuch", "1"],
        ["serve", "--config", "/nosuch.toml"],
        ["serve", "--model", "/no such model"],
    ],
)
def test_a_usage_error_exits_2_in_a_few_words(arguments: list[str], tmp_path: Path) -> None:
    found = run(*arguments, MANYLORA_DATA_DIR=str(tmp_path))

    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr
    assert "Traceback" not in found.stderr


def test_every_setting_is_an_option_but_the_secret_ones(tmp_path: Path) -> None:
    shown = run("serve", "--help", COLUMNS="200").stdout

    for option in ("--port", "--database-url", "--max-num-batched-tokens", "--no-demo"):
        assert option in shown
    assert "--admin-token" not in shown
