"""The kernel's process connector: fork, exec and exit as they happen.

Layout from the kernel's ``uapi/linux/connector.h`` and ``uapi/linux/cn_proc.h``. Subscribing
needs CAP_NET_ADMIN before Linux 6.6, and the initial user and pid namespaces always.
"""

from __future__ import annotations

import os
import select
import socket
import struct

from wattspan.processes import netlink
from wattspan.processes.events import News

_GROUP = 1  # CN_IDX_PROC
_CN = struct.Struct("=IIIIHH")  # idx val seq ack len flags
# idx val, then what, then the four numbers an event may have: of a fork parent_pid parent_tgid
# child_pid child_tgid, of the others process_pid process_tgid and more.
_WHOLE = struct.Struct("=II12xI12xIIII")
_SHORTEST = netlink.HEADER + _WHOLE.size
_NONE, _FORKED, _EXECED, _EXITED = 0, 0x1, 0x2, 0x80000000
_LISTEN = 1  # PROC_CN_MCAST_LISTEN
_PATIENCE = 500  # milliseconds for the kernel's answer to a subscription


def note_event(datagram: bytes, news: News) -> None:
    """Note the one event of a datagram. Threads are left out: a process's clock has them all.

    Thousands of these come in a second on a busy host, so it is taken apart in one go.
    """
    if len(datagram) < _SHORTEST:
        return
    index, value, what, first, second, third, fourth = _WHOLE.unpack_from(datagram, netlink.HEADER)
    if index != _GROUP or value != 1:
        return
    if what == _FORKED:
        if third == fourth:  # the child's task and group
            news.born[third] = second
    elif what == _EXITED:
        if first == second:
            news.died.add(second)
    elif what == _EXECED:
        news.execed.add(second)


def acknowledgement(datagram: bytes) -> int | None:
    """The error in the kernel's answer to a subscription, 0 if it is granted; None: no answer."""
    if len(datagram) < _SHORTEST:
        return None
    index, value, what, error, *_ = _WHOLE.unpack_from(datagram, netlink.HEADER)
    return error if (index, value, what) == (_GROUP, 1, _NONE) else None


class ProcessConnector:
    """A subscription to the process connector."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._drain = netlink.Drain(link)
        self._seen = 0

    @classmethod
    def open(cls) -> ProcessConnector:
        """Subscribe; OSError where the kernel does not permit it, or stays silent."""
        link = netlink.open_netlink(netlink.CONNECTOR, _GROUP)
        try:
            request = _CN.pack(_GROUP, 1, 0, 0, 4, 0) + struct.pack("=I", _LISTEN)
            link.send(netlink.message(3, 0, request))
            _await_acknowledgement(link)
            link.setblocking(False)
        except OSError:
            link.close()
            raise
        return cls(link)

    @property
    def overruns(self) -> int:
        return self._drain.overruns

    def drain(self, news: News) -> None:
        try:
            for datagram in self._drain.datagrams():
                note_event(datagram, news)
        except OSError:
            news.lost = True
        if self._drain.overruns != self._seen:
            self._seen = self._drain.overruns
            news.lost = True

    def close(self) -> None:
        self._link.close()


def _await_acknowledgement(link: socket.socket) -> None:
    """Outside the initial namespaces the kernel answers nothing at all."""
    ready = select.poll()
    ready.register(link, select.POLLIN)
    for _ in range(1000):  # events of others may come first
        if not ready.poll(_PATIENCE):
            raise TimeoutError("the kernel does not answer; are these the initial namespaces?")
        error = acknowledgement(link.recv(netlink.LARGEST))
        if error is not None:
            if error:
                raise OSError(error, os.strerror(error))
            return
    raise TimeoutError("the kernel does not acknowledge the subscription")
