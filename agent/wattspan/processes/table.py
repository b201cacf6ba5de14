"""Tracked processes, and the fastest way to read their CPU clocks.

Reading the clocks of thousands of idle processes ten times a second would be the largest cost, and
nearly always useless. The kernel's sum over all processes, exact to the nanosecond, shows whether
there was work beyond that of the active processes: only then are the idle ones read, and in any
case once a second. Up to ``tolerance`` of a poll's work may thus be charged up to a second late;
none is lost. Without such a sum the idle processes are read at every poll.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from itertools import compress

from wattspan.model import MILLISECOND, SECOND, Consumer, PayerInfo
from wattspan.processes.cgroups import TotalCpuClock

ReadClock = Callable[[int], int]
"""Nanoseconds of the CPU clock with this id; OSError once its process is gone."""

GONE = -1


def clock_id(pid: int) -> int:
    """The id of a process's CPU clock, all its threads together (CPUCLOCK_SCHED)."""
    return (~pid << 3) | 2


class TrackedProcess:
    """One process under watch."""

    __slots__ = (
        "active",
        "cgroup_text",
        "charged",
        "clock_list",
        "command",
        "consumer",
        "exit_cpu",
        "footprint",
        "index",
        "info",
        "kernel",
        "next_placement",
        "parent",
        "reviewed",
        "weights",
    )

    def __init__(
        self, consumer: Consumer, charged: int, command: str, parent: int, *, kernel: bool = False
    ) -> None:
        self.consumer = consumer
        self.command = command  # as the kernel called it when it was first seen
        self.parent = parent
        self.kernel = kernel
        self.charged = charged  # how far its clock has been accounted for
        self.active = 0  # the sweep in which it last did something
        self.clock_list: ClockList | None = None  # the list it is in; None once it is gone
        self.index = -1
        self.info: PayerInfo | None = None  # None until it has used a CPU
        self.cgroup_text = ""  # its /proc/PID/cgroup
        self.reviewed = False  # whether it has been looked at for the second time
        self.footprint = 0  # bytes of memory it gave back at its end
        self.exit_cpu: int | None = None  # what the kernel said of its end, while it is still there
        self.weights: dict[int, float] | None = None  # by socket
        self.next_placement = 0  # when to see again where it runs, on the monotonic clock


class ClockList:
    """Rows, and beside them plain lists, so that asking all their clocks is three C loops.

    A process costs one system call (half a microsecond, twice that when it has slept so long
    that the caches have forgotten it), and nothing else unless its clock has moved.
    """

    def __init__(self, read_clock: ReadClock) -> None:
        self._read = read_clock
        self._rows: list[TrackedProcess] = []
        self._clocks: list[int] = []
        self._values: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[TrackedProcess]:
        return iter(self._rows)

    def add(self, row: TrackedProcess) -> None:
        row.clock_list, row.index = self, len(self._rows)
        self._rows.append(row)
        self._clocks.append(clock_id(row.consumer.pid))
        self._values.append(row.charged)

    def remove(self, row: TrackedProcess) -> None:
        """Forget a row; the last one takes its place."""
        at = row.index
        moved, clock, value = self._rows.pop(), self._clocks.pop(), self._values.pop()
        if moved is not row:
            self._rows[at], self._clocks[at], self._values[at] = moved, clock, value
            moved.index = at
        row.clock_list, row.index = None, -1

    def moved(self) -> list[tuple[TrackedProcess, int]]:
        """Read every clock: the rows whose clock has moved, and its value."""
        values = self._read_all()
        different = compress(range(len(values)), map(operator.ne, values, self._values))
        found = [(self._rows[at], values[at]) for at in different]
        self._values = values
        return found

    def _read_all(self) -> list[int]:
        values: list[int] = []
        rest = iter(self._clocks)
        while True:
            try:
                # Values before a failure stay in the list; the failed clock is consumed.
                values.extend(map(self._read, rest))
            except OSError:
                values.append(GONE)
            else:
                return values


