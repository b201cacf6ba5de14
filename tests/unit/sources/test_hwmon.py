"""The ``hwmon`` source: meaning of sensors, files, integration, faults and settings."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed.covers import cover_of, decided
from testbed.process_rights import without_root
from testbed.waiting import eventually

from wattspan.attribution.cover import Cover
from wattspan.attribution.ledger import LedgerSettings
from wattspan.attribution.metering import CounterMeters, energy_between
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Gap,
    HwType,
    Instant,
    Interval,
    Provenance,
    Tick,
    Trouble,
)
from wattspan.ports import Batch, SourceContext, SourceError
from wattspan.sources.driver_thread import DriverThreadSource
from wattspan.sources.hwmon.sensors import (
    POWER_READ_INTERVAL,
    Sensor,
    SensorQuantity,
    resolve_sensors,
)
from wattspan.sources.hwmon.source import (
    HwmonSettings,
    HwmonSource,
    open_hwmon,
    plugin,
    scan_sensors,
)
from wattspan.testing import FakeDirectory, ManualClock


class Tree:
    """A hwmon class below a root; chips by number."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._chips = 0

    def chip(self, name: str, device: str, files: Mapping[str, object]) -> Path:
        """The directory of a new chip with these files; ``device/FILE`` is one of its device."""
        folder = self.root / "devices" / device
        hwmon = folder / "hwmon" / f"hwmon{self._chips}"
        hwmon.mkdir(parents=True)
        (hwmon / "device").symlink_to("../..")
        by_class = self.root / "class/hwmon"
        by_class.mkdir(parents=True, exist_ok=True)
        (by_class / hwmon.name).symlink_to(os.path.relpath(hwmon, by_class))
        self._chips += 1
        for file, content in {"name": name, **files}.items():
            (hwmon / file).write_text(f"{content}\n")
        return hwmon

    def meter(self, number: int, label: str, microwatts: int) -> Path:
        """An ACPI power meter with the files of older kernels."""
        return self.chip(
            "power_meter",
            f"ACPI000D:0{number}",
            {
                "device/power1_oem_info": label,
                "device/power1_average": microwatts,
                "device/power1_average_interval": 50,
            },
        )

    def grace(self) -> Path:
        """The meters of a Grace Hopper module; the directory of the processor's."""
        self.meter(0, "Module Power Socket 0", 700_000_000)
        grace = self.meter(1, "Grace Power Socket 0", 200_000_000)
        self.meter(2, "CPU Power Socket 0", 120_000_000)
        self.meter(3, "SysIO Power Socket 0", 30_000_000)
        return grace


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def source(tree: Tree, clock: ManualClock, roles: Mapping[str, str] | None = None) -> HwmonSource:
    return HwmonSource(tree.root, clock, roles or {})


def summed(batch: Batch) -> set[str]:
    return cover_of(batch.domains)


def write(path: Path, value: object) -> None:
    path.write_text(f"{value}\n")


def test_grace_socket_is_summed_and_its_rails_are_not(tree: Tree, clock: ManualClock) -> None:
    tree.grace()
    batch = source(tree, clock).read()
    assert summed(batch) == {"hwmon:power_meter/grace-power-socket-0"}
    by_name = {domain.name: domain for domain in batch.domains}
    grace = by_name["Grace Power Socket 0"]
    assert (grace.resource, grace.hw_type) == ("cpu:0", HwType.CPU)
    assert grace.provenance is Provenance.DERIVED
    assert grace.parent == by_name["Module Power Socket 0"].id
    assert by_name["CPU Power Socket 0"].parent == grace.id
    assert by_name["Module Power Socket 0"].hw_type is HwType.ENCLOSURE


def test_machine_meter_is_summed_by_configuration_only(tree: Tree, clock: ManualClock) -> None:
    tree.meter(0, "", 80_000_000)
    plain = source(tree, clock).read()
    assert summed(plain) == set()
    assert "sources.hwmon.sensors" in plain.domains[0].why
    configured = source(tree, clock, {"power_meter/power1": "cpu"}).read()
    assert summed(configured) == {"hwmon:power_meter/power1"}
    assert configured.domains[0].resource == "cpu"


def test_ignored_socket_meter_lets_its_rails_be_summed(tree: Tree, clock: ManualClock) -> None:
    tree.grace()
    batch = source(tree, clock, {"power_meter/Grace Power Socket 0": "ignore"}).read()
    assert {one.name for one in decided(batch.domains).values() if one.in_cover} == {
        "CPU Power Socket 0",
        "SysIO Power Socket 0",
    }


