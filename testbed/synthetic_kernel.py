"""A kernel whose truth is known: processes that live, work, die and are given each other's pids."""

import errno
from array import array
from collections.abc import Callable, Mapping

from wattspan.clock import OWN_THREAD_CLOCK
from wattspan.model import Consumer, NamePolicy
from wattspan.processes.cgroups import CgroupTimes
from wattspan.processes.cpu_socket_division import ProcessSocketTimes
from wattspan.processes.kernel_events import ExitRecord, ProcessEvents
from wattspan.processes.performance_counters import ProcessCounters
from wattspan.processes.procfs import TICK, ProcFs, Stat
from wattspan.processes.source import CpuUsageSource
from wattspan.testing import ManualClock
from wattspan.util.cpu_topology import (
    CpuTopology,
)


class Life:
    def __init__(self, pid: int, parent: int, started: int, born: int, cgroup: str) -> None:
        self.pid, self.parent, self.started, self.born = pid, parent, started, born
        self.cgroup = cgroup
        self.allowed, self.processor = frozenset({0}), 0
        self.cpu = 0
        self.comm, self.last_comm = "work", "dead"
        self.zombie = False
        self.seen = False  # known to the source from its clock
        self.polled = False  # alive at a poll
        self.has_children = False
        self.mother: Life | None = None

    @property
    def consumer(self) -> Consumer:
        return Consumer(self.pid, self.started)


class Channel:
    """One of the kernel's two channels; ``losing`` drops messages and reports it later."""

    def __init__(self) -> None:
        self.waiting: list[object] = []
        self.losing = False
        self._lost = False

    def send(self, note: object) -> None:
        if self.losing:
            self._lost = True
        else:
            self.waiting.append(note)

    def pending(self) -> bool:
        return bool(self.waiting) or self._lost

    def drain(self, news: ProcessEvents) -> None:
        for note in self.waiting:
            if isinstance(note, ExitRecord):
                news.add_exit(note)
            elif isinstance(note, tuple):
                news.add_birth(*note)
            else:
                news.exited.add(note)
        self.waiting.clear()
        if self._lost:
            news.lost, self._lost = True, False

    def close(self) -> None:
        pass


class Envelope:
    """The clock of the one cgroup ``/``, where everybody is."""

    name = "synthetic"

    def __init__(self, kernel: "SyntheticKernel") -> None:
        self._kernel = kernel
        self._last = kernel.total
        self.reads = 0

    def path_in(self, text: str) -> str | None:
        return "/"

    def text_of(self, path: str) -> str:
        return f"0::{path}"

    def wanted(self, path: str) -> bool:
        return False

    def covering(self, path: str | None) -> str | None:
        return "/"

    def add(self, path: str) -> bool:
        return True

    def read(self) -> tuple[Mapping[str, int], Mapping[str, str | None]]:
        self.reads += 1
        self._kernel.own_cpu_time += self._kernel.cgroup_cost
        for life, nanoseconds in self._kernel.work_before_cgroup_read:
            self._kernel.run(life, nanoseconds)
        change, self._last = self._kernel.total - self._last, self._kernel.total
        return {"/": change}, {}

    def close(self) -> None:
        pass


