"""The emulated tree follows its energy model, looks like the kernel's, and fails as scripted."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from testbed.emulated_faults import FaultyPowercapTree
from testbed.powercap_host import PowercapHost, counters
from testbed.powercap_layouts import FINE_UNIT, LAYOUTS

from wattspan.emulation.powercap_engine import CpuLaw, on_sockets
from wattspan.emulation.powercap_tree import (
    COARSE_UNIT,
    CounterScope,
    EmulatedZone,
    TreeError,
    zone_at,
)


def shown(host: PowercapHost, zone: str) -> int:
    return int((host.tree.path(zone) / "energy_uj").read_text())


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_looks_like_the_kernels_tree(tmp_path: Path, name: str) -> None:
    with PowercapHost(tmp_path, name) as host:
        for zone in host.layout.zones:
            link = tmp_path / "class/powercap" / zone.directory
            assert link.readlink().parts[:4] == ("..", "..", "devices", "virtual")
            assert (link / "subsystem").resolve() == tmp_path / "class/powercap"
            assert (link / "name").read_text() == f"{zone.name}\n"
            assert (link / "energy_uj").read_bytes().endswith(b"\n")
            assert int((link / "max_energy_range_uj").read_text()) == zone.max_range
        packages = {
            int(path.read_text())
            for path in tmp_path.glob("devices/system/cpu/cpu*/topology/physical_package_id")
        }
        assert packages == set(range(host.layout.sockets))


@pytest.mark.parametrize(
    ("step", "max_range"), [(COARSE_UNIT, 262_143_328_850), (FINE_UNIT, 65_532_610_987)]
)
def test_ranges_equal_those_of_real_kernels(step: int, max_range: int) -> None:
    assert (
        EmulatedZone("x:0", "package-0", CounterScope("package"), step=step).max_range == max_range
    )


def test_busy_second_adds_energy_to_its_socket_only(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        before = dict(host.engine.energies())
        host.work(0, 2.5)
        host.pass_time(1)
        spent = {zone: energy - before[zone] for zone, energy in host.engine.energies().items()}
        law = host.engine.law
        idle = law.package_idle * 1000
        assert spent["intel-rapl:0"] - idle == 22_500_000
        assert spent["intel-rapl:1"] == idle
        assert spent["intel-rapl:0:0"] - law.dram_idle * 1000 == 3_750_000


def test_counter_shows_the_energy_in_whole_steps(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        host.work(0, 0.123)
        host.pass_time(0.777)
        energy = host.engine.energy("intel-rapl:0")
        steps = energy * 1000 // COARSE_UNIT
        assert shown(host, "intel-rapl:0") == steps * COARSE_UNIT // 1000
        assert 0 <= energy - shown(host, "intel-rapl:0") <= 62


def test_counter_moves_once_a_millisecond(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        before = shown(host, "intel-rapl:0")
        host.pass_time(0.0009)
        assert shown(host, "intel-rapl:0") == before
        host.pass_time(0.0002)
        assert shown(host, "intel-rapl:0") - before == pytest.approx(42_000, abs=62)


def test_held_descriptor_sees_every_value_and_never_a_longer_file(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        fd = os.open(host.tree.path("intel-rapl:0") / "energy_uj", os.O_RDONLY)
        size = os.fstat(fd).st_size
        for _ in range(3):
            host.pass_time(1000)
            assert int(os.pread(fd, 64, 0)) == shown(host, "intel-rapl:0")
            assert os.fstat(fd).st_size == size
        os.close(fd)


def test_counter_wraps_to_zero_at_the_end_of_its_turn(tmp_path: Path) -> None:
    layout = LAYOUTS["xeon-2s"]
    near = tuple(replace(zone, start=2**32 - 1) for zone in layout.zones)
    with PowercapHost(tmp_path, replace(layout, zones=near)) as host:
        # One second at 42 W after standing one step before the end.
        steps = 42_000_000_000 // COARSE_UNIT - 1
        assert shown(host, "intel-rapl:0") == steps * COARSE_UNIT // 1000


def test_dies_share_their_package_without_remainder(tmp_path: Path) -> None:
    with PowercapHost(tmp_path, "multi-die") as host:
        host.work(1, 1 / 3)
        host.pass_time(0.1)
        law = CpuLaw()
        whole = law.picojoules(CounterScope("package", 1), 10**8 + 10**9, (0, 333333333), (1, 1))
        parts = [
            law.picojoules(
                CounterScope("package", 1, die, 3), 10**8 + 10**9, (0, 333333333), (1, 1)
            )
            for die in range(3)
        ]
        assert sum(parts) == whole


def test_mirrored_dies_show_one_counter(tmp_path: Path) -> None:
    with PowercapHost(tmp_path, "mirrored-dies") as host:
        host.work(0, 1)
        host.pass_time(1)
        assert len({shown(host, zone.directory) for zone in host.layout.zones}) == 1


def test_psys_contains_packages_and_memory(tmp_path: Path) -> None:
    with PowercapHost(tmp_path, "tpmi-2s") as host:
        host.work(1, 3)
        host.pass_time(5)
        energies = host.engine.energies()
        parts = sum(energy for zone, energy in energies.items() if zone != "intel-rapl:1")
        assert energies["intel-rapl:1"] > parts


def test_amd_core_counter_is_one_core_of_many(tmp_path: Path) -> None:
    tree = FaultyPowercapTree(tmp_path, LAYOUTS["epyc-2s"], cpus=8)
    tree.close()
    law = CpuLaw()
    lead = law.picojoules(CounterScope("lead-core", 0), 0, (4 * 10**9, 0), (4, 4))
    assert lead * 4 == law.picojoules(CounterScope("core", 0), 0, (4 * 10**9, 0), (4, 4))


def test_reset_counter_starts_again_and_the_truth_goes_on(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        host.pass_time(100)
        host.engine.reset("intel-rapl:0")
        assert shown(host, "intel-rapl:0") == 0
        host.pass_time(1)
        assert shown(host, "intel-rapl:0") == pytest.approx(42_000_000, abs=100)
        assert host.engine.energy("intel-rapl:0") == 102 * 42_000_000


def test_counter_on_the_brink_wraps_in_a_moment(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        host.engine.brink("intel-rapl:0")
        high = counters(host.source.read())["rapl:package-0"]
        low = counters(host.read_after(1))["rapl:package-0"]
        end = zone_at(host.layout, "intel-rapl:0").max_range
        assert end - 20_100_000 < high <= end - 19_900_000
        assert 0 <= low < 42_100_000


def test_frozen_counter_stands_still_and_catches_up(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        host.engine.freeze("intel-rapl:0")
        before = shown(host, "intel-rapl:0")
        host.pass_time(10)
        assert shown(host, "intel-rapl:0") == before
        host.engine.mend("intel-rapl:0")
        assert shown(host, "intel-rapl:0") == pytest.approx(11 * 42_000_000, abs=100)


def test_counter_can_run_backwards(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        before = shown(host, "intel-rapl:0")
        host.engine.rewind("intel-rapl:0", 1_000_000)
        assert shown(host, "intel-rapl:0") == pytest.approx(before - 1_000_000, abs=200)


def test_held_descriptor_into_a_vanished_zone_reads_nothing(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        fd = os.open(host.tree.path("intel-rapl:0:0") / "energy_uj", os.O_RDONLY)
        host.engine.vanish("intel-rapl:0")
        host.pass_time(1)
        assert os.pread(fd, 64, 0) == b""
        assert not (tmp_path / "class/powercap/intel-rapl:0:0").is_symlink()
        os.close(fd)


def test_denied_counter_is_unreadable_for_every_user(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        assert host.engine.deny("intel-rapl:0") == "EACCES"
        with pytest.raises(PermissionError):
            (host.tree.path("intel-rapl:0") / "energy_uj").read_bytes()


def test_failing_counter_opens_and_then_fails(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        assert host.engine.fail("intel-rapl:0") == "EIO"
        with (
            (host.tree.path("intel-rapl:0") / "energy_uj").open("rb", buffering=0) as file,
            pytest.raises(OSError, match="Input/output"),
        ):
            file.read(64)


@pytest.mark.parametrize("root", ["/sys", "/sys/class/powercap", "/proc/self"])
def test_real_powercap_tree_is_never_written(root: str) -> None:
    with pytest.raises(TreeError, match="belongs to the kernel"):
        FaultyPowercapTree(Path(root), LAYOUTS["client"])


def test_nonempty_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(TreeError, match="not empty"):
        FaultyPowercapTree(tmp_path, LAYOUTS["client"])


def test_cpu_times_of_emulated_sockets_never_decrease() -> None:
    loads = [{0: 10, 1: 20, 2: 30}, {0: 11, 2: 31}, {0: 5, 1: 22, 2: 31, 9: 7}]
    sums = on_sockets(lambda: loads.pop(0), (0, 0, 1))
    assert [list(sums()) for _ in range(3)] == [[30, 30], [31, 31], [33, 38]]
