"""The modules that applications load; here, their errors and the registration with the agent.

Imports the standard library only, and most of it only when a value is read. The public names are in
``wattspan``: ``wattspan.window``, ``wattspan.measured`` and so on.

A process that opens windows registers itself with the agent from time to time. The agent keeps the
history of a registered process for longer than others and samples it more often. The edges of
windows go to the agent through a ring in shared memory, and the agent keeps the energies up to
them. Without an agent nothing happens, and a later window tries again. Registration uses no thread
and imports a few small modules: a thread that imports while the program forks leaves the child with
an import lock that is never released.
"""

from __future__ import annotations

import os
from _weakref import ref  # of C: `weakref` imports more
from time import monotonic_ns

TYPE_CHECKING = False  # the sdk imports `typing` for type checkers only

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Hashable, Iterator, Mapping
    from typing import Any

    from wattspan.sdk.ring import RingChannel
else:
    from _collections import deque  # of C, as above


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
"""Nanoseconds until the next attempt without an agent, or look at the connection to it."""

TOLD_AGAIN = 25 * 10**9
"""Nanoseconds for which edges are told to an agent that has missed them; it takes no older ones."""

_WATCH_REQUEST = (
    b"POST /v1/watch?pid=self&family=1 HTTP/1.1\r\n"
    b"host: wattspan\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


KEPT_WINDOWS, READ_TOGETHER, OLD_READ_TOGETHER = 8192, 1024, 256
"""Numbers of windows; agents of earlier releases refuse more than the last in one question."""


class UnreadWindows:
    """Windows that have ended, in this order, whose values were not read yet. Thread-safe.

    They are read together with the first that the program reads. Each has a ``period``, and its
    method ``accept`` keeps an answer that is final; it returns False of one that soon is. Windows
    that the program drops are forgotten.
    """

    def __init__(self) -> None:
        self._all: deque[ref[Any]] = deque(maxlen=KEPT_WINDOWS)
        self._of: dict[Hashable, deque[ref[Any]]] = {}  # by kind of the values
        self._together = READ_TOGETHER

    def add(self, window: Any) -> None:
        """Add a window at its end."""
        link = ref(window)
        for unread in (self._all, *self._of.values()):
            unread.append(link)

    def read(
        self, window: Any, kind: Hashable, ask: Callable[[list[tuple[int, int]]], list[Any]]
    ) -> Any:
        """The answer for ``window`` by a question for several periods, its own first.

        Without an answer, periods at the end are asked for again; an agent that refuses so many is
        asked for fewer from then on. None if no other window is
        unread, or for a MeasurementError: then it is to be read alone. AgentBusyError.
        """
        from contextlib import suppress

        if (unread := self._of.get(kind)) is None:
            unread = self._of[kind] = deque(self._all, KEPT_WINDOWS)
        found = [window]
        with suppress(IndexError):  # there are no more
            while len(found) < self._together:
                if (one := unread.popleft()()) not in (None, window):
                    found.append(one)
        if len(found) == 1:
            return None
        try:
            answers = ask([one.period for one in found])
        except AgentBusyError:
            unread.extendleft(map(ref, reversed(found)))
            raise
        except RefusedError:
            if len(found) <= OLD_READ_TOGETHER:
                return None
            self._together = OLD_READ_TOGETHER
            unread.extendleft(map(ref, reversed(found)))
            return self.read(window, kind, ask)
        except MeasurementError:
            return None
        pairs = zip(found, answers, strict=False)
        unknown = [one for one, answer in pairs if not one.accept(kind, answer)]
        unread.extendleft(map(ref, reversed(unknown + found[len(answers) :])))
        return answers[0]


class WatchRegistration:
    """The registration of this process; ``due`` is the monotonic time of the next one.

    ``note_edge`` tells the agent the monotonic time of an edge of a window, in a microsecond. Its
    copies are itself, so that copies of windows belong to the process that opened these.
    """

    __slots__ = ("_channel", "_holds_until", "_untold", "due", "key", "note_edge", "unread")

    def __init__(self) -> None:
        self.due = self._holds_until = 0
        self.key = os.urandom(16)
        self.unread = UnreadWindows()
        self._channel: RingChannel | None = None
        self._untold: deque[int] = deque(maxlen=KEPT_WINDOWS)  # before there was an agent
        self.note_edge: Callable[[int], object] = self._untold.append

    def __reduce__(self) -> tuple[Callable[[bytes], WatchRegistration], tuple[bytes]]:
        return _registration_of, (self.key,)

    def renew(self) -> None:
        """Register. Returns at once and never raises; reading a value reports errors."""
        now = monotonic_ns()
        self.due = now + RETRY_AFTER  # first: other threads need not register
        if any(map(_send_watch_request, run_directories())):
            self._holds_until = now + RENEW_AFTER
            if not self._connects():
                self.due = self._holds_until

    def renew_if_due(self) -> None:
        """Register if the last registration may be forgotten."""
        now = monotonic_ns()
        if now < self.due:
            return
        if now < self._holds_until and self._channel is not None and self._channel.is_open:
            self.due = now + RETRY_AFTER
        else:
            self.renew()

    def _connects(self) -> bool:
        """True if the ring of edges is, or can be, connected."""
        last = self._channel
        if last is not None and last.is_open:
            return True
        from wattspan.sdk.ring import SIDE_CHANNEL_SOCKET, RingChannel

        try:
            channel = RingChannel()
        except OSError:
            return False
        if channel.connect(f"{one}/{SIDE_CHANNEL_SOCKET}" for one in run_directories()):
            self._channel, self.note_edge = channel, channel.pen.write_edge
            # A new agent has missed these: the connection is looked at seldom.
            since = monotonic_ns() - TOLD_AGAIN
            told = last.pen.edges(since) if last is not None else []
            for edge in (*told, *(at for at in tuple(self._untold) if at > since)):
                self.note_edge(edge)
            self._untold.clear()
        return self._channel is not last


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
