"""Kernel events of processes: the process connector (fork, exec, exit) and taskstats (CPU time).

Both use netlink, whose messages and attributes are coded here as well.

Layout of the connector from the kernel's ``uapi/linux/connector.h`` and ``uapi/linux/cn_proc.h``.
A subscription needs CAP_NET_ADMIN before Linux 6.6, and the initial user and pid namespaces.

Layout of taskstats from ``uapi/linux/taskstats.h``. New versions add fields at the end, but version
15 added some in the middle, so the layout is verified with a query about this process. Taskstats
need CAP_NET_ADMIN and the initial user and pid namespaces.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

GENERIC = 16  # NETLINK_GENERIC
CONNECTOR = 11  # NETLINK_CONNECTOR
ERROR = 2  # NLMSG_ERROR
REQUEST, ACK = 1, 4
_SO_RCVBUFFORCE = 33
_HEADER = struct.Struct("=IHHII")
_CODE = struct.Struct("=i")
_ATTRIBUTE = struct.Struct("=HH")
_BUFFER = 4 << 20  # enough for some thousand exits between two polls; allocated on demand
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
    return _HEADER.pack(_HEADER.size + len(payload), kind, flags, sequence, 0) + payload


def messages(datagram: bytes) -> Iterator[tuple[int, bytes]]:
    """The (type, payload) of every whole message in a datagram; a cut one ends it."""
    at = 0
    while at + _HEADER.size <= len(datagram):
        length, kind, _, _, _ = _HEADER.unpack_from(datagram, at)
        if length < _HEADER.size or at + length > len(datagram):
            return
        yield kind, datagram[at + _HEADER.size : at + length]
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


class ExitRecord(NamedTuple):
    """The accounting record of an exited process: nearly all of its CPU time.

    The kernel writes it before the process frees its memory, so the time of that (some tenths of a
    millisecond, more for a large process) is missing from ``cpu``. ``certain`` is False on an old
    kernel, whose record may be of a process or of one of its threads.
    """

    pid: int
    parent: int
    cpu: int  # nanoseconds, all threads
    elapsed: int  # nanoseconds since its start
    command: str
    user_id: int | None
    certain: bool = True


@dataclass(slots=True)
class ProcessEvents:
    """Events since the last drain. ``lost``: there were more events than these."""

    born: dict[int, int] = field(default_factory=dict)  # pid to its parent's
    execed: set[int] = field(default_factory=set)
    exited: set[int] = field(default_factory=set)
    exits: dict[int, list[ExitRecord]] = field(default_factory=dict)
    lost: bool = False

    def add_exit(self, record: ExitRecord) -> None:
        """Add a record; the sum over a thread group replaces the record of its first thread."""
        records = self.exits.setdefault(record.pid, [])
        if record.certain and records and not records[-1].certain:
            records.pop()
        records.append(record)

    def merge(self, later: ProcessEvents) -> None:
        self.born.update(later.born)
        self.execed |= later.execed
        self.exited |= later.exited
        for pid, records in later.exits.items():
            self.exits.setdefault(pid, []).extend(records)
        self.lost = self.lost or later.lost

    @property
    def churn(self) -> bool:
        return bool(self.born or self.exited or self.exits or self.lost)


class EventChannel:
    """A netlink socket on which the kernel reports processes."""

    def __init__(self, link: socket.socket, record: Callable[[bytes, ProcessEvents], None]) -> None:
        """``record`` adds the events of one datagram."""
        self._link, self._record = link, record

    def pending(self) -> bool:
        """True if ``drain`` would add something, or if that is unknown."""
        try:
            return bool(self._link.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False
        except OSError:
            return True

    def drain(self, events: ProcessEvents) -> None:
        """Add everything reported so far to ``events``; never waits, never raises."""
        receive, record = self._link.recvfrom, self._record
        while True:
            try:
                datagram, sender = receive(MAX_DATAGRAM)
            except BlockingIOError:
                return
            except OSError as error:
                events.lost = True
                if error.errno != errno.ENOBUFS:
                    return
                continue
            if sender[0] == 0:  # only messages of the kernel are trustworthy
                record(datagram, events)

    def close(self) -> None:
        self._link.close()


_PROC_GROUP = 1  # CN_IDX_PROC
_CN = struct.Struct("=IIIIHH")  # idx val seq ack len flags
# idx val, then what, then the four numbers an event may have: of a fork parent_pid parent_tgid
# child_pid child_tgid, of the others process_pid process_tgid and more.
_EVENT = struct.Struct("=II12xI12xIIII")
_MIN_EVENT = _HEADER.size + _EVENT.size
_NONE, _FORKED, _EXECED, _EXITED = 0, 0x1, 0x2, 0x80000000
_LISTEN = 1  # PROC_CN_MCAST_LISTEN
_ACK_TIMEOUT_MS = 500  # milliseconds for the kernel's answer to a subscription


def record_event(datagram: bytes, events: ProcessEvents) -> None:
    """Add the one event of a datagram, unless it concerns a thread.

    A busy host has thousands of events a second, so one unpack reads all fields.
    """
    if len(datagram) < _MIN_EVENT:
        return
    index, value, what, first, second, third, fourth = _EVENT.unpack_from(datagram, _HEADER.size)
    if index != _PROC_GROUP or value != 1:
        return
    if what == _FORKED:
        if third == fourth:  # the child's task and group
            events.born[third] = second
    elif what == _EXITED:
        if first == second:
            events.exited.add(second)
    elif what == _EXECED:
        events.execed.add(second)


def acknowledgement(datagram: bytes) -> int | None:
    """The error number of an acknowledged subscription, 0 for success; None for other messages."""
    if len(datagram) < _MIN_EVENT:
        return None
    index, value, what, error, *_ = _EVENT.unpack_from(datagram, _HEADER.size)
    return error if (index, value, what) == (_PROC_GROUP, 1, _NONE) else None


def open_process_connector() -> EventChannel:
    """Subscribe to the process connector; OSError if the kernel does not permit or answer it."""
    link = open_netlink(CONNECTOR, _PROC_GROUP)
    try:
        request = _CN.pack(_PROC_GROUP, 1, 0, 0, 4, 0) + struct.pack("=I", _LISTEN)
        link.send(message(3, 0, request))
        _await_acknowledgement(link)
        link.setblocking(False)
    except OSError:
        link.close()
        raise
    return EventChannel(link, record_event)


def _await_acknowledgement(link: socket.socket) -> None:
    """Wait for the acknowledgement, which the kernel sends in the initial namespaces only."""
    ready = select.poll()
    ready.register(link, select.POLLIN)
    for _ in range(1000):  # events of others may come first
        if not ready.poll(_ACK_TIMEOUT_MS):
            raise TimeoutError("the kernel does not answer; are these the initial namespaces?")
        error = acknowledgement(link.recv(MAX_DATAGRAM))
        if error is not None:
            if error:
                raise OSError(error, os.strerror(error))
            return
    raise TimeoutError("the kernel does not acknowledge the subscription")


_CONTROL, _GET_FAMILY, _FAMILY_ID, _FAMILY_NAME = 0x10, 3, 1, 2
_GET, _ASK_PID, _REGISTER_MASK = 1, 1, 3
_TGID, _STATS, _AGGR_PID, _AGGR_TGID = 2, 3, 4, 5
_GENL = struct.Struct("=BBH")
_REPLY_TIMEOUT = 1.0  # seconds for an answer while opening

_VERSION = struct.Struct("=H")
_CPU_VIRTUAL = struct.Struct("=Q")  # cpu_run_virtual_total: the scheduler's nanoseconds
_ACCT = struct.Struct("=IIII")  # ac_uid ac_gid ac_pid ac_ppid
_TIMES = struct.Struct("=QQQ")  # ac_etime ac_utime ac_stime, microseconds
_GROUP = struct.Struct("=I4xQ")  # ac_tgid ac_tgetime
_AT_FLAG, _AT_VIRTUAL, _AT_COMM, _AT_ACCT, _AT_TIMES, _AT_GROUP = 8, 72, 80, 120, 144, 368
_LAST_OF_GROUP = 0x20  # AGROUP
_GROUP_SINCE_VERSION = 12  # the version that brought ac_tgid and AGROUP


def parse_exit(payload: bytes) -> ExitRecord | None:
    """The exit of a process in one generic-netlink message; None for other messages.

    A process with one thread has one record (AGGR_PID). The last thread of a group adds the sum
    over the group (AGGR_TGID), which takes precedence.
    """
    task: ExitRecord | None = None
    total: tuple[int, int] | None = None
    for kind, value in attributes(payload[_GENL.size :]):
        parts = dict(attributes(value))
        stats = parts.get(_STATS, b"")
        if len(stats) < _AT_TIMES + _TIMES.size:
            continue
        if kind == _AGGR_PID:
            task = _task(stats)
        elif kind == _AGGR_TGID and len(parts.get(_TGID, b"")) >= 4:
            total = (struct.unpack_from("=I", parts[_TGID])[0], _cpu_of(stats))
    if task is not None and total is not None:
        return task._replace(pid=total[0], cpu=total[1], certain=True)
    return task


def record_exits(family: int, datagram: bytes, events: ProcessEvents) -> None:
    """Add the exits of a datagram of the taskstats ``family``."""
    for kind, payload in messages(datagram):
        record = parse_exit(payload) if kind == family else None
        if record is not None:
            events.add_exit(record)


def _task(stats: bytes) -> ExitRecord | None:
    user_id, _, pid, parent = _ACCT.unpack_from(stats, _AT_ACCT)
    elapsed = _TIMES.unpack_from(stats, _AT_TIMES)[0]
    version = _VERSION.unpack_from(stats)[0]
    certain = version >= _GROUP_SINCE_VERSION and len(stats) >= _AT_GROUP + _GROUP.size
    if certain:
        if not stats[_AT_FLAG] & _LAST_OF_GROUP:
            return None  # other threads of the process live
        pid, elapsed = _GROUP.unpack_from(stats, _AT_GROUP)
    comm = stats[_AT_COMM : _AT_COMM + 32].split(b"\0", 1)[0].decode("utf-8", "replace")
    return ExitRecord(pid, parent, _cpu_of(stats), elapsed * 1000, comm, user_id, certain)


def _cpu_of(stats: bytes) -> int:
    """CPU time: by the scheduler, or in ticks if the kernel has no delay accounting."""
    _, user, system = _TIMES.unpack_from(stats, _AT_TIMES)
    return int(_CPU_VIRTUAL.unpack_from(stats, _AT_VIRTUAL)[0] or (user + system) * 1000)


def open_taskstats(cpus: str) -> EventChannel:
    """Subscribe to the exits on ``cpus``, a list as in ``/sys/devices/system/cpu/possible``.

    OSError if the kernel does not permit it or if its layout is unknown.
    """
    link = open_netlink(GENERIC)
    try:
        link.settimeout(_REPLY_TIMEOUT)
        name = attribute(_FAMILY_NAME, b"TASKSTATS\0")
        answer = _request_stats(link, _CONTROL, _GENL.pack(_GET_FAMILY, 1, 0) + name)
        family = struct.unpack("=H", dict(attributes(answer[4:]))[_FAMILY_ID][:2])[0]
        _check_layout(link, family)
        mask = attribute(_REGISTER_MASK, cpus.encode() + b"\0")
        flags = REQUEST | ACK
        link.send(message(family, flags, _GENL.pack(_GET, 1, 0) + mask))
        _acknowledged(link)
        link.setblocking(False)
    except (KeyError, struct.error) as error:
        link.close()
        raise OSError(errno.EPROTO, "the kernel's answer is invalid") from error
    except OSError:
        link.close()
        raise
    return EventChannel(link, partial(record_exits, family))


def _request_stats(link: socket.socket, kind: int, payload: bytes) -> bytes:
    link.send(message(kind, REQUEST, payload))
    for answer, body in messages(link.recv(MAX_DATAGRAM)):
        if answer == ERROR:
            raise_error(body)
        return body
    raise OSError(errno.EPROTO, "the kernel's answer is empty")


def _check_layout(link: socket.socket, family: int) -> None:
    """Verify the layout: query this process, and compare the pid in the answer."""
    own = attribute(_ASK_PID, struct.pack("=I", os.getpid()))
    answer = _request_stats(link, family, _GENL.pack(_GET, 1, 0) + own)
    stats = dict(attributes(dict(attributes(answer[4:]))[_AGGR_PID]))[_STATS]
    if _ACCT.unpack_from(stats, _AT_ACCT)[2] != os.getpid():
        version = _VERSION.unpack_from(stats)[0]
        raise OSError(errno.EPROTO, f"taskstats version {version} has another layout")


def _acknowledged(link: socket.socket) -> None:
    """Wait for the acknowledgement; ignore exits before it."""
    for _ in range(10_000):
        for kind, payload in messages(link.recv(MAX_DATAGRAM)):
            if kind == ERROR:
                raise_error(payload)
                return
    raise OSError(errno.EPROTO, "the kernel does not acknowledge the subscription")