@pytest.mark.parametrize(
    ("module", "cpu"), [("VDD_IN", "VDD_CPU_GPU_CV"), ("POM_5V_IN", "POM_5V_CPU")]
)
def test_jetson_rails_are_summed_without_the_module_input(
    tree: Tree, clock: ManualClock, module: str, cpu: str
) -> None:
    rails = (module, cpu, "VDD_SOC")
    files: dict[str, object] = {"in7_label": "sum of shunt voltages", "in7_input": 1}
    for number, rail in enumerate(rails, 1):
        files |= {
            f"in{number}_label": rail,
            f"in{number}_input": 5_000,
            f"curr{number}_input": 400 * number,
        }
    tree.chip("ina3221", "1-0040", {**files, "curr4_input": 9})
    reader = source(tree, clock)
    reader.read()
    clock.advance(1)
    batch = reader.read()
    kinds = {domain.name: (domain.hw_type, domain.in_cover) for domain in batch.domains}
    assert kinds == {
        module: (HwType.ENCLOSURE, False),
        cpu: (HwType.CPU, True),
        "VDD_SOC": (HwType.ENCLOSURE, True),
    }
    energies = {reading.domain_id: reading.counter for reading in batch.readings}
    assert energies[f"hwmon:ina3221/{cpu.lower()}"] == 4_000_000  # 5 V, 0.8 A, 1 s


def test_intel_card_is_summed_and_its_parts_are_not(tree: Tree, clock: ManualClock) -> None:
    tree.chip(
        "xe",
        "0000:03:00.0",
        {
            "energy1_label": "card",
            "energy1_input": 5,
            "energy2_label": "pkg",
            "energy2_input": 3,
            "power1_max": 150_000_000,
        },
    )
    tree.chip("i915", "0000:04:00.0", {"energy1_input": 7})
    tree.chip("i915_gt0", "0000:04:00.0", {"energy1_input": 6})
    batch = source(tree, clock).read()
    assert summed(batch) == {"hwmon:xe/card", "hwmon:i915/energy1"}
    assert {domain.hw_type for domain in batch.domains} == {HwType.GPU}
    assert {domain.provenance for domain in batch.domains} == {Provenance.MEASURED}
    assert all(domain.resource is None for domain in batch.domains)
    addresses = {domain.id: domain.pci for domain in batch.domains}
    assert addresses["hwmon:xe/card"] == "0000:03:00.0"
    assert addresses["hwmon:i915/energy1"] == "0000:04:00.0"


def test_sensor_of_a_gpu_has_the_address_at_which_its_library_names_it(
    tree: Tree, clock: ManualClock
) -> None:
    """AMD SMI reads the same board, which counts once."""
    tree.chip("amdgpu", "0000:0c:00.0", {"power1_label": "PPT", "power1_average": 90_000_000})
    tree.meter(0, "Grace Power Socket 0", 200_000_000)
    batch = source(tree, clock, {"amdgpu/PPT": "gpu"}).read()
    assert {domain.id: domain.pci for domain in batch.domains} == {
        "hwmon:amdgpu/ppt": "0000:0c:00.0",
        "hwmon:power_meter/grace-power-socket-0": "",
    }
    assert source(tree, clock).read().domains[0].id == "hwmon:power_meter/grace-power-socket-0"


def test_two_equal_cards_are_told_apart_by_their_address(tree: Tree, clock: ManualClock) -> None:
    files = {"energy1_label": "card", "energy1_input": 5}
    tree.chip("xe", "0000:03:00.0", files)
    other = tree.chip("xe", "0000:04:00.0", files)
    both = {"hwmon:xe/card@0000:03:00.0", "hwmon:xe/card@0000:04:00.0"}
    reader = source(tree, clock)
    assert summed(reader.read()) == both
    link = tree.root / "class/hwmon" / other.name
    link.unlink()  # one of them is given to a virtual machine, and returns
    clock.advance(6)
    batch = reader.read()
    assert summed(batch) == {"hwmon:xe/card"}
    assert [failure.domain_id for failure in batch.failures] == ["hwmon:xe/card@0000:04:00.0"]
    link.symlink_to(other)
    clock.advance(6)
    batch = reader.read()
    assert (summed(batch), batch.failures) == (both, ())


