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

_forsaken: list[mmap.mmap] = []


class Descriptor:
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


class Channel:
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
        self._held = Descriptor(ring)  # the ring's own, and then the connection
        self.is_used = False  # an agent has been given it
        self.pen = Pen(self._memory)

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
                connection = _handed_over(self._held, path)
                self._held.close()
                self._held, self.is_used = connection, True
                return True
        return False

    def close(self) -> None:
        """Let go of the agent; the memory goes with its last writer."""
        if not self._held.is_ours:  # then the map's own descriptor is not ours either: it must stay
            _forsaken.append(self._memory)
        self._held.close()

    def __del__(self) -> None:
        if hasattr(self, "_held"):
            self._held.close()


def _handed_over(ring: Descriptor, path: str) -> Descriptor:
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
        return Descriptor(sock.detach())
    finally:
        sock.close()
