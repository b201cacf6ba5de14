"""Which CPU sits in which socket, from a sysfs root.

How long each CPU was busy, whoever it was.

Two ways, the better one first. Both count from the first read and are read before the clocks of
the processes, so that work done in between is never mistaken for work of nobody.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from wattspan.processes.procfs import TICK

_MAX_CPUS = 1 << 16  # eight times what Linux can be built for


class CpuTopology:
    """The sockets of a host. A CPU keeps its socket while it is offline, when sysfs is silent."""

    def __init__(self, sysfs: Path = Path("/sys")) -> None:
        self._cpus = sysfs / "devices/system/cpu"
        self._online = ""
        self._sockets: dict[int, int] = {}
        self.online: frozenset[int] = frozenset()
        self.sockets: tuple[int, ...] = (0,)
        """The physical package ids, in order; one socket, 0, where nothing is known."""
        self.refresh()

    @property
    def possible(self) -> str:
        """The CPUs there can be, as a kernel list."""
        return self._text("possible") or self._text("present") or "0"

    def socket_of(self, cpu: int) -> int:
        """A CPU that sysfs does not know counts with the last socket."""
        return self._sockets.get(cpu, self.sockets[-1])

    def capacity(self) -> Mapping[int, int]:
        """How many CPUs of each socket are online."""
        count = dict.fromkeys(self.sockets, 0)
        for cpu in self.online:
            count[self.socket_of(cpu)] += 1
        return count

    def refresh(self) -> bool:
        """Look again if CPUs came or went; True if so. One small read if nothing did."""
        online = self._text("online")
        if online == self._online and self._sockets:
            return False
        self._online = online
        seen: set[int] = set()
        for path in self._cpus.glob("cpu[0-9]*/topology/physical_package_id"):
            cpu = int(re.sub(r"\D", "", path.parent.parent.name))
            try:
                # -1 is the kernel's word for "the firmware does not say".
                self._sockets[cpu] = max(0, int(path.read_text()))
            except (OSError, ValueError):
                continue
            seen.add(cpu)
        self.sockets = tuple(sorted(set(self._sockets.values()))) or (0,)
        self.online = frozenset(parse_cpu_list(online)) if online else frozenset(seen)
        return True

    def _text(self, name: str) -> str:
        try:
            return (self._cpus / name).read_text().strip()
        except OSError:
            return ""


def parse_cpu_list(text: str) -> Iterable[int]:
    """``0-3,8`` as numbers; what is not a list is empty, and no CPU has a number beyond all."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if match is not None:
            numbers.update(range(int(match[1]), min(int(match[2] or match[1]) + 1, _MAX_CPUS)))
    return sorted(numbers)


_MAX_BYTES = 1 << 20
_INITIAL_BYTES = 1 << 13  # a buffer of a megabyte costs more to have than such a file to read


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


class CpuacctBusyClock:
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
            values = list(map(int, _read_whole(self._fd).split()))
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


class ProcStatBusyClock:
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
            rows = _idle_ticks(_read_whole(self._fd))
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


def _read_whole(fd: int) -> bytes:
    raw = os.pread(fd, _INITIAL_BYTES, 0)
    return raw if len(raw) < _INITIAL_BYTES else os.pread(fd, _MAX_BYTES, 0)


def _idle_ticks(raw: bytes) -> dict[int, int]:
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


class UnattributedTime:
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