def test_unknown_sensors_are_not_read(tree: Tree, clock: ManualClock) -> None:
    tree.chip("amdgpu", "0000:05:00.0", {"power1_average": 1_000_000})
    tree.chip("nvme", "0000:06:00.0", {"temp1_input": 30_000})
    assert source(tree, clock).read() == Batch(())
    context = SourceContext(clock, FakeDirectory(), sysfs=tree.root)
    assert open_hwmon(HwmonSettings(), context) is None
    with pytest.raises(SourceError, match=r"amdgpu/power1"):
        open_hwmon(HwmonSettings(enabled=True), context)


def test_average_power_is_integrated(tree: Tree, clock: ManualClock) -> None:
    grace = tree.grace()
    reader = source(tree, clock)
    first = reader.read()
    for _ in range(10):
        clock.advance(0.1)
        batch = reader.read()
    (domain,) = (domain for domain in decided(batch.domains).values() if domain.in_cover)
    before = next(reading for reading in first.readings if reading.domain_id == domain.id)
    after = next(reading for reading in batch.readings if reading.domain_id == domain.id)
    step = energy_between(domain, before, after)
    assert isinstance(step, Interval)
    assert step.energy == 200_000_000
    # The average of 50 ms is that of the time 25 ms ago.
    assert clock.monotonic() - after.at.mono == 25_000_000
    write(grace / "device/power1_average", 400_000_000)
    clock.advance(0.1)
    later = next(r for r in reader.read().readings if r.domain_id == domain.id)
    assert later.counter - after.counter == 30_000_000  # the mean of 200 and 400 W over 0.1 s


def test_each_read_shows_a_new_average_of_grace(tree: Tree, clock: ManualClock) -> None:
    """The driver shows a value for 50 ms; every other average is high, as of work at each tick."""
    grace = tree.grace()
    reader = source(tree, clock)
    began = clock.monotonic()
    renewed = began - SECOND
    counters = []
    for number in range(2000):
        now = clock.monotonic()
        assert now - renewed >= 50 * MILLISECOND, f"read {number} shows the value before it"
        renewed = now
        average = (now - began) // (50 * MILLISECOND)
        write(grace / "device/power1_average", 300_000_000 if average % 2 else 100_000_000)
        readings = {one.domain_id: one for one in reader.read().readings}
        assert len(readings) == 4, f"read {number}"
        counters.append(readings["hwmon:power_meter/grace-power-socket-0"])
        clock.advance(POWER_READ_INTERVAL / SECOND)
    seconds = (counters[-1].at.mono - counters[0].at.mono) / SECOND
    power = (counters[-1].counter - counters[0].counter) / seconds / 1e6
    assert power == pytest.approx(200, rel=0.002)


def test_summed_sensors_are_read_first(tree: Tree, clock: ManualClock) -> None:
    tree.grace()
    tree.meter(4, "Module Power Socket 1", 500_000_000)
    tree.meter(5, "CPU Power Socket 1", 100_000_000)
    batch = source(tree, clock).read()
    assert [reading.domain_id for reading in batch.readings][:2] == [
        "hwmon:power_meter/grace-power-socket-0",
        "hwmon:power_meter/cpu-power-socket-1",
    ]
    assert len(batch.readings) == 6


def test_chip_without_a_sensor_of_power_is_read_less_often(tree: Tree, clock: ManualClock) -> None:
    xe = tree.chip("xe", "0000:03:00.0", {"energy1_label": "card", "energy1_input": 5})
    tree.meter(0, "Grace Power Socket 0", 200_000_000)
    reader = source(tree, clock)
    read = []
    for energy in range(7, 12):
        read.append([reading.domain_id for reading in reader.read().readings])
        write(xe / "energy1_input", energy)
        clock.advance(POWER_READ_INTERVAL / SECOND)
    card, grace = "hwmon:xe/card", "hwmon:power_meter/grace-power-socket-0"
    assert [grace in ids for ids in read] == [True] * 5
    assert [card in ids for ids in read] == [True, False, True, False, True]


def test_sensors_are_read_by_a_thread(tree: Tree, clock: ManualClock) -> None:
    tree.grace()
    opened = open_hwmon(HwmonSettings(), SourceContext(clock, FakeDirectory(), sysfs=tree.root))
    assert isinstance(opened, DriverThreadSource)
    with contextlib.closing(opened):
        for _ in range(2):
            found = eventually(lambda: opened.read().readings, "the thread reads the sensors")
            assert {reading.at.mono for reading in found} == {clock.monotonic() - 25 * MILLISECOND}
            clock.advance(POWER_READ_INTERVAL / SECOND)


