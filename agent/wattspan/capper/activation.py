"""Sockets that the service manager listens on for us, and hands over when we start.

It made them and will hand them to whoever comes after us: they are never unlinked here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass

from wattspan.ports import ListenError

FIRST = 3
"""The descriptor of the first of them, by the protocol."""

_VARIABLES = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


@dataclass(frozen=True, slots=True)
class InheritedSocket:
    """A Unix socket that listens already, and the path that it listens on."""

    socket: socket.socket
    address: str


def inherited_descriptors(
    environ: MutableMapping[str, str], *, first: int = FIRST
) -> tuple[int, ...]:
    """The descriptors that were handed to this process, which nothing it starts will inherit.

    What says so goes from ``environ``: whatever this process starts has been handed nothing.
    """
    count, whom = environ.get("LISTEN_FDS", ""), environ.get("LISTEN_PID", "")
    for name in _VARIABLES:
        environ.pop(name, None)
    if whom != str(os.getpid()) or not (count.isascii() and count.isdecimal()):
        return ()
    handed = []
    for descriptor in range(first, first + min(int(count), 1024)):
        with suppress(OSError):  # one that is not there is no socket either
            os.set_inheritable(descriptor, False)
            handed.append(descriptor)
    return tuple(handed)


def inherited_unix_socket(
    environ: MutableMapping[str, str], *, first: int = FIRST
) -> InheritedSocket | None:
    """The one Unix socket that was handed to this process, if any was. ListenError."""
    handed = inherited_descriptors(environ, first=first)
    if not handed:
        return None
    if len(handed) > 1:
        raise _refusal(f"{len(handed)} sockets were handed over, and one is served")
    try:
        listener = socket.socket(fileno=handed[0])
    except OSError:
        raise _refusal("what was handed over is no socket") from None
    if (why := _unsuitable_reason(listener)) is not None:
        listener.detach()  # it is not ours to close
        raise _refusal(why)
    return InheritedSocket(listener, _address(listener))


def _unsuitable_reason(listener: socket.socket) -> str | None:
    """Why it cannot be served, if it cannot."""
    if listener.family != socket.AF_UNIX:
        return "what was handed over is no Unix socket"
    if listener.type != socket.SOCK_STREAM:
        return "the socket that was handed over is no stream"
    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return "the socket that was handed over does not listen"
    return None


def _address(listener: socket.socket) -> str:
    name = listener.getsockname()
    if isinstance(name, bytes):
        return "@" + name[1:].decode("utf-8", "replace")
    return str(name)


def _refusal(why: str) -> ListenError:
    return ListenError(
        f"Cannot serve the service manager's socket: {why}. Its unit names one ListenStream= with"
        " a path, and Accept=no."
    )
