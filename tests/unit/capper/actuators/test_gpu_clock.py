"""Locked GPU clocks, which can be set and reset and not read back."""

from __future__ import annotations

import pytest
from testbed.fake_actuators import KnobNvml
from testbed.fake_nvml import FakeGpu

from wattspan.capper.actuators import SETTLE_TIMEOUT
from wattspan.capper.actuators.gpu import GpuBoards, GpuClock, GpuPower
from wattspan.model import Trouble
from wattspan.ports import ActuatorError
from wattspan.sources.nvml.device import NvmlVendor
from wattspan.testing import ManualClock

A = "gpu:GPU-a"


class Host:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.nvml = KnobNvml(self.clock, FakeGpu("GPU-a"))
        self.boards = GpuBoards(NvmlVendor(self.nvml, self.clock))
        self.clocks = GpuClock(self.boards, self.clock)


@pytest.fixture
def host() -> Host:
    return Host()


def test_clock_lock_is_unknown_before_the_first_write(host: Host) -> None:
    state = host.clocks.read(A)
    assert (state.minimum, state.default, state.maximum) == (345, 1980, 1980)
    assert (state.requested, state.enforced) == (None, None)


def test_range_is_that_of_the_fastest_memory_clock(host: Host) -> None:
    host.clocks.read(A)
    assert host.nvml.calls.count("nvmlDeviceGetSupportedGraphicsClocks") == 1
    host.clocks.read(A)
    assert host.nvml.calls.count("nvmlDeviceGetSupportedGraphicsClocks") == 1  # constant
    assert host.clocks.read(A).maximum == 1980


def test_idle_board_may_still_sleep(host: Host) -> None:
    host.clocks.write(A, 1_200)
    assert host.nvml.locks["GPU-a"] == (345, 1_200)


def test_writing_none_resets_a_foreign_clock_lock(host: Host) -> None:
    host.nvml.locks["GPU-a"] = (345, 900)
    assert host.clocks.write(A, None).requested is None
    assert host.nvml.locks == {}


def test_clock_lock_without_visible_effect_is_requested_not_enforced(host: Host) -> None:
    host.nvml.deaf.add("GPU-a")
    state = host.clocks.write(A, 1_200)
    assert (state.requested, state.enforced) == (1_200, None)
    assert host.clock.monotonic() - ManualClock().monotonic() == SETTLE_TIMEOUT


def test_board_that_does_not_tell_its_range_can_be_unlocked_and_not_locked(host: Host) -> None:
    host.nvml.errors["nvmlDeviceGetMaxClockInfo"] = 3
    assert host.clocks.devices() == ()
    with pytest.raises(ActuatorError) as caught:
        host.clocks.write(A, 1_200)
    assert caught.value.trouble is Trouble.ABSENT


def test_board_without_a_list_of_clocks_has_no_known_minimum(host: Host) -> None:
    host.nvml.errors["nvmlDeviceGetSupportedMemoryClocks"] = 3
    assert host.clocks.read(A).minimum is None
    host.clocks.write(A, 1_200)
    assert host.nvml.locks["GPU-a"] == (0, 1_200)


def test_what_is_out_of_range_is_refused_with_the_range(host: Host) -> None:
    for value in (344, 1_981):
        with pytest.raises(ActuatorError, match="345 MHz to 1980 MHz"):
            host.clocks.write(A, value)
    assert host.nvml.locks == {}


def test_lock_is_forgotten_when_the_driver_was_away(host: Host) -> None:
    host.clocks.write(A, 1_200)
    host.nvml.reload_driver()
    assert host.clocks.read(A).requested is None


def test_clock_lock_is_dropped_after_a_driver_reload_seen_by_another_actuator(host: Host) -> None:
    host.clocks.write(A, 1_200)
    host.nvml.reload_driver()
    GpuPower(host.boards, host.clock).read(A)
    assert host.clocks.read(A).requested is None
