"""The process that measures itself: it asks the agent, now and then, to keep it.

The agent remembers a process that is kept for longer than others, and looks at it more finely.
No agent, no harm: it is tried again with a later window.

No thread does this, and nothing is imported for it but the socket module: a thread that is
importing while the program forks leaves the child with a lock that nobody lets go of.
"""

from __future__ import annotations

import os
from time import monotonic_ns  # noqa: TID251 - an application has no clock of ours

from wattspan.client.places import SOCKET, run_directories

RENEW = 300 * 10**9
"""Nanoseconds until the agent is asked again: it may have been started anew."""

RETRY = 10 * 10**9
"""Nanoseconds until it is tried again after nobody was there."""

_REQUEST = (
    b"POST /v1/watch?pid=self&family=1 HTTP/1.1\r\n"
    b"host: wattspan\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


class Here:
    """This process. ``due`` is the monotonic time from which on a window asks to be kept."""

    __slots__ = ("due",)

    def __init__(self) -> None:
        self.due = 0

    def keep(self) -> None:
        """Ask; returns at once and never raises. Whoever reads figures hears what is wrong."""
        self.due = monotonic_ns() + RETRY  # at once: no other thread need do the same
        if any(map(_asked, run_directories())):
            self.due += RENEW - RETRY


def _asked(directory: str) -> bool:
    """Whether somebody there has been asked; the answer is not waited for."""
    from socket import AF_UNIX, SOCK_STREAM, socket

    try:
        with socket(AF_UNIX, SOCK_STREAM) as connection:
            connection.setblocking(False)  # an agent that is too busy to listen is nobody
            connection.connect(f"{directory}/{SOCKET}")
            return connection.send(_REQUEST) == len(_REQUEST)
    except (OSError, ValueError):  # ValueError: a path that no socket can have
        return False


here = Here()


def _reborn() -> None:
    """After a fork the child measures itself."""
    global here
    here = Here()


os.register_at_fork(after_in_child=_reborn)
