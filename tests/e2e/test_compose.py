"""What docker-compose.yml starts, run as plain processes: its command, environment and check."""

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import yaml

from support.served import PROGRAMS, free_port, served
from support.tiny_model import make_tiny_llama

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<rest>[^}]*))?\}")
ADMIN_TOKEN = "operator-token-of-the-test"
SECRETS = {"POSTGRES_PASSWORD": "p@ss/word", "MANYLORA_ADMIN_TOKEN": ADMIN_TOKEN}


class UnsetError(Exception):
    """A variable that compose demands is unset or empty."""


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    """`${NAME:-default}` and `${NAME:?message}` as compose reads them."""

    def value(match: re.Match[str]) -> str:
        found = variables.get(match["name"])
        if found:
            return found
        if match["kind"] == "-":
            return match["rest"]
        raise UnsetError(match["rest"] or match["name"])

    return VARIABLE.sub(value, text)


def environment_of(service: str, variables: Mapping[str, str]) -> dict[str, str]:
    """What the service gets if `variables` stand in `.env`: `environment` goes over `env_file`."""
    told = COMPOSE["services"][service]
    assert told["env_file"] == [{"path": ".env", "required": False}]
    declared = {name: interpolate(text, variables) for name, text in told["environment"].items()}
    return {**variables, **declared}


@dataclass(frozen=True)
class Running:
    """The api service as a process on this machine."""

    base: str
    environment: dict[str, str]

    def call(self, method: str, path: str, body: object = None, *, key: str = ADMIN_TOKEN) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.request(method, self.base + path, json=body, headers=headers, timeout=60)
        assert answer.is_success, answer.text
        return answer


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory, postgres_url: str) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("compose")
    port = free_port()
    environment = environment_of("api", SECRETS) | {
        "MANYLORA_HOST": "127.0.0.1",
        "MANYLORA_PORT": str(port),
        "MANYLORA_METRICS_HOST": "127.0.0.1",
        "MANYLORA_METRICS_PORT": str(free_port()),
        "MANYLORA_DATA_DIR": str(folder / "data"),
        "MANYLORA_CACHE": str(folder / "cache"),
        "MANYLORA_MODEL": str(make_tiny_llama(folder / "model")),
        "MANYLORA_DATABASE_URL": postgres_url,
    }
    command = COMPOSE["services"]["api"]["command"]
    with served(command, environment, port=port, log=folder / "log") as base:
        yield Running(base, environment)


@pytest.mark.postgres
def test_the_services_own_health_check_passes_once_it_is_ready(api: Running) -> None:
    kind, *command = COMPOSE["services"]["api"]["healthcheck"]["test"]

    result = subprocess.run(
        [PROGRAMS / command[0], *command[1:]], env=os.environ | api.environment, check=False
    )

    assert kind == "CMD"
    assert result.returncode == 0


@pytest.mark.postgres
def test_a_tenant_made_with_the_operators_token_gets_an_answer_and_its_usage_row(
    api: Running, postgres_url: str
) -> None:
    tenant = api.call("POST", "/api/v1/tenants", {"slug": "acme", "name": "Acme"}).json()
    made = api.call(
        "POST", f"/api/v1/tenants/{tenant['id']}/keys", {"name": "ci", "scopes": ["infer"]}
    ).json()
    key = made["key"]
    [model] = api.call("GET", "/v1/models", key=key).json()["data"]

    asked = {"model": model["id"], "prompt": [5, 6, 7, 8, 9], "max_tokens": 4, "temperature": 0}
    answer = api.call("POST", "/v1/completions", asked, key=key)

    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == 5
    assert 1 <= usage["completion_tokens"] <= 4
    records = api.call("GET", "/api/v1/usage/records?format=jsonl").text
    [row] = [json.loads(line) for line in records.splitlines()]
    assert row["request_id"] == answer.headers["x-request-id"]
    with psycopg.connect(postgres_url) as connection:
        kept = connection.execute(
            "SELECT request_id, prompt_tokens, completion_tokens FROM usage_records"
        ).fetchall()
    assert kept == [(row["request_id"], 5, usage["completion_tokens"])]
    assert (row["prompt_tokens"], row["completion_tokens"]) == kept[0][1:]


@pytest.mark.parametrize("secret", SECRETS)
def test_it_refuses_to_start_without_a_secret(secret: str) -> None:
    others = {name: value for name, value in SECRETS.items() if name != secret}

    with pytest.raises(UnsetError, match=secret):
        environment_of("api", others)


def test_any_option_may_stand_in_the_env_file_but_those_that_the_file_fixes() -> None:
    chosen = {"MANYLORA_NUM_KV_BLOCKS": "4096", "MANYLORA_MODEL": "mine", "MANYLORA_PORT": "1"}

    environment = environment_of("api", SECRETS | chosen)

    assert environment["MANYLORA_NUM_KV_BLOCKS"] == "4096"
    assert environment["MANYLORA_MODEL"] == "mine"
    assert environment["MANYLORA_PORT"] == "8000"


def test_the_gpu_profile_differs_in_its_device_alone() -> None:
    gpu, cpu = environment_of("api-gpu", SECRETS), environment_of("api", SECRETS)

    assert gpu == cpu | {"MANYLORA_DEVICE": "cuda"}
    assert COMPOSE["services"]["api-gpu"]["command"] == COMPOSE["services"]["api"]["command"]


def test_the_example_environment_names_every_variable_and_holds_no_secret() -> None:
    lines = (ROOT / ".env.example").read_text().splitlines()
    example = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    used = {match["name"] for match in VARIABLE.finditer((ROOT / "docker-compose.yml").read_text())}

    assert used | {"COMPOSE_PROFILES"} == set(example)
    assert [name for name in SECRETS if example[name]] == []


def test_the_image_checks_its_health_as_the_service_does() -> None:
    _, *command = COMPOSE["services"]["api"]["healthcheck"]["test"]

    assert json.dumps(command) in (ROOT / "Dockerfile").read_text()


def test_the_file_meets_the_compose_specification() -> None:
    checker = [PROGRAMS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec"]

    result = subprocess.run(
        [*checker, "docker-compose.yml"], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stdout
