"""The processes under watch, and the fastest way to ask all their clocks."""

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
        "charged",
        "command",
        "consumer",
        "final",
        "index",
        "info",
        "known",
        "parent",
        "text",
        "weights",
    )

    def __init__(self, consumer: Consumer, charged: int, command: str, parent: int) -> None:
        self.consumer = consumer
        self.command = command  # as the kernel called it when it was first seen
        self.parent = parent
        self.charged = charged  # how far its clock has been accounted for
        self.index = -1
        self.info: PayerInfo | None = None  # None until it has used a CPU
        self.text = ""  # its /proc/PID/cgroup
        self.known = False  # whether it has been looked at for the second time
        self.final: int | None = None  # what the kernel said of its end, while it is still there
        self.weights: dict[int, float] | None = None  # by socket


class ProcessTable:
    """Rows by pid, and beside them plain lists, so that a poll is three C loops.

    A process costs one system call a poll (about half a microsecond), and nothing else unless
    its clock has moved. Sleeping ones are not left out on purpose: one that wakes would be
    charged late, in an interval whose energy it did not spend.
    """

    def __init__(self, read_clock: ReadClock) -> None:
        self._read = read_clock
        self._rows: list[Tracked] = []
        self._clocks: list[int] = []
        self._values: list[int] = []
        self._by_pid: dict[int, Tracked] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, pid: int) -> bool:
        return pid in self._by_pid

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self._rows)

    def get(self, pid: int) -> Tracked | None:
        return self._by_pid.get(pid)

    def rebase(self) -> None:
        """Forget what every process did up to now."""
        for row, value in self.moved():
            row.charged = max(row.charged, value)

    def clock(self, pid: int) -> int | None:
        """The clock of any process, watched or not; None if there is none of this pid."""
        try:
            return self._read(clock_id(pid))
        except (OSError, OverflowError):
            return None

    def add(self, row: Tracked) -> None:
        row.index = len(self._rows)
        self._rows.append(row)
        self._clocks.append(clock_id(row.consumer.pid))
        self._values.append(row.charged)
        self._by_pid[row.consumer.pid] = row

    def remove(self, row: Tracked) -> None:
        """Forget a row; the last one takes its place."""
        at, last = row.index, len(self._rows) - 1
        if at != last:
            moved = self._rows[last]
            self._rows[at], self._clocks[at] = moved, self._clocks[last]
            self._values[at] = self._values[last]
            moved.index = at
        self._rows.pop()
        self._clocks.pop()
        self._values.pop()
        del self._by_pid[row.consumer.pid]
        row.index = -1

    def moved(self) -> list[tuple[Tracked, int]]:
        """Read every clock; the rows whose clock is not where it was, and where it is now."""
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
