"""CPU time of each process on each socket, counted by the scheduler through eBPF.

The program runs at every context switch and at every expired timer of high resolution, of which the
scheduler's tick is one, so that a process which is never switched out is counted too. It adds the
time since its last run on this CPU to the process that has run. A few interrupts are counted with
the processes that they interrupt, and on a virtual machine the time that the hypervisor took from
the CPU while they ran; only the proportions between sockets are used.

With perf events it adds what they have counted in that time as well. A time in which others had the
CPU's counters, so that an event was not counted throughout, is left out together with its counts.
The kernel lets only programs under a licence that is compatible with the GPL read perf events: that
program alone, `program` with ``count``, is under the MIT licence and the GPL, version 2, as well.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from wattspan.processes import ebpf
from wattspan.processes.cpu_socket_division import SocketTimesSample
from wattspan.processes.ebpf import Instruction, Op
from wattspan.processes.procfs import ProcFs
from wattspan.util.cpu_topology import CpuTopology, parse_cpu_list

TRACEPOINTS = ("sched_switch", "hrtimer_expire_entry")

MIN_ENTRIES, ENTRIES_PER_CPU = 4096, 16
"""Limit of pairs of a process and a socket between two samples; others are not counted.

A thousand processes that begin and end between two samples are up to two thousand pairs, beside
those of all others. Each sample walks a table of this length: an empty one of 4,096 takes 7 us.
"""

_WORD, _INDEX = 8, struct.Struct("=I")
"""A key is process << 32 | socket; a value has a word of nanoseconds, and one for each event."""

# The words of each CPU: the time of the last run, 0 before; the socket; the index of the first of
# its events; the time that events were not counted in, negative; and the count of each event.
_LAST, _SOCKET, _FIRST, _MISSED, _COUNTS = range(0, 5 * _WORD, _WORD)
_STATE = struct.Struct("=QQQQ")

_STACK = 10  # register: the end of the stack
_READING = struct.Struct("=QQQ")  # count, and the times for which it was enabled and has run


def program(cpus: int, totals: int, events: int = 0, count: int = 0) -> Sequence[Instruction]:
    """The program; ``cpus``, ``totals`` and ``events`` are descriptors of maps.

    ``cpus`` has one element for each CPU, ``events`` has ``count`` for each.
    """
    value = -2 * _WORD - _WORD * (1 + count)
    return (
        Instruction(Op.CALL, value=ebpf.MONOTONIC_TIME),
        Instruction(Op.MOVE, 7, 0),
        Instruction(Op.CALL, value=ebpf.PID_AND_GROUP),
        Instruction(Op.MOVE, 8, 0),
        Instruction(Op.STORE_WORD, _STACK, offset=-4, value=0),
        Instruction(Op.LOAD_MAP, 1, value=cpus),
        Instruction(Op.MOVE, 2, _STACK),
        Instruction(Op.ADD, 2, value=-4),
        Instruction(Op.CALL, value=ebpf.LOOKUP),
        Instruction(Op.JUMP_IF_ZERO, 0, jump="end"),
        Instruction(Op.MOVE, 6, 0),
        Instruction(Op.LOAD, 9, 6, _LAST),
        Instruction(Op.STORE, 6, 7, _LAST),
        Instruction(Op.STORE, _STACK, 9, value),
        *(_count_events(events, count, value) if count else ()),
        Instruction(Op.SHIFT_RIGHT, 8, value=32),
        Instruction(Op.JUMP_IF_ZERO, 8, jump="end"),  # the CPU was idle
        Instruction(Op.LOAD, 9, _STACK, value),
        Instruction(Op.JUMP_IF_ZERO, 9, jump="end"),
        Instruction(Op.SUBTRACT, 7, 9),
        Instruction(Op.STORE, _STACK, 7, value),
        Instruction(Op.LOAD, 1, 6, _SOCKET),
        Instruction(Op.SHIFT_LEFT, 8, value=32),
        Instruction(Op.COMBINE, 8, 1),
        Instruction(Op.STORE, _STACK, 8, -16),
        Instruction(Op.LOAD_MAP, 1, value=totals),
        Instruction(Op.MOVE, 2, _STACK),
        Instruction(Op.ADD, 2, value=-16),
        Instruction(Op.CALL, value=ebpf.LOOKUP),
        Instruction(Op.JUMP_IF_ZERO, 0, jump="insert"),
        *_add_all(range(0, _WORD * (1 + count), _WORD), value),
        Instruction(Op.SET, 0, value=0, label="end"),
        Instruction(Op.LEAVE),
        Instruction(Op.LOAD_MAP, 1, value=totals, label="insert"),
        Instruction(Op.MOVE, 2, _STACK),
        Instruction(Op.ADD, 2, value=-16),
        Instruction(Op.MOVE, 3, _STACK),
        Instruction(Op.ADD, 3, value=value),
        Instruction(Op.SET, 4, value=0),
        Instruction(Op.CALL, value=ebpf.UPDATE),
        Instruction(Op.SET, 0, value=0),
        Instruction(Op.LEAVE),
        *((Instruction(Op.SET, 0, value=0, label="unknown"),) if count else ()),
        *((Instruction(Op.STORE, 6, 0, _LAST), Instruction(Op.LEAVE)) if count else ()),
    )


def _count_events(events: int, count: int, value: int) -> Iterator[Instruction]:
    """Store what each event has counted since the last run after the first word of ``value``.

    To "unknown" if one cannot be read, to "end" if one was not counted throughout.
    """
    reading = value - _READING.size
    yield Instruction(Op.SET, 9, value=0)
    for at in range(count):
        now = _COUNTS + _WORD * at
        yield from (
            Instruction(Op.LOAD_MAP, 1, value=events),
            Instruction(Op.LOAD, 2, 6, _FIRST),
            Instruction(Op.ADD, 2, value=at),
            Instruction(Op.MOVE, 3, _STACK),
            Instruction(Op.ADD, 3, value=reading),
            Instruction(Op.SET, 4, value=_READING.size),
            Instruction(Op.CALL, value=ebpf.READ_PERF_EVENT),
            Instruction(Op.JUMP_UNLESS_ZERO, 0, jump="unknown"),
            Instruction(Op.LOAD, 1, _STACK, reading),
            Instruction(Op.LOAD, 2, 6, now),
            Instruction(Op.STORE, 6, 1, now),
            Instruction(Op.SUBTRACT, 1, 2),
            Instruction(Op.STORE, _STACK, 1, value + _WORD * (1 + at)),
            Instruction(Op.LOAD, 1, _STACK, reading + _WORD),
            Instruction(Op.LOAD, 2, _STACK, reading + 2 * _WORD),
            Instruction(Op.SUBTRACT, 1, 2),
            Instruction(Op.SUBTRACT, 9, 1),
        )
    yield from (
        Instruction(Op.LOAD, 1, 6, _MISSED),
        Instruction(Op.STORE, 6, 9, _MISSED),
        Instruction(Op.SUBTRACT, 9, 1),
        Instruction(Op.JUMP_UNLESS_ZERO, 9, jump="end"),
    )


def _add_all(words: Sequence[int], value: int) -> Iterator[Instruction]:
    for word in words:
        yield Instruction(Op.LOAD, 1, _STACK, value + word)
        yield Instruction(Op.ADD_ATOMICALLY, 0, 1, word)


class SocketTimes:
    """Counts the CPU time, and ``events``, of each process on each socket from now on."""

    def __init__(
        self,
        topology: CpuTopology,
        possible: str,
        procfs: Path = Path("/proc"),
        events: Sequence[ebpf.PerfEvent] = (),
    ) -> None:
        """``possible`` is the kernel's list of possible CPUs; ``topology`` has their sockets.

        OSError if the kernel does not permit or support it, or if ``procfs`` is of a pid namespace:
        the program sees the pids of the host, which there are those of other processes.
        """
        if ProcFs(procfs).is_namespaced():
            raise OSError(errno.ENODEV, "a pid namespace has other pids than the kernel")
        self._topology, self._events = topology, events
        self._possible = tuple(parse_cpu_list(possible))
        if len(self._possible) < (os.cpu_count() or 1):  # the kernel would read too much
            raise OSError(errno.ENODEV, "the possible CPUs are unknown")
        self._open: list[int] = []
        count, cpus = len(events), len(self._possible)
        entries, value = max(MIN_ENTRIES, ENTRIES_PER_CPU * cpus), _WORD * (1 + count)
        try:
            self._cpus = self._map(ebpf.PERCPU_ARRAY, 4, _COUNTS + _WORD * count, 1)
            totals = self._map(ebpf.HASH, _WORD, value, entries)
            self._reader = ebpf.BatchReader(totals, entries, 1 + count)
            self._counters = self._map(ebpf.PERF_EVENT_ARRAY, 4, 4, count * cpus) if count else 0
            self._place_cpus()
            code = program(self._cpus, totals, self._counters, count)
            licence = "Dual MIT/GPL" if count else "Apache-2.0"
            self.program = self._keep(ebpf.load_program("wattspan_socket", code, licence))
            for name in TRACEPOINTS:
                self._keep(ebpf.attach_raw_tracepoint(name, self.program))
            self._reader.take()
        except OSError:
            self.close()
            raise

    def refresh(self) -> None:
        """Use the present sockets of the topology, and the counters of CPUs that have come."""
        with suppress(OSError):
            self._place_cpus()

    def _place_cpus(self) -> None:
        count, state = len(self._events), bytearray()
        for at, cpu in enumerate(self._possible):
            first = at * count
            state += _STATE.pack(0, self._topology.socket_of(cpu), first, 0) + bytes(_WORD * count)
            opened: list[int] = []
            if count and cpu in self._topology.online:
                opened = ebpf.open_perf_events(self._events, cpu)
            try:
                for index, event in enumerate(opened, first):
                    ebpf.update_map(self._counters, _INDEX.pack(index), _INDEX.pack(event))
            finally:
                ebpf.close_all(opened)  # the map holds them
        ebpf.update_map(self._cpus, bytes(4), bytes(state))

    def sample(self) -> SocketTimesSample:
        """The nanoseconds since the last sample."""
        try:
            pairs, values = self._reader.take()
        except OSError:
            return SocketTimesSample()
        return SocketTimesSample(pairs.tolist(), values.tolist())

    def sums(self) -> bytes:
        """All pairs, and then all values with the events, since the last call. OSError."""
        if self._topology.refresh():
            self.refresh()
        return b"".join(self._reader.take())

    def close(self) -> None:
        ebpf.close_all(self._open)

    def _map(self, kind: int, key: int, value: int, entries: int) -> int:
        return self._keep(ebpf.create_map(kind, key, value, entries))

    def _keep(self, descriptor: int) -> int:
        self._open.append(descriptor)
        return descriptor
