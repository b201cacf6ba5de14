"""The side channel between application and agent: socket, hello, ring of records, and its writer.

An application makes a ring in shared memory (a memfd, sealed against shrinking), connects to
``feed.sock`` and sends one hello with the descriptor of the memfd. Neither side sends anything
else: the records are in the ring, and the end of the connection is the end of the channel.

A ring has ``count`` records of 48 bytes, big-endian. Record number n, counted from 1, is in slot
n % count:

| bytes | content |
|---|---|
| 0-7 | span id |
| 8-15 | id of the parent if it is a span of the same process, else 0; 0 at the end of a span |
| 16-23 | CLOCK_MONOTONIC, nanoseconds |
| 24-31 | CPU time of the thread, nanoseconds |
| 32-35 | native id of the thread |
| 36-39 | 1 the span starts, 2 it ends, 3 a window begins or ends (no span: its time alone counts) |
| 40-47 | n, written last |

Any thread writes records without a lock. No call blocks: a Unix socket connects and accepts a
hello at once or not at all.
"""

from __future__ import annotations

import _socket  # the sockets of C, which programs that patch the socket module leave alone
import contextlib
import fcntl
import itertools
import mmap
import os
import struct
import sys
from array import array
from collections.abc import Callable, Iterable
from threading import get_native_id, local

SIDE_CHANNEL_SOCKET = "feed.sock"

MAGIC = b"wattspan"
VERSION = 1
HELLO = struct.Struct(">8sHHI")  # magic, version, bytes a record, records in the ring

WRITE_FORMAT = struct.Struct(">QQQQIIQ")  # of the application: ids are numbers
READ_FORMAT = struct.Struct(">8s8sQQIIQ")  # of the agent: ids are bytes
RECORD_SIZE = WRITE_FORMAT.size
STARTED, ENDED, EDGE = 1, 2, 3

RECORDS = 16384
"""Records of an application's ring: 768 KiB, 160 ms at the highest rate of a Python process."""


CPU_TIME_VALID_FOR = 100_000
"""Nanoseconds for which the CPU time of a thread is extrapolated: reading it is the most expensive
part of a record."""


class RingWriter:
    """The memory of a ring and the numbers of its records; shared by all threads of a process.

    ``take`` returns the next number, atomically. ``here.me`` is the calling thread, and
    ``threads[0]`` the number of threads that have read it.
    """

    __slots__ = ("here", "memory", "take", "threads")

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.take = itertools.count(1).__next__
        self.threads = [0]
        self.here = CurrentThread(self.threads)

    def write_edge(self, at: int) -> None:
        """Record that a window begins or ends at a monotonic time."""
        number = self.take()
        place = number % RECORDS * RECORD_SIZE
        WRITE_FORMAT.pack_into(self.memory, place, 0, 0, at, 0, 0, EDGE, number)

    def edges(self, since: int) -> list[int]:
        """The times of the edges after ``since`` that the ring still has."""
        records = WRITE_FORMAT.iter_unpack(self.memory)
        return sorted(at for _, _, at, _, _, kind, _ in records if kind == EDGE and at > since)


class ThreadCpuTime:
    """A thread: its native id, and its CPU time at the monotonic time ``asked``."""

    __slots__ = ("asked", "cpu", "id")

    def __init__(self) -> None:
        self.id = get_native_id()
        self.asked = self.cpu = 0


class CurrentThread(local):
    """The calling thread: ``__init__`` runs once in each thread, with the same ``threads``."""

    def __init__(self, threads: list[int]) -> None:
        self.me = ThreadCpuTime()
        threads[0] += 1


_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1: only existing mappings can write

_leaked_maps: list[mmap.mmap] = []


class OwnedDescriptor:
    """A file descriptor that the program may close, and whose number it may reuse.

    A program that becomes a daemon closes every descriptor.
    """

    __slots__ = ("_inode", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._inode = self._found()

    def _found(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            status = os.fstat(self.number)
            return status.st_dev, status.st_ino
        return None

    @property
    def is_ours(self) -> bool:
        return self._found() == self._inode is not None

    def close(self) -> None:
        if self.is_ours:
            os.close(self.number)


class RingChannel:
    """A ring, writable at once, and the connection to the agent that reads it, if there is one."""

    def __init__(self) -> None:
        """Create a ring; OSError."""
        ring = os.memfd_create("wattspan", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(ring, RECORDS * RECORD_SIZE)
            self._memory = mmap.mmap(ring, RECORDS * RECORD_SIZE)
            # the agent cannot truncate it
            fcntl.fcntl(ring, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            with contextlib.suppress(OSError):
                fcntl.fcntl(ring, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(ring)
            raise
        self._held = OwnedDescriptor(ring)  # of the ring, and later of the connection
        self.is_used = False  # an agent has received the ring
        self.pen = RingWriter(self._memory)

    @property
    def is_open(self) -> bool:
        """True if the agent that received the ring is still connected."""
        if not self.is_used or not self._held.is_ours:
            return False
        try:
            return os.read(self._held.number, 1) != b""  # the agent never sends data
        except BlockingIOError:
            return True
        except OSError:
            return False

    def connect(self, paths: Iterable[str]) -> bool:
        """Send the ring to the first agent that listens at one of ``paths``."""
        for path in paths:
            with contextlib.suppress(OSError):
                connection = _send_ring(self._held, path)
                self._held.close()
                self._held, self.is_used = connection, True
                return True
        return False

    def close(self) -> None:
        """Disconnect; the memory is freed with its last writer."""
        if not self._held.is_ours:  # the descriptor of the map may be foreign, too
            _leaked_maps.append(self._memory)
        self._held.close()

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_held") and not ends():  # at the end of Python, modules are gone
            self.close()


def _send_ring(ring: OwnedDescriptor, path: str) -> OwnedDescriptor:
    """Send ``ring``; returns the connection, or raises OSError at once."""
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(path)
        if not ring.is_ours:
            raise OSError("the ring was closed")
        hello = HELLO.pack(MAGIC, VERSION, RECORD_SIZE, RECORDS)
        rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array("i", [ring.number]))
        sock.sendmsg([hello], [rights])
        return OwnedDescriptor(sock.detach())
    finally:
        sock.close()
