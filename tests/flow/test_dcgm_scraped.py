"""A real Prometheus returns data for dashboards made for DCGM's exporter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from testbed.exporting import Served, serving
from testbed.prometheus_server import scraping
from testbed.scrapes import full_host
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.model import Microjoules, Snapshot

pytestmark = [pytest.mark.exhaustive, pytest.mark.needs_prometheus]

QUERIES = {
    # the query of dashboard 12239 with its variables substituted
    'DCGM_FI_DEV_POWER_USAGE{instance=~".*", gpu=~"0"}': "611",
    'sum(DCGM_FI_DEV_POWER_USAGE{instance=~".*", gpu=~"0|1"})': "611",
    'count by (gpu) (DCGM_FI_DEV_POWER_USAGE{UUID="GPU-0", modelName=~"NVIDIA H100.*"})': "1",
    'count by (Hostname) (DCGM_FI_DEV_POWER_USAGE{Hostname="node7"})': "1",
    'count by (hostname) (DCGM_FI_DEV_POWER_USAGE{hostname="node7"})': "1",
}


def test_power_and_energy_are_there(tmp_path: Path, free_port: Callable[[], int]) -> None:
    base = full_host()
    gpus = tuple(replace(gpu, index=n) for n, gpu in enumerate(base.gpus))
    host = replace(base, gpus=gpus)
    with serving(SystemClock(), aliases=["dcgm"]) as served:
        served.snapshot = host
        served.before = lambda: spend(served, host)
        target = {"targets": [f"127.0.0.1:{served.port}"]}
        jobs = [{"job_name": "gpus", "static_configs": [target]}]
        with scraping(tmp_path, free_port(), jobs) as prometheus:
            for query, answer in QUERIES.items():
                # a target is up shortly before its samples are available
                told = eventually(lambda q=query: list(prometheus.query(q).values()), query)
                assert told == [answer], query
            eventually(
                lambda: prometheus.query(
                    'increase(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="0"}[1m]) / 1000 > 1'
                ),
                "energy in millijoules increases",
            )


def spend(served: Served, host: Snapshot) -> None:
    """Every look at the host finds that its GPUs have spent another 5 J."""
    spent = served.snapshot.account("GPU-0").energy + 5_000_000
    domains = tuple(
        replace(account, energy=Microjoules(spent)) if account.domain.id == "GPU-0" else account
        for account in host.domains
    )
    served.snapshot = replace(host, domains=domains)
