"""Kernel evidence about processes and TCP connections, for the identity of senders.

``InetDiag`` asks the kernel for one TCP socket by its two ends: microseconds, however many there
are. Reading ``/proc/net/tcp`` instead walks the kernel's whole hash table: milliseconds even on
an idle host.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from wattspan.model import Consumer
from wattspan.processes import netlink
from wattspan.processes.procfs import TICK, ProcFs

_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY
_REQUEST = struct.Struct("=BBBBI")  # struct inet_diag_req_v2: family, protocol, ext, pad, states
_ENDPOINTS = struct.Struct("!HH16s16s")  # of struct inet_diag_sockid: ports, addresses
_ANY_INTERFACE = struct.pack(
    "=III", 0, 0xFFFFFFFF, 0xFFFFFFFF
)  # on any interface, whatever its cookie
_REPLY = struct.Struct("=4x48x12xII")  # struct inet_diag_msg: user and inode
_ENDPOINTS_OFFSET = 4
_REPLY_TIMEOUT = 1.0


class SocketInfo(NamedTuple):
    user: int
    inode: int


class InetDiag:
    """One netlink socket to the kernel's socket directory, of this network namespace."""

    def __init__(self) -> None:
        self._link = netlink.open_netlink(_SOCK_DIAG)
        self._link.settimeout(_REPLY_TIMEOUT)
        self._sequence = 0

    def find(
        self,
        end: tuple[ipaddress.IPv6Address, int],
        other: tuple[ipaddress.IPv6Address, int],
    ) -> SocketInfo | None:
        """The connected socket at ``end``; None if there is none.

        Addresses of IPv4 are given as IPv6 maps them. OSError where the kernel does not answer.
        """
        self._sequence += 1
        mapped = end[0].ipv4_mapped is not None
        ends = _packed_endpoints(end, other, plain=mapped)
        family = socket.AF_INET if mapped else socket.AF_INET6
        request = (
            _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + ends + _ANY_INTERFACE
        )
        self._link.send(
            netlink.message(_BY_FAMILY, netlink.REQUEST, request, sequence=self._sequence)
        )
        datagram = self._link.recv(netlink.MAX_DATAGRAM)
        for kind, payload in netlink.messages(datagram):
            if kind == netlink.ERROR:
                try:
                    netlink.raise_error(payload)
                except FileNotFoundError:
                    return None
            else:
                if len(payload) < _REPLY.size:
                    break
                if payload[0] == socket.AF_INET6:  # the IPv4 connection of an IPv6 socket, or not
                    ends = _packed_endpoints(end, other, plain=False)
                # If there is no such connection the kernel answers with the listener of that port.
                same = payload[_ENDPOINTS_OFFSET : _ENDPOINTS_OFFSET + len(ends)] == ends
                return SocketInfo(*_REPLY.unpack_from(payload)) if same else None
        raise OSError(errno.EBADMSG, "the kernel's answer is not a socket")

    def close(self) -> None:
        self._link.close()


def _packed_endpoints(
    end: tuple[ipaddress.IPv6Address, int],
    other: tuple[ipaddress.IPv6Address, int],
    *,
    plain: bool,
) -> bytes:
    """Both ends as the kernel writes them; ``plain`` is IPv4 that is not mapped."""
    here, there = (
        address.packed[12:].ljust(16, b"\0") if plain else address.packed
        for address in (end[0], other[0])
    )
    return _ENDPOINTS.pack(end[1], other[1], here, there)


Endpoint = tuple[str, int]
"""Address and port of one end of a connection."""


class SocketOwner(NamedTuple):
    """The owner of a socket: its user, and the inode in the descriptors of processes."""

    user: int
    inode: int


class TcpConnections:
    """The TCP connections of this network namespace, from either end.

    The kernel is asked directly if possible, otherwise its table below the procfs root is read.
    Only the table counts if ``root`` is not the host's own.
    """

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = root
        self._diag: InetDiag | None = None
        self._kernel_answers = False  # whether the kernel is known to answer at all
        if root == Path("/proc"):
            try:
                self._diag = InetDiag()
            except OSError:
                self._diag = None

    def owner_of(self, end: Endpoint, other: Endpoint) -> SocketOwner | None:
        """The owner of the socket at ``end``.

        None if that end is not in this network namespace, or if no process holds it any more: the
        kernel then shows user 0, which would be root.
        """
        try:
            here, there = (_address(end[0]), end[1]), (_address(other[0]), other[1])
        except ValueError:
            return None
        found = self._ask(here, there)
        if found is None and not self._kernel_answers:
            found = self._look_up(here, there)
        return found if found is not None and found.inode else None

    def close(self) -> None:
        if self._diag is not None:
            self._diag.close()
            self._diag = None

    # ------------------------------------------------------------------------------- details

    def _ask(self, here: _Endpoint6, there: _Endpoint6) -> SocketOwner | None:
        if self._diag is None:
            return None
        try:
            found = self._diag.find(here, there)
        except OSError:
            self.close()
            self._kernel_answers = False
            return None
        if found is None:  # a kernel without the feature gives the same answer
            return None
        self._kernel_answers = True
        return SocketOwner(found.user, found.inode)

    def _look_up(self, here: _Endpoint6, there: _Endpoint6) -> SocketOwner | None:
        for table, needle in _needles(here, there):
            row = _find_row(self._root / "net" / table, needle)
            if row is not None:
                # state, queues, timer, retransmissions, user, time-out, inode
                fields = row.split(None, 7)
                try:
                    return SocketOwner(int(fields[4]), int(fields[6]))
                except (IndexError, ValueError):
                    return None
        return None


