"""Debian's Prometheus and its promtool on what is served."""

from __future__ import annotations

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.certificates import Authority
from support.exporting import Served, serving
from support.requirements import find_program
from support.scrapes import full_host
from support.snapshots import busy_host
from support.waiting import eventually
from wattspan.clock import SystemClock
from wattspan.model import Microjoules, Provenance
from wattspan_exporters.prometheus.itself import Itself
from wattspan_exporters.prometheus.render import Format, Renderer

pytestmark = pytest.mark.needs_prometheus


@pytest.mark.parametrize(
    "snapshot",
    [full_host(), busy_host(), busy_host(Provenance.EMULATED)],
    ids=["full", "busy", "emulated"],
)
def test_promtool_finds_nothing_to_complain_of(snapshot: Any) -> None:
    scrape = Renderer().render(snapshot, Format.TEXT, Itself("1.2.3").render(Format.TEXT))
    promtool = find_program("promtool")
    assert promtool
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=scrape, capture_output=True, timeout=60
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


# ------------------------------------------------------------------------- a real Prometheus


class Prometheus:
    """A Prometheus server under test, asked through its API."""

    def __init__(self, port: int) -> None:
        self._api = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **parameters: str) -> Any:
        url = f"{self._api}/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, promql: str) -> dict[str, str]:
        """The values an instant query gives, by the job they come from, as Prometheus writes."""
        result = self.get("query", query=promql)["result"]
        return {one["metric"].get("job", ""): one["value"][1] for one in result}

    def targets_up(self, count: int) -> bool:
        with suppress(OSError):
            active = self.get("targets")["activeTargets"]
            return [target["health"] for target in active] == ["up"] * count
        return False


@pytest.fixture
def scraped(
    tmp_path: Path, free_port: Callable[[], int]
) -> Iterator[tuple[Prometheus, Served, Served]]:
    """A Prometheus that scrapes two exporters: one plain, one by mutual TLS."""
    authority = Authority(tmp_path)
    server, client = authority.issue("server"), authority.issue("client")
    tls = {
        "tls_certificate": str(server.certificate),
        "tls_key": str(server.key),
        "tls_client_ca": str(authority.certificate),
    }
    with serving(SystemClock()) as plain, serving(SystemClock(), **tls) as mutual:
        jobs = [
            {
                "job_name": "plain",
                "static_configs": [{"targets": [f"127.0.0.1:{plain.port}"]}],
            },
            {
                "job_name": "mutual",
                "scheme": "https",
                "tls_config": {
                    "ca_file": str(authority.certificate),
                    "cert_file": str(client.certificate),
                    "key_file": str(client.key),
                },
                "static_configs": [{"targets": [f"127.0.0.1:{mutual.port}"]}],
            },
        ]
        config = {"global": {"scrape_interval": "500ms"}, "scrape_configs": jobs}
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        port = free_port()
        program = find_program("prometheus")
        assert program
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    program,
                    f"--config.file={tmp_path / 'prometheus.yml'}",
                    f"--storage.tsdb.path={tmp_path / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=log,
            )
        try:
            prometheus = Prometheus(port)
            eventually(lambda: prometheus.targets_up(2), "both targets are up", within=90)
            yield prometheus, plain, mutual
        finally:
            process.terminate()
            process.wait(30)


@pytest.mark.slow
def test_a_real_prometheus_has_the_same_figures(
    scraped: tuple[Prometheus, Served, Served],
) -> None:
    prometheus, plain, mutual = scraped
    both = {"plain", "mutual"}

    def answers(promql: str, value: str) -> bool:
        return prometheus.query(promql) == dict.fromkeys(both, value)

    assert answers('hw_energy_joules_total{hw_id="intel-rapl:0"}', "12421.123456")
    assert answers(
        'wattspan_gap_seconds_total{reason="suspend",hw_id="intel-rapl:0"}', "3600.000000001"
    )
    assert answers('wattspan_process_energy_joules_total{group="build"}', "280.123456")
    assert answers(r'count by (job) ({command="quo\"te\\back\nline"})', "1")
    difference = (
        'round(sum by (job) (hw_energy_joules_total{hw_parent=""}) '
        "- sum by (job) (hw_host_energy_joules_total), 0.000001)"
    )
    assert answers(difference, "0")
    accounts = (
        'sum by (job) (hw_energy_joules_total{hw_type="cpu", hw_parent=""}) '
        '- sum by (job) (wattspan_process_energy_joules_total{hw_type="cpu"}) '
        '- sum by (job) (wattspan_idle_energy_joules_total{hw_type="cpu"}) '
        '- sum by (job) (wattspan_unattributed_energy_joules_total{hw_type="cpu"})'
    )
    assert answers(f"round({accounts}, 0.000001)", "0")
    families = prometheus.get("targets/metadata", metric="hw_energy_joules")
    told = {(family["type"], family["unit"]) for family in families}
    assert told == {("counter", "joules")}  # the text format has no units: it was OpenMetrics

    package = full_host().domains[0]
    grown = replace(package, energy=Microjoules(package.energy + 1))
    for served in (plain, mutual):
        served.snapshot = replace(full_host(), domains=(grown, *full_host().domains[1:]))
    eventually(
        lambda: answers('hw_energy_joules_total{hw_id="intel-rapl:0"}', "12421.123457"),
        "the next microjoule is scraped",
        within=30,
    )
    assert answers('resets(hw_energy_joules_total{hw_id="intel-rapl:0"}[5m])', "0"), (
        "growth is no reset"
    )
