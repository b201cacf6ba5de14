"""CPU time of each process on each socket, counted by the scheduler through eBPF.

The program runs at every context switch and at every expired timer of high resolution, of which the
scheduler's tick is one, so that a process which is never switched out is counted too. It adds the
time since its last run on this CPU to the process that has run. A few interrupts are counted with
the processes that they interrupt, and on a virtual machine the time that the hypervisor took from
the CPU while they ran; only the proportions between sockets are used.

``bpf(2)`` needs CAP_BPF and CAP_PERFMON (before Linux 5.8 CAP_SYS_ADMIN), and Linux 5.6 for batches
of map elements. Layouts of ``union bpf_attr`` from ``uapi/linux/bpf.h``, instructions from the
kernel's ``Documentation/bpf/standardization/instruction-set.rst``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from wattspan.processes.cpu_socket_division import SocketTimesSample
from wattspan.processes.procfs import ProcFs
from wattspan.util.cpu_topology import CpuTopology, parse_cpu_list

TRACEPOINTS = ("sched_switch", "hrtimer_expire_entry")

MIN_ENTRIES, ENTRIES_PER_CPU = 4096, 16
"""Limit of pairs of a process and a socket between two samples; others are not counted.

A thousand processes that begin and end between two samples are up to two thousand pairs, beside
those of all others. Each sample walks a table of this length: an empty one of 4,096 takes 7 us.
"""

_KEY, _VALUE = struct.Struct("=Q"), struct.Struct("=Q")  # process << 32 | socket; nanoseconds
_CPU = struct.Struct("=QQ")  # time of the last run, 0 before; socket
_STACK = 10  # register: the end of the stack


def program(cpus: int, totals: int) -> Sequence[Instruction]:
    """The program; ``cpus`` and ``totals`` are descriptors of maps.

    ``cpus`` has one element with a `_CPU` for each CPU.
    """
    return (
        Instruction(Op.CALL, value=MONOTONIC_TIME),
        Instruction(Op.MOVE, 7, 0),
        Instruction(Op.CALL, value=PID_AND_GROUP),
        Instruction(Op.MOVE, 8, 0),
        Instruction(Op.STORE_WORD, _STACK, offset=-4, value=0),
        Instruction(Op.LOAD_MAP, 1, value=cpus),
        Instruction(Op.MOVE, 2, _STACK),
        Instruction(Op.ADD, 2, value=-4),
        Instruction(Op.CALL, value=LOOKUP),
        Instruction(Op.JUMP_IF_ZERO, 0, jump="end"),
        Instruction(Op.LOAD, 9, 0, 0),  # the last run
        Instruction(Op.STORE, 0, 7, 0),
        Instruction(Op.LOAD, 6, 0, 8),  # the socket
        Instruction(Op.SHIFT_RIGHT, 8, value=32),
        Instruction(Op.JUMP_IF_ZERO, 8, jump="end"),  # the CPU was idle
        Instruction(Op.JUMP_IF_ZERO, 9, jump="end"),
        Instruction(Op.SUBTRACT, 7, 9),
        Instruction(Op.SHIFT_LEFT, 8, value=32),
        Instruction(Op.COMBINE, 8, 6),
        Instruction(Op.STORE, _STACK, 8, -16),
        Instruction(Op.LOAD_MAP, 1, value=totals),
        Instruction(Op.MOVE, 2, _STACK),
        Instruction(Op.ADD, 2, value=-16),
        Instruction(Op.CALL, value=LOOKUP),
        Instruction(Op.JUMP_IF_ZERO, 0, jump="insert"),
        Instruction(Op.ADD_ATOMICALLY, 0, 7, 0),
        Instruction(Op.SET, 0, value=0, label="end"),
        Instruction(Op.LEAVE),
        Instruction(Op.STORE, _STACK, 7, -24, label="insert"),
        Instruction(Op.LOAD_MAP, 1, value=totals),
        Instruction(Op.MOVE, 2, _STACK),
        Instruction(Op.ADD, 2, value=-16),
        Instruction(Op.MOVE, 3, _STACK),
        Instruction(Op.ADD, 3, value=-24),
        Instruction(Op.SET, 4, value=0),
        Instruction(Op.CALL, value=UPDATE),
        Instruction(Op.SET, 0, value=0),
        Instruction(Op.LEAVE),
    )


class SocketTimes:
    """Counts the CPU time of each process on each socket from now on."""

    def __init__(self, topology: CpuTopology, possible: str, procfs: Path = Path("/proc")) -> None:
        """``possible`` is the kernel's list of possible CPUs; ``topology`` has their sockets.

        OSError if the kernel does not permit or support it, or if ``procfs`` is of a pid namespace:
        the program sees the pids of the host, which there are those of other processes.
        """
        if ProcFs(procfs).is_namespaced():
            raise OSError(errno.ENOTSUP, "a pid namespace has other pids than the kernel")
        self._topology = topology
        self._possible = tuple(parse_cpu_list(possible))
        if len(self._possible) < (os.cpu_count() or 1):  # the kernel would read too much
            raise OSError(errno.ENODEV, "the possible CPUs are unknown")
        self._open: list[int] = []
        try:
            self._cpus = self._keep(create_map(_PERCPU_ARRAY, 4, _CPU.size, 1))
            entries = max(MIN_ENTRIES, ENTRIES_PER_CPU * len(self._possible))
            totals = self._keep(create_map(_HASH, _KEY.size, _VALUE.size, entries))
            self._reader = BatchReader(totals, entries)
            self._place_cpus()
            self.program = self._keep(load_program("wattspan_socket", program(self._cpus, totals)))
            for name in TRACEPOINTS:
                self._keep(attach_raw_tracepoint(name, self.program))
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
        update_map(self._cpus, bytes(4), b"".join(places))

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


# -------------------------------------------------------------------------- maps and attachments

_SYSCALLS = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}
_MAP_CREATE, _MAP_UPDATE, _PROG_LOAD, _RAW_TRACEPOINT, _TAKE_BATCH = 0, 2, 5, 17, 25
_RAW_TRACEPOINT_PROGRAM = 17
_HASH, _PERCPU_ARRAY = 1, 6  # types of maps

_LICENSE = b"Apache-2.0\0"  # no helper here is restricted to GPL programs

_Block = ctypes.Array[ctypes.c_char]

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_NUMBER = _SYSCALLS.get(os.uname().machine, -1)


def _block(content: bytes) -> _Block:
    return ctypes.create_string_buffer(content, len(content))


def call_bpf(command: int, attributes: bytes) -> int:
    """OSError if the kernel refuses; ENOSYS on an unknown architecture."""
    block = _block(attributes)
    result = int(_LIBC.syscall(_NUMBER, command, block, len(block)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def create_map(kind: int, key: int, value: int, entries: int) -> int:
    """The descriptor of a new map with keys and values of so many bytes."""
    return call_bpf(_MAP_CREATE, struct.pack("=IIIII12x", kind, key, value, entries, 0))


def update_map(descriptor: int, key: bytes, value: bytes) -> None:
    """Set an element. A value of a per-CPU map has a part for every possible CPU."""
    keys, values = _block(key), _block(value)
    places = ctypes.addressof(keys), ctypes.addressof(values)
    call_bpf(_MAP_UPDATE, struct.pack("=I4xQQQ", descriptor, *places, 0))


class BatchReader:
    """Removes and returns all elements of a hash map with keys and values of 8 bytes."""

    def __init__(self, descriptor: int, entries: int) -> None:
        self._entries = entries
        keys, values = (ctypes.create_string_buffer(8 * entries) for _ in range(2))
        self._keys, self._values = (memoryview(one).cast("B").cast("Q") for one in (keys, values))
        self._position = ctypes.create_string_buffer(4)
        places = (ctypes.addressof(one) for one in (self._position, keys, values))
        self._attributes = _block(struct.pack("=QQQQIIQQ", 0, *places, entries, descriptor, 0, 0))
        self._count = memoryview(self._attributes).cast("B")[32:36].cast("I")

    def take(self) -> tuple[list[int], list[int]]:
        """The keys and the values. OSError if the kernel refuses."""
        self._count[0] = self._entries
        if _LIBC.syscall(_NUMBER, _TAKE_BATCH, self._attributes, len(self._attributes)) < 0:
            code = ctypes.get_errno()
            if code != errno.ENOENT:  # the end of the map, which is the usual result
                raise OSError(code, os.strerror(code))
        count = self._count[0]
        return self._keys[:count].tolist(), self._values[:count].tolist()


# ------------------------------------------------------------------------------------ programs


class Op(IntEnum):
    """Operations; registers have 64 bits. ``[R + offset]`` is memory at the address in R."""

    LOAD = 0x79  # target = [source + offset]
    STORE = 0x7B  # [target + offset] = source
    STORE_WORD = 0x62  # [target + offset] = value, of 32 bits
    ADD_ATOMICALLY = 0xDB  # [target + offset] += source, for several CPUs
    LOAD_MAP = 0x18  # target = the map with the descriptor ``value``; takes two instructions
    MOVE = 0xBF  # target = source
    SET = 0xB7  # target = value
    ADD = 0x07  # target += value
    SUBTRACT = 0x1F  # target -= source
    COMBINE = 0x4F  # target |= source
    SHIFT_LEFT = 0x67  # target <<= value
    SHIFT_RIGHT = 0x77  # target >>= value
    JUMP_IF_ZERO = 0x15  # to ``jump`` if target is 0
    CALL = 0x85  # the kernel's helper function ``value``
    LEAVE = 0x95


LOOKUP, UPDATE, MONOTONIC_TIME, PID_AND_GROUP = 1, 2, 5, 14
"""Helper functions of the kernel."""
_MAP_DESCRIPTOR = 1  # as the source register of LOAD_MAP: the value is no plain number


class Instruction(NamedTuple):
    """One instruction; ``jump`` names the label of a jump's target, ``label`` its own."""

    code: Op
    target: int = 0
    source: int = 0
    offset: int = 0
    value: int = 0
    jump: str = ""
    label: str = ""


