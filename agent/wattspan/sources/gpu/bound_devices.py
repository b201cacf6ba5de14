"""The PCI devices that a driver has: a board that appears while others are read is noticed by them.

A driver's library lists its boards when it is initialised. Without a board that is missing there is
no reason to initialise it again, so that a board which is added or bound later stays unknown.
"""

from __future__ import annotations

from pathlib import Path

from wattspan.model import SECOND

SYSFS = Path("/sys")
LOOK_INTERVAL = 5 * SECOND
SETTLING = 30 * SECOND
"""A driver has a device before it can be used: it is reported again after this time."""


class BoundDevices:
    """The devices of ``driver`` in ``<sysfs>/bus/pci/drivers``; none if it is not loaded."""

    def __init__(self, sysfs: Path, driver: str) -> None:
        self._directory = sysfs / "bus/pci/drivers" / driver
        self._present: frozenset[str] | None = None
        self._due = 0
        self._settled: int | None = None

    def appeared(self, now: int) -> bool:
        """True at the first look after a device was added, and once more after ``SETTLING``.

        ``now`` is monotonic. The first call finds the devices that are there already.
        """
        if now < self._due:
            return False
        self._due = now + LOOK_INTERVAL
        before, self._present = self._present, self._look()
        if before is not None and self._present - before:
            self._settled = now + SETTLING
            return True
        if self._settled is not None and now >= self._settled:
            self._settled = None
            return True
        return False

    def suspended(self, address: str) -> bool:
        """True if the kernel has powered the device down: a call of its driver would wake it."""
        if not address:
            return False
        try:
            status = (self._directory / address / "power/runtime_status").read_text()
        except OSError:
            return False
        return status.strip() in {"suspended", "suspending"}

    def all_suspended(self) -> bool:
        """True if there are devices, and all of them are suspended."""
        present = self._look()
        return bool(present) and all(map(self.suspended, present))

    def _look(self) -> frozenset[str]:
        try:
            return frozenset(entry.name for entry in self._directory.iterdir() if ":" in entry.name)
        except OSError:
            return frozenset()
