"""ACPI power meters of an emulated host, as the kernel's ``power_meter`` driver shows them.

A meter shows the mean power of its last whole interval. Its files are in the directory of its
device, where older kernels have them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from wattspan.emulation.powercap_tree import CounterScope
from wattspan.model import MILLISECOND

_CLASS = "class/hwmon"
_DEVICES = "devices/LNXSYSTM:00"
_WIDTH = 24  # of a value's file, so that no write changes its length


@dataclass(frozen=True, slots=True)
class EmulatedMeter:
    """A power meter: its label, the energy that it measures, and its interval in nanoseconds."""

    label: str
    scope: CounterScope
    interval: int = 50 * MILLISECOND


class PowerMeters:
    """The files of some meters below ``root``, which represents ``/sys``. Not thread-safe."""

    def __init__(self, root: Path, meters: Sequence[EmulatedMeter]) -> None:
        self._meters = meters
        self._files: list[int] = []
        self._last: list[tuple[int, int] | None] = [None] * len(meters)  # time, picojoules
        for number, meter in enumerate(meters):
            device = root / _DEVICES / f"ACPI000D:{number:02x}"
            hwmon = device / f"hwmon/hwmon{number}"
            hwmon.mkdir(parents=True)
            (hwmon / "device").symlink_to("../..")
            for folder in (hwmon, device):
                (folder / "name").write_text("power_meter\n")
            (device / "power1_oem_info").write_text(f"{meter.label}\n")
            (device / "power1_average_interval").write_text(f"{meter.interval // MILLISECOND}\n")
            by_class = root / _CLASS
            by_class.mkdir(parents=True, exist_ok=True)
            (by_class / hwmon.name).symlink_to(os.path.relpath(hwmon, by_class))
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._files.append(os.open(device / "power1_average", flags, 0o444))
            self._show(number, 0)

    def step(self, at: int, picojoules: Callable[[CounterScope], int]) -> None:
        """Time has come to ``at``; a meter whose interval has passed shows its mean power."""
        for number, meter in enumerate(self._meters):
            last, energy = self._last[number], picojoules(meter.scope)
            if last is None:
                self._last[number] = (at, energy)
            elif at - last[0] >= meter.interval:
                # Picojoules over nanoseconds are milliwatts.
                self._show(number, 1000 * (energy - last[1]) // (at - last[0]))
                self._last[number] = (at, energy)

    def _show(self, number: int, microwatts: int) -> None:
        os.pwrite(self._files[number], (b"%d" % microwatts).ljust(_WIDTH, b"\n"), 0)

    def close(self) -> None:
        """Close the files; the tree stays."""
        for fd in self._files:
            os.close(fd)
        self._files = []
