"""Unix sockets: the process and user at the other end, and HTTP/1.1 over one."""

from __future__ import annotations

import http.client
import socket
import struct
from collections.abc import Iterable
from typing import NamedTuple

_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid
_UNKNOWN_UID = -1


class PeerCredentials(NamedTuple):
    """``pid`` is None for a process of another pid namespace, ``uid`` for an unknown user."""

    pid: int | None = None
    uid: int | None = None


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    """The credentials that the peer had when it connected (SO_PEERCRED). OSError."""
    ucred = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(ucred)
    return PeerCredentials(pid or None, None if uid == _UNKNOWN_UID else uid)


def uids_of(names: Iterable[str]) -> tuple[frozenset[int], tuple[str, ...]]:
    """The uids of users, given by name or number, and the names that no user has."""
    import pwd  # absent on some systems of applications that import this module

    uids, unknown = set[int](), []
    for name in names:
        try:
            uids.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            if name.isdecimal():
                uids.add(int(name))
            else:
                unknown.append(name)
    return frozenset(uids), tuple(unknown)


class UnixHttpConnection(http.client.HTTPConnection):
    """A connection to the server that listens at ``path``; ``timeout`` is in seconds."""

    def __init__(self, path: str, timeout: float | None = None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(self._path)
        except BaseException:
            self.sock.close()
            raise
