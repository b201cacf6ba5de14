"""Netlink: sockets, coding of messages and attributes, and reception of many datagrams at a time.

A busy host reports thousands of events a second. A classic BPF program on the socket drops unused
ones in the kernel, and one ``recvmmsg`` reads the others into slots of one buffer, which one
``struct.Struct.iter_unpack`` decodes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

GENERIC = 16  # NETLINK_GENERIC
CONNECTOR = 11  # NETLINK_CONNECTOR
ERROR = 2  # NLMSG_ERROR
REQUEST, ACK = 1, 4
HEADER = struct.Struct("=IHHII")
"""``nlmsghdr``: length, type, flags, sequence, port."""

_SO_RCVBUFFORCE, _SO_ATTACH_FILTER = 33, 26
_CODE = struct.Struct("=i")
_ATTRIBUTE = struct.Struct("=HH")
_BUFFER = 16 << 20  # enough for ten thousand exits between two polls; allocated on demand
MAX_DATAGRAM = 8192
"""Longer than all expected messages; a small buffer is cheap to allocate for each read."""


def open_netlink(protocol: int, groups: int = 0) -> socket.socket:
    """A bound netlink socket with a receive buffer large enough for bursts.

    OSError if the kernel does not permit or support it.
    """
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, protocol)
    try:
        link.bind((0, groups))
        try:
            link.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
        except OSError:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    except OSError:
        link.close()
        raise
    return link


def message(kind: int, flags: int, payload: bytes, sequence: int = 1) -> bytes:
    return HEADER.pack(HEADER.size + len(payload), kind, flags, sequence, 0) + payload


def messages(datagram: bytes) -> Iterator[tuple[int, bytes]]:
    """The (type, payload) of every whole message in a datagram; a cut one ends it."""
    at = 0
    while at + HEADER.size <= len(datagram):
        length, kind, _, _, _ = HEADER.unpack_from(datagram, at)
        if length < HEADER.size or at + length > len(datagram):
            return
        yield kind, datagram[at + HEADER.size : at + length]
        at += (length + 3) & ~3


def attribute(kind: int, value: bytes) -> bytes:
    length = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(length, kind) + value + b"\0" * (-length % 4)


def attributes(payload: bytes) -> Iterator[tuple[int, bytes]]:
    """The (type, value) of every whole attribute; a cut one ends it."""
    at = 0
    while at + _ATTRIBUTE.size <= len(payload):
        length, kind = _ATTRIBUTE.unpack_from(payload, at)
        if length < _ATTRIBUTE.size or at + length > len(payload):
            return
        yield kind & 0x3FFF, payload[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3


def raise_error(payload: bytes) -> None:
    """Raise the error of an NLMSG_ERROR; return for an acknowledgement."""
    if len(payload) < _CODE.size:
        raise OSError(errno.EBADMSG, "the kernel's error message is truncated")
    code = -_CODE.unpack_from(payload)[0]
    if code:
        raise OSError(code, os.strerror(code) if code in errno.errorcode else "unknown error")


# ---------------------------------------------------------------------------------------- filters

_INSTRUCTION = struct.Struct("=HBBI")  # sock_filter: code, jt, jf, k
_WHOLE = 0xFFFFFFFF
_PASS, _DROP = "pass", "drop"


class FilterOp(IntEnum):
    """Operations of a filter, on one loaded value and a copy of an earlier one."""

    LOAD_LENGTH = 0x80  # of the datagram
    LOAD_WORD = 0x20  # 4 bytes at an offset; a datagram that ends before them is dropped
    LOAD_BYTE = 0x30
    KEEP = 0x07  # copy the loaded value, for IF_SAME
    IF_EQUAL = 0x15
    IF_SAME = 0x1D
    IF_AT_LEAST = 0x35
    IF_ANY_BIT = 0x45
    RETURN = 0x06


class Rule(NamedTuple):
    """One instruction of a filter; ``true`` and ``false`` name the labels of a jump's targets.

    "" is the next instruction, "pass" and "drop" end the program.
    """

    code: FilterOp
    value: int = 0
    true: str = ""
    false: str = ""
    label: str = ""


def if_word(value: int, true: str = "", false: str = "") -> Rule:
    """Jump by the loaded word, which the sender wrote in the host's byte order.

    The program loads words in network byte order.
    """
    return Rule(FilterOp.IF_EQUAL, socket.htonl(value), true, false)


def assemble(rules: Sequence[Rule]) -> bytes:
    """The classic BPF program of ``rules``, each of which ends in a jump or the next rule."""
    places = {rule.label: at for at, rule in enumerate(rules) if rule.label}
    places |= {_PASS: len(rules), _DROP: len(rules) + 1}

    def jump(at: int, label: str) -> int:
        return places[label] - at - 1 if label else 0

    lines = [
        _INSTRUCTION.pack(rule.code, jump(at, rule.true), jump(at, rule.false), rule.value)
        for at, rule in enumerate(rules)
    ]
    ends = (_INSTRUCTION.pack(FilterOp.RETURN, 0, 0, value) for value in (_WHOLE, 0))
    return b"".join((*lines, *ends))


def attach_filter(link: socket.socket, program: bytes) -> bool:
    """Let the kernel drop datagrams before they are queued; False if it refuses the program."""
    code = ctypes.create_string_buffer(program, len(program))
    count = len(program) // _INSTRUCTION.size
    try:
        link.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_FILTER,
            struct.pack("@HP", count, ctypes.addressof(code)),
        )
    except OSError:
        return False
    return True


# -------------------------------------------------------------------------------------- reception

ADDRESS = 16
"""Bytes of a slot before its datagram: the sender's ``sockaddr_nl`` and padding."""

