"""Devices that the kernel may suspend: when they are read, and when they are left alone."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from wattspan.model import SECOND
from wattspan.sources.device_power import IDLE_TIME, LONGEST_IDLE_TIME, DevicePower


class Device:
    """Files of the kernel, and the power that reads them each second."""

    def __init__(self, root: Path, status: str = "active", control: str = "auto") -> None:
        self.files, self.now = root / "power", 1000 * SECOND
        self.files.mkdir()
        self.set("runtime_status", status)
        self.set("control", control)
        self.power = DevicePower(root)

    def set(self, name: str, value: str) -> None:
        (self.files / name).write_text(f"{value}\n")

    def run(self, seconds: int, *, idle: bool = True) -> list[int]:
        """The seconds in which the device was read."""
        read = []
        for second in range(seconds):
            if not self.power.is_quiet(self.now):
                read.append(second)
                self.power.observe(self.now, idle=idle)
            self.now += SECOND
        return read


@pytest.mark.parametrize("status", ["suspended", "suspending"])
def test_suspended_device_is_not_read(tmp_path: Path, status: str) -> None:
    assert Device(tmp_path, status).run(100) == []


@pytest.mark.parametrize("status", ["active", "resuming", "unsupported", "error", "", "nonsense"])
def test_working_device_is_read_whatever_its_status(tmp_path: Path, status: str) -> None:
    assert len(Device(tmp_path, status).run(100, idle=False)) == 100


@pytest.mark.parametrize(
    ("status", "control"),
    [("unsupported", "auto"), ("error", "auto"), ("", "auto"), ("active", "on"), ("active", "")],
)
def test_device_that_is_never_suspended_is_read_while_idle(
    tmp_path: Path, status: str, control: str
) -> None:
    assert len(Device(tmp_path, status, control).run(100)) == 100


def test_device_without_files_is_read(tmp_path: Path) -> None:
    power = DevicePower(tmp_path / "gone")
    assert not power.is_quiet(0)
    assert not any(power.observe(second * SECOND, idle=True) for second in range(100))


@pytest.mark.parametrize(
    ("delay", "rest"), [("1000", 4), ("5000", 8), ("10000", 13), ("-1", 8), ("9" * 30, 33)]
)
def test_idle_device_is_left_alone_for_longer_than_the_delay_of_the_kernel(
    tmp_path: Path, delay: str, rest: int
) -> None:
    device = Device(tmp_path)
    device.set("autosuspend_delay_ms", delay)
    first = IDLE_TIME // SECOND
    read = device.run(first + 40)
    assert read[: first + 1] == list(range(first + 1))
    assert read[first + 1] == first + rest


def test_device_that_is_not_suspended_in_its_rests_is_left_alone_less_and_less(
    tmp_path: Path,
) -> None:
    device = Device(tmp_path)
    read = device.run(40_000)
    rests = [b - a for a, b in itertools.pairwise(read) if b - a > 1]
    begins = [a for a, b in itertools.pairwise(read) if b - a > 1]
    assert set(rests) == {8}
    gaps = [b - a for a, b in itertools.pairwise(begins)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == pytest.approx(LONGEST_IDLE_TIME / SECOND, abs=10)


def test_device_that_was_suspended_is_soon_left_alone_again(tmp_path: Path) -> None:
    device = Device(tmp_path)
    device.run(500)
    device.set("runtime_status", "suspended")
    assert device.run(600) == []
    device.set("runtime_status", "active")
    read = device.run(30)
    assert read[0] == 0
    assert read[11] - read[10] == 8


def test_device_that_flaps_each_second_is_read_in_every_other(tmp_path: Path) -> None:
    device = Device(tmp_path)
    read = 0
    for second in range(100):
        device.set("runtime_status", "suspended" if second % 2 else "active")
        read += len(device.run(1))
    assert read == 50
