"""CPU time by CPU from ``/proc/stat``, and the socket each CPU sits in from sysfs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


class StatFile:
    """``/proc/stat``, held open. Moves in clock ticks: 10 ms."""

    def __init__(self, path: Path) -> None:
        """OSError if it cannot be opened."""
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._tick = 1_000_000_000 // os.sysconf("SC_CLK_TCK")

    def busy(self) -> dict[int, int]:
        """Nanoseconds each online CPU has been busy; ValueError if the file makes no sense."""
        ticks = busy_ticks(os.pread(self._fd, 1 << 20, 0))
        if not ticks:
            raise ValueError(f"{self.path} names no CPU")
        return {cpu: busy * self._tick for cpu, busy in ticks.items()}

    def close(self) -> None:
        os.close(self._fd)


def busy_ticks(stat: bytes) -> dict[int, int]:
    """Busy ticks by CPU: user, nice, system and interrupts.

    Not idle, waiting, or stolen by the hypervisor; guest time is in user already.
    """
    busy = {}
    for line in stat.splitlines():
        label, *fields = line.split()
        if not label.startswith(b"cpu"):
            break  # the CPUs come first
        if label != b"cpu":
            user, nice, system, _idle, _iowait, irq, softirq = (int(f) for f in fields[:7])
            busy[int(label[3:])] = user + nice + system + irq + softirq
    return busy


def sockets_of_cpus(sysfs: Path, cpus: Iterable[int]) -> dict[int, int]:
    """The socket of each CPU; 0 where the host does not tell (some virtual machines say -1)."""
    return {cpu: _socket(sysfs / f"devices/system/cpu/cpu{cpu}/topology") for cpu in cpus}


def _socket(topology: Path) -> int:
    try:
        return max(0, int((topology / "physical_package_id").read_text()))
    except (OSError, ValueError):
        return 0