def test_read_under_way_is_known_to_other_threads(tree: Tree, clock: ManualClock) -> None:
    """A sensor that hangs is reported."""
    tree.grace()
    calls = []

    class Observed(HwmonSource):
        def read(self) -> Batch:
            calls.append(session.current_call)
            return super().read()

    session = Observed(tree.root, clock, {})
    assert len(session.sample().readings) == 4
    assert calls == [("the read of the sensors", clock.monotonic())]
    assert session.current_call is None


def test_power_is_integrated_between_samples_and_a_counter_is_not_read(
    tree: Tree, clock: ManualClock
) -> None:
    """At a sample each second, the energy is that of the 18 averages of it."""
    power = tree.meter(0, "Grace Power Socket 0", 200_000_000) / "device/power1_average"
    xe = tree.chip("xe", "0000:03:00.0", {"energy1_label": "card", "energy1_input": 5})
    session = source(tree, clock)
    grace, card = "hwmon:power_meter/grace-power-socket-0", "hwmon:xe/card"
    before = {one.domain_id: one for one in session.sample().readings}[grace]
    write(xe / "energy1_input", 7)
    for number in range(17):
        due = session.next_read(clock.monotonic())
        clock.advance(ns=due - clock.monotonic())
        write(power, 300_000_000 if number % 2 else 100_000_000)
        session.read_between(clock.monotonic())
    clock.advance(ns=POWER_READ_INTERVAL)
    write(power, 200_000_000)
    readings = {one.domain_id: one for one in session.sample().readings}
    after = readings[grace]
    assert readings[card].counter == 7
    duration = 18 * POWER_READ_INTERVAL
    assert after.at.mono - before.at.mono == duration
    assert after.counter - before.counter == pytest.approx(200 * duration / 1000, rel=0.03)


@pytest.mark.parametrize("interval", [18 * POWER_READ_INTERVAL, 180 * POWER_READ_INTERVAL])
@pytest.mark.parametrize(
    ("chip", "members", "counts"),
    [
        ("grace", None, True),
        ("grace", {"hwmon:power_meter/grace-power-socket-0"}, True),
        ("grace", {"rapl:0"}, False),
        ("power_meter", set(), False),
        ("amd_hsmp_hwmon", {"rapl:0"}, False),
        ("denied", {"hwmon:zenpower/rapl_p_package"}, False),
    ],
)
def test_sensor_is_read_between_samples_where_it_counts(
    tree: Tree, clock: ManualClock, chip: str, members: set[str] | None, counts: bool, interval: int
) -> None:
    """Others wake the thread once a second: a machine's meter, a package beside RAPL."""
    if chip == "grace":
        tree.meter(1, "Grace Power Socket 0", 200_000_000)
    elif chip == "denied":
        zen = {"power1_label": "RAPL_P_Package", "power1_input": "not to be read"}
        tree.chip("zenpower", "a", zen)
    else:
        tree.chip(chip, "a", {"power1_input": 200_000_000})
    session, turns, energies = source(tree, clock), 0, []
    if members is not None:
        session.follow_cover(frozenset(members))
    began = sample = clock.monotonic()
    while (now := clock.monotonic()) < began + 60 * SECOND:
        turns += 1
        if now >= sample:
            batch = session.sample()
            sample += interval
            energies += [(one.epoch, one.counter, one.at.mono) for one in batch.readings]
            assert bool(batch.failures) is (chip == "denied")
        else:
            session.read_between(now)
        due = session.next_read(now)
        assert due is not None
        clock.advance(ns=max(MILLISECOND, min(sample, due) - now))
    assert turns > 60 * 18 if counts else turns <= 60 * 1.2
    if chip != "denied":
        (first, *_, last) = energies
        assert last[0] == first[0], "no gap"
        assert last[1] - first[1] == pytest.approx((last[2] - first[2]) / 5, rel=0.001)


def test_counters_alone_need_no_reads_between_samples(tree: Tree, clock: ManualClock) -> None:
    tree.chip("xe", "0000:03:00.0", {"energy1_label": "card", "energy1_input": 5})
    session = source(tree, clock)
    session.sample()
    assert session.next_read(clock.monotonic()) is None


def test_closed_source_looks_for_its_sensors_again(tree: Tree, clock: ManualClock) -> None:
    tree.grace()
    session = source(tree, clock)
    session.sample()
    session.close()
    assert session.next_read(clock.monotonic()) is None
    assert len(session.sample().readings) == 4


