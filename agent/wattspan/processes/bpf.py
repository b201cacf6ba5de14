"""eBPF by ``bpf(2)``: maps, programs and raw tracepoints.

Needs CAP_BPF and CAP_PERFMON (before Linux 5.8 CAP_SYS_ADMIN), and Linux 5.6 for batches of map
elements. Layouts of ``union bpf_attr`` from ``uapi/linux/bpf.h``, instructions from the kernel's
``Documentation/bpf/standardization/instruction-set.rst``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

_SYSCALLS = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}
_MAP_CREATE, _MAP_UPDATE, _PROG_LOAD, _RAW_TRACEPOINT, _TAKE_BATCH = 0, 2, 5, 17, 25
_RAW_TRACEPOINT_PROGRAM = 17
HASH, PERCPU_ARRAY = 1, 6
"""Types of maps."""

_LICENSE = b"Apache-2.0\0"  # no helper here is restricted to GPL programs


_Block = ctypes.Array[ctypes.c_char]

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_NUMBER = _SYSCALLS.get(os.uname().machine, -1)


def _block(content: bytes) -> _Block:
    return ctypes.create_string_buffer(content, len(content))


def _bpf(command: int, attributes: _Block) -> int:
    """OSError if the kernel refuses; ENOSYS on an unknown architecture."""
    result = int(_LIBC.syscall(_NUMBER, command, attributes, len(attributes)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def create_map(kind: int, key: int, value: int, entries: int) -> int:
    """The descriptor of a new map with keys and values of so many bytes."""
    return _bpf(_MAP_CREATE, _block(struct.pack("=IIIII12x", kind, key, value, entries, 0)))


def update_map(descriptor: int, key: bytes, value: bytes) -> None:
    """Set an element. A value of a per-CPU map has a part for every possible CPU."""
    keys, values = _block(key), _block(value)
    places = ctypes.addressof(keys), ctypes.addressof(values)
    _bpf(_MAP_UPDATE, _block(struct.pack("=I4xQQQ", descriptor, *places, 0)))


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


class Instruction(NamedTuple):
    """One instruction; ``jump`` names the label of a jump's target, ``label`` its own."""

    code: int
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
    return _bpf(_PROG_LOAD, _block(attributes))


def attach_raw_tracepoint(name: str, program: int) -> int:
    """The descriptor of the attachment, which ends when it is closed."""
    text = _block(name.encode() + b"\0")
    return _bpf(_RAW_TRACEPOINT, _block(struct.pack("=QI4x", ctypes.addressof(text), program)))


def assemble(program: Sequence[Instruction]) -> bytes:
    """The machine code of a program. Loading a map's descriptor takes two instructions."""
    places: dict[str, int] = {}
    at = 0
    for one in program:
        if one.label:
            places[one.label] = at
        at += 2 if one.code == _LOAD_64 else 1
    code = bytearray()
    for one in program:
        here = len(code) // 8
        offset = places[one.jump] - here - 1 if one.jump else one.offset
        code += _encoded(one.code, one.target, one.source, offset, one.value)
        if one.code == _LOAD_64:
            code += bytes(8)
    return bytes(code)


def _encoded(code: int, target: int, source: int, offset: int, value: int) -> bytes:
    # Bit fields of the registers begin at the other end of the byte on a big-endian machine.
    little = struct.pack("=H", 1)[0] == 1
    registers = target | source << 4 if little else target << 4 | source
    return struct.pack("=BBhi", code, registers, offset, value)


_LOAD_64, _MAP_DESCRIPTOR = 0x18, 1


def load_map(target: int, descriptor: int) -> Instruction:
    return Instruction(_LOAD_64, target, _MAP_DESCRIPTOR, value=descriptor)


def load(target: int, source: int, offset: int, *, label: str = "") -> Instruction:
    """``target = *(u64 *)(source + offset)``."""
    return Instruction(0x79, target, source, offset, label=label)


def store(target: int, offset: int, source: int, *, label: str = "") -> Instruction:
    """``*(u64 *)(target + offset) = source``."""
    return Instruction(0x7B, target, source, offset, label=label)


def store_word(target: int, offset: int, value: int) -> Instruction:
    """``*(u32 *)(target + offset) = value``."""
    return Instruction(0x62, target, 0, offset, value)


def add_atomically(target: int, offset: int, source: int) -> Instruction:
    """``*(u64 *)(target + offset) += source``, for several CPUs."""
    return Instruction(0xDB, target, source, offset)


def move(target: int, source: int) -> Instruction:
    return Instruction(0xBF, target, source)


def set_to(target: int, value: int, *, label: str = "") -> Instruction:
    return Instruction(0xB7, target, value=value, label=label)


def add(target: int, value: int) -> Instruction:
    return Instruction(0x07, target, value=value)


def subtract(target: int, source: int) -> Instruction:
    return Instruction(0x1F, target, source)


def combine(target: int, source: int) -> Instruction:
    """Bitwise or."""
    return Instruction(0x4F, target, source)


def shift_left(target: int, bits: int) -> Instruction:
    return Instruction(0x67, target, value=bits)


def shift_right(target: int, bits: int) -> Instruction:
    return Instruction(0x77, target, value=bits)


def jump_if_zero(target: int, jump: str) -> Instruction:
    return Instruction(0x15, target, jump=jump)


LOOKUP, UPDATE, MONOTONIC_TIME, PID_AND_GROUP = 1, 2, 5, 14
"""Helper functions of the kernel."""


def call(function: int) -> Instruction:
    return Instruction(0x85, value=function)


def leave(*, label: str = "") -> Instruction:
    return Instruction(0x95, label=label)