def load_program(name: str, program: Sequence[Instruction]) -> int:
    """The descriptor of a verified program for raw tracepoints."""
    code, terms = _block(assemble(program)), _block(_LICENSE)
    attributes = struct.pack(
        "=IIQQ24x16s",
        _RAW_TRACEPOINT_PROGRAM,
        len(code) // 8,
        ctypes.addressof(code),
        ctypes.addressof(terms),
        name.encode()[:15],
    )
    return call_bpf(_PROG_LOAD, attributes)


def attach_raw_tracepoint(name: str, program: int) -> int:
    """The descriptor of the attachment, which ends when it is closed."""
    text = _block(name.encode() + b"\0")
    return call_bpf(_RAW_TRACEPOINT, struct.pack("=QI4x", ctypes.addressof(text), program))


def assemble(program: Sequence[Instruction]) -> bytes:
    """The machine code of a program."""
    places: dict[str, int] = {}
    at = 0
    for one in program:
        if one.label:
            places[one.label] = at
        at += 2 if one.code is Op.LOAD_MAP else 1
    code = bytearray()
    for one in program:
        here = len(code) // 8
        offset = places[one.jump] - here - 1 if one.jump else one.offset
        source = _MAP_DESCRIPTOR if one.code is Op.LOAD_MAP else one.source
        code += _encoded(one.code, one.target, source, offset, one.value)
        if one.code is Op.LOAD_MAP:
            code += bytes(8)
    return bytes(code)


def _encoded(code: int, target: int, source: int, offset: int, value: int) -> bytes:
    # Bit fields of the registers begin at the other end of the byte on a big-endian machine.
    little = struct.pack("=H", 1)[0] == 1
    registers = target | source << 4 if little else target << 4 | source
    return struct.pack("=BBhi", code, registers, offset, value)