_PORT = struct.Struct("=4xI")
_MSG_DONTWAIT = 0x40


class DatagramBatch(NamedTuple):
    """Datagrams in slots of equal size, each after the address of its sender.

    A datagram longer than its slot is cut.
    """

    memory: memoryview
    slot: int
    lengths: Sequence[int]

    def datagram(self, at: int) -> bytes:
        """The datagram in slot ``at``; empty if the sender is not the kernel."""
        begin = at * self.slot
        if _PORT.unpack_from(self.memory, begin)[0]:
            return b""
        begin += ADDRESS
        return bytes(self.memory[begin : begin + self.lengths[at]])

    def is_full(self, at: int) -> bool:
        """True if the datagram in slot ``at`` may have been cut."""
        return self.lengths[at] >= self.slot - ADDRESS


class _Vector(ctypes.Structure):  # struct iovec
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _Header(ctypes.Structure):  # struct msghdr
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_size", ctypes.c_uint32),
        ("vectors", ctypes.c_void_p),
        ("vector_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_size", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _MessageSlot(ctypes.Structure):  # struct mmsghdr
    _fields_ = (("header", _Header), ("length", ctypes.c_uint32))


class DatagramReader:
    """Reads the waiting datagrams of a socket, up to ``slots`` at a time, without waiting."""

    def __init__(self, link: socket.socket, longest: int, slots: int) -> None:
        """Datagrams of more than ``longest`` bytes are cut."""
        link.setblocking(False)
        self._link = link
        self._arrival = select.poll()
        self._arrival.register(link, select.POLLIN)
        self._slot = ADDRESS + (longest + 15) // 16 * 16
        self._slots = slots
        self._buffer = ctypes.create_string_buffer(self._slot * slots)
        self._memory = memoryview(self._buffer).cast("B")
        self._vectors = (_Vector * slots)()
        self._messages = (_MessageSlot * slots)()
        begin = ctypes.addressof(self._buffer)
        for at in range(slots):
            address = begin + at * self._slot
            self._vectors[at] = _Vector(address + ADDRESS, self._slot - ADDRESS)
            header = self._messages[at].header
            header.name, header.name_size = address, ADDRESS
            header.vectors, header.vector_count = ctypes.addressof(self._vectors[at]), 1
        size, place = ctypes.sizeof(_MessageSlot), _MessageSlot.length.offset
        self._length = struct.Struct(f"={place}xI{size - place - 4}x")
        self._headers = memoryview(self._messages).cast("B")
        self._receive = ctypes.CDLL(None, use_errno=True).recvmmsg

    def read(self) -> DatagramBatch:
        """The waiting datagrams; empty without any. The next call overwrites them.

        Fewer than `slots` are all. OSError if the kernel reports an error: ENOBUFS for dropped
        datagrams, of which the remaining ones can be read by the next call.
        """
        count = self._receive(self._link.fileno(), self._messages, self._slots, _MSG_DONTWAIT, None)
        if count < 0:
            code = ctypes.get_errno()
            if code != errno.EAGAIN:
                raise OSError(code, os.strerror(code))
            count = 0
        size = self._length.size
        lengths = [one for (one,) in self._length.iter_unpack(self._headers[: count * size])]
        return DatagramBatch(self._memory[: count * self._slot], self._slot, lengths)

    def pending(self) -> bool:
        """True if a datagram or an error waits."""
        return bool(self._arrival.poll(0))

    @property
    def slots(self) -> int:
        """The largest number of datagrams of one read."""
        return self._slots

    def close(self) -> None:
        self._link.close()
