"""Kernel events of processes: forks, execs and exits, and accounting records of exits.

The process connector reports forks, execs and exits. Layout from the kernel's
``uapi/linux/connector.h`` and ``uapi/linux/cn_proc.h``. A subscription needs CAP_NET_ADMIN before
Linux 6.6, and the initial user and pid namespaces.

Taskstats are accounting records of exited processes. Layout from ``uapi/linux/taskstats.h``. New
versions add fields at the end, but version 15 added some in the middle, so the layout is verified
with a query about this process. Taskstats need CAP_NET_ADMIN and the initial user and pid
namespaces.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple, Protocol

from wattspan.processes.netlink import (
    ACK,
    ADDRESS,
    CONNECTOR,
    ERROR,
    GENERIC,
    HEADER,
    MAX_DATAGRAM,
    REQUEST,
    DatagramBatch,
    DatagramReader,
    FilterOp,
    Rule,
    assemble,
    attach_filter,
    attribute,
    attributes,
    if_word,
    message,
    messages,
    open_netlink,
    raise_error,
)


class ExitRecord(NamedTuple):
    """The accounting record of an exited process: nearly all of its CPU time.

    The kernel writes it before the process frees its memory, so the time of that (some tenths of a
    millisecond, more for a large process) is missing from ``cpu``. ``memory`` is the most resident
    memory of the process in KiB, 0 if the kernel does not record it. ``certain`` is False on an old
    kernel, whose record may be of a process or of one of its threads.
    """

    pid: int
    parent: int
    cpu: int  # nanoseconds, all threads
    elapsed: int  # nanoseconds since its start
    command: str
    user_id: int | None
    certain: bool = True
    memory: int = 0


@dataclass(slots=True)
class ProcessEvents:
    """Events since the last drain. ``lost``: there were more events than these."""

    born: dict[int, int] = field(default_factory=dict)  # pid to its parent's
    reborn: set[int] = field(default_factory=set)  # pids that were born more than once
    execed: set[int] = field(default_factory=set)
    exited: set[int] = field(default_factory=set)
    exits: dict[int, list[ExitRecord]] = field(default_factory=dict)
    lost: bool = False

    def add_birth(self, pid: int, parent: int) -> None:
        if pid in self.born:
            self.reborn.add(pid)
        self.born[pid] = parent

    def add_exit(self, record: ExitRecord) -> None:
        """Add a record; the sum over a thread group replaces the record of its first thread."""
        records = self.exits.setdefault(record.pid, [])
        if record.certain and records and not records[-1].certain:
            records.pop()
        records.append(record)

    def merge(self, later: ProcessEvents) -> None:
        self.reborn |= later.reborn | (self.born.keys() & later.born.keys())
        self.born.update(later.born)
        self.execed |= later.execed
        self.exited |= later.exited
        for pid, records in later.exits.items():
            self.exits.setdefault(pid, []).extend(records)
        self.lost = self.lost or later.lost

    @property
    def churn(self) -> bool:
        return bool(self.born or self.exited or self.exits or self.lost)


class Datagrams(Protocol):
    """Datagrams of the kernel; see :class:`wattspan.processes.netlink.DatagramReader`."""

    @property
    def slots(self) -> int: ...
    def pending(self) -> bool: ...
    def read(self) -> DatagramBatch: ...
    def close(self) -> None: ...


class EventChannel:
    """A netlink socket on which the kernel reports processes."""

    def __init__(
        self, datagrams: Datagrams, record: Callable[[DatagramBatch, ProcessEvents], None]
    ) -> None:
        """``record`` adds the events of one batch."""
        self._datagrams, self._record = datagrams, record

    def pending(self) -> bool:
        """True if ``drain`` would add something, or if that is unknown."""
        return self._datagrams.pending()

    def drain(self, events: ProcessEvents) -> None:
        """Add everything reported so far to ``events``; never waits, never raises."""
        while True:
            try:
                batch = self._datagrams.read()
            except OSError as error:
                events.lost = True
                if error.errno != errno.ENOBUFS:
                    return
                continue
            self._record(batch, events)
            if len(batch.lengths) < self._datagrams.slots:
                return

    def close(self) -> None:
        self._datagrams.close()


# ---------------------------------------------------------------------------- process connector

_PROC_GROUP = 1  # CN_IDX_PROC
_CN = struct.Struct("=IIIIHH")  # idx val seq ack len flags
# idx val, then what, then the four numbers an event may have: of a fork parent_pid parent_tgid
# child_pid child_tgid, of the others process_pid process_tgid and more.
_EVENT = struct.Struct("=II12xI12xIIII")
_MIN_EVENT = HEADER.size + _EVENT.size
_AT_WHAT = HEADER.size + _CN.size
_AT_NUMBERS = _AT_WHAT + 16
_LONGEST = 176  # bytes: two events of Linux 6.18, of 76 bytes each, leave some of a slot free
# A slot: sender's port, length of the message, and the fields of `_EVENT`.
_EVENT_SLOT = struct.Struct(f"=4xI8xI12x{_EVENT.format[1:]}{_LONGEST - _MIN_EVENT}x")
_EVENT_SLOTS = 256
_NONE, _FORKED, _EXECED, _EXITED = 0, 0x1, 0x2, 0x80000000
_LISTEN = 1  # PROC_CN_MCAST_LISTEN
_ACK_TIMEOUT_MS = 500  # milliseconds for the kernel's answer to a subscription


def event_filter(*, exits: bool) -> Sequence[Rule]:
    """Filter for forks, execs and, if wanted, exits of processes, and for acknowledgements.

    Events of threads and other kinds of events are dropped.
    """
    return (
        Rule(FilterOp.LOAD_LENGTH),
        Rule(FilterOp.IF_AT_LEAST, 2 * _MIN_EVENT, "pass"),  # several messages
        Rule(FilterOp.LOAD_WORD, _AT_WHAT),
        if_word(_FORKED, "fork"),
        if_word(_EXECED, "task"),
        if_word(_EXITED, "task" if exits else "drop"),
        if_word(_NONE, "pass", "drop"),
        Rule(FilterOp.LOAD_WORD, _AT_NUMBERS, label="task"),  # process_pid and process_tgid
        Rule(FilterOp.KEEP),
        Rule(FilterOp.LOAD_WORD, _AT_NUMBERS + 4),
        Rule(FilterOp.IF_SAME, 0, "pass", "drop"),
        Rule(FilterOp.LOAD_WORD, _AT_NUMBERS + 8, label="fork"),  # child_pid and child_tgid
        Rule(FilterOp.KEEP),
        Rule(FilterOp.LOAD_WORD, _AT_NUMBERS + 12),
        Rule(FilterOp.IF_SAME, 0, "pass", "drop"),
    )


def record_events(batch: DatagramBatch, events: ProcessEvents) -> None:
    """Add the events of processes, without those of threads.

    A busy host has thousands of events a second, so one unpack reads all fields.
    """
    slots = list(_EVENT_SLOT.iter_unpack(batch.memory))
    plain = [
        slot[1] == length >= _MIN_EVENT for length, slot in zip(batch.lengths, slots, strict=True)
    ]
    if all(plain):
        found = [slot[2:] for slot in slots if slot[0] == 0]  # only the kernel is trustworthy
    else:
        found = list(_unpacked_events(batch, plain, events))
    for index, value, what, first, second, third, fourth in found:
        if index != _PROC_GROUP or value != 1:
            continue
        if what == _FORKED:
            if third == fourth:  # the child's task and group
                events.add_birth(third, second)
        elif what == _EXITED:
            if first == second:
                events.exited.add(second)
        elif what == _EXECED:
            events.execed.add(second)


def _unpacked_events(
    batch: DatagramBatch, plain: Sequence[bool], events: ProcessEvents
) -> Iterator[tuple[int, ...]]:
    """The fields of the kernel's events; a datagram that is not ``plain`` may have several."""
    for at, whole in enumerate(plain):
        events.lost = events.lost or (not whole and batch.is_full(at))
        bodies = (body for _, body in messages(batch.datagram(at)) if len(body) >= _EVENT.size)
        yield from map(_EVENT.unpack_from, bodies)


