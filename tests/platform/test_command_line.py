"""The commands, run as the user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from manylora.platform.command_line import spread_lora_modules
from manylora.platform.db import open_database
from manylora.platform.demo import OPERATOR_EMAIL, first_operator
from manylora.platform.operators import sign_in

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
    assert upgraded.stdout == current.stdout == "0002_request_lives\n"


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


def test_help_says_defaults_and_what_may_be_chosen() -> None:
    said = " ".join(run("serve", "--help", COLUMNS="1000").stdout.split())

    assert "--log-level debug|info|warning|error log level (default: info)" in said
    assert "--enable-prefix-caching / --no-enable-prefix-caching reuse" in said
    assert "common prefixes (default: yes)" in said
    assert "demo adapters (default: no)" in said
    assert "(default: 8000)" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["check-adapter", "/nosuch", "--model", "/nosuch"],
        ["check-adapter", "/", "--model", "/"],
        ["serve", "--port", "x"],
        ["serve", "--nosuch", "1"],
        ["serve", "--config", "/nosuch.toml"],
        ["serve", "--model", "/no such model"],
        ["generate", "/nosuch.jsonl"],
        ["generate", "--output", "out.jsonl"],
        ["generate", "/nosuch.jsonl", "--output", "out.jsonl", "--port", "1"],
    ],
)
def test_a_usage_error_exits_2_in_a_few_words(arguments: list[str], tmp_path: Path) -> None:
    found = run(*arguments, MANYLORA_DATA_DIR=str(tmp_path))

    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--database-url", "nonsense"], "database_url"),
        (["serve", "--database-url", "postgresql://127.0.0.1:1/x"], "127.0.0.1:1/x does not"),
        (["serve", "--data-dir", "/proc/nowhere"], "data_dir"),
        (["serve", "--data-dir", "/dev/null"], "data_dir"),
        (["db", "upgrade", "--database-url", "postgresql://127.0.0.1:1/x"], "127.0.0.1:1/x does"),
        (["db", "upgrade", "--data-dir", "/proc/nowhere"], "data_dir"),
        (["generate", "/nosuch.jsonl", "--output", "/nosuch/out"], "no file /nosuch.jsonl"),
        (["generate", __file__, "--output", "o", "--lora-modules", "a"], "form name=path"),
        (["generate", __file__, "--output", "o", "--lora-modules", "a=/x", "a=/y"], "given twice"),
        (["db", "current", "--data-dir", "/nowhere"], "/nowhere/manylora.db"),
        (["operator", "reset-password", "a@b", "--data-dir", "/nowhere"], "/nowhere/manylora.db"),
    ],
)
def test_a_place_that_cannot_be_used_is_told_in_one_line(
    arguments: list[str], says: str, tmp_path: Path
) -> None:
    found = run(*arguments, MANYLORA_DATA_DIR=str(tmp_path))

    assert found.returncode == 2
    assert found.stdout == ""
    [line] = found.stderr.splitlines()
    assert says in line


def test_what_is_made_is_for_its_owner_alone(tmp_path: Path) -> None:
    data = tmp_path / "data"

    run("db", "upgrade", "--data-dir", data)

    for path in (data, *data.iterdir()):
        assert path.stat().st_mode & 0o077 == 0, path


def test_an_operators_password_is_reset(tmp_path: Path) -> None:
    environment = {"MANYLORA_DATA_DIR": str(tmp_path)}
    run("db", "upgrade", **environment)
    with open_database(f"sqlite:///{tmp_path}/manylora.db") as database:
        first_operator(database)

        nobody = run("operator", "reset-password", "nobody@localhost", **environment)
        found = run("operator", "reset-password", OPERATOR_EMAIL, **environment)

        assert sign_in(database, email=OPERATOR_EMAIL, password=found.stdout.strip())
    assert (nobody.returncode, nobody.stdout) == (2, "")
    assert "no operator" in nobody.stderr


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("x --lora-modules a=1 b=2 c=3 --seed 1", "x -L a=1 -L b=2 -L c=3 --seed 1"),
        ("--lora-modules a=1 --lora-modules b=2 in.jsonl", "-L a=1 -L b=2 in.jsonl"),
        ("--lora-modules a=1 --config=a.toml b=2", "-L a=1 --config=a.toml b=2"),
        ("--seed a=1 b=2", "--seed a=1 b=2"),
        ("generate --lora-modules", "generate -L"),
    ],
)
def test_one_option_may_name_several_adapters_as_in_vllm(given: str, read: str) -> None:
    assert spread_lora_modules(given.split()) == read.replace("-L", "--lora-modules").split()


def test_every_setting_is_an_option_but_the_secret_ones(tmp_path: Path) -> None:
    shown = run("serve", "--help", COLUMNS="200").stdout

    for option in ("--port", "--database-url", "--max-num-batched-tokens", "--no-demo"):
        assert option in shown
    assert "--admin-token" not in shown
