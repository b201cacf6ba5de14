"""Unix sockets: the process and user at the other end, names of users, and HTTP/1.1 over one."""

from __future__ import annotations

import functools
import socket
import struct
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

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


@functools.lru_cache(maxsize=1024)
def user_name(user_id: int) -> str:
    """The name of a user; the number without one."""
    import pwd  # absent on some systems of applications that import this package

    try:
        return pwd.getpwuid(user_id).pw_name
    except (KeyError, OverflowError):
        return str(user_id)


class _DeadlineSocket(socket.socket):
    """A stream whose operations take ``patience`` seconds at most, all together. TimeoutError.

    The timeout of a socket limits each operation alone: a peer that sends single bytes would never
    exceed it.
    """

    def __init__(self, patience: float, clock: Callable[[], float]) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._clock, self._deadline = clock, clock() + patience
        self.settimeout(patience)

    def _limit(self) -> None:
        left = self._deadline - self._clock()
        if left <= 0:
            raise TimeoutError("timed out")
        self.settimeout(left)

    def sendall(self, *arguments: Any) -> None:
        self._limit()
        super().sendall(*arguments)

    def recv_into(self, *arguments: Any) -> int:
        self._limit()
        return super().recv_into(*arguments)


def unix_http_connection(
    path: str, timeout: float | None = None, *, clock: Callable[[], float] | None = None
) -> HTTPConnection:
    """A connection to the server that listens at ``path``.

    ``timeout`` is in seconds and limits each operation; all of them together if a monotonic
    ``clock`` is given.
    """
    return _connection_class()(path, timeout, clock)


@functools.cache
def _connection_class() -> Callable[..., HTTPConnection]:
    from http.client import HTTPConnection  # imports ssl, which takes 10 ms and 4 MB

    class UnixHttpConnection(HTTPConnection):
        def __init__(
            self, path: str, timeout: float | None, clock: Callable[[], float] | None
        ) -> None:
            super().__init__("localhost", timeout=timeout)
            self._path, self._clock = path, clock

        def connect(self) -> None:
            if self._clock is None or self.timeout is None:
                self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            else:
                self.sock = _DeadlineSocket(self.timeout, self._clock)
            try:
                self.sock.settimeout(self.timeout)
                self.sock.connect(self._path)
            except BaseException:
                self.sock.close()
                raise

    return UnixHttpConnection