def acknowledgement(datagram: bytes) -> int | None:
    """The error number of an acknowledged subscription, 0 for success; None for other messages."""
    if len(datagram) < _MIN_EVENT:
        return None
    index, value, what, error, *_ = _EVENT.unpack_from(datagram, HEADER.size)
    return error if (index, value, what) == (_PROC_GROUP, 1, _NONE) else None


def open_process_connector(*, exits: bool = True) -> EventChannel:
    """Subscribe to the process connector; OSError if the kernel does not permit or answer it.

    Without ``exits`` the kernel reports births and execs only.
    """
    link = open_netlink(CONNECTOR, _PROC_GROUP)
    try:
        attach_filter(link, assemble(event_filter(exits=exits)))
        request = _CN.pack(_PROC_GROUP, 1, 0, 0, 4, 0) + struct.pack("=I", _LISTEN)
        link.send(message(3, 0, request))
        _await_acknowledgement(link)
    except OSError:
        link.close()
        raise
    return EventChannel(DatagramReader(link, _LONGEST, _EVENT_SLOTS), record_events)


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


# ------------------------------------------------------------------------------------ taskstats

_CONTROL, _GET_FAMILY, _FAMILY_ID, _FAMILY_NAME = 0x10, 3, 1, 2
_GET, _ASK_PID, _REGISTER_MASK = 1, 1, 3
_TGID, _STATS, _AGGR_PID, _AGGR_TGID = 2, 3, 4, 5
_GENL = struct.Struct("=BBH")
_REPLY_TIMEOUT = 1.0  # seconds for an answer while opening

