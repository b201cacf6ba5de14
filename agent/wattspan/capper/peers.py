"""Who may speak: the kernel says who it is, the operator says who may."""

from __future__ import annotations

import os
import pwd
import socket
import struct
from collections.abc import Iterable

from wattspan.capper.wishes import Peer

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def peer_of(connection: socket.socket) -> Peer:
    """The process that connected, and its user."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(told)
    # A pid of 0 is a process that has none here: it lives in another pid namespace.
    return Peer(pid or None, uid)


def allowed_users(names: Iterable[str]) -> tuple[frozenset[int], tuple[str, ...]]:
    """The uids that may speak: root's, our own, and those of ``names``; and names of nobody."""
    uids, unknown = uids_of(names)
    return uids | {0, os.geteuid()}, unknown


def uids_of(names: Iterable[str]) -> tuple[frozenset[int], tuple[str, ...]]:
    """The uids of users, by name or number; and the names that no user has."""
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
