"""Taskstats: the CPU time of a process that has just ended, from the kernel's own books.

Layout from ``uapi/linux/taskstats.h``, which only ever grows at the end, but for version 15,
where fields were put in the middle and taken out again. So nothing is believed before a
question about this very process has been answered rightly. Needs CAP_NET_ADMIN and the initial
user and pid namespaces.
"""

from __future__ import annotations

import errno
import os
import socket
import struct

from wattspan.processes import netlink
from wattspan.processes.events import Final, News

_CONTROL, _GET_FAMILY, _FAMILY_ID, _FAMILY_NAME = 0x10, 3, 1, 2
_GET, _ASK_PID, _REGISTER_MASK = 1, 1, 3
_TGID, _STATS, _AGGR_PID, _AGGR_TGID = 2, 3, 4, 5
_GENL = struct.Struct("=BBH")
_PATIENCE = 1.0  # seconds for an answer while opening

_VERSION = struct.Struct("=H")
_CPU_VIRTUAL = struct.Struct("=Q")  # cpu_run_virtual_total: the scheduler's nanoseconds
_ACCT = struct.Struct("=IIII")  # ac_uid ac_gid ac_pid ac_ppid
_TIMES = struct.Struct("=QQQ")  # ac_etime ac_utime ac_stime, microseconds
_MEMORY = struct.Struct("=Q")  # hiwater_rss, KiB
_GROUP = struct.Struct("=I4xQ")  # ac_tgid ac_tgetime
_AT_FLAG, _AT_VIRTUAL, _AT_COMM, _AT_ACCT, _AT_TIMES, _AT_MEMORY, _AT_GROUP = (
    8,
    72,
    80,
    120,
    144,
    200,
    368,
)
_LAST_OF_GROUP = 0x20  # AGROUP
_TELLS_GROUP = 12  # the version that brought ac_tgid and AGROUP


def parse_exit(payload: bytes) -> Final | None:
    """The final of a process in one generic-netlink message; None for a thread's, or nonsense.

    A lone process reports itself (AGGR_PID). The last thread of a group adds the sum over the
    group (AGGR_TGID), which is then what counts.
    """
    task: Final | None = None
    total: tuple[int, int] | None = None
    for kind, value in netlink.attributes(payload[_GENL.size :]):
        parts = dict(netlink.attributes(value))
        stats = parts.get(_STATS, b"")
        if len(stats) < _AT_MEMORY + _MEMORY.size:
            continue
        if kind == _AGGR_PID:
            task = _task(stats)
        elif kind == _AGGR_TGID and len(parts.get(_TGID, b"")) >= 4:
            total = (struct.unpack_from("=I", parts[_TGID])[0], _cpu_of(stats))
    if task is not None and total is not None:
        return task._replace(pid=total[0], cpu=total[1], certain=True)
    return task


def _task(stats: bytes) -> Final | None:
    user_id, _, pid, parent = _ACCT.unpack_from(stats, _AT_ACCT)
    elapsed = _TIMES.unpack_from(stats, _AT_TIMES)[0]
    version = _VERSION.unpack_from(stats)[0]
    certain = version >= _TELLS_GROUP and len(stats) >= _AT_GROUP + _GROUP.size
    if certain:
        if not stats[_AT_FLAG] & _LAST_OF_GROUP:
            return None  # its process lives on, and so does the process's clock
        pid, elapsed = _GROUP.unpack_from(stats, _AT_GROUP)
    comm = stats[_AT_COMM : _AT_COMM + 32].split(b"\0", 1)[0].decode("utf-8", "replace")
    memory = _MEMORY.unpack_from(stats, _AT_MEMORY)[0] * 1024
    return Final(pid, parent, _cpu_of(stats), elapsed * 1000, comm, user_id, certain, memory)


def _cpu_of(stats: bytes) -> int:
    """A kernel without delay accounting leaves the scheduler's figure 0: the ticks remain."""
    _, user, system = _TIMES.unpack_from(stats, _AT_TIMES)
    return int(_CPU_VIRTUAL.unpack_from(stats, _AT_VIRTUAL)[0] or (user + system) * 1000)


class TaskStats:
    """A subscription to the exits on all CPUs."""

    def __init__(self, link: socket.socket, family: int) -> None:
        self._link = link
        self._family = family
        self._drain = netlink.Drain(link)
        self._seen = 0

    @classmethod
    def open(cls, cpus: str) -> TaskStats:
        """Subscribe on ``cpus`` (a list as in ``/sys/devices/system/cpu/possible``)."""
        link = netlink.open_netlink(netlink.GENERIC)
        try:
            link.settimeout(_PATIENCE)
            name = netlink.attribute(_FAMILY_NAME, b"TASKSTATS\0")
            answer = _ask(link, _CONTROL, _GENL.pack(_GET_FAMILY, 1, 0) + name)
            family = struct.unpack("=H", dict(netlink.attributes(answer[4:]))[_FAMILY_ID][:2])[0]
            _check_layout(link, family)
            mask = netlink.attribute(_REGISTER_MASK, cpus.encode() + b"\0")
            flags = netlink.REQUEST | netlink.ACK
            link.send(netlink.message(family, flags, _GENL.pack(_GET, 1, 0) + mask))
            _acknowledged(link)
            link.setblocking(False)
        except (KeyError, struct.error) as error:
            link.close()
            raise OSError(errno.EPROTO, "the kernel's answer makes no sense") from error
        except OSError:
            link.close()
            raise
        return cls(link, family)

    @property
    def overruns(self) -> int:
        return self._drain.overruns

    def drain(self, news: News) -> None:
        try:
            for datagram in self._drain.datagrams():
                for kind, payload in netlink.messages(datagram):
                    final = parse_exit(payload) if kind == self._family else None
                    if final is not None:
                        news.add_final(final)
        except OSError:
            news.lost = True
        if self._drain.overruns != self._seen:
            self._seen = self._drain.overruns
            news.lost = True

    def close(self) -> None:
        self._link.close()


def _ask(link: socket.socket, kind: int, payload: bytes) -> bytes:
    link.send(netlink.message(kind, netlink.REQUEST, payload))
    for answer, body in netlink.messages(link.recv(netlink.LARGEST)):
        if answer == netlink.ERROR:
            netlink.raise_error(body)
        return body
    raise OSError(errno.EPROTO, "the kernel's answer is empty")


def _check_layout(link: socket.socket, family: int) -> None:
    """Ask for our own figures and look whether our own pid stands where it should."""
    own = netlink.attribute(_ASK_PID, struct.pack("=I", os.getpid()))
    answer = _ask(link, family, _GENL.pack(_GET, 1, 0) + own)
    stats = dict(netlink.attributes(dict(netlink.attributes(answer[4:]))[_AGGR_PID]))[_STATS]
    if _ACCT.unpack_from(stats, _AT_ACCT)[2] != os.getpid():
        version = _VERSION.unpack_from(stats)[0]
        raise OSError(errno.EPROTO, f"taskstats version {version} has another layout")


def _acknowledged(link: socket.socket) -> None:
    """Exits may be reported before the acknowledgement; they are of no interest yet."""
    for _ in range(10_000):
        for kind, payload in netlink.messages(link.recv(netlink.LARGEST)):
            if kind == netlink.ERROR:
                netlink.raise_error(payload)
                return
    raise OSError(errno.EPROTO, "the kernel does not acknowledge the subscription")