def holds_socket(root: Path, pid: int, inode: int) -> bool | None:
    """True if the process has the socket open; None if its descriptors are not visible."""
    name = f"socket:[{inode}]"
    folder = f"{root}/{pid}/fd"
    try:
        descriptors = os.listdir(folder)  # noqa: PTH208 - many names, no paths
    except FileNotFoundError:
        return False
    except OSError:
        return None
    for descriptor in descriptors:
        try:
            if os.readlink(f"{folder}/{descriptor}") == name:  # noqa: PTH115
                return True
        except OSError:
            continue  # closed meanwhile
    return False


_Endpoint6 = tuple[ipaddress.IPv6Address, int]


def _address(text: str) -> ipaddress.IPv6Address:
    """Any address as IPv6 has it, without its zone."""
    plain = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(plain, ipaddress.IPv4Address):
        return ipaddress.IPv6Address(b"\0" * 10 + b"\xff\xff" + plain.packed)
    return plain


def _needles(here: _Endpoint6, there: _Endpoint6) -> list[tuple[str, bytes]]:
    """Tables to search, each with the beginning of the wanted row.

    The IPv4 connection of an IPv6 socket is in the table of IPv6, and its other end may be a plain
    IPv4 socket.
    """
    found = []
    if here[0].ipv4_mapped and there[0].ipv4_mapped:
        row = (
            _hex_address(here[0].ipv4_mapped, here[1]),
            _hex_address(there[0].ipv4_mapped, there[1]),
        )
        found.append(("tcp", b": %b %b " % row))
    found.append(("tcp6", b": %b %b " % (_hex_address(*here), _hex_address(*there))))
    return found


def _hex_address(address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> bytes:
    """As the tables have it: words of the network's order, printed as if they were of ours."""
    packed = address.packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return b"".join(b"%08X" % word for word in words) + b":%04X" % port


def _find_row(table: Path, needle: bytes) -> bytes | None:
    """The rest of the line behind ``needle``."""
    try:
        text = table.read_bytes()
    except OSError:
        return None
    at = text.find(needle)
    if at < 0:
        return None
    rest = text[at + len(needle) :]
    return rest.partition(b"\n")[0]


class LiveProcess(NamedTuple):
    """A process that lives."""

    consumer: Consumer
    parent: int
    born: int  # nanoseconds since boot, in which the host's sleep counts; a tick too early
    users: frozenset[int]  # real, effective, saved and of the file system
    pids: tuple[int, ...]  # its pid in each pid namespace, from ours inwards
    copied: bool  # it was forked and runs no program of its own since
    kernel: bool


class ProcessInspector:
    """Reads below one procfs root. None for a process that is gone or hidden; never an error."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = root
        self._procfs = ProcFs(root)
        self._connections = TcpConnections(root)

    def identify(self, pid: int) -> Consumer | None:
        """The process that has ``pid`` now."""
        stat = self._procfs.stat(pid)
        return Consumer(pid, stat.started) if stat is not None else None

    def look(self, pid: int) -> LiveProcess | None:
        """All that is shown of the process that has ``pid`` now."""
        stat = self._procfs.stat(pid)
        status = self._procfs.status(pid) if stat is not None else None
        if stat is None or status is None or _numbers(status, b"\nTgid:") != (pid,):
            return None  # threads have directories too, and are no processes
        return LiveProcess(
            Consumer(pid, stat.started),
            stat.parent,
            stat.started * TICK,
            frozenset(_numbers(status, b"\nUid:")),
            _numbers(status, b"\nNSpid:") or (pid,),
            stat.copied,
            stat.kernel,
        )

    def pids(self) -> list[int]:
        return self._procfs.pids()

    def owner(self, pid: int) -> int | None:
        """The process's user; cheaper than ``look``."""
        return self._procfs.user_id(pid)

    def cgroup(self, pid: int) -> str:
        """The text of ``/proc/PID/cgroup``; "" if there is none."""
        return self._procfs.cgroup(pid) or ""

    def owner_of(self, end: Endpoint, other: Endpoint) -> SocketOwner | None:
        """The owner of the socket at ``end`` of a TCP connection; None: not of this host."""
        return self._connections.owner_of(end, other)

    def holds(self, pid: int, inode: int) -> bool | None:
        """True if a process has a socket open; None if its descriptors are not visible."""
        return holds_socket(self._root, pid, inode)

    def close(self) -> None:
        self._procfs.close()
        self._connections.close()


def _numbers(status: bytes, name: bytes) -> tuple[int, ...]:
    """The numbers of one line of ``/proc/PID/status``."""
    at = status.find(name)
    if at < 0:
        return ()
    line, ended, _ = status[at + len(name) :].partition(b"\n")
    words = line.split()
    # A truncated line would yield another number.
    return tuple(map(int, words)) if ended and all(map(bytes.isdigit, words)) else ()