_VERSION = struct.Struct("=H")
_CPU_VIRTUAL = struct.Struct("=Q")  # cpu_run_virtual_total: the scheduler's nanoseconds
_ACCT = struct.Struct("=IIII")  # ac_uid ac_gid ac_pid ac_ppid
_TIMES = struct.Struct("=QQQ")  # ac_etime ac_utime ac_stime, microseconds
_MEMORY = struct.Struct("=Q")  # hiwater_rss, KiB
_GROUP = struct.Struct("=I4xQ")  # ac_tgid ac_tgetime
_AT_FLAG, _AT_VIRTUAL, _AT_COMM, _AT_ACCT, _AT_TIMES, _AT_GROUP = 8, 72, 80, 120, 144, 368
_AT_MEMORY = 200
_LAST_OF_GROUP = 0x20  # AGROUP
_GROUP_SINCE_VERSION = 12  # the version that brought ac_tgid and AGROUP
_EXIT_SLOTS = 128
_SPARE = 64  # bytes: a full slot means a cut datagram


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


class ExitLayout(NamedTuple):
    """The layout of the kernel's exit records, from its answer to a query about this process."""

    family: int
    size: int  # of a datagram with one record
    task: int  # header of the attribute with the record, and of its statistics
    stats: int
    grouped: bool  # records have the fields of the group

    @classmethod
    def of(cls, family: int, answer: bytes, pid: int) -> ExitLayout:
        """OSError if the answer is not about the process ``pid``."""
        payload = dict(messages(answer)).get(family, b"")
        stats = dict(attributes(dict(attributes(payload[_GENL.size :]))[_AGGR_PID]))[_STATS]
        version = _VERSION.unpack_from(stats)[0]
        if _ACCT.unpack_from(stats, _AT_ACCT)[2] != pid:
            raise OSError(errno.EPROTO, f"taskstats version {version} has another layout")
        if len(answer) < _MIN_EXIT or bytes(stats) != answer[_AT_STATS : _AT_STATS + len(stats)]:
            return cls(family, len(answer), 0, 0, False)
        grouped = version >= _GROUP_SINCE_VERSION
        task, header = (_WORD.unpack_from(answer, at)[0] for at in (_AT_TASK, _AT_STATS - 4))
        return cls(family, len(answer), task, header, grouped)

    def filter(self) -> Sequence[Rule]:
        """Filter for all messages except records of threads of which the group has others."""
        return (
            Rule(FilterOp.LOAD_WORD, 4),  # type and flags
            if_word(self.family, "", "pass"),
            Rule(FilterOp.LOAD_WORD, _AT_TASK),
            if_word(self.task, "", "pass"),
            Rule(FilterOp.LOAD_WORD, _AT_STATS - 4),
            if_word(self.stats, "", "pass"),
            Rule(FilterOp.LOAD_BYTE, _AT_STATS + _AT_FLAG),
            Rule(FilterOp.IF_ANY_BIT, _LAST_OF_GROUP, "pass", "drop"),
        )


# A datagram with a record: nlmsghdr, genlmsghdr, attribute of the record, its pid, its statistics.
_AT_TASK = HEADER.size + _GENL.size
_AT_STATS = _AT_TASK + 4 + 8 + 4
_WORD = struct.Struct("=I")
# A slot: sender's port, type and flags, the two headers; then flag, cpu_run_virtual_total, command,
# uid, ppid, utime, stime, hiwater_rss, tgid and tgetime.
_EXIT = struct.Struct("=4xI8x4xI8x4xI8xI8xB63xQ32s8xI8xI16xQQ32xQ160xI4xQ")
_MIN_EXIT = _EXIT.size - ADDRESS


