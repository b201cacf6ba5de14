"""What can go wrong when a figure is read; the measured program's work is not touched by it.

Where an agent's sockets may be.

The process that measures itself: it asks the agent, now and then, to keep it.

The agent remembers a process that is kept for longer than others, and looks at it more finely.
No agent, no harm: it is tried again with a later window.

No thread does this, and nothing is imported for it but the socket module: a thread that is
importing while the program forks leaves the child with a lock that nobody lets go of.
"""

from __future__ import annotations

import os
from time import monotonic_ns

TYPE_CHECKING = False  # the sdk imports `typing` for type checkers only

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class MeasurementError(Exception):
    """A figure that cannot be had: the thing, the cause, the remedy, in its message."""


class AgentUnavailableError(MeasurementError):
    """No agent answers on this host."""


class RefusedError(MeasurementError):
    """The agent does not answer this question."""


class NotMeasuredError(MeasurementError):
    """Nothing was measured where a figure is asked for; it is unknown, and not zero."""


class WindowError(RuntimeError):
    """A window is used out of order: begun twice, ended before it was begun, read while open."""


SYSTEM_RUN_DIRECTORY = "/run/wattspan"
API_SOCKET = "api.sock"


def run_directories(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """The run directories an agent may have, the likeliest first."""
    if told := environ.get("WATTSPAN_RUN_DIR"):
        yield told
        return
    yield SYSTEM_RUN_DIRECTORY
    if own := environ.get("XDG_RUNTIME_DIR"):
        yield f"{own}/wattspan"


RENEW_AFTER = 300 * 10**9
"""Nanoseconds until the agent is asked again: it may have been started anew."""

RETRY_AFTER = 10 * 10**9
"""Nanoseconds until it is tried again after nobody was there."""

_WATCH_REQUEST = (
    b"POST /v1/watch?pid=self&family=1 HTTP/1.1\r\n"
    b"host: wattspan\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


class WatchRegistration:
    """This process. ``due`` is the monotonic time from which on a window asks to be kept."""

    __slots__ = ("due",)

    def __init__(self) -> None:
        self.due = 0

    def keep(self) -> None:
        """Ask; returns at once and never raises. Whoever reads figures hears what is wrong."""
        self.due = monotonic_ns() + RETRY_AFTER  # at once: no other thread need do the same
        if any(map(_send_watch_request, run_directories())):
            self.due += RENEW_AFTER - RETRY_AFTER


def _send_watch_request(directory: str) -> bool:
    """Whether somebody there has been asked; the answer is not waited for."""
    from socket import AF_UNIX, SOCK_STREAM, socket

    try:
        with socket(AF_UNIX, SOCK_STREAM) as connection:
            connection.setblocking(False)  # an agent that is too busy to listen is nobody
            connection.connect(f"{directory}/{API_SOCKET}")
            return connection.send(_WATCH_REQUEST) == len(_WATCH_REQUEST)
    except (OSError, ValueError):  # ValueError: a path that no socket can have
        return False


registration = WatchRegistration()


def _reset_after_fork() -> None:
    """After a fork the child measures itself."""
    global registration
    registration = WatchRegistration()


os.register_at_fork(after_in_child=_reset_after_fork)
