"""Tracked processes, and the fastest way to read their CPU clocks.

Reading the clocks of thousands of idle processes ten times a second would be the largest cost of
the agent, for few results. The kernel's exact sum over all processes shows if there was work beyond
that of the active processes: only then are the idle ones read, and in any case every five seconds.
Up to ``tolerance`` of the work of a poll may thus be charged five seconds late. Idle processes that
the sum leaves out are read once a second. Without such a sum all are read at every poll.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import compress

from wattspan.model import MILLISECOND, SECOND, Consumer, Payer, PayerInfo
from wattspan.processes.cgroups import TotalCpuClock

ReadClock = Callable[[int], int]
"""Nanoseconds of the CPU clock with an id; OSError after the end of its process."""

GONE = -1


def clock_id(pid: int) -> int:
    """The id of the CPU clock of a process with all its threads (CPUCLOCK_SCHED)."""
    return (~pid << 3) | 2


@dataclass(slots=True, eq=False)
class TrackedProcess:
    """One tracked process."""

    consumer: Consumer
    charged: int  # value of its clock that has been charged
    command: str  # the kernel's name at the last description
    parent: int
    kernel: bool = False
    active: int = 0  # sweep of its last work
    clock_list: ClockList | None = None  # None once it has ended
    index: int = -1
    info: PayerInfo | None = None  # None until it has used a CPU
    cgroup_text: str = ""  # its /proc/PID/cgroup
    reviewed: bool = False  # a second description is scheduled or done
    exit_cpu: int | None = None  # CPU time of its exit record, until its clock is gone
    exit_memory: int = 0  # of the same record, KiB
    weights: Mapping[int, float] | None = None  # by socket
    next_placement: int = 0  # monotonic time from which a sample of its socket is due


class ClockList:
    """Rows with parallel lists of clocks and values, which three C loops read and compare.

    A process costs one system call of half a microsecond (a whole one after a long sleep, when it
    is in no cache), and nothing else unless its clock has moved.
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
        """Remove a row; the last one takes its place."""
        at = row.index
        moved, clock, value = self._rows.pop(), self._clocks.pop(), self._values.pop()
        if moved is not row:
            self._rows[at], self._clocks[at], self._values[at] = moved, clock, value
            moved.index = at
        row.clock_list, row.index = None, -1

    def moved(self, values: list[int] | None = None) -> list[tuple[TrackedProcess, int]]:
        """Read every clock; returns the rows with a changed clock, and its value.

        ``values`` are those of an earlier ``read``, since which no row was added or removed.
        """
        values = self.read() if values is None else values
        different = compress(range(len(values)), map(operator.ne, values, self._values))
        found = [(self._rows[at], values[at]) for at in different]
        self._values = values
        return found

    def spent(self, values: list[int], *, kernel: bool) -> int:
        """The CPU time in ``values`` since the last call of ``moved``.

        Without ``kernel``, that of kernel threads is left out.
        """
        if kernel:
            return sum(values) - sum(self._values)
        return sum(
            value - before
            for row, value, before in zip(self._rows, values, self._values, strict=True)
            if value != before and not row.kernel
        )

    def read(self) -> list[int]:
        """The values of all clocks; GONE for those of ended processes."""
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
    """All rows by pid: active ones, which every poll reads, and idle ones.

    A process becomes active with any work. ``in_sum`` tells of an idle one whether the kernel's sum
    includes its work; ``idle`` has those, and ``apart`` has the others.
    """

    def __init__(
        self, read_clock: ReadClock, in_sum: Callable[[TrackedProcess], bool] = lambda _: True
    ) -> None:
        self._read, self._in_sum = read_clock, in_sum
        self.active = ClockList(read_clock)
        self.idle = ClockList(read_clock)
        self.apart = ClockList(read_clock)
        self._by_pid: dict[int, TrackedProcess] = {}
        self._sweep = 0

    def __len__(self) -> int:
        return len(self._by_pid)

    def __iter__(self) -> Iterator[int]:
        """Every tracked pid."""
        return iter(self._by_pid)

    def __contains__(self, pid: int) -> bool:
        return pid in self._by_pid

    def get(self, pid: int) -> TrackedProcess | None:
        return self._by_pid.get(pid)

    def rows(self, pids: Iterable[int]) -> list[TrackedProcess]:
        """The tracked ones of these processes."""
        return [self._by_pid[pid] for pid in self._by_pid.keys() & pids]

    def clock(self, pid: int) -> int | None:
        """The clock of any process, tracked or not; None without a process of this pid."""
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
        """Record that the clock of a process is charged up to ``value``."""
        row.charged = value
        row.active = self._sweep
        if row.clock_list is not self.active:
            self.wake((row.consumer.pid,))

    def wake(self, pids: Iterable[int]) -> None:
        """Make these processes active, as far as they are tracked."""
        for row in self.rows(pids):
            if row.clock_list is not None and row.clock_list is not self.active:
                row.clock_list.remove(row)
                self.active.add(row)

    def watch(self, payers: Collection[Payer]) -> list[TrackedProcess]:
        """Make these payers active, as far as they are tracked; returns their rows."""
        pids = {payer.pid for payer in payers if isinstance(payer, Consumer)}
        rows = [row for row in self.rows(pids) if row.consumer in payers]
        self.wake(row.consumer.pid for row in rows)
        return rows

    def sweep(self, patience: int) -> None:
        """Move the processes without work in the last ``patience`` sweeps to the idle lists."""
        self._sweep += 1
        for row in [row for row in self.active if self._sweep - row.active > patience]:
            self.active.remove(row)
            (self.idle if self._in_sum(row) else self.apart).add(row)

    def rebase(self) -> None:
        """Ignore all work up to now."""
        for row, value in [*self.active.moved(), *self.idle.moved(), *self.apart.moved()]:
            row.charged = max(row.charged, value)


