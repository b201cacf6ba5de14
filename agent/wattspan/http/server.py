"""Who may shake hands: a listener's TLS connections, until they are established or given up.

The server: several listeners, one event loop, one thread.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from email.utils import formatdate
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from wattspan.http.access_policy import OPEN_ACCESS, AccessPolicy
from wattspan.http.connection import HttpConnection
from wattspan.http.connection_limiter import (
    ConnectionLimiter,
    CountRejection,
    RejectionReason,
    UidOf,
    connection_owner,
    endpoint,
    local_user,
    unknown_uid,
)
from wattspan.http.limits import ServerCapacity, ServerLimits
from wattspan.http.messages import Handler
from wattspan.http.sockets import BACKLOG, ListeningSocket, listen_tcp, listen_unix
from wattspan.http.tls import TlsContexts
from wattspan.model import SECOND
from wattspan.ports import Clock

MAX_HANDSHAKES = 256
"""TLS connections of one listener that may be neither established nor given up."""

HANDSHAKE, FAREWELL = 5.0, 2.0
"""Seconds that a client is given to shake hands, and to end TLS as it should."""

_ACCEPT_RETRY_DELAY = 1.0  # seconds until another connection is accepted where the first try failed

ProtocolFactory = Callable[[], asyncio.Protocol]


class TlsAcceptor:
    """Accepts connections, each with the newest context; used in the server's thread only.

    asyncio's own servers take one context for ever, and know no peer before TLS is established:
    whoever begins many handshakes and ends none would keep everybody else out.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: ProtocolFactory,
        tls: TlsContexts,
        clock: Clock,
        refused: CountRejection,
        *,
        most: int = MAX_HANDSHAKES,
        uid_of: UidOf = unknown_uid,
    ) -> None:
        self._listener, self._make, self._tls = listener, make, tls
        self._clock, self._refused = clock, refused
        self._most, self._uid_of = most, uid_of
        self._crowd: ConnectionLimiter[asyncio.Task[None]] = ConnectionLimiter(most)
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Accept nobody any more, and give up whoever still shakes hands."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for task in self._crowd.guests:
            task.cancel()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(BACKLOG):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor is left, most likely
                told = {"message": "a connection cannot be accepted", "exception": error}
                self._loop.call_exception_handler(told)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_ACCEPT_RETRY_DELAY, self._listen)
                return
            connection.setblocking(False)
            self._welcome(connection, address)

    def _welcome(self, connection: socket.socket, address: tuple[Any, ...]) -> None:
        """Shake hands, if need be in the place of one of whoever has the most."""
        remote, local = endpoint(address), endpoint(connection.getsockname())
        peer = connection_owner(remote, local_user(remote, local, self._uid_of))
        now = self._clock.monotonic()
        leaving = self._crowd.makes_way(peer, now)
        if leaving is not None:
            leaving.cancel()
            self._crowd.leave(leaving)
            self._refused(RejectionReason.CROWDED)
        if len(self._crowd) >= self._most:
            connection.close()
            self._refused(RejectionReason.CROWDED)
            return
        task = self._loop.create_task(self._shake(connection))
        self._crowd.enter(task, peer, now)

        def over(_: object) -> None:
            self._crowd.leave(task)
            if task.cancelled():
                connection.close()  # which nobody has done if it had not begun

        task.add_done_callback(over)

    async def _shake(self, connection: socket.socket) -> None:
        with suppress(OSError):  # it failed, which is counted, or took too long
            await self._loop.connect_accepted_socket(
                self._make,
                connection,
                ssl=self._tls(),
                ssl_handshake_timeout=HANDSHAKE,
                ssl_shutdown_timeout=FAREWELL,
            )


GRACE = 2.0  # seconds that a request in hand is given when the server stops
_THREAD_EXIT_TIMEOUT = 0.2  # seconds in which a thread that does nothing has ended
_ACCEPTING = 5
"""Turns of the loop from a connection's acceptance to its being known to us, and some."""

WORKER_THREADS = 4
"""Threads for what would keep the loop too long: each listener for spans reads one large request
at a time, and questions look one at a time into what is on disk."""

MINUTE = 60 * SECOND
MAX_REMEMBERED_MESSAGES = (
    50  # sentences that are remembered, so as not to be said again within a minute
)

Log = Callable[[str], None]
LimitedProtocolFactory = Callable[[ServerCapacity], asyncio.Protocol]
_Task = tuple[Future[Any], Callable[[], Any]]


