"""Kernel evidence about processes and TCP connections, for the identity of senders.

The kernel finds one TCP socket by its two ends in microseconds, for any number of sockets (netlink
``sock_diag``). Tables such as ``/proc/net/tcp`` take milliseconds even on an idle host.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from wattspan.model import Consumer, Principal
from wattspan.processes.netlink import (
    ERROR,
    MAX_DATAGRAM,
    REQUEST,
    attributes,
    message,
    messages,
    open_netlink,
    raise_error,
)
from wattspan.processes.principals import PrincipalResolver
from wattspan.processes.procfs import TICK, ProcFs

_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY
_REQUEST = struct.Struct("=BBBBI")  # struct inet_diag_req_v2: family, protocol, ext, pad, states
_ENDPOINTS = struct.Struct("!HH16s16s")  # of struct inet_diag_sockid: ports, addresses
_ANY_INTERFACE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # with any cookie on any interface
_REPLY = struct.Struct("=4x48x12xII")  # struct inet_diag_msg: user and inode
_ENDPOINTS_OFFSET = 4
_ATTRIBUTES_OFFSET = 72
_CGROUP_ID = 21  # INET_DIAG_CGROUP_ID
_REPLY_TIMEOUT = 1.0
_LISTENING = "0A"  # the state in /proc/net/tcp
_MAX_DESCRIPTORS = 1 << 16  # of one process; their search takes a tenth of a second


Endpoint = tuple[str, int]
"""Address and port of one end of a connection."""

_Endpoint6 = tuple[ipaddress.IPv6Address, int]


class SocketOwner(NamedTuple):
    """The owner of a socket: its user, and the inode in the descriptors of processes.

    ``cgroup`` is the id of the cgroup that created it; None without the unified hierarchy.
    """

    user: int
    inode: int
    cgroup: int | None = None


TcpListener = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int, SocketOwner]
"""The address and port of a socket that accepts connections, and its owner, without a cgroup."""


def listening_sockets(tables: Path) -> Iterator[TcpListener]:
    """Those in the tables of a network namespace, as ``/proc/self/net``: slow, and for every user.

    A table that cannot be read is left out.
    """
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (tables / table).read_text("ascii").splitlines()[1:]:
                words = line.split()
                if len(words) < 10 or words[3] != _LISTENING:
                    continue
                packed, _, port = words[1].partition(":")
                raw = bytes.fromhex(packed)
                # Each 32 bits are in the byte order of the machine.
                if sys.byteorder == "little":
                    raw = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
                owner = SocketOwner(int(words[7]), int(words[9]))
                yield ipaddress.ip_address(raw), int(port, 16), owner


class TcpConnections:
    """The TCP connections of this network namespace, from either end."""

    def __init__(self, note: Callable[[OSError], object] = lambda _: None) -> None:
        """``note`` is told why the kernel does not answer."""
        self._note = note
        self._link: socket.socket | None = None
        self._sequence = 0

    def owner_of(self, end: Endpoint, other: Endpoint) -> SocketOwner | None:
        """The owner of the socket at ``end``.

        None if that end is not in this network namespace, if no process holds it any more (the
        kernel then shows user 0, which would be root), or if the kernel does not answer.
        """
        try:
            here, there = (_address(end[0]), end[1]), (_address(other[0]), other[1])
        except ValueError:
            return None
        try:
            if self._link is None:
                self._link = open_netlink(_SOCK_DIAG)
                self._link.settimeout(_REPLY_TIMEOUT)
            found = self.find(self._link, here, there)
        except OSError as error:
            self._note(error)
            self.close()
            return None
        return found if found is not None and found.inode else None

    def find(self, link: socket.socket, end: _Endpoint6, other: _Endpoint6) -> SocketOwner | None:
        """The owner according to the kernel on ``link``; OSError if its answer is invalid.

        Addresses of IPv4 are given as IPv6 maps them.
        """
        self._sequence += 1
        mapped = end[0].ipv4_mapped is not None
        ends = _packed_endpoints(end, other, plain=mapped)
        family = socket.AF_INET if mapped else socket.AF_INET6
        request = (
            _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + ends + _ANY_INTERFACE
        )
        link.send(message(_BY_FAMILY, REQUEST, request, sequence=self._sequence))
        datagram = link.recv(MAX_DATAGRAM)
        for kind, payload in messages(datagram):
            if kind == ERROR:
                try:
                    raise_error(payload)
                except FileNotFoundError:
                    return None
            else:
                if len(payload) < _REPLY.size:
                    break
                if payload[0] == socket.AF_INET6:  # possibly the IPv4 connection of such a socket
                    ends = _packed_endpoints(end, other, plain=False)
                # Without such a connection the kernel returns the listener of that port.
                same = payload[_ENDPOINTS_OFFSET : _ENDPOINTS_OFFSET + len(ends)] == ends
                if not same:
                    return None
                user, inode = _REPLY.unpack_from(payload)
                return SocketOwner(user, inode, _cgroup_id(payload))
        raise OSError(errno.EBADMSG, "the kernel's answer is not a socket")

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def _cgroup_id(payload: bytes) -> int | None:
    """The id of the cgroup among the attributes of a socket."""
    for kind, value in attributes(payload[_ATTRIBUTES_OFFSET:]):
        if kind == _CGROUP_ID and len(value) == 8:
            return int.from_bytes(value, sys.byteorder)
    return None


def _packed_endpoints(end: _Endpoint6, other: _Endpoint6, *, plain: bool) -> bytes:
    """Both ends in the format of the kernel; ``plain`` is IPv4 that is not mapped."""
    here, there = (
        address.packed[12:].ljust(16, b"\0") if plain else address.packed
        for address in (end[0], other[0])
    )
    return _ENDPOINTS.pack(end[1], other[1], here, there)


def _address(text: str) -> ipaddress.IPv6Address:
    """``text`` as an IPv6 address, IPv4 mapped, without its zone."""
    plain = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(plain, ipaddress.IPv4Address):
        return ipaddress.IPv6Address(b"\0" * 10 + b"\xff\xff" + plain.packed)
    return plain


class LiveProcess(NamedTuple):
    """A running process."""

    consumer: Consumer
    parent: int
    born: int  # nanoseconds since boot, suspend included; up to a tick too early
    users: frozenset[int]  # real, effective, saved and of the file system
    principal: Principal | None  # of the effective user
    pids: tuple[int, ...]  # its pid in each pid namespace, outermost first
    copied: bool  # forked, without an exec since
    kernel: bool
    name: str = ""  # of its program, 15 bytes at most


class ProcessInspector(ProcFs):
    """The processes below one procfs root and their connections, for the identity of senders."""

    def __init__(
        self, root: Path = Path("/proc"), principals: PrincipalResolver | None = None
    ) -> None:
        super().__init__(root)
        self._principals = principals or PrincipalResolver()
        self._connections = TcpConnections(self._note)

    def look(self, pid: int) -> LiveProcess | None:
        """The present process of ``pid``, with its users and namespaces."""
        stat = self.stat(pid)
        status = self.status(pid) if stat is not None else None
        if stat is None or status is None or _numbers(status, b"\nTgid:") != (pid,):
            return None  # threads have directories too, and are no processes
        users, text = _numbers(status, b"\nUid:"), self.cgroup(pid)
        if len(users) < 4:
            return None
        proven = None if text is None else self._proven(text, users[1])
        return LiveProcess(
            Consumer(pid, stat.started),
            stat.parent,
            stat.started * TICK,
            frozenset(users),
            proven,
            _numbers(status, b"\nNSpid:") or (pid,),
            stat.copied,
            stat.kernel,
            stat.comm,
        )

    def principal(self, pid: int) -> Principal | None:
        """The principal of the present process of ``pid``; None if the kernel proves none."""
        user, text = self.user_id(pid), self.cgroup(pid)
        return None if text is None else self._proven(text, user)

    def _proven(self, cgroup_text: str, user: int | None) -> Principal | None:
        before = self._principals.shortages
        proven = self._principals.principal(cgroup_text, user)
        self._note_since(before)
        return proven

    def _note_since(self, before: tuple[OSError | None, ...]) -> None:
        for old, new in zip(before, self._principals.shortages, strict=True):
            if new is not None and new is not old:
                self._note(new)

    def socket_principal(self, owner: SocketOwner) -> Principal | None:
        """The principal of the user and the cgroup of a socket; None for an unknown cgroup."""
        before = self._principals.shortages
        proven = self._principals.of_socket(owner.user, owner.cgroup)
        self._note_since(before)
        return proven

    def owner_of(self, end: Endpoint, other: Endpoint) -> SocketOwner | None:
        """The owner of the socket at ``end``; see `TcpConnections.owner_of`."""
        return self._connections.owner_of(end, other)

    def holds(self, pid: int, inode: int) -> bool | None:
        """True if the process has the socket open; None if its descriptors are not visible.

        Only the first `_MAX_DESCRIPTORS` are searched.
        """
        name = f"socket:[{inode}]"
        folder = f"{self._root}/{pid}/fd"
        try:
            with os.scandir(folder) as entries:
                descriptors = [one.path for one in islice(entries, _MAX_DESCRIPTORS)]
        except FileNotFoundError:
            return False
        except OSError as error:
            self._note(error)
            return None
        for descriptor in descriptors:
            try:
                if os.readlink(descriptor) == name:  # noqa: PTH115 - a bare string
                    return True
            except OSError as error:
                self._note(error)  # else it was closed meanwhile
        return False

    def close(self) -> None:
        super().close()
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
