"""How long each of this machine's CPUs has been busy, and what that is on emulated sockets."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

CpuLoad = Callable[[], Sequence[int]]
"""CPU nanoseconds that each CPU has spent since some fixed moment, by CPU number."""

_CPUACCT = (
    "fs/cgroup/cpuacct/cpuacct.usage_percpu",
    "fs/cgroup/cpu,cpuacct/cpuacct.usage_percpu",
)


class CgroupLoad:
    """The root cgroup's account by CPU (cgroup v1), in nanoseconds.

    It is what the scheduler charged to all tasks, by the clock that their CPU times come from.
    """

    def __init__(self, path: Path) -> None:
        """OSError if there is no such account."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __call__(self) -> Sequence[int]:
        return [int(value) for value in os.pread(self._fd, 65536, 0).split()]

    def close(self) -> None:
        os.close(self._fd)


class StatLoad:
    """``/proc/stat``: every machine has it, in ticks of 10 ms that are sampled on many kernels.

    Busy is user, nice, system, interrupts; not idle, waiting, or stolen by the hypervisor. Guest
    time is in user already.
    """

    def __init__(self, path: Path) -> None:
        """OSError if it cannot be read."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._tick = 1_000_000_000 // os.sysconf("SC_CLK_TCK")

    def __call__(self) -> Sequence[int]:
        return [busy * self._tick for busy in busy_ticks(os.pread(self._fd, 1 << 20, 0))]

    def close(self) -> None:
        os.close(self._fd)


def busy_ticks(stat: bytes) -> list[int]:
    """Busy ticks by CPU number out of ``/proc/stat``; 0 for a CPU that is offline."""
    by_cpu: dict[int, int] = {}
    for line in stat.splitlines():
        label, *fields = line.split()
        if not label.startswith(b"cpu"):
            break  # the CPUs come first
        if label != b"cpu":
            user, nice, system, _idle, _iowait, irq, softirq = (int(f) for f in fields[:7])
            by_cpu[int(label[3:])] = user + nice + system + irq + softirq
    return [by_cpu.get(cpu, 0) for cpu in range(max(by_cpu, default=-1) + 1)]


def open_cpu_load(*, sysfs: Path = Path("/sys"), procfs: Path = Path("/proc")) -> CpuLoad:
    """The most precise account of CPU time this machine has."""
    for name in _CPUACCT:
        try:
            return CgroupLoad(sysfs / name)
        except OSError:
            continue
    return StatLoad(procfs / "stat")


def on_sockets(load: CpuLoad, socket_of_cpu: Sequence[int]) -> Callable[[], Sequence[int]]:
    """The load of each emulated socket: the sum over the real CPUs that stand for it.

    CPUs beyond ``socket_of_cpu`` belong to the last socket. A CPU that goes offline keeps what
    it had spent, so no sum ever falls.
    """
    sockets = max(socket_of_cpu) + 1
    highest: list[int] = []

    def sums() -> Sequence[int]:
        now = load()
        highest.extend([0] * (len(now) - len(highest)))
        totals = [0] * sockets
        for cpu, busy in enumerate(now):
            highest[cpu] = max(highest[cpu], busy)
        for cpu, busy in enumerate(highest):
            totals[socket_of_cpu[min(cpu, len(socket_of_cpu) - 1)]] += busy
        return totals

    return sums
