"""How long each CPU was busy, whoever it was.

Two ways, the better one first. Both count from the first read and are read before the clocks of
the processes, so that work done in between is never mistaken for work of nobody.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from wattspan.processes.procfs import TICK

_BIGGEST = 1 << 20
_USUAL = 1 << 13  # a buffer of a megabyte costs more to have than such a file to read


class BusyClock(Protocol):
    """Cumulative busy nanoseconds by CPU, since the first read."""

    @property
    def name(self) -> str: ...

    @property
    def step(self) -> int:
        """Nanoseconds by which it moves at once."""
        ...

    def read(self, mono: int) -> Mapping[int, int] | None:
        """None if it cannot be read just now."""
        ...

    def close(self) -> None: ...


class AccountedBusy:
    """The root of cgroup v1's ``cpuacct``: what the scheduler charged, to the nanosecond.

    The very figures that process clocks are sums of, so a difference is real. Every CPU the
    host can have stands in its place, online or not.
    """

    name = "cpuacct.usage_percpu"
    step = 1

    def __init__(self, cpuacct: Path) -> None:
        self._fd = os.open(cpuacct / "cpuacct.usage_percpu", os.O_RDONLY | os.O_CLOEXEC)
        self._first: list[int] | None = None

    def read(self, mono: int) -> Mapping[int, int] | None:
        try:
            values = list(map(int, _whole(self._fd).split()))
        except (OSError, ValueError):
            return None
        if self._first is None:
            self._first = values
        return {
            cpu: value - first
            for cpu, (value, first) in enumerate(zip(values, self._first, strict=False))
        }

    def close(self) -> None:
        os.close(self._fd)


class IdleComplement:
    """The time that ``/proc/stat`` does not call idle, waiting for input, or stolen.

    A kernel that stops its tick on idle CPUs measures idle time exactly, but samples busy time
    at the tick: the complement has no sampling error, only the 10 ms steps of the file. It may
    therefore fall by a step; whoever sums it must bear that.
    """

    name = "/proc/stat"
    step = TICK

    def __init__(self, procfs: Path) -> None:
        self._fd = os.open(procfs / "stat", os.O_RDONLY | os.O_CLOEXEC)
        self._last: dict[int, tuple[int, int]] = {}  # CPU to (mono, ticks not busy)
        self._busy: dict[int, int] = {}

    def read(self, mono: int) -> Mapping[int, int] | None:
        try:
            rows = _not_busy(_whole(self._fd))
        except (OSError, ValueError):
            return None
        for cpu, ticks in rows.items():
            # A CPU that was offline has no row, and starts anew when it returns.
            since, before = self._last.get(cpu, (mono, ticks))
            change = mono - since - (ticks - before) * TICK
            self._busy[cpu] = self._busy.get(cpu, 0) + change
        self._last = {cpu: (mono, ticks) for cpu, ticks in rows.items()}
        return dict(self._busy)

    def close(self) -> None:
        os.close(self._fd)


def _whole(fd: int) -> bytes:
    raw = os.pread(fd, _USUAL, 0)
    return raw if len(raw) < _USUAL else os.pread(fd, _BIGGEST, 0)


def _not_busy(raw: bytes) -> dict[int, int]:
    """Ticks idle, in iowait and stolen, by CPU."""
    rows: dict[int, int] = {}
    for line in raw.split(b"\n"):
        if not line.startswith(b"cpu"):
            if rows:
                break  # the CPUs stand first; the interrupts after them are long
            continue
        fields = line.split()
        if len(fields[0]) > 3:
            stolen = int(fields[8]) if len(fields) > 8 else 0
            rows[int(fields[0][3:])] = int(fields[4]) + int(fields[5]) + stolen
    return rows


class Unclaimed:
    """Busy time that nobody can be charged with, never negative and not biased by steps.

    What is emitted is the growth of the running maximum of ``busy - spent``. A step that makes
    the difference too large is emitted once and is then the new mark, so noise of amplitude
    ``a`` adds at most ``a`` in all, however long it lasts, where clipping each difference at
    zero would add some of it every time. The price: after a stretch in which ``spent`` ran
    ahead, as much must be unclaimed before it shows.
    """

    def __init__(self) -> None:
        self._emitted = 0

    def settle(self, busy: int, spent: int) -> int:
        """The nanoseconds newly unclaimed, given both totals since the beginning."""
        new = max(0, busy - spent - self._emitted)
        self._emitted += new
        return new

    @property
    def total(self) -> int:
        return self._emitted