def card(tree: Tree, status: str = "active") -> tuple[Path, Path]:
    """The directories of an Intel GPU that the kernel may suspend, and of its power."""
    xe = tree.chip("xe", "0000:03:00.0", {"energy1_label": "card", "energy1_input": 5_000_000})
    power = (xe / "device/power").resolve()
    power.mkdir()
    for name, content in (("runtime_status", status), ("control", "auto")):
        write(power / name, content)
    write(power / "autosuspend_delay_ms", 1000)
    return xe, power


@pytest.mark.parametrize("status", ["suspended", "suspending"])
def test_suspended_card_is_not_read_and_its_energy_is_unknown(
    tree: Tree, clock: ManualClock, status: str
) -> None:
    """A read of its counter would wake it."""
    xe, power = card(tree)
    reader = source(tree, clock)
    (before,) = reader.read().readings
    write(power / "runtime_status", status)
    write(xe / "energy1_input", "must not be read")
    for _ in range(60):
        clock.advance(0.1)
        batch = reader.read()
        assert (batch.readings, batch.failures) == ((), ())
        assert [domain.suspended for domain in batch.domains] == [True]
    write(power / "runtime_status", "active")
    clock.advance(0.1)
    batch = reader.read()
    assert batch.failures
    assert not batch.domains[0].suspended, "its energy is absent from now on"
    write(xe / "energy1_input", 1_000)
    clock.advance(0.1)
    batch = reader.read()
    assert [domain.suspended for domain in batch.domains] == [False]
    assert [one.epoch for one in batch.readings] == [before.epoch + 1]


@pytest.mark.parametrize(("watts", "rests"), [(8.0, True), (80.0, False)])
def test_idle_card_is_left_alone_so_that_the_kernel_can_suspend_it(
    tree: Tree, clock: ManualClock, watts: float, rests: bool
) -> None:
    xe, _ = card(tree)
    reader = source(tree, clock)
    energy, longest, last = 5_000_000, 0, clock.monotonic()
    for tick in range(300):
        clock.advance(0.1)
        energy += round((8.0 if tick < 30 else watts) * 1e5)
        write(xe / "energy1_input", energy)
        if readings := reader.read().readings:
            longest, last = max(longest, readings[-1].at.mono - last), readings[-1].at.mono
            assert readings[-1].counter == energy
    assert (longest >= 4 * SECOND) is rests


@pytest.mark.parametrize("delay", [1000, 5000, 10_000, 30_000, 60_000])
def test_rest_of_a_card_loses_no_energy_and_keeps_its_place(
    tree: Tree, clock: ManualClock, delay: int
) -> None:
    xe, power = card(tree)
    write(power / "autosuspend_delay_ms", delay)
    reader, meters, cover = source(tree, clock), CounterMeters(LedgerSettings().absence), Cover()
    periods: list[Interval | Gap | None] = []
    for tick in range(1000):
        write(xe / "energy1_input", 8_000_000 * tick)
        batch = reader.read()
        read = {one.domain_id for one in batch.readings}
        changed = cover.update(clock.monotonic(), {"hwmon": batch.domains}, read)
        assert [domain.in_cover for domain in cover.domains["hwmon"]] == [True]
        domains = {name: cover.domains[name] for name in changed}
        metered = meters.advance(Tick(clock.now(), domains, batch.readings))
        periods += (one.period for one in metered)
        clock.advance(0.1)
    intervals = [one for one in periods if isinstance(one, Interval)]
    assert len(intervals) == sum(one is not None for one in periods)
    assert max(one.duration for one in intervals) >= min(delay, 30_000) * MILLISECOND
    write(power / "runtime_status", "suspended")
    clock.advance(0.1)
    meters.advance(Tick(clock.now(), {"hwmon": reader.read().domains}, ()))
    assert all(meters.silent(domain.id) for domain in batch.domains)


def test_unobserved_time_has_no_energy(tree: Tree, clock: ManualClock) -> None:
    tree.grace()
    reader = source(tree, clock)
    before = reader.read().readings[0]
    clock.advance(60)
    after = next(r for r in reader.read().readings if r.domain_id == before.domain_id)
    assert after.epoch == before.epoch + 1


def test_counter_that_has_not_moved_has_no_reading(tree: Tree, clock: ManualClock) -> None:
    hwmon = tree.chip("xe", "0000:03:00.0", {"energy1_input": 5_000_000})
    reader = source(tree, clock)
    assert [reading.counter for reading in reader.read().readings] == [5_000_000]
    clock.advance(0.1)
    assert reader.read().readings == ()
    write(hwmon / "energy1_input", 7_000_000)
    clock.advance(0.1)
    assert [reading.counter for reading in reader.read().readings] == [7_000_000]


