"""Busy time of the CPUs of a host.

Busy time has two sources, the better first. Both count from the first read and are read before the
clocks of the processes, so that work between the two reads is not counted as unattributed time.
"""

from __future__ import annotations

import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from wattspan.model import SECOND
from wattspan.processes.procfs import TICK

_MAX_BYTES = 1 << 20
_INITIAL_BYTES = 1 << 13  # a buffer of a megabyte takes longer than reading such a file


class BusyClock(ABC):
    """Cumulative busy nanoseconds by CPU, since the first read.

    ``step`` is the smallest difference of two values in nanoseconds.
    """

    name: str
    step: int

    def __init__(self, file: Path) -> None:
        self._fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, mono: int) -> Mapping[int, int] | None:
        """The values at the monotonic time ``mono``; None if the file is not readable now."""
        return self.values(self.sample(), mono)

    def sample(self) -> bytes | None:
        """The content of the file, for ``values``; None if it is not readable now."""
        try:
            return self.content()
        except (OSError, ValueError):
            return None

    def values(self, sample: bytes | None, mono: int) -> Mapping[int, int] | None:
        """The values of a sample of the monotonic time ``mono``, in order of time."""
        try:
            return self.parse(sample, mono) if sample is not None else None
        except ValueError:
            return None

    def content(self) -> bytes:
        """The content of the file; OSError or ValueError if it is not readable now."""
        return _read_whole(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    @abstractmethod
    def parse(self, raw: bytes, mono: int) -> Mapping[int, int]: ...


class CpuacctBusyClock(BusyClock):
    """The root of cgroup v1's ``cpuacct``: the CPU time of the scheduler, to the nanosecond.

    Process clocks are sums of the same figures, so a difference is real. The file has a value for
    every possible CPU, online or not.
    """

    name = "cpuacct.usage_percpu"
    step = 1

    def __init__(self, cpuacct: Path) -> None:
        super().__init__(cpuacct / "cpuacct.usage_percpu")
        self._first: list[int] | None = None

    def parse(self, raw: bytes, mono: int) -> Mapping[int, int]:
        values = list(map(int, raw.split()))
        if self._first is None:
            self._first = values
        return dict(enumerate(map(operator.sub, values, self._first)))


class ProcStatBusyClock(BusyClock):
    """The time that ``/proc/stat`` does not call idle, waiting for input, or stolen.

    A kernel that stops its tick on idle CPUs measures idle time exactly, but samples busy time at
    the tick: the complement has no sampling error, only the 10 ms steps of the file. It may
    therefore decrease by a step.
    """

    name = "/proc/stat"
    step = TICK

    def __init__(self, procfs: Path) -> None:
        super().__init__(procfs / "stat")
        self._last: dict[int, tuple[int, int]] = {}  # CPU to (mono, ticks not busy)
        self._busy: dict[int, int] = {}

    def parse(self, raw: bytes, mono: int) -> Mapping[int, int]:
        rows = _idle_ticks(raw)
        for cpu, ticks in rows.items():
            # An offline CPU has no row; its count continues when it returns.
            since, before = self._last.get(cpu, (mono, ticks))
            change = mono - since - (ticks - before) * TICK
            self._busy[cpu] = self._busy.get(cpu, 0) + change
        self._last = {cpu: (mono, ticks) for cpu, ticks in rows.items()}
        return dict(self._busy)


REFINED_TIME = 600 * SECOND
"""Idle states are read for this time after the start: by then the idle power is known, or will
hardly be. Reading takes a system call for each state."""

MAX_IDLE_STATES = 512
"""Idle states of more CPUs are not read."""

_IDLE_STATES = "devices/system/cpu/cpu[0-9]*/cpuidle/state[0-9]*/time"


class IdleStateBusyClock(BusyClock):
    """Another clock, refined to a microsecond by the residencies of idle states (cpuidle).

    The kernel adds the time of a state when the CPU leaves it, so a CPU that has been idle for long
    seems busy, and one that was idle at the first read seems idle for too long: the values are
    limited to those of the other clock, within two of its steps.
    """

    name = "cpuidle and /proc/stat"
    step = 1000

    def __init__(self, sysfs: Path, coarse: BusyClock) -> None:
        """OSError without idle states, or with too many."""
        self._coarse = coarse
        self._fds: dict[int, list[int]] = {}
        self._offset: dict[int, int] = {}
        self._until: int | None = None
        files = sorted(sysfs.glob(_IDLE_STATES))
        if not 0 < len(files) <= MAX_IDLE_STATES:
            raise FileNotFoundError(f"{len(files)} idle states in {sysfs}")
        for file in files:
            cpu = int(file.parents[2].name.removeprefix("cpu"))
            self._fds.setdefault(cpu, []).append(os.open(file, os.O_RDONLY | os.O_CLOEXEC))

    def content(self) -> bytes:
        states = []
        for cpu, fds in [*self._fds.items()]:
            try:
                states.append(b"%d %d" % (cpu, sum(int(os.pread(fd, 32, 0)) for fd in fds)))
            except (OSError, ValueError):  # a file that vanished with its CPU does not return
                self._close_states(cpu)
        return self._coarse.content() + b"\0" + b"\n".join(states)

    def close(self) -> None:
        self._close_states()
        self._coarse.close()

    def parse(self, raw: bytes, mono: int) -> Mapping[int, int]:
        coarse, _, states = raw.partition(b"\0")
        values = dict(self._coarse.parse(coarse, mono))
        if self._until is None:
            self._until = mono + REFINED_TIME
        if mono >= self._until:
            self._close_states()
            return values
        tolerance = 2 * self._coarse.step
        for line in states.splitlines():
            cpu, microseconds = map(int, line.split())
            if cpu not in values:  # offline
                continue
            known, awake = values[cpu], mono - microseconds * 1000
            offset = self._offset.get(cpu)
            if offset is None or awake + offset < known - tolerance:
                offset = self._offset[cpu] = known - awake
            values[cpu] = min(awake + offset, known + tolerance)
        return values

    def _close_states(self, *cpus: int) -> None:
        """Go on with the other clock for these CPUs, or for all; its step is that of the sum."""
        for cpu in cpus or [*self._fds]:
            for fd in self._fds.pop(cpu, ()):
                os.close(fd)
        self.name, self.step = self._coarse.name, self._coarse.step


def _read_whole(fd: int) -> bytes:
    raw = os.pread(fd, _INITIAL_BYTES, 0)
    return raw if len(raw) < _INITIAL_BYTES else os.pread(fd, _MAX_BYTES, 0)


def _idle_ticks(raw: bytes) -> dict[int, int]:
    """Ticks idle, in iowait and stolen, by CPU."""
    rows: dict[int, int] = {}
    for line in raw.split(b"\n"):
        if not line.startswith(b"cpu"):
            if rows:
                break  # the long line of interrupts follows
            continue
        fields = line.split()
        if len(fields[0]) > 3:
            stolen = int(fields[8]) if len(fields) > 8 else 0
            rows[int(fields[0][3:])] = int(fields[4]) + int(fields[5]) + stolen
    return rows
