"""What `deploy/` asks of Prometheus is run by a real one that scrapes a real server."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from support.prometheus import DEPLOY, Prometheus, is_installed, scraping
from support.served import free_port, served
from support.tiny_model import make_tiny_llama
from support.vllm_metrics import VLLM, WITHOUT_MODEL

HERE = Path(__file__).parent
ADMIN_TOKEN = "operator-token-of-the-test"
MODEL = "tiny"
DASHBOARD = json.loads((DEPLOY / "grafana" / "manylora.json").read_text())
RULES = DEPLOY / "prometheus" / "alerts.yml"
ALERTS = {
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
}
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SHOWN = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
EMPTY_IN_HEALTH = {"What would have spared the latest preemption"}
COMPARISON = re.compile(r"(==|>|<) (?=\d)")

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(not is_installed(), reason="prometheus and promtool are not installed"),
]


def ask(base: str, path: str, body: object, key: str = ADMIN_TOKEN) -> Any:
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(base + path, json=body, headers=headers, timeout=60)
    assert answer.is_success, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that has scraped a server with a tiny model before, during and after some traffic."""
    folder = tmp_path_factory.mktemp("prometheus")
    port, metrics_port = free_port(), free_port()
    environment = {
        "MANYLORA_MODEL": str(make_tiny_llama(folder / MODEL)),
        "MANYLORA_SERVED_MODEL_NAME": MODEL,
        "MANYLORA_PORT": str(port),
        "MANYLORA_METRICS_PORT": str(metrics_port),
        "MANYLORA_DATA_DIR": str(folder / "data"),
        "MANYLORA_CACHE": str(folder / "cache"),
        "MANYLORA_ADMIN_TOKEN": ADMIN_TOKEN,
        "MANYLORA_NUM_KV_BLOCKS": "64",
        "MANYLORA_THREADS": "1",
    }
    with (
        served(["manylora", "serve"], environment, port=port, log=folder / "log") as base,
        scraping(f"127.0.0.1:{metrics_port}", folder) as prometheus,
    ):
        ask(base, "/api/v1/tenants", {"slug": "acme"})
        key = ask(base, "/api/v1/tenants/acme/keys", {"name": "test"})["key"]
        body = {"model": MODEL, "prompt": "hello " * 20, "max_tokens": 8, "ignore_eos": True}
        for _ in range(4):
            prometheus.wait_for_scrapes(1)
            ask(base, "/v1/completions", body, key)
        prometheus.wait_for_scrapes(2)
        yield prometheus


def as_grafana_asks(expression: str) -> str:
    """With the variables filled in."""
    filled = expression.replace("$__rate_interval", "1m").replace("$model_name", MODEL)
    assert "$" not in filled, filled
    return filled


@pytest.mark.parametrize(("title", "expression"), SHOWN)
def test_each_expression_of_the_dashboard_has_a_result(
    prometheus: Prometheus, title: str, expression: str
) -> None:
    found = prometheus.query(as_grafana_asks(expression))

    assert bool(found) != (title in EMPTY_IN_HEALTH)


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_is_about_something_and_silent_in_health(
    prometheus: Prometheus, alert: str
) -> None:
    """Without its thresholds, it has a result; with them it has none."""
    compared, thresholds = COMPARISON.subn(r"\1 bool ", ALERTS[alert])

    assert thresholds > 0
    assert prometheus.query(compared) != []
    assert prometheus.query(ALERTS[alert]) == []


def test_prometheus_evaluates_all_rules(prometheus: Prometheus) -> None:
    [group] = prometheus.get("rules")["groups"]

    assert {rule["name"]: rule["health"] for rule in group["rules"]} == dict.fromkeys(ALERTS, "ok")


@pytest.mark.parametrize(("name", "kind"), VLLM.items())
def test_vllms_metrics_are_found_as_its_dashboards_ask(
    prometheus: Prometheus, name: str, kind: str
) -> None:
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}
    chosen = "" if name in WITHOUT_MODEL else f'{{model_name="{MODEL}",engine="0"}}'

    for suffix in suffixes.get(kind, ("",)):
        assert prometheus.query(name + suffix + chosen) != []


@pytest.mark.parametrize(
    "expression",
    [
        "histogram_quantile(0.99, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[1m])))",
        "rate(vllm:e2e_request_latency_seconds_sum[1m]) > 0",
        "rate(vllm:inter_token_latency_seconds_sum[1m]) > 0",
        "rate(vllm:request_prefill_time_seconds_sum[1m]) > 0",
        "rate(vllm:request_decode_time_seconds_sum[1m]) > 0",
        "rate(vllm:generation_tokens_total[1m]) > 0",
        "rate(vllm:prompt_tokens_total[1m]) > 0",
        "rate(vllm:iteration_tokens_total_count[1m]) > 0",
        'increase(vllm:request_success_total{finished_reason="length"}[1m]) > 0',
        'manylora_tenant_tokens_total{tenant="acme",kind="completion"} == 32',
        "vllm:request_generation_tokens_sum == 32",
    ],
)
def test_the_traffic_is_seen(prometheus: Prometheus, expression: str) -> None:
    assert prometheus.query(expression) != []


@pytest.mark.parametrize(
    "command",
    [
        ("check", "config", DEPLOY / "prometheus" / "prometheus.yml"),
        ("check", "rules", "--lint-fatal", RULES),
        ("test", "rules", HERE / "alerts_test.yml"),
    ],
    ids=["config", "rules", "alerts"],
)
def test_promtool_accepts(command: tuple[str | Path, ...]) -> None:
    result = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stdout + result.stderr


def test_each_alert_is_made_to_fire() -> None:
    tests = yaml.safe_load((HERE / "alerts_test.yml").read_text())["tests"]

    fired = {name for name in ALERTS for test in tests if f'alertname="{name}"' in str(test)}
    fired |= {one["alertname"] for test in tests for one in test.get("alert_rule_test", ())}
    assert fired == set(ALERTS)


def test_the_dashboard_is_laid_out_and_asks_the_chosen_source() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]

    assert len(ids) == len(set(ids))
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    asked = [panel["datasource"]["uid"] for panel in PANELS]
    asked += [target["datasource"]["uid"] for panel in PANELS for target in panel["targets"]]
    assert set(asked) == {"${DS_PROMETHEUS}"}
