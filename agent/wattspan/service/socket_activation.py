"""The listening socket that systemd passes to a service (sd_listen_fds).

systemd made the socket and passes it to the next start as well, so it is never removed here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from contextlib import suppress

from wattspan.http.sockets import ListeningSocket
from wattspan.ports import ListenError

FIRST_DESCRIPTOR = 3  # by the protocol
_MAX_DESCRIPTORS = 1024
_VARIABLES = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


def inherited_unix_socket(
    environ: MutableMapping[str, str], *, first: int = FIRST_DESCRIPTOR
) -> ListeningSocket | None:
    """The Unix socket that was passed to this process, if any. ListenError.

    Its variables are removed from ``environ``, so that no child takes them for its own.
    """
    passed = _descriptors(environ, first)
    if not passed:
        return None
    if len(passed) > 1:
        raise _unsuitable(f"{len(passed)} sockets were passed, and one is served")
    try:
        listener = socket.socket(fileno=passed[0])
    except OSError:
        raise _unsuitable("the passed descriptor is no socket") from None
    fault = ""
    if listener.family != socket.AF_UNIX:
        fault = "the passed descriptor is no Unix socket"
    elif listener.type != socket.SOCK_STREAM:
        fault = "the passed socket is no stream socket"
    elif not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        fault = "the passed socket does not listen"
    if fault:
        listener.detach()  # it is not ours to close
        raise _unsuitable(fault)
    name = listener.getsockname()
    address = "@" + name[1:].decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
    return ListeningSocket(listener, address, lambda: None)


def _descriptors(environ: MutableMapping[str, str], first: int) -> list[int]:
    """The passed descriptors, made uninheritable."""
    count, pid = environ.get("LISTEN_FDS", ""), environ.get("LISTEN_PID", "")
    for name in _VARIABLES:
        environ.pop(name, None)
    if pid != str(os.getpid()) or not (count.isascii() and count.isdecimal()):
        return []
    passed = []
    for descriptor in range(first, first + min(int(count), _MAX_DESCRIPTORS)):
        with suppress(OSError):  # a descriptor that is not open
            os.set_inheritable(descriptor, False)
            passed.append(descriptor)
    return passed


def _unsuitable(cause: str) -> ListenError:
    return ListenError(
        f"Cannot serve the socket of the service manager: {cause}. Its unit must name one"
        " ListenStream= with a path, and Accept=no."
    )
