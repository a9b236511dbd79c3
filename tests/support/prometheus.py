"""A real Prometheus that scrapes a server of ours with the configuration that `deploy/` has."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support.served import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
PATIENCE_SECONDS = 60.0
SCRAPE_SECONDS = 0.25


def is_installed() -> bool:
    return bool(shutil.which("prometheus") and shutil.which("promtool"))


@dataclass(frozen=True)
class Prometheus:
    """One that runs."""

    base: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of an instant query.

        Raises:
            AssertionError: Prometheus refuses it; with its reason.
        """
        return list(self.get("query", query=expression)["result"])

    def get(self, path: str, **parameters: str) -> Any:
        url = f"{self.base}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def wait_for_scrapes(self, count: int) -> None:
        """Until it has scraped so many times from now on, with success."""
        seen, deadline = self._num_scrapes(), time.monotonic() + PATIENCE_SECONDS
        while self._num_scrapes() < seen + count:
            assert time.monotonic() < deadline, self.get("targets")
            time.sleep(SCRAPE_SECONDS / 2)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._is_ready():
            assert time.monotonic() < deadline, "Prometheus does not start"
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base}/-/ready", timeout=10):
                return True
        except OSError:  # it does not listen, or says 503
            return False

    def _num_scrapes(self) -> int:
        found = self.query('sum_over_time(up{job="manylora"}[10m])')
        return int(found[0]["value"][1]) if found else 0


@contextmanager
def scraping(target: str, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with our rules, scraping `host:port` four times a second."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = dict.fromkeys(config["global"], f"{int(SCRAPE_SECONDS * 1000)}ms")
    config["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in config["rule_files"]]
    [job] = config["scrape_configs"]
    job["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'prometheus'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        prometheus = Prometheus(f"http://127.0.0.1:{port}")
        prometheus.wait_until_ready()
        yield prometheus
    finally:
        process.terminate()
        process.wait(timeout=30)
