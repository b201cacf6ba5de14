"""The application's end of the side channel: a ring in shared memory, and who was given it.

Nothing here waits: a Unix socket connects and takes a hello at once or not at all.
"""

from __future__ import annotations

import _socket  # the bare sockets of C: whoever patches the socket module leaves them alone
import contextlib
import fcntl
import mmap
import os
from array import array
from collections.abc import Iterable

from wattspan.otel.pen import Pen
from wattspan.otel.wire import HELLO, MAGIC, RECORD_SIZE, RECORDS, VERSION

_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1: nobody but who has mapped it already can write
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

_forsaken: list[mmap.mmap] = []


class Channel:
    """A ring that the agent reads, as long as the connection lasts."""

    def __init__(self, connection: int, memory: mmap.mmap) -> None:
        self._connection = connection
        self._inode = os.fstat(connection).st_ino
        self._memory = memory
        self.pen = Pen(memory)

    def alive(self) -> bool:
        """Whether the agent still listens."""
        try:
            if os.fstat(self._connection).st_ino == self._inode:
                return os.read(self._connection, 1) != b""  # it never says anything
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Let go of the connection; the ring goes with its last writer.

        A program that becomes a daemon may close every descriptor it finds. Then ours are
        somebody else's by now, and must be left alone: the map's own, too.
        """
        with contextlib.suppress(OSError):
            if os.fstat(self._connection).st_ino == self._inode:
                os.close(self._connection)
                self._connection = -1
                return
        if self._connection >= 0:
            _forsaken.append(self._memory)

    def __del__(self) -> None:
        if self._connection >= 0:
            self.close()


def connect(paths: Iterable[str]) -> Channel | None:
    """Give a fresh ring to the first agent that listens at one of ``paths``; None if none does."""
    for path in paths:
        with contextlib.suppress(OSError):
            connection = _connected(path)
            try:
                return Channel(connection, _handed_over(connection))
            except OSError:
                os.close(connection)
    return None


def _connected(path: str) -> int:
    # raises an OSError at once if nobody listens, or too many wait to be heard
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock.detach()


def _handed_over(connection: int) -> mmap.mmap:
    """A new ring, which has been sent over ``connection``."""
    size = RECORDS * RECORD_SIZE
    ring = os.memfd_create("wattspan", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(ring, size)
        memory = mmap.mmap(ring, size)
        fcntl.fcntl(ring, fcntl.F_ADD_SEALS, _SEALS)  # nobody can cut it off under our feet
        with contextlib.suppress(OSError):
            fcntl.fcntl(ring, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        hello = HELLO.pack(MAGIC, VERSION, RECORD_SIZE, RECORDS)
        rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array("i", [ring]))
        sock = _socket.socket(fileno=connection)
        try:
            sock.sendmsg([hello], [rights])
        finally:
            sock.detach()
    finally:
        os.close(ring)
    return memory
