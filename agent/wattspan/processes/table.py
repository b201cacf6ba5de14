"""The processes under watch, and the fastest way to ask their clocks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from itertools import compress

from wattspan.model import Consumer, PayerInfo

ReadClock = Callable[[int], int]
"""Nanoseconds of the CPU clock with this id; OSError once its process is gone."""

GONE = -1


def clock_id(pid: int) -> int:
    """The id of a process's CPU clock, all its threads together (CPUCLOCK_SCHED)."""
    return (~pid << 3) | 2


class Tracked:
    """One process under watch."""

    __slots__ = (
        "active",
        "charged",
        "command",
        "consumer",
        "final",
        "footprint",
        "index",
        "info",
        "kernel",
        "known",
        "look",
        "parent",
        "rank",
        "text",
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
        self.rank: Rank | None = None  # the rank it stands in; None once it is gone
        self.index = -1
        self.info: PayerInfo | None = None  # None until it has used a CPU
        self.text = ""  # its /proc/PID/cgroup
        self.known = False  # whether it has been looked at for the second time
        self.footprint = 0  # bytes of memory it gave back at its end
        self.final: int | None = None  # what the kernel said of its end, while it is still there
        self.weights: dict[int, float] | None = None  # by socket
        self.look = 0  # when to see again where it runs, on the monotonic clock


class Rank:
    """Rows, and beside them plain lists, so that asking all their clocks is three C loops.

    A process costs one system call (half a microsecond, twice that when it has slept so long
    that the caches have forgotten it), and nothing else unless its clock has moved.
    """

    def __init__(self, read_clock: ReadClock) -> None:
        self._read = read_clock
        self._rows: list[Tracked] = []
        self._clocks: list[int] = []
        self._values: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self._rows)

    def add(self, row: Tracked) -> None:
        row.rank, row.index = self, len(self._rows)
        self._rows.append(row)
        self._clocks.append(clock_id(row.consumer.pid))
        self._values.append(row.charged)

    def remove(self, row: Tracked) -> None:
        """Forget a row; the last one takes its place."""
        at = row.index
        moved, clock, value = self._rows.pop(), self._clocks.pop(), self._values.pop()
        if moved is not row:
            self._rows[at], self._clocks[at], self._values[at] = moved, clock, value
            moved.index = at
        row.rank, row.index = None, -1

    def moved(self) -> list[tuple[Tracked, int]]:
        """Ask every clock: the rows whose clock is not where it was, and where it is now."""
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
                # What came before a failure stays in the list; the failed clock is consumed.
                values.extend(map(self._read, rest))
            except OSError:
                values.append(GONE)
            else:
                return values


class ProcessTable:
    """All rows by pid, in two ranks: the awake, asked at every poll, and the sleepers.

    When the sleepers are asked is for the owner to say; who did something is awake again.
    """

    def __init__(self, read_clock: ReadClock) -> None:
        self._read = read_clock
        self.awake = Rank(read_clock)
        self.asleep = Rank(read_clock)
        self._by_pid: dict[int, Tracked] = {}
        self._sweep = 0

    def __len__(self) -> int:
        return len(self._by_pid)

    def __iter__(self) -> Iterator[int]:
        """Every pid under watch."""
        return iter(self._by_pid)

    def __contains__(self, pid: int) -> bool:
        return pid in self._by_pid

    def get(self, pid: int) -> Tracked | None:
        return self._by_pid.get(pid)

    def clock(self, pid: int) -> int | None:
        """The clock of any process, watched or not; None if there is none of this pid."""
        try:
            return self._read(clock_id(pid))
        except (OSError, OverflowError):
            return None

    def add(self, row: Tracked) -> None:
        row.active = self._sweep
        self._by_pid[row.consumer.pid] = row
        self.awake.add(row)

    def remove(self, row: Tracked) -> None:
        if row.rank is not None:
            row.rank.remove(row)
            del self._by_pid[row.consumer.pid]

    def worked(self, row: Tracked, value: int) -> None:
        """Note that a process did something: its clock is at ``value``, all accounted for."""
        row.charged = value
        row.active = self._sweep
        if row.rank is self.asleep:
            self.wake(row.consumer.pid)

    def wake(self, pid: int) -> None:
        """Have this process asked at the next poll."""
        row = self._by_pid.get(pid)
        if row is not None and row.rank is self.asleep:
            self.asleep.remove(row)
            self.awake.add(row)

    def sweep(self, patience: int) -> None:
        """Let those sleep who did nothing in the last ``patience`` sweeps."""
        self._sweep += 1
        for row in [row for row in self.awake if self._sweep - row.active > patience]:
            self.awake.remove(row)
            self.asleep.add(row)

    def rebase(self) -> None:
        """Forget what every process did up to now."""
        for row, value in [*self.awake.moved(), *self.asleep.moved()]:
            row.charged = max(row.charged, value)