class ProcessTable:
    """All rows by pid, in two lists: the active ones, read at every poll, and the idle ones.

    The owner decides when the idle ones are read; a process that has worked is active again.
    """

    def __init__(self, read_clock: ReadClock) -> None:
        self._read = read_clock
        self.active = ClockList(read_clock)
        self.idle = ClockList(read_clock)
        self._by_pid: dict[int, TrackedProcess] = {}
        self._sweep = 0

    def __len__(self) -> int:
        return len(self._by_pid)

    def __iter__(self) -> Iterator[int]:
        """Every pid under watch."""
        return iter(self._by_pid)

    def __contains__(self, pid: int) -> bool:
        return pid in self._by_pid

    def get(self, pid: int) -> TrackedProcess | None:
        return self._by_pid.get(pid)

    def clock(self, pid: int) -> int | None:
        """The clock of any process, tracked or not; None if there is none of this pid."""
        try:
            return self._read(clock_id(pid))
        except (OSError, OverflowError):
            return None

    def add(self, row: TrackedProcess) -> None:
        row.active = self._sweep
        self._by_pid[row.consumer.pid] = row
        self.active.add(row)

    def remove(self, row: TrackedProcess) -> None:
        if row.clock_list is not None:
            row.clock_list.remove(row)
            del self._by_pid[row.consumer.pid]

    def worked(self, row: TrackedProcess, value: int) -> None:
        """Note that a process did something: its clock is at ``value``, all accounted for."""
        row.charged = value
        row.active = self._sweep
        if row.clock_list is self.idle:
            self.wake(row.consumer.pid)

    def wake(self, pid: int) -> None:
        """Make this process active: its clock is read at the next poll."""
        row = self._by_pid.get(pid)
        if row is not None and row.clock_list is self.idle:
            self.idle.remove(row)
            self.active.add(row)

    def sweep(self, patience: int) -> None:
        """Move the processes without work in the last ``patience`` sweeps to the idle list."""
        self._sweep += 1
        for row in [row for row in self.active if self._sweep - row.active > patience]:
            self.active.remove(row)
            self.idle.add(row)

    def rebase(self) -> None:
        """Forget what every process did up to now."""
        for row, value in [*self.active.moved(), *self.idle.moved()]:
            row.charged = max(row.charged, value)


IDLE_SCAN_INTERVAL = SECOND
"""Longest interval between two reads of the idle processes."""

IDLE_AFTER = 10
"""Seconds without any work after which a process counts as a sleeper."""

TOLERANCE_DIVISOR = 1000
"""Work of one part in this of the host's capacity may go unnoticed for a moment."""


def tolerance(capacity: int) -> int:
    """The nanoseconds that may be charged late, given what could have been done in a poll."""
    return max(MILLISECOND // 2, capacity // TOLERANCE_DIVISOR)


class IdleScanner:
    """Compares charges with the kernel's sum since the last read of all clocks."""

    def __init__(self, total: TotalCpuClock | None) -> None:
        self._total = total
        self._now: int | None = None
        self._since: int | None = None
        self._charged = 0
        self._next = 0

    @property
    def total(self) -> TotalCpuClock | None:
        return self._total

    def read(self) -> None:
        """To be called before any clock of a process is read."""
        self._now = self._total.read() if self._total is not None else None

    def charged(self, amount: int) -> None:
        """So much of the sum has been charged."""
        self._charged += amount

    def due(self, mono: int, capacity: int) -> bool:
        """True if the clocks of idle processes must be read now."""
        if self._now is None or self._since is None or mono >= self._next:
            return True
        return self._now - self._since - self._charged > tolerance(capacity)

    def scanned(self, mono: int) -> None:
        """All clocks have been read: the remaining difference belongs to no tracked process."""
        self._next = mono + IDLE_SCAN_INTERVAL
        self._since, self._charged = self._now, 0
        if self._total is not None:
            self._total.refresh()
