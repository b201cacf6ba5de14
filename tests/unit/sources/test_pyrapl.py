"""pyRAPL behind its guards: its failures affect one place only."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from testbed.powercap_host import PowercapHost, counters, epochs

from wattspan.model import Instant, Microjoules, Trouble
from wattspan.sources.rapl.powercap import PowercapSource, ReaderComparison, cross_check
from wattspan.sources.rapl.pyrapl import (
    PyRaplError,
    PyRaplSensor,
    PyRaplSource,
)
from wattspan.testing import ManualClock


def source_on(host: PowercapHost) -> PyRaplSource:
    return PyRaplSource(host.tree.root, host.clock, emulated=True)


@pytest.mark.parametrize("layout", ["xeon-2s", "client", "tpmi-2s", "epyc-2s", "many-sockets"])
def test_pyrapl_reads_packages_and_memory_like_the_powercap_reader(
    tmp_path: Path, layout: str
) -> None:
    with PowercapHost(tmp_path, layout) as host:
        own = host.read_after(12.345)
        source = source_on(host)
        batch = source.read()
        seen = {identity: value for identity, value in counters(own).items()
                if "psys" not in identity and "core" not in identity}  # fmt: skip
        assert counters(batch) == seen
        ours = {domain.id: domain for domain in own.domains}
        assert all(domain == ours[domain.id] for domain in batch.domains)
        source.close()


def test_unchanged_domains_are_the_same_object(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        source = source_on(host)
        assert source.read().domains is source.read().domains
        source.close()


def test_dram_is_read_for_all_sockets_or_none(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        host.engine.vanish("intel-rapl:1:0")
        source = source_on(host)
        assert counters(source.read()).keys() == {"rapl:package-0", "rapl:package-1"}
        source.close()


def test_vanished_zone_is_a_failure_and_a_later_start_a_new_epoch(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        source = source_on(host)
        assert set(epochs(source.read()).values()) == {0}
        host.engine.vanish("intel-rapl:0:0")
        (failure,) = source.read().failures
        assert failure.trouble is Trouble.RETRY
        assert not source.read().readings  # not tried again at once
        host.engine.reappear("intel-rapl:0:0")
        host.pass_time(6)
        assert set(epochs(source.read()).values()) == {1}
        source.close()


def test_denied_counter_names_the_remedy(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        host.engine.deny("intel-rapl:1")
        (failure,) = source_on(host).read().failures
        assert failure.trouble is Trouble.DENIED
        assert "`systemd-tmpfiles --create wattspan.conf`" in failure.remedy


def test_garbage_is_a_failure(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        host.engine.garble("intel-rapl:0")
        (failure,) = source_on(host).read().failures
        assert "ValueError" in failure.cause


def test_host_without_packages_is_refused(tmp_path: Path) -> None:
    with PowercapHost(tmp_path, "psys-only") as host:
        (failure,) = source_on(host).read().failures
        assert "pyRAPL refuses this host" in failure.cause


def test_import_changes_no_logging_and_survives_strict_warnings() -> None:
    code = """
import logging
from pathlib import Path
from wattspan.sources.rapl.pyrapl import PyRaplError, PyRaplSensor
try:
    PyRaplSensor(Path("/nowhere"), {}, {})
except PyRaplError as error:
    print(error)
assert logging.root.handlers == [] and logging.root.level == logging.WARNING
assert logging.root.manager.disable == 0
"""
    done = subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "pyRAPL refuses this host" in done.stdout
    assert done.stderr == ""


def test_root_logging_handlers_are_kept() -> None:
    before = list(logging.root.handlers)
    with pytest.raises(PyRaplError):
        PyRaplSensor(Path("/nowhere"), {}, {})
    assert logging.root.handlers == before


def test_pyrapl_is_imported_only_if_selected() -> None:
    code = "import sys, wattspan.sources.rapl.powercap; sys.exit('pyRAPL' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_powercap_and_pyrapl_readings_agree(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        host.clock.on_sleep = lambda _: host.engine.step()
        check = cross_check(host.tree.root, host.clock, emulated=True)
        assert all(comparison.agrees for comparison in check.comparisons)
        assert check.failures == ()
        assert {c.domain_id for c in check.comparisons} == {
            "rapl:package-0",
            "rapl:package-0/dram",
            "rapl:package-1",
            "rapl:package-1/dram",
        }
        for comparison in check.comparisons:
            assert comparison.difference == 0
            assert comparison.powercap == pytest.approx(
                6_000_000 if "dram" in comparison.domain_id else 42_000_000, abs=100
            )


def test_wrap_during_the_check_disturbs_neither_reader(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        host.engine.rewind("intel-rapl:0", host.engine.energy("intel-rapl:0") + 1_000_000)
        host.clock.on_sleep = lambda _: host.engine.step()
        check = cross_check(host.tree.root, host.clock, emulated=True)
        assert all(comparison.agrees for comparison in check.comparisons)
        assert check.comparisons[0].powercap == pytest.approx(42_000_000, abs=200)


@pytest.mark.parametrize("jump", [100_000_000_000, -200_000_000])
def test_energy_that_is_implausible_is_compared(tmp_path: Path, jump: int) -> None:
    with PowercapHost(tmp_path) as host:

        def step(_: object) -> None:
            host.engine.step()
            host.engine.rewind("intel-rapl:0", -jump)

        host.clock.on_sleep = step
        check = cross_check(host.tree.root, host.clock, emulated=True)
        assert "rapl:package-0" in {comparison.domain_id for comparison in check.comparisons}


class JumpingClock(ManualClock):
    """The counter of ``host`` jumps after one reader has read it."""

    def __init__(self, host: PowercapHost) -> None:
        super().__init__()
        self.on_sleep = self._pass_time
        self._host, self._stamps = host, 0

    def _pass_time(self, _: object) -> None:
        self._host.pass_time(1)
        self._stamps = 1

    def now(self) -> Instant:
        self._stamps += bool(self._stamps)
        if self._stamps == 3:
            self._host.engine.rewind("intel-rapl:0", -100_000_000_000)
        return super().now()


def test_energy_that_is_implausible_to_one_reader_is_a_disagreement(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        check = cross_check(host.tree.root, JumpingClock(host), emulated=True)
        (different,) = (one for one in check.comparisons if not one.agrees)
        assert different.domain_id == "rapl:package-0"
        assert different.difference == pytest.approx(100_000_000_000, rel=0.001)


def test_domain_of_one_reader_is_not_compared(tmp_path: Path) -> None:
    with PowercapHost(tmp_path, "multi-die") as host:
        host.clock.on_sleep = lambda _: host.engine.step()
        check = cross_check(host.tree.root, host.clock, emulated=True)
        assert check.comparisons == ()
        assert "cannot distinguish the dies" in str(check.failures[0])


@pytest.mark.parametrize(
    ("powercap", "pyrapl", "agrees"),
    [(50_000_000, 50_900_000, True), (50_000_000, 51_100_000, False), (0, 90_000, True)],
)
def test_comparison_allows_for_reading_at_different_instants(
    powercap: int, pyrapl: int, agrees: bool
) -> None:
    comparison = ReaderComparison("x", Microjoules(powercap), Microjoules(pyrapl))
    assert comparison.agrees is agrees


def test_close_leaves_no_file_open(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        before = len(list(Path("/proc/self/fd").iterdir()))
        source = source_on(host)
        source.read()
        host.engine.vanish("intel-rapl:0")
        source.read()
        source.close()
        own = PowercapSource(tmp_path, host.clock)
        own.read()
        own.close()
        assert len(list(Path("/proc/self/fd").iterdir())) <= before
