"""Debian's Prometheus and its promtool against the served metrics."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testbed.certificates import Authority
from testbed.exporting import Served, serving
from testbed.prometheus_server import Prometheus, scraping
from testbed.requirements import find_program
from testbed.scrapes import full_host
from testbed.snapshots import busy_host
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.model import Microjoules, Provenance
from wattspan_exporters.catalogue import CATALOGUE
from wattspan_exporters.prometheus.exporter import SelfMetrics
from wattspan_exporters.prometheus.renderer import ExpositionFormat, Renderer

pytestmark = pytest.mark.needs_prometheus


@pytest.mark.parametrize(
    "snapshot",
    [full_host(), busy_host(), busy_host(Provenance.EMULATED)],
    ids=["full", "busy", "emulated"],
)
def test_promtool_accepts_the_scrape(snapshot: Any) -> None:
    itself, form = SelfMetrics("1.2.3"), ExpositionFormat.TEXT
    renderer = Renderer((*CATALOGUE, *itself.metrics))
    scrape = renderer.render(snapshot, form, itself.render(form))
    promtool = find_program("promtool")
    assert promtool
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=scrape, capture_output=True, timeout=60
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


# ------------------------------------------------------------------------- a real Prometheus


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
        with scraping(tmp_path, free_port(), jobs) as prometheus:
            yield prometheus, plain, mutual


def test_real_prometheus_has_the_same_figures(
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
    assert told == {("counter", "joules")}  # the text format has no units: OpenMetrics was used

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
