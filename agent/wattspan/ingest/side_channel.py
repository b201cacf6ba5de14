"""The agent's end of the side channel: connected processes, and their rings of span records.

No call blocks: :meth:`SideChannelServer.drain` accepts new processes, reads every ring and notices
ended processes, with a few system calls a process. A client that violates the protocol is
disconnected.

A ring is shared memory that an untrusted process writes while the agent reads it. The agent reads
it by ``pread`` and never maps it, so no action of its owner can fault the agent, and a missing
page reads as zeros. A record is valid if it has the expected number *and* two consecutive reads
agree on all of its bytes, so a half-written or overwritten record is never taken.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import stat
import struct
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from wattspan.http.sockets import ListeningSocket, UserPrincipals, listen_unix
from wattspan.model import Principal
from wattspan.ports import PeerPrincipals
from wattspan.sdk.ring import (
    EDGE,
    ENDED,
    HELLO,
    MAGIC,
    READ_FORMAT,
    RECORD_SIZE,
    STARTED,
    VERSION,
)
from wattspan.sharing.fair_pool import FairPool, share_path
from wattspan.sharing.pools import PoolName, Pools
from wattspan.spans.values import SpanEnd, SpanStart
from wattspan.util.files import process_exists
from wattspan.util.unix_sockets import peer_credentials

# -------------------------------------------------------------------------------------- rings

MAX_RING_RECORDS = 1 << 16
"""Records of the largest accepted ring; bounds the cost of reading one."""

_FIRST, _CHUNK = 16, 512  # records of the first read, which finds most rings empty, and the next
_NUMBER = RECORD_SIZE - 8  # offset of the number in a record
_MAX_SKIP = 1 << 40  # no process writes as many records between two reads of its ring
_NO_PARENT = bytes(8)

RingRecord = SpanStart | SpanEnd


class RingError(ValueError):
    """A violation of the protocol of the side channel."""


class RingReader:
    """Reads one ring; owns the descriptor once it is constructed."""

    def __init__(self, descriptor: int, count: int) -> None:
        """``descriptor`` is a sealed memfd of ``count`` records.

        RingError if it is anything else; then the caller keeps the descriptor.
        """
        if not 1 <= count <= MAX_RING_RECORDS:
            raise RingError(f"a ring of {count} records")
        try:
            status = os.fstat(descriptor)
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            raise RingError(f"no memfd: {error}") from None
        if not stat.S_ISREG(status.st_mode) or status.st_size < count * RECORD_SIZE:
            raise RingError(f"{status.st_size} bytes are no ring of {count} records")
        if not seals & fcntl.F_SEAL_SHRINK:
            raise RingError("not sealed against shrinking")
        self._descriptor = descriptor
        self._count = count
        self._next = 1
        self._hole = 0  # number of a missing record that was waited for
        self.edges: list[int] = []
        """The edges of windows in the last `drain`."""
        self.examined = 0
        """The records of the last `drain`: valid and invalid ones, and a chunk for each jump."""

    def close(self) -> None:
        os.close(self._descriptor)

    def drain(
        self, limit: int = MAX_RING_RECORDS, *, last: bool = False
    ) -> tuple[list[RingRecord], int]:
        """The unread records and the number of lost ones, once about ``limit`` were examined.

        A record whose number was allocated but is not written yet is waited for once, until the
        next call; not if this is the ``last`` call.
        """
        records: list[RingRecord] = []
        lost, size, self.examined, self.edges = 0, _FIRST, 0, []
        # Enough rounds to read the whole ring and more; a faster writer is left for the next call.
        for _ in range(2 * self._count // _CHUNK + 16):
            before = self._next
            lost += self._read(size, records)
            if self._next == before:
                skipped = self._skip(last=last)
                lost += skipped
                if not skipped:
                    break
            # Invalid records and jumps take as much time as valid ones.
            self.examined += min(self._next - before, _CHUNK)
            if self.examined >= limit:
                break
            size = _CHUNK
        return records, lost

    def _read(self, size: int, records: list[RingRecord]) -> int:
        """Append those of the next ``size`` records that are there; returns the invalid ones."""
        once = self._bytes(size)
        if _number(once, 0) != self._next:
            return 0
        again = self._bytes(size)
        if once != again:
            once = once[: _common_prefix(once, again) * RECORD_SIZE]
        new, number, invalid = tuple.__new__, self._next, 0
        for id_, parent, at, cpu, thread, kind, written in READ_FORMAT.iter_unpack(once):
            if written != number:
                break
            number += 1
            if kind == STARTED:
                known = b"" if parent == _NO_PARENT else parent
                records.append(new(SpanStart, (id_, known, at, thread, cpu)))
            elif kind == ENDED:
                records.append(new(SpanEnd, (id_, at, thread, cpu)))
            elif kind == EDGE:
                self.edges.append(at)
            else:
                invalid += 1
        self._next = number
        return invalid

    def _skip(self, *, last: bool) -> int:
        """Skip a missing record if later ones are there; returns the number of lost records."""
        ahead = self._bytes(_FIRST)
        numbers = [_number(ahead, slot) for slot in range(len(ahead) // RECORD_SIZE)]
        if numbers[0] > self._next:
            return self._catch_up(numbers[0])
        written = (n for n, number in enumerate(numbers) if n and number == self._next + n)
        hole = next(written, 0)
        if hole and not last and self._hole != self._next:
            self._hole = self._next
            return 0
        self._next += hole
        return hole

    def _catch_up(self, number: int) -> int:
        """The writer has overwritten unread records; returns the number of lost records."""
        if number - self._next > _MAX_SKIP or (number - self._next) % self._count:
            raise RingError(f"record {number} stands in the place of {self._next}")
        # The oldest records will be overwritten next, so reading continues behind them.
        first = number - self._count + 1 + self._count // 8
        lost, self._next = first - self._next, first
        return lost

    def _bytes(self, size: int) -> bytes:
        """The next ``size`` slots, fewer at the end of the ring."""
        slot = self._next % self._count
        wanted = min(size, self._count - slot) * RECORD_SIZE
        read = os.pread(self._descriptor, wanted, slot * RECORD_SIZE)
        if len(read) != wanted:
            raise RingError("the ring was truncated")
        return read


def _number(slots: bytes, slot: int) -> int:
    return int.from_bytes(slots[slot * RECORD_SIZE + _NUMBER : (slot + 1) * RECORD_SIZE])


def _common_prefix(once: bytes, again: bytes) -> int:
    """The number of leading records that are equal in both, by bisection."""

    def differs(record: int) -> bool:
        end = (record + 1) * RECORD_SIZE
        return once[:end] != again[:end]

    return bisect_left(range(len(once) // RECORD_SIZE), 1, key=differs)


# ------------------------------------------------------------------------------------- server

MAX_RECORDS = 1 << 16
"""Records read in one turn, of all processes; bounds its time and memory."""

MAX_OWNER_RECORDS = 1024
"""Records of one owner read in one turn, some 20,000 a second: more wait in their rings.

