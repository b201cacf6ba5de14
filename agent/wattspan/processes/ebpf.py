"""eBPF programs of this process: their instructions, maps and attachments, and perf events.

``bpf(2)`` needs CAP_BPF and CAP_PERFMON (before Linux 5.8 CAP_SYS_ADMIN), and Linux 5.6 for batches
of map elements. Layouts of ``union bpf_attr`` from ``uapi/linux/bpf.h`` and of ``perf_event_attr``
from ``uapi/linux/perf_event.h``, instructions from the kernel's
``Documentation/bpf/standardization/instruction-set.rst``.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

# -------------------------------------------------------------------------- maps and attachments

_SYSCALLS = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}
_PERF_SYSCALLS = {"x86_64": 298, "aarch64": 241, "riscv64": 241, "ppc64le": 319, "s390x": 331}
"""The numbers of bpf and of perf_event_open."""
_MAP_CREATE, _MAP_UPDATE, _PROG_LOAD, _RAW_TRACEPOINT, _TAKE_BATCH = 0, 2, 5, 17, 25
_RAW_TRACEPOINT_PROGRAM = 17
HASH, PERF_EVENT_ARRAY, PERCPU_ARRAY = 1, 4, 6
"""Types of maps."""

_Block = ctypes.Array[ctypes.c_char]

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_BPF, _PERF_EVENT_OPEN = (one.get(os.uname().machine, -1) for one in (_SYSCALLS, _PERF_SYSCALLS))


def _block(content: bytes) -> _Block:
    return ctypes.create_string_buffer(content, len(content))


def call_bpf(command: int, attributes: bytes) -> int:
    """OSError if the kernel refuses; ENOSYS on an unknown architecture."""
    block = _block(attributes)
    return _checked(_LIBC.syscall(_BPF, command, block, len(block)))


def _checked(result: int) -> int:
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
    """Removes and returns all elements of a hash map with keys of 8 bytes, values of ``words``."""

    def __init__(self, descriptor: int, entries: int, words: int = 1) -> None:
        self._entries, self._words = entries, words
        keys, values = (ctypes.create_string_buffer(8 * n * entries) for n in (1, words))
        self._keys, self._values = (memoryview(one).cast("B").cast("Q") for one in (keys, values))
        self._position = ctypes.create_string_buffer(4)
        places = (ctypes.addressof(one) for one in (self._position, keys, values))
        self._attributes = _block(struct.pack("=QQQQIIQQ", 0, *places, entries, descriptor, 0, 0))
        self._count = memoryview(self._attributes).cast("B")[32:36].cast("I")

    def take(self) -> tuple[memoryview[int], memoryview[int]]:
        """The keys and the words of all values, until the next call. OSError."""
        self._count[0] = self._entries
        if _LIBC.syscall(_BPF, _TAKE_BATCH, self._attributes, len(self._attributes)) < 0:
            code = ctypes.get_errno()
            if code != errno.ENOENT:  # the end of the map, which is the usual result
                raise OSError(code, os.strerror(code))
        count = self._count[0]
        return self._keys[:count], self._values[: count * self._words]


PerfEvent = tuple[int, int]
"""Type and configuration of a perf event."""

_CLOSED_BY_EXEC, _ALL_PROCESSES = 8, -1
_ENABLE = 0x20002400 if os.uname().machine == "ppc64le" else 0x2400  # PERF_EVENT_IOC_ENABLE


def open_perf_events(events: Sequence[PerfEvent], cpu: int) -> list[int]:
    """The descriptors of one group of ``events``, which counts all processes of a CPU. OSError.

    The kernel counts a group as a whole or, while others need the counters, not at all.
    """
    opened: list[int] = []
    try:
        for kind, config in events:
            leader = opened[0] if opened else -1
            # A running group may leave out later members: the leader begins disabled.
            block = _block(struct.pack("=IIQ24xQ16x", kind, 64, config, not opened))
            arguments = (block, _ALL_PROCESSES, cpu, leader, _CLOSED_BY_EXEC)
            opened.append(_checked(_LIBC.syscall(_PERF_EVENT_OPEN, *arguments)))
        fcntl.ioctl(opened[0], _ENABLE)
    except OSError:
        close_all(opened)
        raise
    return opened


def close_all(descriptors: list[int]) -> None:
    """Close and forget the descriptors."""
    while descriptors:
        with suppress(OSError):
            os.close(descriptors.pop())


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
    JUMP_UNLESS_ZERO = 0x55
    CALL = 0x85  # the kernel's helper function ``value``
    LEAVE = 0x95


LOOKUP, UPDATE, MONOTONIC_TIME, PID_AND_GROUP, READ_PERF_EVENT = 1, 2, 5, 14, 55
"""Helper functions of the kernel. Only programs under a GPL-compatible licence may call the last,
which is also in Linux' own ``bperf_leader.bpf.c``."""
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


def load_program(name: str, program: Sequence[Instruction], licence: str) -> int:
    """The descriptor of a verified program for raw tracepoints."""
    code, terms = _block(assemble(program)), _block(licence.encode() + b"\0")
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