@pytest.mark.parametrize("content", ["", "-5", "7.5", "one", "\x00\xff"])
def test_impossible_value_is_a_failure_of_its_sensor_alone(
    tree: Tree, clock: ManualClock, content: str
) -> None:
    grace = tree.grace()
    write(grace / "device/power1_average", content)
    batch = source(tree, clock).read()
    (failure,) = batch.failures
    assert failure.trouble is Trouble.MALFORMED
    assert failure.domain_id == "hwmon:power_meter/grace-power-socket-0"
    assert len(batch.readings) == 3


def test_rail_at_rest_may_show_a_small_negative_current(tree: Tree, clock: ManualClock) -> None:
    files = {"in1_label": "VDD_GPU", "in1_input": 5_000, "curr1_input": -16}
    rail = tree.chip("ina3221", "1-0040", files)
    reader = source(tree, clock)
    assert [one.counter for one in reader.read().readings] == [0]
    write(rail / "curr1_input", 400)
    clock.advance(1)
    batch = reader.read()
    assert [one.counter for one in batch.readings] == [1_000_000]  # from 0 to 2 W in a second
    assert batch.failures == ()
    write(rail / "curr1_input", -500)  # a battery is charged
    clock.advance(1)
    assert "'-500' is no possible value" in reader.read().failures[0].cause


@pytest.mark.parametrize("shown", [9_000_000, -9_000_000])
def test_battery_counts_while_it_discharges(tree: Tree, clock: ManualClock, shown: int) -> None:
    files = {"device/type": "Battery", "device/status": "Discharging", "power1_input": shown}
    battery = tree.chip("BAT0", "BAT0", files)
    reader = source(tree, clock, {"BAT0/power1": "machine"})
    reader.read()
    for state, energies in {"Discharging": [9_000_000], "Charging": [], "Full": []}.items():
        write(battery / "device/status", state)
        clock.advance(1)
        assert [one.counter for one in reader.read().readings] == energies


def test_removed_sensor_is_reported_and_used_again(tree: Tree, clock: ManualClock) -> None:
    grace = tree.grace()
    reader = source(tree, clock)
    epoch = reader.read().readings[1].epoch
    (tree.root / "class/hwmon" / grace.name).unlink()
    (grace / "device/power1_average").unlink()
    clock.advance(1)
    assert [one.trouble for one in reader.read().failures] == [Trouble.ABSENT]
    clock.advance(1)
    (failure,) = reader.read().failures
    assert "vanished" in str(failure)
    (tree.root / "class/hwmon" / grace.name).symlink_to(grace)
    write(grace / "device/power1_average", 1)
    clock.advance(6)
    batch = reader.read()
    assert batch.failures == ()
    (again,) = (r for r in batch.readings if "grace" in r.domain_id)
    assert again.epoch == epoch + 1


def test_domain_list_is_reused_while_unchanged(tree: Tree, clock: ManualClock) -> None:
    tree.grace()
    reader = source(tree, clock)
    first = reader.read().domains
    clock.advance(7)
    assert reader.read().domains is first
    reader.close()
    assert reader.read().domains == first


def test_average_is_preferred_to_present_power(tree: Tree) -> None:
    tree.chip("psu", "i2c-1", {"power1_input": 1, "power1_average": 2, "power2_input": 3})
    found = {files.sensor.channel: files.sensor.quantity for files in scan_sensors(tree.root)}
    assert found == {"power1": SensorQuantity.AVERAGE_POWER, "power2": SensorQuantity.POWER}


def test_other_file_is_read_where_one_fails(tree: Tree, clock: ManualClock) -> None:
    chip = tree.chip("psu", "i2c-1", {"power1_input": 5_000_000})
    average, power = chip / "power1_average", chip / "power1_input"
    average.mkdir()
    reader = source(tree, clock, {"psu/power1": "cpu"})
    assert average.name in str(reader.read().failures[0])
    for readable, lost in ((power, average), (average, power)):
        if lost.is_file():
            lost.unlink()
            lost.mkdir()
            readable.rmdir()
            write(readable, 5_000_000)
            clock.advance(0.1)
            reader.read()
        counters = []
        for _ in range(20):
            clock.advance(0.1)
            batch = reader.read()
            assert batch.failures == ()
            counters += [(one.epoch, one.counter) for one in batch.readings]
        assert counters[-1] == (counters[0][0], counters[0][1] + 9_500_000)