The rest of the agent shares the interpreter with the reader, and waits for it.
"""

_MAX_ACCEPTED = 2048  # connections accepted in one turn, and the length of the kernel's queue
_MAX_LOOKUPS = 256  # of principals of one user in one turn; of all users four times as many
_MAX_TRIES = 16  # lookups of the principal of one process in _TRIES_TURNS
_TRIES_TURNS = 20
_HELLO_TURNS = 20  # turns until the hello must have arrived; clients send it with the connection
_RINGS_PER_PROCESS = 4  # one for each tracer provider; a usual process has one

_INT = struct.Struct("i")


class ProcessRecords(NamedTuple):
    """The records of one process since the last turn.

    ``pid`` and ``principal`` are the kernel's at the time of connection; the records are claims of
    the process. They are in the order of their creation, except that those of different threads
    may be slightly out of order. ``lost`` records were overwritten before they were read. After
    ``gone``, nothing follows from this process unless it connects anew. ``edges`` are the times at
    which windows begin and end.
    """

    pid: int
    principal: Principal | None
    records: list[RingRecord]
    lost: int
    gone: bool
    edges: Sequence[int] = ()


class _Client:
    """A connected process; ``ring`` is None before its hello."""

    def __init__(self, connection: socket.socket, pid: int, principal: Principal) -> None:
        self.connection, self.pid, self.principal = connection, pid, principal
        self.pool: FairPool[Principal] | None = None  # that it has a place of
        self.ring: RingReader | None = None
        self.turns = 0
        self.announces: bool | None = None  # spans; None before the first record
        self.quiet = False

    def close(self) -> None:
        self.connection.close()
        if self.ring is not None:
            self.ring.close()


@dataclass(slots=True)
class SideChannelCounters:
    """Connections and records since the start."""

    connected: int = 0  # at present
    quiet: int = 0  # of these, that have never announced a span and no window in the last turn
    tried: int = 0  # connections in the last turn, also those that were not admitted
    admitted: int = 0
    crowded_out: int = 0  # rejected for lack of room
    put_out: int = 0  # disconnected for a violation of the protocol
    lost: int = 0  # records of spans that were invalid, or overwritten before they were read

    @property
    def active(self) -> bool:
        """True if processes announce, or tried to connect in the last turn."""
        return self.connected - self.quiet + self.tried > 0


class SideChannelServer:
    """Listens at ``path``, a Unix socket that every user may connect to.

    At most ``max_processes`` are connected at a time, divided among users; root may use what is
    left. ``max_windows`` processes that only open windows are beside them, whose places displace
    those of the users with more.
    """

    def __init__(
        self,
        path: Path,
        principals: PeerPrincipals | None = None,
        *,
        max_processes: int = 256,
        max_windows: int | None = None,
        max_records: int = MAX_RECORDS,
        max_owner_records: int = MAX_OWNER_RECORDS,
        pools: Pools | None = None,
    ) -> None:
        self._path, self._principals = path, principals or UserPrincipals()
        pools = pools or Pools()
        self._pool: FairPool[Principal] = pools.make(PoolName.SIDE_CHANNEL, max_processes)
        self._windows: FairPool[Principal] = pools.make(PoolName.WINDOW_RINGS, max_windows)
        self._max_records, self._max_owner_records = max_records, max_owner_records
        self._log = logging.getLogger(__name__)
        self._listening: ListeningSocket | None = None
        self._clients: list[_Client] = []
        self._turns, self._tries = 0, Counter[tuple[int, int | None]]()
        self.counts = SideChannelCounters()

    def start(self) -> None:
        """Listen; replaces a stale socket. ListenError."""
        # Every user may connect: the kernel names the user, and the agent only reads.
        listening = listen_unix(self._path, 0o666, what="spans as they begin")
        listening.socket.listen(_MAX_ACCEPTED)
        listening.socket.setblocking(False)
        self._listening = listening

    def stop(self) -> None:
        """Disconnect; applications notice it within a second of their next span."""
        if self._listening is not None:
            self._listening.remove()
            self._listening.socket.close()
            self._listening = None
        for client in tuple(self._clients):
            self._remove(client)

    @property
    def descriptor(self) -> int | None:
        """The descriptor that can be read once a process connects; None while not listening."""
        return None if self._listening is None else self._listening.socket.fileno()

    def drain(self) -> list[ProcessRecords]:
        """The records since the last turn, of processes with records and of ended processes.

        At most about ``max_records`` are examined, and ``max_owner_records`` of one owner; the next
        turn begins with the processes left over.
        """
        self._accept()
        reports: list[ProcessRecords] = []
        left, of_owner = self._max_records, Counter[Hashable]()
        left_over = set[_Client]()
        for client in list(self._clients):
            owner = client.principal.path[0]
            limit = min(left, self._max_owner_records - of_owner[owner])
            if limit <= 0:
                left_over.add(client)
                continue
            try:
                report = self._read(client, limit)
            except (OSError, RingError) as error:
                self._disconnect(client, error)
                report = None
                if client.ring:
                    report = ProcessRecords(client.pid, client.principal, [], 0, gone=True)
            if report is not None:
                reports.append(report)
                examined = 0 if client.ring is None else client.ring.examined
                left -= examined
                of_owner[owner] += examined
                self.counts.lost += 0 if client.announces is False else report.lost
        if left_over:
            self._clients.sort(key=left_over.__contains__, reverse=True)
        self.counts.connected = len(self._clients)
        self.counts.quiet = sum(client.quiet for client in self._clients)
        return _merge_exits(reports, {(one.pid, one.principal) for one in self._clients})

    def _accept(self) -> None:
        """Accept connections; a flood of one user or process costs few lookups of principals."""
        self._turns += 1
        if self._turns % _TRIES_TURNS == 0:
            self._tries.clear()
        self.counts.tried = 0
        lookups = Counter[int | None]()
        for connection in self._new_connections():
            self.counts.tried += 1
            pid, uid = peer_credentials(connection)
            if _is_closed(connection):
                self.counts.put_out += 1
                connection.close()
                continue
            principal = None
            if (
                pid is not None
                and lookups[uid] < _MAX_LOOKUPS
                and lookups.total() < 4 * _MAX_LOOKUPS
                and self._tries[pid, uid] < _MAX_TRIES
            ):
                lookups[uid] += 1
                self._tries[pid, uid] += 1
                principal = self._principals.connected(pid, uid)
            place = None if pid is None or principal is None else self._place(pid, principal)
            if pid is None or principal is None or place is None:
                self.counts.crowded_out += 1
                connection.close()
                continue
            connection.setblocking(False)
            self.counts.admitted += 1
            self._clients.append(_Client(connection, pid, principal))
            self._clients[-1].pool = place

    def _new_connections(self) -> Iterator[socket.socket]:
        if self._listening is None:
            return
        for _ in range(_MAX_ACCEPTED):
            try:
                yield self._listening.socket.accept()[0]
            except BlockingIOError:
                return
            except OSError as error:  # the client has disconnected, or no descriptor is free
                if error.errno != errno.ECONNABORTED:
                    return

    def _place(self, pid: int, principal: Principal) -> FairPool[Principal] | None:
        """The pool with a place for a connection, which is reserved; None without one.

        It may only open windows: their places are for it if those for spans are taken.
        """
        # Of a pid that another user's process had before, a child may hold the connections.
        rings = sum((one.pid, one.principal) == (pid, principal) for one in self._clients)
        pools = (self._pool, self._windows) if rings < _RINGS_PER_PROCESS else ()
        return next((one for one in pools if self._acquire(one, principal)), None)

    def _acquire(self, pool: FairPool[Principal], principal: Principal) -> bool:
        """True if there is a place, perhaps that of an owner with more."""
        if principal.is_host_root and pool.left > 0:
            pool.force(share_path(principal))
            return True
        admission = pool.acquire(share_path(principal))
        for path in admission.displaced:
            losers = (
                c for c in self._clients if c.pool is pool and share_path(c.principal) == path
            )
            next(losers).pool = None
        return bool(admission)

    def _move(self, client: _Client) -> None:
        """Give a client the place that its records need; None if there is none."""
        pool = self._pool if client.announces else self._windows
        if client.pool is not pool:
            self._release(client)
            client.pool = pool if self._acquire(pool, client.principal) else None

    def _read(self, client: _Client, limit: int) -> ProcessRecords | None:
        if client.pool is None:
            raise RingError("other processes have its place")
        ring = client.ring = client.ring or self._receive_hello(client)
        if ring is None:
            return None
        gone = _has_ended(client)  # before the ring is read, so that the ring is complete
        records, lost = ring.drain(limit, last=gone)
        gone = gone and ring.examined < limit  # else there may be more
        if gone:
            self._remove(client)
        if records or ring.edges:
            client.announces = bool(records or client.announces)
            if not gone:
                self._move(client)
        client.quiet = client.announces is False and not ring.edges
        if not records and not lost and not gone and not ring.edges:
            return None
        return ProcessRecords(client.pid, client.principal, records, lost, gone, ring.edges)

    def _receive_hello(self, client: _Client) -> RingReader | None:
        """The ring of the client's hello; None before it arrives. OSError or RingError."""
        descriptors: list[int] = []
        try:
            try:
                hello, ancillary, flags, _ = client.connection.recvmsg(
                    HELLO.size, socket.CMSG_SPACE(_INT.size), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                client.turns += 1
                if client.turns > _HELLO_TURNS:
                    raise RingError("no hello") from None
                return None
            for _, _, data in ancillary:
                descriptors += (fd for (fd,) in _INT.iter_unpack(data[: len(data) // 4 * 4]))
            ring = receive_ring(hello, descriptors, truncated=bool(flags & socket.MSG_CTRUNC))
            descriptors.clear()  # the ring owns it now
            return ring
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _disconnect(self, client: _Client, reason: Exception) -> None:
        self._log.debug(
            "The side channel disconnects pid %d (%s): %s", client.pid, client.principal, reason
        )
        if client.pool is None:
            self.counts.crowded_out += 1
        else:
            self.counts.put_out += 1
        self._remove(client)

    def _remove(self, client: _Client) -> None:
        self._clients.remove(client)
        self._release(client)
        client.close()

    def _release(self, client: _Client) -> None:
        if client.pool is not None:
            client.pool.release(share_path(client.principal))


def receive_ring(hello: bytes, descriptors: list[int], *, truncated: bool) -> RingReader:
    """The ring of a hello and the descriptors that came with it; RingError."""
    if len(hello) != HELLO.size:
        raise RingError(f"a hello of {len(hello)} bytes")
    magic, version, size, count = HELLO.unpack(hello)
    if (magic, version, size) != (MAGIC, VERSION, RECORD_SIZE):
        raise RingError(f"{magic!r} version {version} with records of {size} bytes is not ours")
    if len(descriptors) != 1 or truncated:
        raise RingError("a hello comes with one descriptor")
    return RingReader(descriptors[0], count)


def _is_closed(connection: socket.socket) -> bool:
    """True if the client has disconnected without a hello."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _has_ended(client: _Client) -> bool:
    """True if the client disconnected, or is dead and a child has inherited its connection."""
    try:
        if client.connection.recv(1, socket.MSG_PEEK) != b"":
            raise RingError("data after the hello")
    except BlockingIOError:
        return not process_exists(client.pid)
    except ConnectionError:
        pass
    return True


def _merge_exits(
    reports: list[ProcessRecords], connected: set[tuple[int, Principal | None]]
) -> list[ProcessRecords]:
    """Keep ``gone`` only in the last report of a process without another connection."""
    seen = set(connected)
    for index in reversed(range(len(reports))):
        report = reports[index]
        process = report.pid, report.principal
        if report.gone and process in seen:
            reports[index] = report._replace(gone=False)
        seen.add(process)
    return reports
