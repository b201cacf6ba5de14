"""The modules that applications load; here, their errors and the registration with the agent.

Imports the standard library only, and most of it only when a value is read. The public names are in
``wattspan``: ``wattspan.window``, ``wattspan.measured`` and so on.

A process that opens windows registers itself with the agent from time to time. The agent keeps the
history of a registered process for longer than others and samples it more often. Without an agent
nothing happens, and a later window tries again. Registration uses no thread and imports only the
socket module: a thread that imports while the program forks leaves the child with an import lock
that is never released.
"""

from __future__ import annotations

import os
from time import monotonic_ns

TYPE_CHECKING = False  # the sdk imports `typing` for type checkers only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class MeasurementError(Exception):
    """A value cannot be read; the message names the thing, the cause and the remedy."""


class AgentUnavailableError(MeasurementError):
    """No agent responds on this host."""


class RefusedError(MeasurementError):
    """The agent rejects the query."""


class AgentBusyError(RefusedError):
    """The user exceeds the rate of queries, or too many clients are connected."""


class NotMeasuredError(MeasurementError):
    """The value was not measured; it is unknown, not zero."""


class WindowError(RuntimeError):
    """A window was begun twice, ended before its begin, or read while open."""


SYSTEM_RUN_DIRECTORY = "/run/wattspan"
API_SOCKET = "api.sock"
OTLP_HTTP_SOCKET = "otlp.sock"
OTLP_TRACES_PATH = "/v1/traces"


def run_directories(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """The possible run directories of an agent, in the order of search."""
    if configured := environ.get("WATTSPAN_RUN_DIR"):
        yield configured
        return
    yield SYSTEM_RUN_DIRECTORY
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        yield f"{runtime}/wattspan"


RENEW_AFTER = 300 * 10**9
"""Nanoseconds until the next registration: the agent may have restarted."""

RETRY_AFTER = 10 * 10**9
"""Nanoseconds until the next attempt without an agent."""

_WATCH_REQUEST = (
    b"POST /v1/watch?pid=self&family=1 HTTP/1.1\r\n"
    b"host: wattspan\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


class WatchRegistration:
    """The registration of this process; ``due`` is the monotonic time of the next one.

    Its copies are itself, so that copies of windows belong to the process that opened these.
    """

    __slots__ = ("due", "key")

    def __init__(self) -> None:
        self.due, self.key = 0, os.urandom(16)

    def __reduce__(self) -> tuple[Callable[[bytes], WatchRegistration], tuple[bytes]]:
        return _registration_of, (self.key,)

    def renew(self) -> None:
        """Register. Returns at once and never raises; reading a value reports errors."""
        self.due = monotonic_ns() + RETRY_AFTER  # first: other threads need not register
        if any(map(_send_watch_request, run_directories())):
            self.due += RENEW_AFTER - RETRY_AFTER

    def renew_if_due(self) -> None:
        """Register if the last registration may be forgotten."""
        if monotonic_ns() >= self.due:
            self.renew()


def _send_watch_request(directory: str) -> bool:
    """True if a request was sent; does not wait for the response."""
    from socket import AF_UNIX, SOCK_STREAM, socket

    try:
        with socket(AF_UNIX, SOCK_STREAM) as connection:
            connection.setblocking(False)  # an agent that does not accept counts as absent
            connection.connect(f"{directory}/{API_SOCKET}")
            return connection.send(_WATCH_REQUEST) == len(_WATCH_REQUEST)
    except (OSError, ValueError):  # ValueError: a path too long for a socket
        return False


registration = WatchRegistration()


def _registration_of(key: bytes) -> WatchRegistration:
    """The registration of this process; another one for a copy from another process."""
    return registration if registration.key == key else WatchRegistration()


def _reset_after_fork() -> None:
    """In the child of a fork, which registers itself."""
    global registration
    registration = WatchRegistration()


os.register_at_fork(after_in_child=_reset_after_fork)
