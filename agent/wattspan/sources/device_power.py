"""Power of devices: whose it is, and devices that the kernel suspends while nobody uses them.

A read of a suspended device wakes it, and its energy meanwhile is unknown. Each read of an idle
device restarts the time after which the kernel suspends it, and an open handle of some drivers
keeps it awake for ever. A device that may be suspended is therefore left alone for a while once it
is idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from wattspan.model import MILLISECOND, SECOND, Nanoseconds, Thing, ThingKind
from wattspan.util.cpu_topology import CpuTopology
from wattspan.util.files import file_text

IDLE_TIME = 10 * SECOND
"""The time without work after which a device is left alone first."""

LONGEST_IDLE_TIME = 3600 * SECOND
"""The same after some rests in which the kernel did not suspend it: something else needs it."""

USUAL_DELAY, LONGEST_DELAY = 5 * SECOND, 30 * SECOND
REST_MARGIN = 3 * SECOND
"""A rest is longer than the kernel's delay by this: five seconds where the driver has none."""


class DevicePower:
    """One device, by its directory in sysfs: whether it is suspended, or left alone.

    A status that is absent, "unsupported" or "error" is of a device that the kernel keeps awake.
    """

    def __init__(self, device: Path) -> None:
        self._power = device / "power"
        self._status = self._power / "runtime_status"
        self._idle_since: int | None = None
        self._idle_time = IDLE_TIME
        self._rest_until = 0
        self.rest = Nanoseconds(0)
        """The length of the last rest."""

    @property
    def is_managed(self) -> bool:
        """True if the kernel may suspend the device by itself."""
        automatic = file_text(self._power / "control") == "auto"
        return automatic and self.status not in {"", "unsupported", "error"}

    @property
    def status(self) -> str:
        """The kernel's ``runtime_status``; "" if it cannot be read."""
        return file_text(self._status)

    def is_suspended(self) -> bool:
        """True if a read would wake the device, or keep it from being suspended just now."""
        suspended = self.status in {"suspended", "suspending"}
        if suspended:  # the rest has served its purpose
            self._rest_until, self._idle_time, self._idle_since = 0, IDLE_TIME, None
        return suspended

    def is_quiet(self, now: int) -> bool:
        """True if the device must not be read at the monotonic time ``now``."""
        return self.is_suspended() or now < self._rest_until

    def observe(
        self, now: int, *, idle: bool, can_suspend: Callable[[], bool] = lambda: True
    ) -> bool:
        """Record at a read if the device was idle since the last one; True if a rest begins.

        ``can_suspend`` is asked after each idle time: False if its driver never suspends it.
        """
        if not idle:
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = now
        if now - self._idle_since < self._idle_time:
            return False
        if not (can_suspend() and self.is_managed):
            self._idle_since = now
            return False
        delay = file_text(self._power / "autosuspend_delay_ms")
        milliseconds = int(delay) if delay.isascii() and delay.isdigit() else None
        wait = USUAL_DELAY if milliseconds is None else milliseconds * MILLISECOND
        self.rest = Nanoseconds(min(wait, LONGEST_DELAY) + REST_MARGIN)
        self._rest_until = now + self.rest
        self._idle_since, self._idle_time = None, min(2 * self._idle_time, LONGEST_IDLE_TIME)
        return True


_MI300A = "0x74a0"  # the id of the PCI device


def processor_around(chips: Iterable[Path], cpus: Callable[[], CpuTopology]) -> Thing | None:
    """The processor whose power a GPU of AMD shows, as it is in it (an APU); None of a card.

    ``chips`` are its directories in hwmon. The driver shows the voltage of a northbridge ("vddnb")
    of such GPUs only, and none of the MI300A, which has all of the socket's memory in it.
    """
    for chip in chips:
        gpu = chip / "device"
        stacked = file_text(gpu / "device") == _MI300A
        if stacked or file_text(chip / "in1_label") == "vddnb":
            return Thing(ThingKind.SOCKET, cpus().socket_near(gpu), memory=stacked)
    return None
