"""What application and agent agree on: the socket, the hello, and the records in the ring.

An application makes a ring in shared memory (a memfd, sealed against shrinking), connects to
``feed.sock`` and sends one hello with the memfd beside it. Nothing else is ever sent, in either
direction: the ring is the message, and the end of the connection is the end of the feed.

A ring holds ``count`` records of 48 bytes, big-endian. Record number n, counted from 1, stands
in slot n % count:

| bytes | what |
|---|---|
| 0-7 | span id |
| 8-15 | id of its parent if that is a span of the same process, else 0; 0 at its end |
| 16-23 | CLOCK_MONOTONIC, nanoseconds |
| 24-31 | CPU time of the thread, nanoseconds |
| 32-35 | native id of the thread |
| 36-39 | 1 the span starts, 2 it ends |
| 40-47 | n, written last |

What it takes to write records into a ring, from any thread, without a lock.

The application's end of the side channel: a ring in shared memory, and who was given it.

Nothing here waits: a Unix socket connects and takes a hello at once or not at all.
"""

from __future__ import annotations

import _socket  # the bare sockets of C: whoever patches the socket module leaves them alone
import contextlib
import fcntl
import itertools
import mmap
import os
import struct
from array import array
from collections.abc import Iterable, Mapping
from threading import get_native_id, local

SIDE_CHANNEL_SOCKET = "feed.sock"

MAGIC = b"wattspan"
VERSION = 1
HELLO = struct.Struct(">8sHHI")  # magic, version, bytes a record, records in the ring

WRITE_FORMAT = struct.Struct(">QQQQIIQ")  # a record as the application writes it: ids are numbers
READ_FORMAT = struct.Struct(">8s8sQQIIQ")  # the same as the agent reads it: ids are bytes
RECORD_SIZE = WRITE_FORMAT.size
STARTED, ENDED = 1, 2

RECORDS = 16384
"""What an application's ring holds: 160 ms of the most a Python process can do, 768 KiB."""


def socket_candidates(environ: Mapping[str, str]) -> list[str]:
    """Where the agent's socket may be, the likeliest first."""
    if told := environ.get("WATTSPAN_RUN_DIR"):
        return [f"{told}/{SIDE_CHANNEL_SOCKET}"]
    paths = [f"/run/wattspan/{SIDE_CHANNEL_SOCKET}"]
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        paths.append(f"{runtime}/wattspan/{SIDE_CHANNEL_SOCKET}")
    return paths


CPU_TIME_VALID_FOR = 100_000
"""Nanoseconds for which a thread's CPU time is trusted: asking is the dearest part of a record."""


class RingWriter:
    """One ring's memory and the numbers of its records; shared by all threads of a process.

    ``take`` gives the next number, in one step as far as other threads can see. ``threads[0]``
    counts the threads that have looked at ``here``, each to find its own ``me``.
    """

    __slots__ = ("here", "memory", "take", "threads")

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.take = itertools.count(1).__next__
        self.threads = [0]
        self.here = CurrentThread(self.threads)


class ThreadCpuTime:
    """A thread: its native id, and its CPU time when it was last asked for."""

    __slots__ = ("asked", "cpu", "id")

    def __init__(self) -> None:
        self.id = get_native_id()
        self.asked = self.cpu = 0


class CurrentThread(local):
    """The thread that looks at it: ``__init__`` runs once in each, with the same ``threads``."""

    def __init__(self, threads: list[int]) -> None:
        self.me = ThreadCpuTime()
        threads[0] += 1


_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1: nobody but who has mapped it already can write

_leaked_maps: list[mmap.mmap] = []


class OwnedDescriptor:
    """A file descriptor that we opened, and may find closed, or to be somebody else's.

    A program that turns into a daemon closes every descriptor it finds; their numbers are soon
    given out again.
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
    """A ring, which can be written from the first moment, and an agent that reads it, in time."""

    def __init__(self) -> None:
        """A new ring; OSError if that cannot be."""
        ring = os.memfd_create("wattspan", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(ring, RECORDS * RECORD_SIZE)
            self._memory = mmap.mmap(ring, RECORDS * RECORD_SIZE)
            # whoever gets it cannot cut it off under our feet
            fcntl.fcntl(ring, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            with contextlib.suppress(OSError):
                fcntl.fcntl(ring, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(ring)
            raise
        self._held = OwnedDescriptor(ring)  # the ring's own, and then the connection
        self.is_used = False  # an agent has been given it
        self.pen = RingWriter(self._memory)

    @property
    def is_open(self) -> bool:
        """Whether the agent that has been given the ring still listens."""
        if not self.is_used or not self._held.is_ours:
            return False
        try:
            return os.read(self._held.number, 1) != b""  # it never says anything
        except BlockingIOError:
            return True
        except OSError:
            return False

    def connect(self, paths: Iterable[str]) -> bool:
        """Give the ring, once, to the first agent that listens at one of ``paths``."""
        for path in paths:
            with contextlib.suppress(OSError):
                connection = _send_ring(self._held, path)
                self._held.close()
                self._held, self.is_used = connection, True
                return True
        return False

    def close(self) -> None:
        """Let go of the agent; the memory goes with its last writer."""
        if not self._held.is_ours:  # then the map's own descriptor is not ours either: it must stay
            _leaked_maps.append(self._memory)
        self._held.close()

    def __del__(self) -> None:
        if hasattr(self, "_held"):
            self._held.close()


def _send_ring(ring: OwnedDescriptor, path: str) -> OwnedDescriptor:
    """The connection over which ``ring`` has been sent; OSError, at once, if nobody took it."""
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
