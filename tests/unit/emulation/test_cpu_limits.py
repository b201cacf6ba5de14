"""Package power limits of the emulated tree: obeyed, rounded, locked, switched off, conserved."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.fixtures import entered_in
from testbed.powercap_host import PowercapHost

from wattspan.emulation.powercap_engine import CLOCK_EXPONENT, MIN_SPEED, CpuJobs, CpuLaw
from wattspan.emulation.powercap_tree import CounterScope
from wattspan.emulation.workloads import Training

ZONE = "intel-rapl:0"
LAW = CpuLaw()  # of the hosts below: 42 W at idle, 9 W for a busy CPU
WATT = 1_000_000


host = entered_in(lambda folder: PowercapHost(folder, "xeon-2s"))


def limit(host: PowercapHost, zone: str = ZONE, number: int = 0) -> Path:
    return host.tree.path(zone) / f"constraint_{number}_power_limit_uw"


def busy(host: PowercapHost, seconds: float, cpus: float = 10, socket: int = 0) -> None:
    """Let ``cpus`` CPUs of a socket be busy, looked at every 10 ms."""
    for _ in range(round(seconds * 100)):
        host.work(socket, 0.01 * cpus)
        host.pass_time(0.01)


def watts(host: PowercapHost, zone: str = ZONE, cpus: float = 10) -> float:
    """The mean power of a zone over a second, once limits have settled."""
    busy(host, 1, cpus)
    before = host.engine.energy(zone)
    busy(host, 1, cpus)
    return (host.engine.energy(zone) - before) / 1e6


def test_default_limits_do_not_slow_a_package(host: PowercapHost) -> None:
    assert watts(host) == pytest.approx(132)
    assert host.engine.speeds == (1.0, 1.0)
    assert host.engine.charged == host.engine.busy


def test_package_keeps_its_long_term_limit_and_becomes_slower(
    host: PowercapHost,
) -> None:
    limit(host).write_text(str(102 * WATT))
    assert watts(host) == pytest.approx(102, abs=0.1)
    slowed, other = host.engine.speeds
    assert slowed == pytest.approx((60 / 90) ** (1 / CLOCK_EXPONENT), rel=0.01)
    assert other == 1.0


def test_lower_of_both_limits_binds(host: PowercapHost) -> None:
    limit(host, number=1).write_text(str(100 * WATT))
    assert watts(host) == pytest.approx(100, abs=0.1)


def test_restored_limit_has_no_effect(host: PowercapHost) -> None:
    original = limit(host).read_text()
    limit(host).write_text(str(90 * WATT))
    busy(host, 1)
    limit(host).write_text(original)
    busy(host, 0.5)
    assert watts(host) == pytest.approx(132)


def test_limit_below_the_idle_power_is_exceeded(host: PowercapHost) -> None:
    limit(host).write_text(str(20 * WATT))
    assert watts(host) == pytest.approx(42 + MIN_SPEED * 90, abs=0.1)


def test_limit_above_the_mean_power_has_no_effect(host: PowercapHost) -> None:
    limit(host).write_text(str(100 * WATT))
    assert watts(host, cpus=5) == pytest.approx(87, abs=0.1)
    assert host.engine.speeds[0] == 1.0


def test_disabled_zone_has_no_effect(host: PowercapHost) -> None:
    limit(host).write_text(str(90 * WATT))
    (host.tree.path(ZONE) / "enabled").write_text("0")
    assert watts(host) == pytest.approx(132)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("100000000", 100 * WATT),
        ("100000001\n", 100 * WATT),
        ("100124999", 100 * WATT),
        ("100125000", 100_125_000),
        ("9999999999999", 0x7FFF * 125_000),
        ("many", 270 * WATT),
        ("-5", 270 * WATT),
        ("0", 270 * WATT),
    ],
)
def test_limit_is_rounded_to_eighths_of_a_watt(host: PowercapHost, written: str, read: int) -> None:
    limit(host).write_text(written)
    host.pass_time(0.01)
    assert limit(host).read_text() == f"{read}\n"


def test_unfinished_write_changes_nothing(host: PowercapHost) -> None:
    limit(host).write_text("")
    host.pass_time(0.01)
    assert (host.engine.speeds[0], limit(host).read_text()) == (1.0, "")


def test_locked_limits_ignore_writes(tmp_path: Path) -> None:
    with PowercapHost(tmp_path, "xeon-1s-locked") as host:
        limit(host).write_text(str(90 * WATT))
        host.pass_time(0.01)
        assert limit(host).read_text() == f"{270 * WATT}\n"
        assert watts(host) == pytest.approx(132)
        host.engine.unlock(ZONE)
        limit(host).write_text(str(90 * WATT))
        assert watts(host) == pytest.approx(90, abs=0.1)


def test_parts_of_a_slowed_package_still_add_up(tmp_path: Path) -> None:
    with PowercapHost(tmp_path, "multi-die") as host:
        for die in (0, 1):
            limit(host, f"intel-rapl:{die}").write_text(str(50 * WATT))
        busy(host, 2)
        engine = host.engine
        whole = LAW.picojoules(
            CounterScope("package", 0), engine.elapsed, engine.busy, (1, 1), engine.charged
        )
        dies = [engine.energy(f"intel-rapl:{die}") for die in (0, 1)]
        assert 0 <= whole // 1_000_000 - sum(dies) <= 1
        assert engine.charged[0] < engine.busy[0]
        assert engine.charged[1] == engine.busy[1]
        busy(host, 1)
        assert engine.speeds[0] < 1.0, "both dies' limits are the socket's"


def test_memory_energy_does_not_depend_on_the_package_limit(host: PowercapHost) -> None:
    limit(host).write_text(str(60 * WATT))
    before = host.engine.energy("intel-rapl:0:0")
    busy(host, 1)
    assert host.engine.energy("intel-rapl:0:0") - before == 6_000_000 + 15_000_000


def test_returning_zone_has_default_limits(host: PowercapHost) -> None:
    limit(host).write_text(str(90 * WATT))
    busy(host, 1)
    host.engine.vanish(ZONE)
    busy(host, 1)
    assert host.engine.speeds[0] == 1.0
    host.engine.reappear(ZONE)
    assert limit(host).read_text() == f"{270 * WATT}\n"
    limit(host).write_text(str(102 * WATT))
    assert watts(host) == pytest.approx(102, abs=0.1)


def test_job_on_a_slowed_socket_takes_longer_steps(host: PowercapHost) -> None:
    jobs = CpuJobs()
    jobs.attach(7, Training(0.1, host=0.5), socket=0)
    for at in range(0, 2_000_000_000, 10_000_000):
        jobs.step(at, (0.5, 1.0))
    first = jobs.work_log(7).since(0)[0]
    assert first.ended - first.began == pytest.approx(1.5 * first.ideal, rel=1e-6)
    with pytest.raises(LookupError, match="process 8 has no work"):
        jobs.change_work(8, lambda work: work)
