"""The agent's end of the side channel: who is connected, and what they tell.

Nobody waits here: :meth:`Feed.drain` takes in who has come, reads every ring and sees who has
gone, a few system calls a process. Whoever breaks the protocol is put out.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from wattspan.http.sockets import ListeningSocket, listen_unix
from wattspan.ingest.ring_reader import RingError, RingReader, RingRecord
from wattspan.sdk.ring import HELLO, MAGIC, RECORD_SIZE, VERSION
from wattspan.util.peer_credentials import peer_credentials

MAX_RECORDS = 1 << 16
"""Records taken in one turn, of all processes: more would hold up every other span, and swell."""

_MAX_ACCEPTED = 64  # connections taken in one turn
_HELLO_TURNS = 20  # turns that a hello may take; it is sent with the connection
_RINGS_PER_PROCESS = 4  # rings: one for each of its tracer providers, and it has one

_INT = struct.Struct("i")


class ProcessRecords(NamedTuple):
    """What one process told since the last time.

    The kernel says that it is ``pid`` of ``uid``. Records stand in the order in which they were
    made, except that those of different threads may be a little out of order; what they say is
    the process's own word. ``lost`` records were overwritten before they could be read. After
    ``gone`` comes nothing more from this process, unless it connects anew.
    """

    pid: int
    uid: int
    records: list[RingRecord]
    lost: int
    gone: bool


class _SideChannelClient:
    """Somebody connected: before the hello ``ring`` is None."""

    def __init__(self, connection: socket.socket, pid: int, uid: int) -> None:
        self.connection, self.pid, self.uid = connection, pid, uid
        self.ring: RingReader | None = None
        self.turns = 0

    def close(self) -> None:
        self.connection.close()
        if self.ring is not None:
            self.ring.close()


@dataclass(slots=True)
class SideChannelCounters:
    """What became of those who came, since the start."""

    connected: int = 0  # now
    admitted: int = 0
    crowded_out: int = 0  # there was no room
    put_out: int = 0  # they broke the protocol
    lost: int = 0  # records that were overwritten before they could be read, or meant nothing


class SideChannelServer:
    """Listens at ``path``, a Unix socket that every user may connect to.

    At most ``most_processes`` are heard at a time. A user other than root may have as many as
    are left: one user gets half, and something is left for the next.
    """

    def __init__(
        self,
        path: Path,
        *,
        most_processes: int = 256,
        most_records: int = MAX_RECORDS,
        log: logging.Logger | None = None,
    ) -> None:
        self._path = path
        self._most = most_processes
        self._most_records = most_records
        self._log = log or logging.getLogger(__name__)
        self._listening: ListeningSocket | None = None
        self._guests: list[_SideChannelClient] = []
        self.counts = SideChannelCounters()

    def start(self) -> None:
        """Listen. ListenError if that cannot be; a socket that nobody listens at is replaced."""
        # Every user may: whoever connects is told by the kernel, and may only be read.
        listening = listen_unix(self._path, 0o666, what="spans as they begin")
        listening.socket.setblocking(False)
        self._listening = listening

    def stop(self) -> None:
        """Listen no more; the applications notice within a second of their next span."""
        if self._listening is not None:
            self._listening.remove()
            self._listening.socket.close()
            self._listening = None
        for guest in self._guests:
            guest.close()
        self._guests.clear()

    def drain(self) -> list[ProcessRecords]:
        """What processes told since the last time, of those that told anything or are gone.

        About ``most_records`` at once; who has not been heard then is heard first the next time.
        """
        self._admit()
        reports: list[ProcessRecords] = []
        left = self._most_records
        waiting = list(self._guests)
        for heard, guest in enumerate(waiting, 1):
            try:
                report = self._hear(guest, left)
            except (OSError, RingError) as error:
                self._put_out(guest, str(error))
                report = (
                    ProcessRecords(guest.pid, guest.uid, [], 0, gone=True) if guest.ring else None
                )
            if report is not None:
                reports.append(report)
                left -= len(report.records)
                self.counts.lost += report.lost
            if left <= 0:
                ahead = set(waiting[heard:])
                self._guests.sort(key=ahead.__contains__, reverse=True)
                break
        self.counts.connected = len(self._guests)
        return _merge_exits(reports, {guest.pid for guest in self._guests})

    def _admit(self) -> None:
        for connection in self._arrivals():
            pid, uid = peer_credentials(connection)
            if pid is None or uid is None or not self._has_room(pid, uid):
                self.counts.crowded_out += 1
                connection.close()
                continue
            connection.setblocking(False)
            self.counts.admitted += 1
            self._guests.append(_SideChannelClient(connection, pid, uid))

    def _arrivals(self) -> Iterator[socket.socket]:
        if self._listening is None:
            return
        for _ in range(_MAX_ACCEPTED):
            try:
                yield self._listening.socket.accept()[0]
            except BlockingIOError:
                return
            except OSError as error:  # they gave up meanwhile, or we have no descriptor left
                if error.errno != errno.ECONNABORTED:
                    return

    def _has_room(self, pid: int, uid: int) -> bool:
        of_user = sum(guest.uid == uid for guest in self._guests)
        of_process = sum(guest.pid == pid for guest in self._guests)
        return (
            len(self._guests) < self._most
            and (uid == 0 or of_user < self._most - len(self._guests))
            and of_process < _RINGS_PER_PROCESS
        )

    def _hear(self, guest: _SideChannelClient, most: int) -> ProcessRecords | None:
        if guest.ring is None and not self._welcome(guest):
            return None
        assert guest.ring is not None  # noqa: S101 - it has been welcomed
        gone = _has_ended(guest)  # first, so that what it told before is all there
        records, lost = guest.ring.drain(most, last=gone)
        gone = gone and len(records) < most  # or there may be more
        if gone:
            self._guests.remove(guest)
            guest.close()
        if not records and not lost and not gone:
            return None
        return ProcessRecords(guest.pid, guest.uid, records, lost, gone)

    def _welcome(self, guest: _SideChannelClient) -> bool:
        """Take the guest's hello, if it is there; OSError or RingError if it is not one."""
        descriptors: list[int] = []
        try:
            try:
                hello, ancillary, flags, _ = guest.connection.recvmsg(
                    HELLO.size, socket.CMSG_SPACE(_INT.size), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                guest.turns += 1
                if guest.turns > _HELLO_TURNS:
                    raise RingError("no hello") from None
                return False
            for _, _, data in ancillary:
                descriptors += (fd for (fd,) in _INT.iter_unpack(data[: len(data) // 4 * 4]))
            guest.ring = _receive_ring(hello, descriptors, cut=bool(flags & socket.MSG_CTRUNC))
            descriptors.clear()  # the ring owns it now
            return True
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _put_out(self, guest: _SideChannelClient, why: str) -> None:
        self._log.debug("pid %d (uid %d) is no longer heard: %s", guest.pid, guest.uid, why)
        self.counts.put_out += 1
        self._guests.remove(guest)
        guest.close()


def _receive_ring(hello: bytes, descriptors: list[int], *, cut: bool) -> RingReader:
    if len(hello) != HELLO.size:
        raise RingError(f"a hello of {len(hello)} bytes")
    magic, version, size, count = HELLO.unpack(hello)
    if (magic, version, size) != (MAGIC, VERSION, RECORD_SIZE):
        raise RingError(f"{magic!r} version {version} with records of {size} bytes is not ours")
    if len(descriptors) != 1 or cut:
        raise RingError("a hello comes with one descriptor")
    return RingReader(descriptors[0], count)


def _has_ended(guest: _SideChannelClient) -> bool:
    """Whether the guest hung up, or is dead with its connection in a child's hands."""
    try:
        if guest.connection.recv(1, socket.MSG_PEEK) != b"":
            raise RingError("it speaks after its hello")
    except BlockingIOError:
        return _is_dead(guest.pid)
    except ConnectionError:
        pass
    return True


def _is_dead(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _merge_exits(reports: list[ProcessRecords], present: set[int]) -> list[ProcessRecords]:
    """A process is gone when the last of its connections is."""
    told = set(present)
    for index in reversed(range(len(reports))):
        report = reports[index]
        if report.gone and report.pid in told:
            reports[index] = report._replace(gone=False)
        told.add(report.pid)
    return reports
