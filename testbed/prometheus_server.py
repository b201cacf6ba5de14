"""A real Prometheus that scrapes the given targets, queried through its API; a Pushgateway."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from testbed.requirements import find_program
from testbed.waiting import eventually


class Prometheus:
    """A Prometheus server for tests, queried by its API."""

    def __init__(self, port: int) -> None:
        self._api = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **parameters: str) -> Any:
        url = f"{self._api}/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as refusal:
            raise ConnectionError(f"{parameters}: {refusal.read().decode()}") from None

    def query(self, promql: str, by: str = "job") -> dict[str, str]:
        """The values an instant query gives, by a label, as Prometheus writes them."""
        result = self.get("query", query=promql)["result"]
        return {one["metric"].get(by, ""): one["value"][1] for one in result}

    def targets_up(self, count: int) -> bool:
        with suppress(OSError, HTTPException, ValueError):  # Prometheus is starting
            active = self.get("targets")["activeTargets"]
            if [target["health"] for target in active] == ["up"] * count:
                # the health of targets is available shortly before the samples
                return sum(int(up) for up in self.query("up", "instance").values()) == count
        return False


@contextmanager
def scraping(
    folder: Path,
    port: int,
    jobs: Sequence[dict[str, Any]],
    interval: str = "500ms",
    features: Sequence[str] = (),
    rules: Sequence[Path] = (),
) -> Iterator[Prometheus]:
    """A Prometheus whose targets are all up, with ``features`` that are off by default.

    It evaluates the ``rules`` at the scrape interval, unless their groups set another.
    """
    config = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": jobs,
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    program = find_program("prometheus")
    assert program
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                *(f"--enable-feature={feature}" for feature in features),
            ],
            stdout=log,
            stderr=log,
        )
    try:
        prometheus = Prometheus(port)
        eventually(lambda: prometheus.targets_up(len(jobs)), "all targets are up", within=90)
        yield prometheus
    finally:
        process.terminate()
        process.wait(30)


class Pushgateway:
    """A Pushgateway for tests, scraped as Prometheus does."""

    def __init__(self, port: int) -> None:
        self.host = f"127.0.0.1:{port}"

    def get(self, name: str, **labels: str) -> Any:
        """The value of the sample with these labels, but for ``instance``; None without one."""
        with urllib.request.urlopen(f"http://{self.host}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        wanted = {**labels, "instance": ""}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and sample.labels == wanted:
                    return sample.value
        return None

    def ready(self) -> bool:
        with suppress(OSError):
            self.get("up")
            return True
        return False


@contextmanager
def pushgateway(folder: Path, port: int) -> Iterator[Pushgateway]:
    """A Pushgateway without figures."""
    program = find_program("prometheus-pushgateway")
    assert program
    with (folder / "pushgateway.log").open("wb") as log:
        command = [program, f"--web.listen-address=127.0.0.1:{port}"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        gateway = Pushgateway(port)
        eventually(gateway.ready, "the Pushgateway answers")
        yield gateway
    finally:
        process.terminate()
        process.wait(30)
