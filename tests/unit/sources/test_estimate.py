"""The estimate: a declared curve over real CPU time, labelled as an estimate."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed.covers import cover_of, decided
from testbed.powercap_host import PowercapHost, counters

from wattspan.config import FlagValue, load
from wattspan.model import HwType, Milliwatts, Provenance, Trouble
from wattspan.plugins import discover
from wattspan.ports import ConfigError, CounterSource, SourceContext, SourceError
from wattspan.sources.estimate import EstimateSettings, LoadModel, busy_ticks, plugin
from wattspan.testing import FakeDirectory, ManualClock

MODEL = LoadModel(Milliwatts(30_000), Milliwatts(100_000))


class Host:
    """Two CPUs in two sockets with a scripted /proc/stat."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = ManualClock()
        for cpu in (0, 1):
            topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
            topology.mkdir(parents=True)
            (topology / "physical_package_id").write_text(f"{cpu}\n")
        (root / "proc").mkdir()
        self.ticks = [0, 0]
        self.work(0, 0)

    def work(self, *ticks: int) -> None:
        self.ticks = [have + more for have, more in zip(self.ticks, ticks, strict=True)]
        rows = [f"cpu{cpu} {busy} 0 0 5 5 0 0 9 0 0" for cpu, busy in enumerate(self.ticks)]
        total = f"cpu  {sum(self.ticks)} 0 0 10 10 0 0 18 0 0"
        (self.root / "proc/stat").write_text("\n".join([total, *rows, "intr 1 2 3", ""]))

    def open(self, emulated: bool = False, **settings: float) -> CounterSource:
        source = plugin.open(
            EstimateSettings(
                enabled=True,
                procfs=str(self.root / "proc"),
                sysfs=str(self.root / "sys"),
                **{"tdp_watts": 100.0, **settings},  # type: ignore[arg-type]
            ),
            SourceContext(self.clock, FakeDirectory(), emulated=emulated),
        )
        assert source is not None
        return source


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_estimate_is_off_by_default(host: Host) -> None:
    assert plugin.open(EstimateSettings(), SourceContext(host.clock, FakeDirectory())) is None


def test_every_figure_is_labelled_estimated(host: Host) -> None:
    domains = host.open(dram_gigabytes=64).read().domains
    assert {domain.provenance for domain in domains} == {Provenance.ESTIMATED}
    assert [(d.id, d.hw_type, d.resource) for d in domains] == [
        ("estimate:package-0", HwType.CPU, "cpu:0"),
        ("estimate:package-1", HwType.CPU, "cpu:1"),
        ("estimate:dram", HwType.MEMORY, "cpu"),
    ]


@pytest.mark.parametrize(("nodes", "packages"), [("cluster1", 1), ("socket0/cluster1", 2)])
def test_clusters_of_a_device_tree_are_one_socket(host: Host, nodes: str, packages: int) -> None:
    """An S922X with Linux 5.10: https://github.com/util-linux/util-linux/issues/1207."""
    (host.root / "sys/firmware/devicetree/base/cpus/cpu-map" / nodes).mkdir(parents=True)
    assert len(host.open().read().domains) == packages


def test_idle_socket_draws_idle_power_and_a_busy_one_all_of_it(host: Host) -> None:
    source = host.open()
    source.read()
    host.work(200, 0)
    host.clock.advance(2)
    assert counters(source.read()) == {
        "estimate:package-0": 200_000_000,
        "estimate:package-1": 60_000_000,
    }


def test_memory_draws_by_its_size(host: Host) -> None:
    source = host.open(dram_gigabytes=64)
    source.read()
    host.clock.advance(10)
    assert counters(source.read())["estimate:dram"] == 64 * 375_000 * 10


def test_estimate_yields_readings_once_a_second_at_most(host: Host) -> None:
    source = host.open()
    assert source.read().readings
    host.clock.advance(0.9)
    assert not source.read().readings
    host.clock.advance(0.1)
    assert source.read().readings


def test_missing_tdp_is_an_error(host: Host) -> None:
    with pytest.raises(ConfigError, match="tdp_watts is not set"):
        host.open(tdp_watts=0)


@pytest.mark.parametrize("key", ["idle_fraction", "curvature"])
def test_invalid_curve_is_rejected(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        load(
            None,
            environ={},
            flags={f"sources.estimate.{key}": FlagValue("test", 3.0)},
            schema=discover().schema,
            default=Path(os.devnull),
        )


def test_missing_cpu_times_are_an_error(host: Host) -> None:
    shutil.rmtree(host.root / "proc")
    with pytest.raises(SourceError, match=r"sources\.estimate\.procfs"):
        host.open()


def test_estimate_with_a_readable_counter_is_outside_the_cover(tmp_path: Path) -> None:
    host = Host(tmp_path / "host")
    shutil.rmtree(host.root / "sys")
    with PowercapHost(host.root / "sys") as powercap:
        estimated, measured = host.open().read(), powercap.read_after()
        domains = decided((*estimated.domains, *measured.domains))
        assert not any(domains[domain.id].in_cover for domain in estimated.domains)
        why = domains["estimate:package-0"].why
        assert why.endswith("; rapl:package-0 measures the same socket 0, and is emulated")


def test_estimate_with_a_denied_counter_is_in_the_cover(tmp_path: Path) -> None:
    host = Host(tmp_path / "host")
    shutil.rmtree(host.root / "sys")
    with PowercapHost(host.root / "sys", "psys-only") as powercap:
        powercap.engine.deny("intel-rapl:0")
        batches = host.open().read(), powercap.read_after()
        readable = [one.domain_id for batch in batches for one in batch.readings]
        domains = (domain for batch in batches for domain in batch.domains)
        assert cover_of(domains, readable) == {one.id for one in batches[0].domains}


def test_invalid_stat_file_is_a_failure_without_lost_energy(host: Host) -> None:
    source = host.open()
    source.read()
    (host.root / "proc/stat").write_text("cpu0 many\n")
    host.clock.advance(1)
    (failure,) = source.read().failures
    assert failure.trouble is Trouble.RETRY
    host.work(200, 200)
    host.clock.advance(1)
    assert counters(source.read())["estimate:package-0"] == 200_000_000


def test_busy_time_excludes_waiting_stolen_and_duplicate_guest_time() -> None:
    assert busy_ticks(b"cpu 1 1 1 1 1 1 1 1 1 1\ncpu3 1 20 300 7 7 4000 50000 7 1 20\nintr 1") == {
        3: 54321
    }


def test_emulated_host_is_labelled_emulated(host: Host) -> None:
    assert host.open(emulated=True).read().domains[0].provenance is Provenance.EMULATED


@given(
    st.integers(0, 10**10),
    st.integers(0, 10**10),
    st.integers(1, 10**10),
    st.floats(1, 2, allow_nan=False),
)
def test_power_rises_with_load_and_stays_between_idle_and_busy(
    less: int, more: int, capacity: int, curvature: float
) -> None:
    model = LoadModel(Milliwatts(30_000), Milliwatts(100_000), curvature)
    low, high = sorted((less, more))
    assert 30_000 <= model.power(low, capacity) <= model.power(high, capacity) <= 100_000


def test_curve_is_the_published_one() -> None:
    assert MODEL.power(5, 10) == round(30_000 + 70_000 * (1 - 0.5**1.4))
    assert LoadModel(Milliwatts(0), Milliwatts(1000), 1.0).power(1, 4) == 250
