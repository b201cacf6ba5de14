"""Guarantees of every CPU source to the poller, for any change of its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testbed.fixtures import entered_in
from testbed.powercap_host import PowercapHost

from wattspan.attribution.metering import energy_between
from wattspan.emulation.powercap_tree import CounterScope, EmulatedMeter, PowerMeters
from wattspan.model import SECOND, Interval, Provenance, Reading
from wattspan.ports import CounterSource
from wattspan.sources.estimate import EstimateSource, LoadModel
from wattspan.sources.hwmon.source import HwmonSource
from wattspan.sources.rapl.pyrapl import PyRaplSource
from wattspan.util.cpu_topology import CpuTopology


def powercap(host: PowercapHost) -> CounterSource:
    return host.source


def pyrapl(host: PowercapHost) -> CounterSource:
    return PyRaplSource(host.tree.root, host.clock, emulated=True)


def estimate(host: PowercapHost) -> CounterSource:
    return EstimateSource(
        Path("/proc/stat"),
        host.clock,
        LoadModel(30_000, 100_000),  # type: ignore[arg-type]
        cpus=CpuTopology(host.tree.root),
        provenance=Provenance.EMULATED,
    )


def hwmon(host: PowercapHost) -> CounterSource:
    scope = CounterScope("package")
    meters = PowerMeters(host.tree.root, [EmulatedMeter("Grace Power Socket 0", scope)])
    meters.step(0, lambda _: 0)
    meters.step(SECOND, lambda _: 100 * 10**12)
    meters.close()
    return HwmonSource(host.tree.root, host.clock, {}, emulated=True)


host = entered_in(PowercapHost)


@pytest.fixture(params=[powercap, pyrapl, hwmon, estimate])
def source(request: pytest.FixtureRequest, host: PowercapHost) -> Iterator[CounterSource]:
    source = request.param(host)
    yield source
    source.close()


def test_source_is_a_counter_source(source: CounterSource) -> None:
    assert isinstance(source, CounterSource)
    assert source.name in {"rapl", "hwmon", "estimate"}


def test_domain_list_is_reused_while_unchanged(source: CounterSource, host: PowercapHost) -> None:
    first = source.read().domains
    host.pass_time(7)
    assert first
    assert source.read().domains is first


def test_readings_are_of_known_domains_in_order(source: CounterSource, host: PowercapHost) -> None:
    before: dict[str, Reading] = {}
    for _ in range(5):
        host.pass_time(1.5)
        batch = source.read()
        domains = {domain.id: domain for domain in batch.domains}
        for reading in batch.readings:
            if reading.domain_id in before:
                step = energy_between(
                    domains[reading.domain_id], before[reading.domain_id], reading
                )
                assert isinstance(step, Interval)
            before[reading.domain_id] = reading
    assert before


def test_labels_follow_the_host(source: CounterSource) -> None:
    batch = source.read()
    assert {domain.source for domain in batch.domains} == {source.name}
    assert {domain.provenance for domain in batch.domains} == {Provenance.EMULATED}


def test_file_errors_raise_no_exception(source: CounterSource, host: PowercapHost) -> None:
    engine = host.engine
    breakages: list[Callable[[], object]] = [
        lambda: engine.garble("intel-rapl:0"),
        lambda: engine.mend("intel-rapl:0"),
        lambda: engine.deny("intel-rapl:0:0"),
        lambda: engine.fail("intel-rapl:1"),
        lambda: engine.mend("intel-rapl:1"),
        lambda: engine.reset("intel-rapl:1"),
        lambda: engine.vanish("intel-rapl:0"),
        lambda: engine.reappear("intel-rapl:0", "intel-rapl:f"),
        lambda: (host.tree.path("intel-rapl:1") / "name").unlink(),
        lambda: engine.vanish("intel-rapl:1"),
    ]
    for breakage in breakages:
        breakage()
        for seconds in (0.1, 6):
            host.pass_time(seconds)
            batch = source.read()
            known = {domain.id for domain in batch.domains}
            assert {reading.domain_id for reading in batch.readings} <= known
            assert all(str(failure).endswith(".") for failure in batch.failures)


def test_source_can_be_closed_and_read_again(source: CounterSource) -> None:
    assert source.read().readings
    source.close()
    assert source.read().readings
