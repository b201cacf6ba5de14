"""The device history: energy of devices from the readings of ticks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from testbed.simulated_host import CORE, GPU, PACKAGE

from wattspan.api.energy import TimeGrid
from wattspan.attribution.energy_curve import EnergyCurve
from wattspan.attribution.metering import CounterMeters
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Attribution,
    Consumer,
    Domain,
    GpuStatus,
    HwType,
    Instant,
    Interval,
    Microjoules,
    PartEnergy,
    Principal,
    Reading,
    Share,
    Tick,
)
from wattspan.service.device_history import (
    MAX_TEMPERATURES,
    MAX_WAITING_TICKS,
    RAMP_WINDOWS,
    DeviceHistory,
    WindowEdges,
)
from wattspan.service.poller import TickMeter
from wattspan.sharing.pools import Pools

TICK = 100 * MILLISECOND
START = 1000 * SECOND
USER = Principal(1000)
PACKAGE_POWER, GPU_POWER = 5_000_000, 40_000_000  # microjoules a tick


class Host:
    """A package and a GPU, whose readings are stamped 30 ms before the tick."""

    def __init__(
        self,
        interval: int = TICK,
        resumed: int | None = None,
        edges: WindowEdges | None = None,
    ) -> None:
        """``resumed`` is the time of an earlier run's readings, of a tenth of a joule more."""
        self.devices = DeviceHistory(interval, 10 * SECOND, cell=SECOND, edges=edges)
        meters = CounterMeters(10 * SECOND)
        if resumed is not None:
            for domain in (PACKAGE, GPU):
                last = Reading(domain.id, Instant(resumed, 0), Microjoules(-100_000))
                meters.resume(domain, last)
        self._meter = TickMeter(meters)
        self.now, self.tick = START, TICK
        self._listed: dict[str, Sequence[Domain]] = {"rapl": (PACKAGE, CORE), "nvml": (GPU,)}
        self.counters = {PACKAGE.id: 0, GPU.id: 0}
        self.powers = {PACKAGE.id: PACKAGE_POWER, GPU.id: GPU_POWER}

    def second(self, silent: tuple[str, ...] = ()) -> dict[int, int]:
        """A second of ticks, and the ramps that the snapshot at its end has."""
        self.run(SECOND // self.tick, silent)
        return self.devices.ramps()

    def run(
        self, ticks: int, silent: tuple[str, ...] = (), gpus: tuple[GpuStatus, ...] = ()
    ) -> None:
        for _ in range(ticks):
            self.now += self.tick
            for key, power in self.powers.items():
                self.counters[key] += power * self.tick // TICK
            readings = [
                Reading(key, Instant(self.now - 30 * MILLISECOND, 0), Microjoules(counter))
                for key, counter in self.counters.items()
                if key not in silent
            ]
            readings.append(Reading("unlisted", Instant(self.now, 0), Microjoules(1)))
            listed, self._listed = self._listed, {}
            self.record(Tick(Instant(self.now, 0), listed, readings), gpus)

    def record(self, tick: Tick, gpus: Sequence[GpuStatus] = ()) -> None:
        self.devices.record(self._meter.add(tick), gpus)

    def list(self, source: str, *domains: Domain) -> None:
        self._listed = {source: domains}


def test_devices_are_those_of_the_cover() -> None:
    host = Host()
    host.run(1)
    assert host.devices.domains() == {PACKAGE.id: PACKAGE, GPU.id: GPU}


def test_device_energy_is_known_with_the_tick_of_its_reading() -> None:
    host = Host()
    host.run(11)
    end = host.now - 30 * MILLISECOND
    assert host.devices.known(GPU.id) == end
    spent = host.devices.device(GPU.id, end - SECOND, end)
    assert (spent.energy, spent.covered) == ({HwType.GPU: 10 * GPU_POWER}, SECOND)
    assert spent.uncertainty[HwType.GPU] > 0


@pytest.mark.parametrize("ticks", [7, 64, 66, 200])
def test_waiting_ticks_give_the_same_figures_as_ticks_added_at_once(ticks: int) -> None:
    waiting, at_once = Host(), Host()
    for host in (waiting, at_once):
        for number in range(ticks):
            status = GpuStatus(GPU.id, Instant(host.now, 0), temperature_celsius=number % 90)
            if number == ticks // 2:
                host.list("nvml", replace(GPU, resolution=20 * MILLISECOND))
            host.run(1, silent=(GPU.id,) if number % 5 == 3 else (), gpus=(status,))
            if host is at_once:
                host.devices.domains()
    assert len(at_once.devices._waiting) == 0
    assert 0 < len(waiting.devices._waiting) <= MAX_WAITING_TICKS
    answers = [
        (
            host.devices.domains(),
            host.devices.known(key),
            host.devices.silent(key),
            host.devices.device(key, START + TICK // 3, host.now),
            host.devices.timeline(key, START, host.now),
            host.devices.temperatures(key, START, host.now),
        )
        for host in (waiting, at_once)
        for key in (GPU.id, PACKAGE.id)
    ]
    assert answers[:2] == answers[2:]


def test_cells_have_the_energy_of_whole_seconds() -> None:
    host = Host()
    host.run(50)
    cells = host.devices.cells(PACKAGE.id, START + SECOND, START + 3 * SECOND)
    assert (cells.energy, cells.covered) == ({HwType.CPU: 20 * PACKAGE_POWER}, 2 * SECOND)
    assert cells.uncertainty == {HwType.CPU: 0}


@pytest.mark.parametrize("tick", [TICK, SECOND])
@pytest.mark.parametrize("phase", [0, 80, 330, 530, 780])
def test_uncertainty_of_cells_covers_work_beside_their_edge(tick: int, phase: int) -> None:
    """Twice the power from an edge of a cell to the nearest reading, which tells of no moment."""
    host, edge = Host(), START + 3 * SECOND
    host.tick, host.now = tick, START + phase * MILLISECOND
    truth = 30 * PACKAGE_POWER
    while host.now < edge + 5 * SECOND:
        before = host.now - 30 * MILLISECOND
        after, extra = before + tick, 0
        if before < edge < after:
            extra = PACKAGE_POWER * min(edge - before, after - edge) // TICK
            truth += extra if after - edge < edge - before else 0
        host.powers[PACKAGE.id] = PACKAGE_POWER + extra * TICK // tick
        host.run(1)
    told = TimeGrid(SECOND).device(host.devices, PACKAGE, edge, edge + 3 * SECOND)
    error = abs(told.energy[HwType.CPU] - truth)
    assert error <= told.uncertainty[HwType.CPU] <= truth * min(1, tick / SECOND)


def test_unknown_device_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="no such"):
        Host().devices.device("no such", 0, 1)


def test_device_without_readings_becomes_silent() -> None:
    host = Host()
    host.run(5)
    assert not host.devices.silent(GPU.id)
    host.run(19, silent=(GPU.id,))
    assert not host.devices.silent(GPU.id)
    host.run(3, silent=(GPU.id,))
    assert host.devices.silent(GPU.id)
    assert not host.devices.silent(PACKAGE.id)
    host.run(1)
    assert not host.devices.silent(GPU.id)


def test_device_that_never_had_a_reading_becomes_silent() -> None:
    host = Host()
    host.run(10, silent=(GPU.id,))
    assert host.devices.known(GPU.id) is None
    assert not host.devices.silent(GPU.id)
    host.run(12, silent=(GPU.id,))
    assert host.devices.silent(GPU.id)


def test_silence_lasts_at_least_three_intervals() -> None:
    host = Host(interval=SECOND)
    host.run(1)
    host.run(29, silent=(GPU.id,))
    assert not host.devices.silent(GPU.id)
    host.run(1, silent=(GPU.id,))
    assert host.devices.silent(GPU.id)


def test_vanished_device_is_silent_at_once_and_keeps_its_energy() -> None:
    host = Host()
    host.run(11)
    host.list("nvml")
    host.run(1, silent=(GPU.id,))
    assert host.devices.silent(GPU.id)
    assert host.devices.device(GPU.id, START, host.now).energy == {HwType.GPU: 10 * GPU_POWER}
    host.list("nvml", replace(GPU, resolution=20 * MILLISECOND))
    host.run(1)
    assert not host.devices.silent(GPU.id)
    assert host.devices.domains()[GPU.id].resolution == 20 * MILLISECOND


def test_device_outside_the_cover_adds_nothing_until_it_joins_again() -> None:
    host = Host()
    host.run(11)
    host.list("nvml", replace(GPU, in_cover=False, resource=None))
    host.run(1)  # its last reading that counts
    host.run(5)
    assert host.devices.silent(GPU.id)
    assert host.devices.device(GPU.id, START, host.now).energy == {HwType.GPU: 11 * GPU_POWER}
    assert not host.devices.domains()[GPU.id].in_cover
    host.list("nvml", GPU)
    host.run(3)
    found = host.devices.device(GPU.id, START, host.now)
    # The interval of the tick of its return begins outside of any other's, as in the ledger.
    assert found.energy == {HwType.GPU: 14 * GPU_POWER}
    assert found.covered == 14 * TICK


def test_device_that_joins_counts_after_the_last_reading_of_the_one_that_leaves() -> None:
    host = Host()
    host.run(11)
    late = replace(GPU, id="late")
    host.record(
        Tick(
            Instant(host.now, 0),
            {"nvml": (replace(GPU, in_cover=False, resource=None), late)},
            [Reading("late", Instant(host.now - SECOND, 0), Microjoules(0))],
        )
    )
    for tick in (5, 9, 10, 11):
        at = Instant(host.now - SECOND + tick * TICK, 0)
        host.record(Tick(at, {}, [Reading("late", at, Microjoules(tick))]))
    assert host.devices.device("late", START, host.now + SECOND).energy == {HwType.GPU: 1}


def test_device_without_readings_leaves_the_cover_without_a_trace() -> None:
    host = Host()
    silent = replace(GPU, id="silent")
    host.list("nvml", GPU, silent)
    host.run(3)
    host.list("nvml", GPU, replace(silent, in_cover=False, resource=None))
    host.run(3)
    assert host.devices.device("silent", START, host.now).covered == 0
    assert host.devices.device(GPU.id, START, host.now).covered == 5 * TICK


def test_timeline_has_the_energy_between_readings() -> None:
    host = Host()
    host.run(4)
    host.run(120, silent=(GPU.id,))
    steps = host.devices.timeline(GPU.id, START + 2 * TICK, host.now)
    assert [step.energy for step in steps] == [GPU_POWER, GPU_POWER, None]
    assert steps[0].end == steps[1].start == START + 3 * TICK - 30 * MILLISECOND


def test_late_reads_have_the_energy_between_edges_of_windows() -> None:
    edges = WindowEdges()
    host = Host(edges=edges)
    for tick in range(100):
        host.powers[GPU.id] = GPU_POWER * (tick // 3 % 2)
        host.run(1)
    window = START + 2 * TICK + 7, START + 7 * TICK + 7
    other = START + 33 * TICK, START + 34 * TICK
    before = host.devices.device(GPU.id, *window)
    assert before.energy[HwType.GPU] > 2 * GPU_POWER
    edges.update(5, USER, window)
    host.powers[GPU.id] = 1
    host.run(5000)
    assert host.devices.device(GPU.id, *window).energy == before.energy
    assert host.devices.device(GPU.id, *other).energy == {}  # it may be off by half
    assert host.devices.device(GPU.id, *other).covered == 0
    longer = host.devices.device(GPU.id, other[0], other[0] + 30 * TICK)
    assert abs(longer.energy[HwType.GPU] - 15 * GPU_POWER) <= longer.uncertainty[HwType.GPU]
    edges.update(5, USER, (), ended=True)
    host.run(4000)
    assert host.devices.device(GPU.id, *window).energy == {}


def few_knots(host: Host) -> EnergyCurve:
    """Let the host have readings, and its GPU a curve that is soon thinned as after hours."""
    host.run(1)
    host.devices.domains()
    curve = host.devices._devices[GPU.id].curve = EnergyCurve(GPU, SECOND, limit=64)
    return curve


def test_energy_after_an_own_edge_is_not_less_than_none() -> None:
    edges = WindowEdges()
    host = Host(edges=edges)
    begin = START + 6 * TICK - 30 * MILLISECOND
    edges.update(5, USER, [begin])
    curve = few_knots(host)
    for tick in range(1, 3000):
        host.powers[GPU.id] = GPU_POWER if tick == 5 else 1
        host.run(1)
    host.devices.domains()
    ends = [begin + n * TICK for n in range(1, 300)]
    assert min(curve.between(begin, end, [begin]).energy for end in ends) < 0
    told = [host.devices.device(GPU.id, begin, end, edges.of(5)).energy for end in ends]
    assert min(one[HwType.GPU] for one in told if one) == 0


def test_other_readers_learn_nothing_of_edges_of_windows() -> None:
    """Neither while they are known nor once they are forgotten."""
    edges = WindowEdges()
    hosts = [Host(), Host(edges=edges)]
    window = START + 12 * TICK + 7, START + 17 * TICK + 7
    edges.update(5, USER, window)
    for host in hosts:
        few_knots(host)
    for forgotten in (False, True):
        for host in hosts:
            for tick in range(3000):
                host.powers[GPU.id] = GPU_POWER * (tick // 3 % 2)
                host.run(1)
        periods = [(begin, begin + SECOND << n) for begin in window for n in range(9)]
        answers = [
            [
                host.devices.timeline(GPU.id, START, START + SECOND, common=True),
                *(host.devices.device(GPU.id, *one, ()) for one in periods),
                *(host.devices.cells(GPU.id, *one, ()) for one in periods),
            ]
            for host in hosts
        ]
        assert answers[0] == answers[1]
        cells = hosts[1].devices.cells(GPU.id, *periods[8], ())
        assert cells.energy[HwType.GPU] > 2 * cells.uncertainty[HwType.GPU] > 0  # they are thinned
        known = hosts[1].devices.device(GPU.id, *window, edges.of(5)).energy
        assert known == ({} if forgotten else {HwType.GPU: 2 * GPU_POWER})
        edges.update(5, USER, (), ended=True)


@pytest.mark.parametrize("hostile", [10**5, pytest.param(10**6, marks=pytest.mark.slow)])
def test_edges_are_divided_among_users_and_processes(hostile: int) -> None:
    pools = Pools()
    edges = WindowEdges(pools, limit=10)
    own, sibling, foreign = Consumer(5, 1), Consumer(6, 1), Consumer(7, 1)
    edges.update(sibling.pid, USER, [1, 2])
    edges.update(foreign.pid, Principal(7), [3, 4])
    edges.update(own.pid, USER, range(hostile, 0, -1))
    assert [len(edges.of(one.pid)) for one in (sibling, foreign, own)] == [2, 2, 6]
    assert edges.of(own.pid) == [1, 2, 3, 4, 5, 6]  # the oldest are dropped, whatever their times
    assert edges.of() == sorted([1, 2, 3, 4, *range(1, 7)])
    assert pools.refusals()["window_edges", "displaced"] == hostile - 6
    edges.update(own.pid, USER, (), ended=True)
    edges.update(own.pid, USER, (), ended=True)
    assert edges.of() == [1, 2, 3, 4]
    edges.update(own.pid, USER, [2**64 - 1])
    assert edges.of()[-1] == 2**64 - 1


def test_temperatures_are_kept_within_bounds() -> None:
    host = Host()
    host.run(1)
    assert host.devices.gpu(GPU.id) is None
    newest = GpuStatus(GPU.id, Instant(START, 0))
    for i in range(2 * MAX_TEMPERATURES + 5):
        newest = GpuStatus(GPU.id, Instant(START + i * SECOND, 0), temperature_celsius=40 + i % 9)
        host.run(1, gpus=(newest, GpuStatus("unlisted", newest.at)))
        host.run(1, gpus=(newest,))
    host.run(1, gpus=(replace(newest, temperature_celsius=644_245_923),))  # dcgm-exporter#312
    host.run(1, gpus=(replace(newest, temperature_celsius=None),))
    kept = host.devices.temperatures(GPU.id, 0, 2**62)
    assert len(kept) == MAX_TEMPERATURES + 5
    assert kept[-1] == (newest.at.mono, newest.temperature_celsius)
    assert host.devices.temperatures(GPU.id, START, START + 4 * SECOND) == []
    assert host.devices.gpu(GPU.id) == replace(newest, temperature_celsius=None)


def ramps_per_second(host: Host, **changes: int) -> list[dict[int, int]]:
    """The ramps reported in each of the next ten seconds, at other powers in microjoules a tick."""
    host.powers |= changes
    return [host.second() for _ in range(10)]


def test_constant_power_has_a_ramp_of_zero_once_two_windows_are_measured() -> None:
    host = Host()
    assert host.second() == {}
    assert host.second() == {}
    assert host.second() == {SECOND: 0}
    for _ in range(117):
        host.second()
    assert host.second() == dict.fromkeys(RAMP_WINDOWS, 0)


def test_step_of_power_has_the_ramp_of_each_window() -> None:
    host = Host()
    for _ in range(130):
        host.second()
    reported = ramps_per_second(host, **{GPU.id: 60_000_000})
    # 200 W more between two neighbouring seconds; the reading is 30 ms older than the tick.
    assert reported[-1][SECOND] == pytest.approx(200_000, rel=0.04)
    assert reported[-1][10 * SECOND] == pytest.approx(20_000, rel=0.04)
    assert reported[-1][60 * SECOND] == pytest.approx(200_000 / 360, rel=0.04)


def test_fall_of_power_is_a_ramp_like_its_rise() -> None:
    host = Host()
    ramps_per_second(host)
    reported = ramps_per_second(host, **{GPU.id: 20_000_000})
    assert reported[-1][SECOND] == pytest.approx(200_000, rel=0.04)


def test_ramp_is_reported_for_a_minute() -> None:
    host = Host()
    ramps_per_second(host)
    ramps_per_second(host, **{GPU.id: 60_000_000})
    assert [host.second()[SECOND] > 0 for _ in range(49)] == [True] * 49
    for _ in range(5):
        host.second()
    assert host.second()[SECOND] == 0


def test_ramps_of_a_minute_are_known_without_a_call_in_it() -> None:
    host = Host()
    for power in (40_000_000, 60_000_000, 40_000_000):
        host.powers[GPU.id] = power
        host.run(200)
    largest = host.devices.ramps()
    assert largest[SECOND] == pytest.approx(200_000, rel=0.04)
    assert largest[10 * SECOND] == pytest.approx(20_000, rel=0.15)
    assert host.devices.ramps() == largest
    host.run(600)
    assert host.devices.ramps()[SECOND] == 0


def test_unknown_energy_has_no_ramp() -> None:
    host = Host()
    ramps_per_second(host)
    for _ in range(61):
        host.second(silent=(GPU.id,))
    assert host.second(silent=(GPU.id,)) == {}
    assert host.second() == {}


def test_power_of_a_device_that_vanishes_is_no_ramp() -> None:
    host = Host()
    ramps_per_second(host)
    host.list("nvml")
    host.run(1)
    assert {one[SECOND] for one in ramps_per_second(host)} == {0}


def test_restart_makes_no_ramp_and_no_energy_before_it() -> None:
    """The energy of the time without an agent is known as a sum only, which the ledger counts."""
    host = Host(resumed=START - 600 * SECOND)
    ramps = [host.second() for _ in range(3)]
    fresh = Host()
    assert ramps == [fresh.second() for _ in range(3)]
    spent = host.devices.device(GPU.id, START - 700 * SECOND, host.now)
    assert spent == fresh.devices.device(GPU.id, START - 700 * SECOND, host.now)


def test_counter_that_has_not_moved_since_a_restart_is_not_silent() -> None:
    host = Host(resumed=START - 5 * SECOND)
    standing = replace(GPU, moves_with=HwType.CPU)
    host.list("nvml", standing)
    host.powers[GPU.id], host.counters[GPU.id] = 0, -100_000
    host.run(30)
    assert host.devices.known(GPU.id) == host.now - 30 * MILLISECOND
    assert host.devices.device(GPU.id, START, host.now).covered == 0
    assert not host.devices.silent(GPU.id)


def test_window_of_less_than_two_readings_has_no_ramp() -> None:
    host = Host(interval=SECOND)
    host.tick = SECOND
    for _ in range(30):
        host.second()
    assert host.second() == {10 * SECOND: 0}


def test_ramps_of_a_second_return_two_seconds_after_the_fine_interval() -> None:
    host = Host(interval=SECOND)
    for tick, seconds in ((SECOND, 30), (TICK, 3)):
        host.tick = tick
        for _ in range(seconds):
            ramps = host.second()
    assert ramps == {SECOND: 0, 10 * SECOND: 0}


# ------------------------------------------------------------------------------------ parts

MIG = replace(
    GPU,
    id="gpu:MIG-1",
    name=f"{GPU.name}, 1g.10gb 3",
    in_cover=False,
    parent=GPU.id,
    resource=None,
)


def settle(host: Host, start: float, end: float, energy: int, of: int) -> None:
    """The GPU's energy between two seconds after the start is attributed."""
    begin, stop = (Instant(START + round(at * SECOND), 0) for at in (start, end))
    interval = Interval(GPU.id, begin, stop, Microjoules(of))
    part = PartEnergy(MIG.id, Microjoules(energy), Microjoules(0), Microjoules(0))
    rest = PartEnergy("gpu:MIG-2", Microjoules(0), Microjoules(of - energy), Microjoules(0))
    shares = (Share(Consumer(1, 0), Microjoules(energy)),)
    attribution = Attribution(
        interval, shares, Microjoules(of - energy), Microjoules(0), parts=(part, rest)
    )
    host.devices.settle(Tick(stop, {}, ()), [attribution])


@pytest.mark.parametrize("second", [1, 4])
def test_instance_has_the_energy_that_its_board_was_attributed(second: int) -> None:
    """Time without attribution between two intervals has none."""
    host = Host()
    host.list("nvml", GPU, MIG)
    host.run(1)
    settle(host, 0, 1, 3_000, 10_000)
    settle(host, second, second + 1, 5_000, 10_000)
    end = START + (second + 1) * SECOND
    spent = host.devices.device(MIG.id, START, end)
    assert (spent.energy, spent.covered) == ({HwType.GPU: 8_000}, 2 * SECOND)
    assert host.devices.known(MIG.id) == end


def test_instance_without_attribution_is_known_at_every_tick_after_the_wait() -> None:
    host = Host()
    host.list("nvml", GPU, MIG)
    host.run(1)
    settle(host, 0, 1, 3_000, 10_000)
    host.run(120)
    for _ in range(30):
        host.run(1)
        assert host.devices.known(MIG.id) == host.now
    settle(host, 16, 17, 3_000, 10_000)
    host.run(20)
    assert host.devices.known(MIG.id) == START + 17 * SECOND


def test_instance_is_awaited_for_longer_and_counts_in_no_ramp() -> None:
    host = Host()
    host.list("nvml", GPU, MIG)
    host.run(1)
    settle(host, 0, 1, 3_000, 10_000)
    host.run(80)
    assert not host.devices.silent(MIG.id)
    assert host.devices.ramps()
