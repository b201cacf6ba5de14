"""Unix sockets: the process and user at the other end, and HTTP/1.1 over one."""

from __future__ import annotations

import functools
import socket
import struct
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from http.client import HTTPConnection

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


def unix_http_connection(path: str, timeout: float | None = None) -> HTTPConnection:
    """A connection to the server that listens at ``path``; ``timeout`` is in seconds."""
    return _connection_class()(path, timeout)


@functools.cache
def _connection_class() -> Callable[[str, float | None], HTTPConnection]:
    from http.client import HTTPConnection  # imports ssl, which takes 10 ms and 4 MB

    class UnixHttpConnection(HTTPConnection):
        def __init__(self, path: str, timeout: float | None) -> None:
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

    return UnixHttpConnection
