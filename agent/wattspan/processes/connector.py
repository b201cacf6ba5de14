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
_EVENT = struct.Struct("=IIQ")  # what cpu timestamp
_FORK = struct.Struct("=IIII")  # parent_pid parent_tgid child_pid child_tgid
_TASK = struct.Struct("=II")  # process_pid process_tgid
_NONE, _FORKED, _EXECED, _EXITED = 0, 0x1, 0x2, 0x80000000
_LISTEN = 1  # PROC_CN_MCAST_LISTEN
_PATIENCE = 500  # milliseconds for the kernel's answer to a subscription


def parse_event(payload: bytes, news: News) -> int | None:
    """Note one connector message; returns the error of an acknowledgement, if it is one.

    Threads are left out: a process's clock holds the time of all of them.
    """
    if len(payload) < _CN.size + _EVENT.size:
        return None
    if _CN.unpack_from(payload)[:2] != (_GROUP, 1):
        return None
    what, _, _ = _EVENT.unpack_from(payload, _CN.size)
    body = _CN.size + _EVENT.size
    if what == _FORKED and len(payload) >= body + _FORK.size:
        _, parent, child, group = _FORK.unpack_from(payload, body)
        if child == group:
            news.born[child] = parent
    elif what == _EXECED and len(payload) >= body + _TASK.size:
        news.execed.add(_TASK.unpack_from(payload, body)[1])
    elif what == _EXITED and len(payload) >= body + _TASK.size:
        task, group = _TASK.unpack_from(payload, body)
        if task == group:
            news.died.add(group)
    elif what == _NONE and len(payload) >= body + 4:
        return int(struct.unpack_from("=I", payload, body)[0])
    return None


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
                for _, payload in netlink.messages(datagram):
                    parse_event(payload, news)
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
        for _, payload in netlink.messages(link.recv(65536)):
            error = parse_event(payload, News())
            if error is not None:
                if error:
                    raise OSError(error, os.strerror(error))
                return
    raise TimeoutError("the kernel does not acknowledge the subscription")
