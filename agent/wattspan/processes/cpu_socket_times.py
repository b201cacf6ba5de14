"""CPU time of each process on each socket, counted by the scheduler through eBPF.

The program runs at every context switch and at every expired timer of high resolution, of which the
scheduler's tick is one, so that a process which is never switched out is counted too. It adds the
time since its last run on this CPU to the process that has run. A few interrupts are counted with
the processes that they interrupt, and on a virtual machine the time that the hypervisor took from
the CPU while they ran; only the proportions between sockets are used.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from contextlib import suppress

from wattspan.processes import bpf
from wattspan.processes.bpf import Instruction
from wattspan.processes.cpu_socket_division import SocketTimesSample
from wattspan.processes.cpus import CpuTopology, parse_cpu_list

TRACEPOINTS = ("sched_switch", "hrtimer_expire_entry")

MIN_ENTRIES, ENTRIES_PER_CPU = 1024, 16
"""Limit of pairs of a process and a socket between two samples; others are not counted.

Each sample walks a table of this length: 4,096 entries take twice as long as 1,024. A thousand
processes that begin and end in a second are some hundred pairs in a tick.
"""

_KEY, _VALUE = struct.Struct("=Q"), struct.Struct("=Q")  # process << 32 | socket; nanoseconds
_CPU = struct.Struct("=QQ")  # time of the last run, 0 before; socket
_STACK = 10  # register: the end of the stack


def program(cpus: int, totals: int) -> Sequence[Instruction]:
    """The program; ``cpus`` and ``totals`` are descriptors of maps.

    ``cpus`` has one element with a `_CPU` for each CPU.
    """
    return (
        bpf.call(bpf.MONOTONIC_TIME),
        bpf.move(7, 0),
        bpf.call(bpf.PID_AND_GROUP),
        bpf.move(8, 0),
        bpf.store_word(_STACK, -4, 0),
        bpf.load_map(1, cpus),
        bpf.move(2, _STACK),
        bpf.add(2, -4),
        bpf.call(bpf.LOOKUP),
        bpf.jump_if_zero(0, "end"),
        bpf.load(9, 0, 0),  # the last run
        bpf.store(0, 0, 7),
        bpf.load(6, 0, 8),  # the socket
        bpf.shift_right(8, 32),
        bpf.jump_if_zero(8, "end"),  # the CPU was idle
        bpf.jump_if_zero(9, "end"),
        bpf.subtract(7, 9),
        bpf.shift_left(8, 32),
        bpf.combine(8, 6),
        bpf.store(_STACK, -16, 8),
        bpf.load_map(1, totals),
        bpf.move(2, _STACK),
        bpf.add(2, -16),
        bpf.call(bpf.LOOKUP),
        bpf.jump_if_zero(0, "insert"),
        bpf.add_atomically(0, 0, 7),
        bpf.set_to(0, 0, label="end"),
        bpf.leave(),
        bpf.store(_STACK, -24, 7, label="insert"),
        bpf.load_map(1, totals),
        bpf.move(2, _STACK),
        bpf.add(2, -16),
        bpf.move(3, _STACK),
        bpf.add(3, -24),
        bpf.set_to(4, 0),
        bpf.call(bpf.UPDATE),
        bpf.set_to(0, 0),
        bpf.leave(),
    )


class SocketTimes:
    """Counts the CPU time of each process on each socket from now on."""

    def __init__(self, topology: CpuTopology, possible: str) -> None:
        """``possible`` is the kernel's list of possible CPUs; ``topology`` has their sockets.

        OSError if the kernel does not permit or support it.
        """
        self._topology = topology
        self._possible = tuple(parse_cpu_list(possible))
        if len(self._possible) < (os.cpu_count() or 1):  # the kernel would read too much
            raise OSError(errno.ENODEV, "the possible CPUs are unknown")
        self._open: list[int] = []
        try:
            self._cpus = self._keep(bpf.create_map(bpf.PERCPU_ARRAY, 4, _CPU.size, 1))
            entries = max(MIN_ENTRIES, ENTRIES_PER_CPU * len(self._possible))
            totals = self._keep(bpf.create_map(bpf.HASH, _KEY.size, _VALUE.size, entries))
            self._reader = bpf.BatchReader(totals, entries)
            self._place_cpus()
            self.program = self._keep(
                bpf.load_program("wattspan_socket", program(self._cpus, totals))
            )
            for name in TRACEPOINTS:
                self._keep(bpf.attach_raw_tracepoint(name, self.program))
            self._reader.take()
        except OSError:
            self.close()
            raise

    def refresh(self) -> None:
        """Use the present sockets of the topology."""
        with suppress(OSError):
            self._place_cpus()

    def _place_cpus(self) -> None:
        places = (_CPU.pack(0, self._topology.socket_of(cpu)) for cpu in self._possible)
        bpf.update_map(self._cpus, bytes(4), b"".join(places))

    def sample(self) -> SocketTimesSample:
        """The nanoseconds since the last sample."""
        try:
            return SocketTimesSample(*self._reader.take())
        except OSError:
            return SocketTimesSample()

    def close(self) -> None:
        while self._open:
            with suppress(OSError):
                os.close(self._open.pop())

    def _keep(self, descriptor: int) -> int:
        self._open.append(descriptor)
        return descriptor