def record_exits(layout: ExitLayout, batch: DatagramBatch, events: ProcessEvents) -> None:
    """Add the exits of processes in datagrams of taskstats.

    Most are of processes with one thread, so one unpack reads all fields of their records.
    """
    expected = (0, layout.family, layout.task, layout.stats)
    add_exit = events.add_exit
    for at, length in enumerate(batch.lengths):
        if length == layout.size and layout.grouped:
            found = _EXIT.unpack_from(batch.memory, at * batch.slot)
            if found[:4] == expected:
                flag, cpu, command, user_id, parent, user, system, memory, pid, elapsed = found[4:]
                if flag & _LAST_OF_GROUP:
                    cpu, name = cpu or (user + system) * 1000, _command(command)
                    times = cpu, elapsed * 1000
                    add_exit(ExitRecord(pid, parent, *times, name, user_id, True, memory))
                continue
        events.lost = events.lost or batch.is_full(at)
        for kind, payload in messages(batch.datagram(at)):
            parsed = parse_exit(payload) if kind == layout.family else None
            if parsed is not None:
                events.add_exit(parsed)


def _task(stats: bytes) -> ExitRecord | None:
    user_id, _, pid, parent = _ACCT.unpack_from(stats, _AT_ACCT)
    elapsed = _TIMES.unpack_from(stats, _AT_TIMES)[0]
    version = _VERSION.unpack_from(stats)[0]
    certain = version >= _GROUP_SINCE_VERSION and len(stats) >= _AT_GROUP + _GROUP.size
    if certain:
        if not stats[_AT_FLAG] & _LAST_OF_GROUP:
            return None  # other threads of the process live
        pid, elapsed = _GROUP.unpack_from(stats, _AT_GROUP)
    name = _command(stats[_AT_COMM : _AT_COMM + 32])
    memory = 0
    if len(stats) >= _AT_MEMORY + _MEMORY.size:
        memory = _MEMORY.unpack_from(stats, _AT_MEMORY)[0]
    return ExitRecord(pid, parent, _cpu_of(stats), elapsed * 1000, name, user_id, certain, memory)


@lru_cache(maxsize=256)
def _command(comm: bytes) -> str:
    return comm.split(b"\0", 1)[0].decode("utf-8", "replace")


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
        _, payload = next(messages(answer))
        family = struct.unpack("=H", dict(attributes(payload[4:]))[_FAMILY_ID][:2])[0]
        pid = os.getpid()
        own = attribute(_ASK_PID, struct.pack("=I", pid))
        layout = ExitLayout.of(
            family, _request_stats(link, family, _GENL.pack(_GET, 1, 0) + own), pid
        )
        if layout.grouped:
            attach_filter(link, assemble(layout.filter()))
        mask = attribute(_REGISTER_MASK, cpus.encode() + b"\0")
        flags = REQUEST | ACK
        link.send(message(family, flags, _GENL.pack(_GET, 1, 0) + mask))
        _acknowledged(link)
    except (KeyError, struct.error) as error:
        link.close()
        raise OSError(errno.EPROTO, "the kernel's answer is invalid") from error
    except OSError:
        link.close()
        raise
    # The exit of the last thread of a group has two records: its own, and the sum of the group.
    datagrams = DatagramReader(link, 2 * layout.size + _SPARE, _EXIT_SLOTS)
    return EventChannel(datagrams, partial(record_exits, layout))


def _request_stats(link: socket.socket, kind: int, payload: bytes) -> bytes:
    """The datagram of the kernel's answer."""
    link.send(message(kind, REQUEST, payload))
    answer = link.recv(MAX_DATAGRAM)
    for code, body in messages(answer):
        if code == ERROR:
            raise_error(body)
        return answer
    raise OSError(errno.EPROTO, "the kernel's answer is empty")


def _acknowledged(link: socket.socket) -> None:
    """Wait for the acknowledgement; ignore exits before it."""
    for _ in range(10_000):
        for kind, payload in messages(link.recv(MAX_DATAGRAM)):
            if kind == ERROR:
                raise_error(payload)
                return
    raise OSError(errno.EPROTO, "the kernel does not acknowledge the subscription")
