"""Devices that are added to a driver while others are read."""

from __future__ import annotations

from pathlib import Path

from wattspan.model import SECOND
from wattspan.sources.gpu.session import LOOK_INTERVAL, SETTLING, BoundDevices


def bind(sysfs: Path, address: str) -> Path:
    device = sysfs / "bus/pci/drivers/nvidia" / address
    device.mkdir(parents=True)
    return device


def looks(bound: BoundDevices, start: int, seconds: int) -> list[int]:
    """The seconds after ``start`` at which a device is reported, with a call each second."""
    return [at for at in range(seconds) if bound.appeared((start + at) * SECOND)]


def test_devices_that_are_there_from_the_start_are_not_reported(tmp_path: Path) -> None:
    bind(tmp_path, "0000:10:00.0")
    assert looks(BoundDevices(tmp_path, "nvidia"), 0, 100) == []


def test_added_device_is_reported_at_once_and_when_it_can_be_used(tmp_path: Path) -> None:
    bind(tmp_path, "0000:10:00.0")
    bound = BoundDevices(tmp_path, "nvidia")
    assert looks(bound, 0, 2) == []
    bind(tmp_path, "0000:11:00.0")
    found = looks(bound, 2, 100)
    assert len(found) == 2
    assert found[0] <= LOOK_INTERVAL / SECOND
    assert found[1] - found[0] >= SETTLING / SECOND


def test_removed_device_is_not_reported_until_it_returns(tmp_path: Path) -> None:
    device = bind(tmp_path, "0000:10:00.0")
    bound = BoundDevices(tmp_path, "nvidia")
    assert looks(bound, 0, 6) == []
    device.rmdir()
    assert looks(bound, 6, 60) == []
    device.mkdir()
    assert len(looks(bound, 66, 60)) == 2


def test_files_of_the_driver_are_no_devices(tmp_path: Path) -> None:
    bound = BoundDevices(tmp_path, "nvidia")
    assert looks(bound, 0, 1) == []  # the driver is not loaded
    bind(tmp_path, "bind")
    assert looks(bound, 1, 60) == []
