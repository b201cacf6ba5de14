"""Kernel events of processes, and the process connector, which reports forks, execs and exits.

Layout from the kernel's ``uapi/linux/connector.h`` and ``uapi/linux/cn_proc.h``. A subscription
needs CAP_NET_ADMIN before Linux 6.6, and the initial user and pid namespaces.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from wattspan.processes.netlink import (
    CONNECTOR,
    HEADER,
    MAX_DATAGRAM,
    DatagramBatch,
    DatagramReader,
    Rule,
    assemble,
    attach_filter,
    if_at_least,
    if_same,
    if_word,
    keep,
    load_length,
    load_word,
    message,
    messages,
    open_netlink,
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
        load_length(),
        if_at_least(2 * _MIN_EVENT, "pass"),  # several messages
        load_word(_AT_WHAT),
        if_word(_FORKED, "fork"),
        if_word(_EXECED, "task"),
        if_word(_EXITED, "task" if exits else "drop"),
        if_word(_NONE, "pass", "drop"),
        load_word(_AT_NUMBERS, "task"),  # process_pid and process_tgid
        keep(),
        load_word(_AT_NUMBERS + 4),
        if_same("pass", "drop"),
        load_word(_AT_NUMBERS + 8, "fork"),  # child_pid and child_tgid
        keep(),
        load_word(_AT_NUMBERS + 12),
        if_same("pass", "drop"),
    )


def record_events(batch: DatagramBatch, events: ProcessEvents) -> None:
    """Add the events of processes, without those of threads.

    A busy host has thousands of events a second, so one unpack reads all fields.
    """
    slots = _EVENT_SLOT.iter_unpack(batch.memory)
    for at, (length, slot) in enumerate(zip(batch.lengths, slots, strict=True)):
        sender, size, *event = slot
        if size == length >= _MIN_EVENT:
            if sender == 0:  # only messages of the kernel are trustworthy
                _add_event(events, *event)
            continue
        events.lost = events.lost or batch.is_full(at)
        for _, payload in messages(batch.datagram(at)):
            if len(payload) >= _EVENT.size:
                _add_event(events, *_EVENT.unpack_from(payload))


def _add_event(
    events: ProcessEvents,
    index: int,
    value: int,
    what: int,
    first: int,
    second: int,
    third: int,
    fourth: int,
) -> None:
    if index != _PROC_GROUP or value != 1:
        return
    if what == _FORKED:
        if third == fourth:  # the child's task and group
            events.add_birth(third, second)
    elif what == _EXITED:
        if first == second:
            events.exited.add(second)
    elif what == _EXECED:
        events.execed.add(second)


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