class HttpServer:
    """Listens at once, answers once it is started.

    Every handler runs in the server's thread. What listens is refused or had when it is asked
    for, by ListenError; what is said of it there (``what``, ``setting``) is for that sentence.
    ``uid_of`` looks up the owners of TCP connections from this host.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        log: Log,
        limits: ServerLimits | None = None,
        uid_of: UidOf = unknown_uid,
        name: str = "web",
    ) -> None:
        self._clock, self._log, self._uid_of, self._name = clock, log, uid_of, name
        self._periodic: list[tuple[float, Callable[[], object]]] = []
        self._limits = limits or ServerLimits()
        self._listeners: list[tuple[ListeningSocket, LimitedProtocolFactory, AccessPolicy]] = []
        self._open = ExitStack()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._date = (0, "")
        self._complaints: dict[str, int] = {}  # when each was last logged

    def listen_tcp(
        self,
        host: str,
        port: int,
        handler: Handler,
        *,
        what: str,
        setting: str,
        verb: str = "receive",
        door: AccessPolicy = OPEN_ACCESS,
    ) -> str:
        """Listen on TCP; the actual ``HOST:PORT``. Port 0 takes any, host "" is every address."""
        listening = listen_tcp(host, port, what=what, setting=setting, verb=verb)
        return self.add(listening, self._http(handler, door), door)

    def listen_unix(
        self,
        path: Path,
        handler: Handler,
        *,
        what: str,
        mode: int = 0o666,
        door: AccessPolicy = OPEN_ACCESS,
    ) -> str:
        """Listen on a Unix socket; its path. Whoever may write to it may send."""
        return self.add(listen_unix(path, mode, what=what), self._http(handler, door), door)

    def add(
        self,
        listening: ListeningSocket,
        make: LimitedProtocolFactory,
        door: AccessPolicy = OPEN_ACCESS,
    ) -> str:
        """Let whatever protocol ``make`` makes speak on ``listening``; its address.

        What it makes enters and leaves the Room, so that it is counted and ended with the rest.
        Of ``door`` it has to see to the tokens; TLS is spoken around it.
        """
        if listening.warning:
            self._log(listening.warning)
        self._open.callback(listening.remove)
        self._open.enter_context(closing(listening.socket))
        self._listeners.append((listening, make, door))
        return listening.address

    def every(self, seconds: float, work: Callable[[], object]) -> None:
        """Do ``work`` in a worker thread at the start and ``seconds`` after each time."""
        self._periodic.append((seconds, work))

    def start(self) -> None:
        """Answer from now on, in a thread of its own."""
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(ready)),
            name=f"wattspan-{self._name}",
            daemon=True,
        )
        self._thread.start()
        ready.wait()

    def stop(self) -> None:
        """Close everything; requests in hand are given a moment. Safe to call twice."""
        if self._thread is not None and self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        self._thread = self._loop = self._stop = None
        self._listeners.clear()
        self._open.close()

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(self._trouble)
        room = ServerCapacity(self._limits, self._clock, self._uid_of)
        try:
            self._loop.set_default_executor(_DaemonPool(WORKER_THREADS))
            servers = [
                await self._serving(listening.socket, partial(make, room), door)
                for listening, make, door in self._listeners
            ]
        finally:
            ready.set()
        repeating = [asyncio.create_task(self._repeat(*each)) for each in self._periodic]
        await self._stop.wait()
        for task in repeating:
            task.cancel()
        # A connection that has just been accepted would be lost, unclosed, with a closed server.
        for listening, _, _ in self._listeners:
            self._loop.remove_reader(listening.socket)
        for _ in range(_ACCEPTING):
            await asyncio.sleep(0)
        for server in servers:
            server.close()
        await self._see_off(room)

    async def _repeat(self, seconds: float, work: Callable[[], object]) -> None:
        while True:
            try:
                await asyncio.to_thread(work)
            except Exception as error:  # noqa: BLE001 - it must not end the server
                self._trouble(None, {"message": "periodic work failed", "exception": error})
            await asyncio.sleep(seconds)

    async def _serving(
        self, listener: socket.socket, make: Callable[[], asyncio.Protocol], door: AccessPolicy
    ) -> asyncio.Server | TlsAcceptor:
        if door.tls is not None:
            return TlsAcceptor(
                listener, make, door.tls, self._clock, door.refused, uid_of=self._uid_of
            )
        return await asyncio.get_running_loop().create_server(make, sock=listener)

    async def _see_off(self, room: ServerCapacity) -> None:
        """End every connection, those with a request in hand last."""
        until = asyncio.get_running_loop().time() + GRACE
        while any(guest.answering for guest in room.guests):
            for guest in [guest for guest in room.guests if not guest.answering]:
                guest.close()
            if asyncio.get_running_loop().time() > until:
                break
            await asyncio.sleep(0.01)
        for guest in room.guests:
            guest.close()
        await asyncio.sleep(0)  # in which the loop closes their sockets

    def _http(self, handler: Handler, door: AccessPolicy) -> LimitedProtocolFactory:
        return lambda room: HttpConnection(handler, room, self._now, self._log, door)

    def _now(self) -> str:
        """The time as HTTP writes it, made once a second."""
        second = self._clock.now().wall // SECOND
        if second != self._date[0]:
            self._date = second, formatdate(second, usegmt=True)
        return self._date[1]

    def _trouble(self, _: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        told = f"The web server: {context['message']}{f' ({error!r})' if error else ''}."
        now = self._clock.monotonic()
        # Where descriptors run out, the loop says so a hundred times a second.
        if now - self._complaints.get(told, -MINUTE) >= MINUTE:
            if len(self._complaints) >= MAX_REMEMBERED_MESSAGES:
                self._complaints.clear()
            self._complaints[told] = now
            self._log(told)


class _DaemonPool(ThreadPoolExecutor):
    """Daemon threads, so that nothing waits for their work when the server or the agent ends.

    The threads of the base class, which is not initialised here, are joined at the end of the
    event loop and of the interpreter: a request that is being decoded would delay both.

    All threads begin at once. One that is started later, and gets no memory for its first step,
    never says that it has begun; who started it would wait for that for ever
    (python/cpython#140746).
    """

    def __init__(self, threads: int) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._workers = [
            threading.Thread(
                target=_run_tasks, args=(self._tasks,), name=f"wattspan-aside-{number}", daemon=True
            )
            for number in range(threads)
        ]
        for worker in self._workers:
            worker.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for _ in self._workers:
            self._tasks.put(None)
        for worker in self._workers:
            worker.join(_THREAD_EXIT_TIMEOUT)


def _run_tasks(tasks: SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        future, work = task
        if future.set_running_or_notify_cancel():
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - whoever awaits the future is told
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del task, future, work  # nothing of it is kept while the next one is awaited
