"""Boards of a laptop or workstation that the kernel suspends while nobody uses them."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.fake_nvml import FakeGpu, FakeNvml
from testbed.field import build_tree
from testbed.gpu_sessions import nvml_session

from wattspan.attribution.metering import CounterMeters
from wattspan.model import Domain, Gap, GapReason, Reading, Tick, Trouble
from wattspan.ports import Batch, SourceContext
from wattspan.service.poller import MonitoredSource
from wattspan.sources.gpu.calls import GPU_IS_LOST
from wattspan.sources.nvml.device import NvmlSettings
from wattspan.testing import FakeDirectory, ManualClock, ReplaySource

FIRST, SECOND_BOARD = "0000:01:00.0", "0000:02:00.0"
ENABLED = "Runtime D3 status:          Enabled (coarse-grained)\nVideo Memory:  Active\n"


class Host:
    """Two boards whose handles keep them awake, and the session that reads them."""

    def __init__(self, root: Path, rtd3: str = ENABLED) -> None:
        self.root, self.clock = root, ManualClock()
        self.gpus = (FakeGpu("GPU-a", address=FIRST), FakeGpu("GPU-b", address=SECOND_BOARD))
        for address in (FIRST, SECOND_BOARD):
            self.power(address, "active")
            build_tree({"files": {f"driver/{address}/power": rtd3}}, root)
        self.nvml = FakeNvml(self.clock, *self.gpus)
        context = SourceContext(self.clock, FakeDirectory(), sysfs=root)
        self.session = nvml_session(
            self.nvml, NvmlSettings(), context, nested=False, driver_files=root / "driver"
        )
        self.meters = CounterMeters(10**10)
        self.domains: tuple[Domain, ...] = ()
        self.gaps: list[Gap] = []

    def power(self, address: str, status: str, control: str = "auto") -> None:
        folder = f"bus/pci/drivers/nvidia/{address}/power"
        files = {f"{folder}/runtime_status": status, f"{folder}/control": control}
        build_tree({"files": files}, self.root)

    def run(self, seconds: float) -> Batch:
        self.nvml.calls.clear()
        batch = Batch(())
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)
            batch = self.session.sample()
            changed = {"nvml": batch.domains} if batch.domains is not self.domains else {}
            self.domains = batch.domains
            tick = Tick(self.clock.now(), changed, batch.readings)
            periods = (one.period for one in self.meters.advance(tick))
            self.gaps += (one for one in periods if isinstance(one, Gap))
        return batch


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def ids(readings: tuple[Reading, ...]) -> set[str]:
    return {one.domain_id for one in readings}


def test_suspended_board_is_not_opened_with_the_others(host: Host) -> None:
    host.power(SECOND_BOARD, "suspended")
    host.gpus[0].utilisation = (50, 10)
    batch = host.run(2)
    assert ids(batch.readings) == {"gpu:GPU-a"}
    assert host.nvml.calls.count("nvmlDeviceGetHandleByPciBusId") == 1
    assert "nvmlDeviceGetHandleByIndex" not in host.nvml.calls
    assert batch.failures == ()
    host.power(SECOND_BOARD, "active")
    batch = host.run(2)
    assert ids(batch.readings) == {"gpu:GPU-a", "gpu:GPU-b"}
    assert {one.epoch for one in batch.readings} == {0}


def test_source_of_boards_that_sleep_from_the_start_is_no_fault_and_finds_them(host: Host) -> None:
    for address in (FIRST, SECOND_BOARD):
        host.power(address, "suspended")
    source = MonitoredSource(ReplaySource([host.run(60)], "nvml"), host.clock)
    source.read()
    health = source.health()
    assert (health.up, [one.trouble for one in health.failures]) == (True, [Trouble.SUSPENDED])
    assert host.nvml.calls == []
    host.power(SECOND_BOARD, "active")
    assert ids(host.run(2).readings) == {"gpu:GPU-b"}


def test_idle_boards_are_closed_so_that_the_kernel_can_suspend_them(host: Host) -> None:
    host.run(12)
    assert host.nvml.initialised == 0
    host.power(FIRST, "suspended")
    host.power(SECOND_BOARD, "suspended")
    batch = host.run(600)
    assert host.nvml.calls == []
    assert batch.failures == ()
    assert all(domain.suspended for domain in batch.domains)
    host.power(FIRST, "active")
    host.nvml.draw(host.gpus[0], 60)
    batch = host.run(2)
    assert ids(batch.readings) == {"gpu:GPU-a"}
    assert [domain.suspended for domain in batch.domains] == [False, True]


@pytest.mark.parametrize("delay", ["", "5000", "10000", "30000"])
def test_boards_that_stay_awake_are_read_again_without_a_loss(host: Host, delay: str) -> None:
    for address in (FIRST, SECOND_BOARD):
        file = f"bus/pci/drivers/nvidia/{address}/power/autosuspend_delay_ms"
        build_tree({"files": {file: delay}}, host.root)
    host.run(12)
    before = host.gaps[:]
    batch = host.run(12 + int(delay or 0) / 1000)
    assert ids(batch.readings) == {"gpu:GPU-a", "gpu:GPU-b"}
    assert {one.epoch for one in batch.readings} == {0}
    assert host.gaps == before == []


def test_energy_of_a_suspended_board_is_a_gap_and_its_return_no_spike(host: Host) -> None:
    host.gpus[0].utilisation = (50, 10)
    host.run(3)
    host.power(SECOND_BOARD, "suspended")
    host.nvml.draw(host.gpus[1], 900)  # whatever it counts meanwhile is not charged
    host.run(5)
    host.power(SECOND_BOARD, "active")
    host.run(1)
    assert {gap.reason for gap in host.gaps} == {GapReason.SUSPEND}
    assert {gap.domain_id for gap in host.gaps} == {"gpu:GPU-b"}
    assert sum(gap.duration for gap in host.gaps) == pytest.approx(5e9, abs=2e8)


def test_board_that_is_lost_as_it_wakes_is_absent_and_not_suspended(host: Host) -> None:
    host.gpus[0].utilisation = (50, 10)
    host.run(2)
    host.power(SECOND_BOARD, "suspended")
    host.run(2)
    host.power(SECOND_BOARD, "active")
    host.nvml.errors["GPU-b"] = GPU_IS_LOST
    host.gaps.clear()
    batch = host.run(2)
    assert not any(domain.suspended for domain in batch.domains)
    reasons = {gap.reason for gap in host.gaps if gap.domain_id == "gpu:GPU-b"}
    assert reasons == {GapReason.ABSENT}


def test_board_that_fell_off_its_bus_is_found_as_soon_as_it_is_reset(host: Host) -> None:
    host.gpus[0].utilisation = (50, 10)
    host.run(2)
    config = host.root / "bus/pci/drivers/nvidia" / SECOND_BOARD / "config"
    config.write_bytes(b"\xff" * 64)
    host.nvml.errors["GPU-b"] = GPU_IS_LOST
    host.run(600)
    assert host.nvml.generation == 1
    config.write_bytes(bytes.fromhex("de103023"))
    host.nvml.errors = {("nvmlDeviceGetHandleByUUID", "GPU-b"): GPU_IS_LOST}
    assert ids(host.run(17).readings) == {"gpu:GPU-a", "gpu:GPU-b"}


def test_board_that_flaps_each_second_has_no_energy_across_a_suspend(host: Host) -> None:
    host.gpus[0].utilisation = (50, 10)
    host.run(1)
    for second in range(20):
        host.power(SECOND_BOARD, "active" if second % 2 else "suspended")
        host.run(1)
    assert {gap.reason for gap in host.gaps} <= {GapReason.SUSPEND, GapReason.LOST}
    assert sum(gap.duration for gap in host.gaps) >= 10e9


@pytest.mark.parametrize(
    ("rtd3", "control"),
    [
        ("Runtime D3 status:          Not supported\n", "auto"),
        ("Runtime D3 status:          Disabled by default\n", "auto"),
        ("", "auto"),
        (ENABLED, "on"),
    ],
)
def test_boards_that_are_never_suspended_stay_open(tmp_path: Path, rtd3: str, control: str) -> None:
    host = Host(tmp_path, rtd3)
    for address in (FIRST, SECOND_BOARD):
        host.power(address, "active", control)
    host.run(60)
    assert host.nvml.calls.count("nvmlShutdown") == 0
    assert len(host.run(0.1).readings) == 2


def test_board_in_use_stays_open_and_is_read(host: Host) -> None:
    host.gpus[0].running = [100]  # with a context, and without work
    host.gpus[1].utilisation = (3, 0)
    host.run(60)
    assert host.nvml.calls.count("nvmlShutdown") == 0


def test_idle_board_is_closed_beside_one_in_use(host: Host) -> None:
    host.gpus[0].utilisation = (50, 10)
    host.run(12)
    assert "nvmlDeviceGetHandleByPciBusId" in host.nvml.calls
    batch = host.run(1)
    assert ids(batch.readings) == {"gpu:GPU-a"}
    assert batch.failures == ()
    host.run(10)
    batch = host.run(1)
    assert ids(batch.readings) == {"gpu:GPU-a", "gpu:GPU-b"}