@pytest.mark.parametrize("interval", [50, 1000, 10_000, 30_000, 60_000])
def test_average_over_any_interval_is_counted_at_once(
    tree: Tree, clock: ManualClock, interval: int
) -> None:
    files = {"power1_average": 200_000_000, "power1_average_interval": interval}
    tree.chip("power_meter", "a", files)
    reader = source(tree, clock, {"power_meter/power1": "cpu"})
    meters, periods = CounterMeters(LedgerSettings().absence), list[Interval | Gap]()
    for _ in range(300):
        clock.advance(0.1)
        batch = reader.read()
        assert clock.monotonic() - batch.readings[0].at.mono <= 2 * SECOND
        metered = meters.advance(Tick(clock.now(), {"hwmon": batch.domains}, batch.readings))
        periods += [one.period for one in metered if one.period is not None]
    energies = [one.energy for one in periods if isinstance(one, Interval)]
    assert len(energies) == len(periods)
    assert sum(energies) == pytest.approx(299 * 20_000_000)


class SlowClock(ManualClock):
    """A clock by which the read of a sensor takes ``cost`` seconds."""

    cost = 0.0

    def now(self) -> Instant:
        cost, self.cost = self.cost, 0.0
        if cost:
            self.advance(cost)
        self.cost = cost
        return super().now()


@pytest.mark.parametrize("cost", [0.03, 0.1, 0.9, 2.5])
def test_power_of_a_slow_sensor_is_measured_or_a_finding(tree: Tree, cost: float) -> None:
    clock, most = SlowClock(), 0
    tree.meter(0, "Grace Power Socket 0", 200_000_000)
    reader = source(tree, clock)
    began, clock.cost = clock.monotonic(), cost
    while (passed := clock.monotonic() - began) < 60 * SECOND:
        batch = reader.sample()
        most = max([most, *(one.counter for one in batch.readings)])
        assert batch.readings or batch.failures or passed < 15 * SECOND
        due = reader.next_read(clock.monotonic()) or 0
        clock.advance(ns=max(0, due - clock.monotonic()))
    if cost < 2:
        assert batch.failures == ()
        assert most == pytest.approx(60 * 200_000_000, rel=0.05)
    else:
        assert "values more than 2 s apart measure no energy" in str(batch.failures[0])
        assert most == 0


_PARTS = {
    "apm_xgene": {"power1_label": "CPU power", "power1_input": 38_500_000},
    "altra_hwmon": {"energy1_label": "Core Energy 000", "energy1_input": 7},
    "amd_energy": {"energy1_label": "Esocket0", "energy1_input": 7},
    "zenpower": {"power1_label": "RAPL_P_Package", "power1_input": 60_000_000},
    "amd_hsmp_hwmon": {"power1_input": 180_000_000},
    "fam15h_power": {"power1_input": 40_000_000},
    "i915": {"energy1_input": 7},
    "power_meter": {"power1_average": 167_000_000},
    "ina3221": {"in1_label": "VDD_CPU", "in1_input": 5_000, "curr1_input": 400},
}


@pytest.mark.parametrize("part", _PARTS)
@pytest.mark.parametrize("role", ["cpu", "cpu:0", "memory", "gpu"])
@pytest.mark.parametrize(
    ("meter", "files"),
    [
        ("power_meter", {"power1_average": 167_000_000}),
        ("ibmpowernv", {"power1_label": "System", "power1_input": 167_000_000}),
        ("ina3221", {"in9_label": "VDD_IN", "in9_input": 5_000, "curr9_input": 400}),
    ],
)
def test_machine_meter_is_never_summed_beside_a_part_of_the_machine(
    tree: Tree, clock: ManualClock, meter: str, files: dict[str, object], role: str, part: str
) -> None:
    tree.chip(part, "a", _PARTS[part])
    tree.chip(meter, "b", files)
    roles = {f"{meter}/{label}": role for label in ("power1", "System", "VDD_IN")}
    # A card is no part of the socket that the configuration names.
    members = 2 if (role, part) == ("cpu:0", "i915") else 1
    assert len(summed(source(tree, clock, roles).read())) == members


def test_chips_without_a_name_are_omitted(tree: Tree) -> None:
    (tree.chip("psu", "i2c-1", {"power1_input": 1}) / "name").unlink()
    assert scan_sensors(tree.root) == []
    assert scan_sensors(tree.root / "absent") == []


