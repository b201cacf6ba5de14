"""How long each of this machine's CPUs has been busy, and what that is on emulated sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from wattspan.clock import SystemClock
from wattspan.ports import Clock
from wattspan.processes.busy import AccountedBusy, BusyClock, IdleComplement

CpuLoad = Callable[[], Mapping[int, int]]
"""CPU nanoseconds that each CPU has spent since some fixed moment, by CPU number."""

_CPUACCT = ("fs/cgroup/cpuacct", "fs/cgroup/cpu,cpuacct")


def open_cpu_load(
    clock: Clock | None = None, *, sysfs: Path = Path("/sys"), procfs: Path = Path("/proc")
) -> CpuLoad:
    """The most precise account of CPU time this machine has: the one the agent itself uses."""
    ticking = clock or SystemClock()
    busy = _open_busy(sysfs, procfs)
    newest: dict[int, int] = {}

    def load() -> Mapping[int, int]:
        newest.update(busy.read(ticking.monotonic()) or {})
        return newest

    return load


def _open_busy(sysfs: Path, procfs: Path) -> BusyClock:
    for name in _CPUACCT:
        try:
            return AccountedBusy(sysfs / name)
        except OSError:
            continue
    return IdleComplement(procfs)


def on_sockets(load: CpuLoad, socket_of_cpu: Sequence[int]) -> Callable[[], Sequence[int]]:
    """The load of each emulated socket: the sum over the real CPUs that stand for it.

    CPUs beyond ``socket_of_cpu`` belong to the last socket. A CPU that goes offline keeps what
    it had spent, so no sum ever falls.
    """
    sockets = max(socket_of_cpu) + 1
    highest: dict[int, int] = {}

    def sums() -> Sequence[int]:
        for cpu, busy in load().items():
            highest[cpu] = max(highest.get(cpu, 0), busy)
        totals = [0] * sockets
        for cpu, busy in highest.items():
            totals[socket_of_cpu[min(cpu, len(socket_of_cpu) - 1)]] += busy
        return totals

    return sums
