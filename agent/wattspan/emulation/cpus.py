"""The law by which an emulated host turns CPU time into energy.

Pure and linear, so that the energy of any process is known exactly from its CPU time: a socket
draws its idle power always, and a fixed number of joules for each second that a CPU is busy. Under
a power limit each busy second costs less, by the same part for every process, and gets less done.
No real processor is that simple; that is the point, the truth is known.

How long each of this machine's CPUs has been busy, and what that is on emulated sockets.

Work of processes that need no GPU: steps whose host's part is as fast as their socket's CPUs.

The CPU time of such a process is real and is what its energy follows; how far its steps come is
the emulated host's to say, for only there a package's power limit slows a CPU down.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wattspan.clock import SystemClock
from wattspan.emulation.powercap_tree import CounterScope
from wattspan.emulation.workloads import GpuWork, WorkLog
from wattspan.model import Microjoules, energy_at
from wattspan.ports import Clock
from wattspan.processes.cpus import BusyClock, CpuacctBusyClock, ProcStatBusyClock


@dataclass(frozen=True, slots=True)
class CpuLaw:
    """Milliwatts: at idle by socket, and on top for each busy CPU (so millijoules a CPU-second).

    ``board_idle`` is what psys sees beyond packages and memory. ``core_percent`` of the active
    package energy is the cores', ``uncore_percent`` of its idle energy the uncore's.
    """

    package_idle: int = 42_000
    package_active: int = 9_000
    dram_idle: int = 6_000
    dram_active: int = 1_500
    board_idle: int = 35_000
    core_percent: int = 75
    uncore_percent: int = 10

    def active(self, kind: str, cpu_ns: int) -> Microjoules:
        """The energy that ``cpu_ns`` of CPU time add to the ``package`` or ``dram`` counters."""
        power = {"package": self.package_active, "dram": self.dram_active}[kind]
        return energy_at(power, cpu_ns)

    def picojoules(
        self,
        meter: CounterScope,
        elapsed: int,
        busy: Sequence[int],
        cpus: Sequence[int],
        paid: Sequence[int] | None = None,
    ) -> int:
        """What ``meter`` has counted after ``elapsed`` ns, in 1e-12 J, exactly.

        ``busy`` is the CPU time of each socket since the start, ``cpus`` how many CPUs it has.
        ``paid`` is the part of that time whose active energy the package spent: all of it,
        unless a power limit slowed its CPUs down.
        """
        socket = meter.socket
        paid = busy if paid is None else paid
        if meter.kind == "psys":
            boards = self.board_idle * elapsed
            return boards + sum(
                self.picojoules(CounterScope(kind, number), elapsed, busy, cpus, paid)
                for number in range(len(busy))
                for kind in ("package", "dram")
            )
        whole = {
            "package": self.package_idle * elapsed + self.package_active * paid[socket],
            "dram": self.dram_idle * elapsed + self.dram_active * busy[socket],
            "core": self.package_active * paid[socket] * self.core_percent // 100,
            "lead-core": self.package_active
            * paid[socket]
            * self.core_percent
            // (100 * max(1, cpus[socket])),
            "uncore": self.package_idle * elapsed * self.uncore_percent // 100,
        }[meter.kind]
        # Cumulative thirds of a whole: the parts add up to it exactly.
        return whole * (meter.die + 1) // meter.dies - whole * meter.die // meter.dies


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
            return CpuacctBusyClock(sysfs / name)
        except OSError:
            continue
    return ProcStatBusyClock(procfs)


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


class CpuJobs:
    """Work by process. Stepped by whoever steps the counters; asked from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: dict[int, tuple[GpuWork, int]] = {}
        self._deeds: dict[int, WorkLog] = {}
        self._at: int | None = None

    def attach(self, pid: int, work: GpuWork, socket: int) -> None:
        """Let a process work on the CPUs of ``socket``."""
        with self._lock:
            self._works[pid] = (work, socket)
            self._deeds[pid] = WorkLog()

    def detach(self, pid: int) -> None:
        """Its work is over; what it finished stays known."""
        with self._lock:
            self._works.pop(pid, None)

    def work_of(self, pid: int) -> GpuWork:
        """How far a process has come; LookupError if it does not work here."""
        with self._lock:
            if pid not in self._works:
                raise LookupError(f"process {pid} has no work on the CPUs")
            return self._works[pid][0]

    def change_work(self, pid: int, change: Callable[[GpuWork], GpuWork]) -> None:
        """Let a process do something else from now on; LookupError if it does not work here."""
        work = self.work_of(pid)
        with self._lock:
            self._works[pid] = (change(work), self._works[pid][1])

    def deeds(self, pid: int) -> WorkLog:
        """What a process has finished."""
        with self._lock:
            return self._deeds.get(pid) or WorkLog()

    def step(self, at: int, speeds: Sequence[float]) -> None:
        """Time has come to ``at``, and until then the sockets were as fast as ``speeds``."""
        with self._lock:
            elapsed = 0 if self._at is None else at - self._at
            self._at = at
            for pid, (work, socket) in self._works.items():
                # Its "GPU" part is what waits for memory, and does not mind the clock.
                moved = work.after(elapsed, 1.0, speeds[socket])
                self._deeds[pid].note(at, moved.finished)
                self._works[pid] = (moved, socket)