def test_source_opens_for_names_that_are_denied(tree: Tree, clock: ManualClock) -> None:
    hwmon = tree.chip("power_meter", "ACPI000D:00", {"power1_average": 1})
    (hwmon / "name").chmod(0)
    tree.root.chmod(0o755)
    with contextlib.chdir(tree.root), without_root():
        context = SourceContext(clock, FakeDirectory(), sysfs=Path())
        opened = open_hwmon(HwmonSettings(), context)
        with pytest.raises(SourceError, match=r"permission denied: class/hwmon/.*/name"):
            open_hwmon(HwmonSettings(enabled=True), context)
    assert opened is not None
    opened.close()


@pytest.mark.parametrize(
    ("sensors", "fault"),
    [
        ({"power1": "cpu"}, "CHIP/LABEL"),
        ({"/power1": "cpu"}, "CHIP/LABEL"),
        ({"psu/power1": "disk"}, "none of cpu"),
        ({"psu/power1": "cpu:x"}, "none of cpu"),
        ({"psu/power1": "memory:0"}, "none of cpu"),
    ],
)
def test_invalid_role_is_refused(sensors: dict[str, str], fault: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=fault):
        msgspec.convert({"sensors": sensors}, HwmonSettings)


def test_valid_roles_are_accepted() -> None:
    roles = {"psu/power1": "cpu:1", "a/b c/d": "memory", "x/y": "ignore", "z/1": "gpu"}
    assert msgspec.convert({"sensors": roles}, HwmonSettings).sensors == roles


_CHIPS = ("power_meter", "ina3221", "xe", "i915", "i915_gt0", "psu")
_LABELS = (
    "",
    "Module Power Socket 0",
    "Grace Power Socket 0",
    "Grace Power Socket 1",
    "CPU Power Socket 0",
    "SysIO Power Socket 0",
    "VDD_IN",
    "VDD_CPU_GPU_CV",
    "VDDQ_VDD2_1V8AO",
    "pkg",
)
_SENSORS = st.builds(
    Sensor,
    st.sampled_from(_CHIPS),
    st.sampled_from(("a", "b")),
    st.sampled_from(("energy1", "energy2", "power1")),
    st.sampled_from(_LABELS),
    st.sampled_from(tuple(SensorQuantity)),
    st.sampled_from((0, SECOND)),
)
_HOSTS = st.lists(
    _SENSORS, max_size=8, unique_by=lambda sensor: (sensor.chip, sensor.device, sensor.channel)
)


@given(
    _HOSTS,
    st.dictionaries(
        st.sampled_from([f"{chip}/{label}" for chip in _CHIPS for label in _LABELS if label]),
        st.sampled_from(("cpu", "cpu:1", "memory", "gpu", "machine", "ignore")),
        max_size=3,
    ),
)
def test_no_summed_sensor_contains_another(sensors: list[Sensor], roles: dict[str, str]) -> None:
    domains = {domain.id: domain for domain in resolve_sensors(sensors, roles).values()}
    assert len(domains) <= len(sensors)
    domains = decided(domains.values())
    for domain in domains.values():
        above = domain.parent
        seen = {domain.id}
        while above is not None:
            assert above not in seen
            seen.add(above)
            assert not (domain.in_cover and domains[above].in_cover)
            above = domains[above].parent


@given(_HOSTS)
def test_ids_are_unique_and_printable(sensors: list[Sensor]) -> None:
    domains = resolve_sensors(sensors, {})
    assert len({domain.id for domain in domains.values()}) == len(domains)
    assert all(" " not in domain.id and domain.why for domain in domains.values())


def test_advice_names_sensors_and_roots_that_do_not_exist(tree: Tree, tmp_path: Path) -> None:
    tree.meter(0, "Grace Power Socket 0", 1)
    names = {"power_meter/Grace Power Socket 0": "cpu:0", "power_meter/Grace Socket 0": "cpu"}
    settings = HwmonSettings(sensors=names, sysfs=str(tree.root))
    (sentence,) = plugin.advice(settings)
    assert '"power_meter/Grace Socket 0"' in sentence
    assert "found: power_meter/Grace Power Socket 0" in sentence
    assert [*plugin.advice(msgspec.structs.replace(settings, enabled=False))] == []
    (root, _, _) = plugin.advice(msgspec.structs.replace(settings, sysfs=str(tmp_path / "none")))
    assert root == f"sources.hwmon.sysfs: there is no directory {tmp_path / 'none'}"