SWEEP_INTERVAL = SECOND
"""The first poll in each of these periods of monotonic time sweeps, and reads the idle processes
that the kernel's sum leaves out.

A poll that waits does not. The poller therefore settles at the first poll in each second.
"""

IDLE_SCAN_INTERVAL = 5 * SECOND
"""All idle processes are read at the first sweep in each of these periods."""

IDLE_AFTER = 10
"""Reads without any work after which a process is idle."""

TOLERANCE_DIVISOR = 1000
"""Ratio of the capacity of the host to the work that may be charged late."""


def tolerance(capacity: int) -> int:
    """The nanoseconds that may be charged late, from the CPU time available in a poll."""
    return max(MILLISECOND // 2, capacity // TOLERANCE_DIVISOR)


class IdleScanner:
    """Compares charges with the kernel's sum since the last read of all clocks."""

    def __init__(self, total: TotalCpuClock | None) -> None:
        self.total = total
        self.now: int | None = None
        """The sum at its last read; None if it is unknown."""
        self._since: int | None = None
        self._charged = 0
        self._period = self._swept = 0

    @property
    def covers_kernel(self) -> bool:
        return self.total is None or self.total.covers_kernel

    def read(self) -> int | None:
        """Read the sum; to be called before any clock of a process is read."""
        self.now = self.total.read() if self.total is not None else None
        return self.now

    def charged(self, amount: int) -> None:
        """Add charged time of the sum."""
        self._charged += amount

    def due(self, mono: int, capacity: int, uncharged: int = 0) -> bool:
        """True if the clocks of all idle processes must be read now.

        ``uncharged`` is time of the sum that is known and will be charged.
        """
        if self.now is None or self._since is None or mono // IDLE_SCAN_INTERVAL != self._period:
            return True
        return self.now - self._since - self._charged - uncharged > tolerance(capacity)

    def sweep_due(self, mono: int) -> bool:
        """True if the table must be swept now."""
        return mono // SWEEP_INTERVAL != self._swept

    def swept(self, mono: int, *, scanned: bool) -> None:
        """Restart; ``scanned`` after a read of all clocks."""
        self._swept = mono // SWEEP_INTERVAL
        if scanned:
            self._period = mono // IDLE_SCAN_INTERVAL
            self._since, self._charged = self.now, 0
        if self.total is not None:
            self.total.refresh()