class SyntheticKernel:
    """Replaces procfs, the CPU clocks, busy time and the kernel's channels."""

    name = "synthetic"
    step = 1
    covers_kernel = True
    has_ended = ProcFs.has_ended

    def __init__(self, pid_max: int = 320, cpus: int = 1) -> None:
        self.clock = ManualClock()
        self.alive: dict[int, Life] = {}
        self.dead: list[Life] = []
        self.births, self.finals = Channel(), Channel()
        self.hidden: set[int] = set()
        self.busy = array("q", [0] * cpus)
        self.tells_last_pid = True
        self.own_cpu_time = 0
        self.cgroup_cost = 0  # CPU time of each read of the cgroup's clock
        self.envelope = Envelope(self)
        self.work_before_cgroup_read: list[tuple[Life, int]] = []
        self.after_read: dict[int, Callable[[], None]] = {}  # events after the read of a clock
        self.lacks: Callable[[], bool] = lambda: False  # descriptors for the next read
        self.shortage: OSError | None = None
        self._pid_max = pid_max
        self._last_pid = 299

    # -------------------------------------------------------------------------- events

    def spawn(self, parent: int = 1, cgroup: str = "0::/\n") -> Life:
        self.clock.advance(ns=TICK)  # no pid is used twice within a tick of the clock
        pid = self._last_pid
        for _ in range(self._pid_max):
            pid = pid + 1 if pid < self._pid_max else 300
            if pid not in self.alive:
                break
        self._last_pid = pid
        life = Life(pid, parent, self._boot() // TICK, self._boot(), cgroup)
        life.mother = self.alive.get(parent)
        self.alive[pid] = life
        self.births.send((pid, parent))
        return life

    def run(self, life: Life, nanoseconds: int) -> None:
        life.cpu += nanoseconds
        self.busy[life.processor] += nanoseconds

    def exit(self, life: Life, *, reap: bool = True, tail: int = 0, memory: int = 0) -> None:
        """``tail`` is spent after the kernel has written the final figure down."""
        if not life.zombie:
            elapsed = self._boot() - life.born
            who = life.pid, life.parent, life.cpu, elapsed, life.last_comm
            record = ExitRecord(*who, 0, memory=memory)
            self.finals.send(record)
            self.run(life, tail)
            self.births.send(life.pid)
            life.zombie = True
            for child in self.alive.values():
                child.parent = 1 if child.parent == life.pid else child.parent
        if reap:
            del self.alive[life.pid]
            self.dead.append(life)

    @property
    def total(self) -> int:
        return sum(self.busy)

    @property
    def lives(self) -> list[Life]:
        return [*self.alive.values(), *self.dead]

    def truth(self) -> dict[int, int]:
        """The CPU time of the pids of which no process ended unseen."""
        by_pid: dict[int, int] = {}
        for life in self.lives:
            by_pid[life.pid] = by_pid.get(life.pid, 0) + life.cpu
        unseen = {life.pid for life in self.lives if not life.seen}
        return {pid: cpu for pid, cpu in by_pid.items() if cpu and pid not in unseen}

    # ------------------------------------------------------------------------- kernel interface

    def _fails(self) -> bool:
        if fails := self.lacks():
            self.shortage = OSError(errno.EMFILE, "Too many open files")
        return fails

    def pids(self) -> list[int]:
        return [] if self._fails() else [pid for pid in self.alive if pid not in self.hidden]

    def last_pid(self) -> int | None:
        return self._last_pid if self.tells_last_pid else None

    def pid_max(self) -> int:
        return self._pid_max

    def shows_all(self) -> bool:
        return not (self._fails() or self.hidden)

    def stat(self, pid: int) -> Stat | None:
        life = self.alive.get(pid)
        if self._fails() or life is None or pid in self.hidden:
            return None
        return Stat(
            pid, life.comm, life.parent, life.started, 1, life.processor, exiting=life.zombie
        )

    def cgroup(self, pid: int) -> str | None:
        return self.alive[pid].cgroup if pid in self.alive and not self._fails() else None

    def command_line(self, pid: int) -> bytes | None:
        return None if self._fails() else b"work\0"

    def user_id(self, pid: int) -> int | None:
        return 0 if pid in self.alive else None

    def threads(self, pid: int) -> list[int]:
        return [] if self._fails() else [pid]

    def affinity(self, pid: int) -> frozenset[int] | None:
        return self.alive[pid].allowed if pid in self.alive else None

    def read_clock(self, clock_id: int) -> int:
        if clock_id == OWN_THREAD_CLOCK:
            return self.own_cpu_time
        life = self.alive.get(~(clock_id >> 3))  # also of a hidden process, as in Linux
        if life is None:
            raise OSError(22, "Invalid argument")
        after = self.after_read.pop(life.pid, None)
        if after is not None:
            after()
        return life.cpu

    def read(self) -> int:
        """The CPU time of all processes."""
        return self.total

    def sample(self) -> bytes:
        """The busy time of the CPUs."""
        return self.busy.tobytes()

    def values(self, sample: bytes, mono: int) -> dict[int, int]:
        return dict(enumerate(array("q", sample)))

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _boot(self) -> int:
        return self.clock.monotonic()

    def source(
        self,
        *,
        events: bool = True,
        envelope: bool = False,
        busy: bool = True,
        vigil: bool = False,
        cgroups: Callable[[], CgroupTimes] | None = None,
        topology: CpuTopology | None = None,
        times: ProcessSocketTimes | None = None,
        counters: ProcessCounters | None = None,
        names: NamePolicy = NamePolicy.COMMAND,
    ) -> CpuUsageSource:
        present = CgroupTimes(self.envelope if envelope else None, self if vigil else None)
        return CpuUsageSource(
            self.clock,
            self,
            self.read_clock,
            topology or ONE_CPU,
            busy=self if busy else None,
            fork_events=self.births if events else None,
            exit_events=self.finals if events else None,
            cgroups=cgroups or (lambda: present),
            times=times,
            counters=counters,
            names=names,
        )


class _OneCpu:
    """A host with one CPU in one socket."""

    sockets = (0,)

    def socket_of(self, cpu: int) -> int:
        return 0

    def capacity(self, *, offline: bool = False) -> dict[int, int]:
        return {0: 1}

    def refresh(self) -> bool:
        return False


ONE_CPU = _OneCpu()
