"""Unix sockets: the process and user at the other end, names of users, and HTTP/1.1 over one."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from math import inf
from time import monotonic  # noqa: TID251 - deadlines of sockets are in real time
from types import MappingProxyType
from typing import Any, NamedTuple

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


LOOK_UP_AGAIN, SHARE_OF_LOOKUPS = 60.0, 1 / 100
"""Seconds after which a name is looked up again, because LDAP, for example, may not have answered;
and the largest share of the time for that, because it may answer slowly."""
_MAX_NAMES = 1024


def remembered_names(
    lookup: Callable[[int], str], now: Callable[[], float] = monotonic
) -> Callable[[int], str]:
    """A function from a user to the name, or to the number while there is none.

    ``lookup`` raises KeyError for a user without a name, who is looked up again after a minute.
    """
    known: dict[int, tuple[str, float]] = {}

    def name_of(user_id: int) -> str:
        name, until = known.get(user_id, ("", 0.0))
        if name and now() < until:
            return name
        began = now()
        try:
            name, until = lookup(user_id), inf
        except (KeyError, OverflowError):
            pause = max(LOOK_UP_AGAIN, (now() - began) / SHARE_OF_LOOKUPS)
            name, until = str(user_id), now() + pause
        if len(known) >= _MAX_NAMES:
            known.clear()
        known[user_id] = name, until
        return name

    return name_of


def _listed_name(user_id: int) -> str:
    import pwd  # absent on some systems of applications that import this package

    return pwd.getpwuid(user_id).pw_name


user_name = remembered_names(_listed_name)
"""The name of a user; the number without one."""


class _DeadlineSocket(socket.socket):
    """A stream whose operations take ``patience`` seconds at most, all together. TimeoutError.

    The timeout of a socket limits each operation alone: a peer that sends single bytes would never
    exceed it. Each byte of the peer comes within ``silence`` seconds of the last one.
    """

    def __init__(self, patience: float, silence: float) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._silence, self._heard = silence, monotonic()
        self._last = self._heard + patience
        self.settimeout(min(patience, silence))

    @property
    def silent(self) -> float:
        """The seconds since the last byte of the peer, or since the start."""
        return monotonic() - self._heard

    def _limit(self) -> None:
        left = min(self._last, self._heard + self._silence) - monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.settimeout(left)

    def sendall(self, *arguments: Any) -> None:
        self._limit()
        super().sendall(*arguments)

    def recv_into(self, *arguments: Any) -> int:
        self._limit()
        received = super().recv_into(*arguments)
        self._heard = monotonic()
        return received


ACKNOWLEDGEMENTS = "Wattspan-Acknowledgements"
"""The header of a client that accepts any number of responses 100 before the answer.

Others accept few: those of Go before 1.24 fail at the sixth.
"""


def unix_request(
    path: str,
    method: str,
    target: str,
    body: str | bytes | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
    *,
    patience: float,
    silence: float = inf,
    keep: Callable[[socket.socket, float], object] | None = None,
) -> tuple[int, bytes]:
    """One HTTP request to the server that listens at ``path``: status and body of the answer.

    All together takes ``patience`` seconds at most, and each byte ``silence``. OSError. ``keep``
    gets the connection on which no answer has begun in time, still open, and the seconds since its
    last byte.
    """
    from http.client import HTTPConnection, HTTPException  # imports ssl, which takes 10 ms and 4 MB

    connection = HTTPConnection("localhost")
    connection.sock = stream = _DeadlineSocket(patience, silence)
    try:
        stream.connect(path)
        connection.request(method, target, body, {"connection": "close", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except HTTPException as error:
        raise ConnectionError(str(error) or type(error).__name__) from None
    except TimeoutError:
        if keep is not None and connection.sock is not None:
            connection.sock = None
            keep(stream, stream.silent)
        raise
    finally:
        connection.close()
