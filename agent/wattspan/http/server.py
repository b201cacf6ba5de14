"""The server: several listeners, one event loop in one thread, and the TLS handshakes."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from email.utils import formatdate
from functools import partial
from queue import SimpleQueue
from typing import Any

from wattspan.http.access_policy import OPEN_ACCESS, AccessPolicy, TlsContexts
from wattspan.http.connection import HttpConnection
from wattspan.http.limits import (
    ConnectionLimiter,
    CountRejection,
    RejectionReason,
    ServerCapacity,
    ServerLimits,
)
from wattspan.http.messages import Handler
from wattspan.http.sockets import (
    BACKLOG,
    ListeningSocket,
    UserPrincipals,
    connection_owner,
    endpoint,
    local_principal,
)
from wattspan.model import SECOND
from wattspan.ports import Clock, PeerPrincipals
from wattspan.sharing.pools import PoolName, Pools
from wattspan.util.throttle import RateLimitedLog

MAX_HANDSHAKES = 256
"""Unfinished TLS handshakes of one listener."""

HANDSHAKE, FAREWELL = 5.0, 2.0
"""Deadlines of a TLS handshake and of a TLS shutdown, in seconds."""

_ACCEPT_RETRY_DELAY = 1.0  # seconds between attempts to accept

ProtocolFactory = Callable[[], asyncio.Protocol]


class TlsAcceptor:
    """Accepts TLS connections with the newest context. Used in the server's thread only.

    asyncio's servers have one context for ever and do not limit handshakes: a client that starts
    many and completes none would exclude all others.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: ProtocolFactory,
        tls: TlsContexts,
        clock: Clock,
        count: CountRejection,
        *,
        most: int = MAX_HANDSHAKES,
        principals: PeerPrincipals | None = None,
        pools: Pools | None = None,
    ) -> None:
        self._listener, self._make, self._tls = listener, make, tls
        self._clock, self._count = clock, count
        self._most, self._principals = most, principals or UserPrincipals()
        self._limiter: ConnectionLimiter[asyncio.Task[None]] = ConnectionLimiter(
            most, pool=(pools or Pools()).make(PoolName.HANDSHAKES, most)
        )
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Stop accepting, and cancel unfinished handshakes."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for task in self._limiter.connections:
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
            except OSError as error:  # most likely no descriptor is free
                context = {"message": "a connection cannot be accepted", "exception": error}
                self._loop.call_exception_handler(context)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_ACCEPT_RETRY_DELAY, self._listen)
                return
            connection.setblocking(False)
            self._start_handshake(connection, address)

    def _start_handshake(self, connection: socket.socket, address: tuple[Any, ...]) -> None:
        """Start a handshake, if need be in the place of one of the owner with the most."""
        remote, local = endpoint(address), endpoint(connection.getsockname())
        peer = connection_owner(remote, local_principal(remote, local, self._principals))
        now = self._clock.monotonic()
        evicted = self._limiter.eviction_candidate(peer, now)
        if evicted is not None:
            evicted.cancel()
            self._limiter.remove(evicted)
            self._count(RejectionReason.CROWDED)
        if len(self._limiter) >= self._most:
            connection.close()
            self._count(RejectionReason.CROWDED)
            return
        task = self._loop.create_task(self._handshake(connection))
        self._limiter.add(task, peer, now)

        def over(_: object) -> None:
            self._limiter.remove(task)
            if task.cancelled():
                connection.close()  # a task that had not started did not close it

        task.add_done_callback(over)

    async def _handshake(self, connection: socket.socket) -> None:
        with suppress(OSError):  # a failed handshake, which is counted, or a timeout
            await self._loop.connect_accepted_socket(
                self._make,
                connection,
                ssl=self._tls(),
                ssl_handshake_timeout=HANDSHAKE,
                ssl_shutdown_timeout=FAREWELL,
            )


GRACE = 2.0  # seconds that a request has to complete when the server stops
_THREAD_EXIT_TIMEOUT = 0.2  # seconds for an idle thread to end
_ACCEPTING = 5
"""Iterations of the loop between the acceptance of a connection and connection_made, at most."""

WORKER_THREADS = 4
"""Threads for work that would block the loop: large requests, reads from disk, rendering."""

Log = Callable[[str], None]
LimitedProtocolFactory = Callable[[ServerCapacity], asyncio.Protocol]
_Task = tuple[Future[Any], Callable[[], Any]]


FAILED_WORK_PAUSE = 1.0
"""Seconds until periodic work that has failed is repeated."""


class HttpServer:
    """An HTTP server on the added sockets, from ``start`` on.

    Handlers run in the server's thread. ``principals`` finds those of peers on
    this host; by default, by user id alone.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        log: Log,
        limits: ServerLimits | None = None,
        principals: PeerPrincipals | None = None,
        name: str = "web",
        pools: Pools | None = None,
    ) -> None:
        self._clock, self._log, self._name = clock, log, name
        self._pools = pools
        self._principals = principals or UserPrincipals()
        self._periodic: list[
            tuple[Callable[[], float], Callable[[], object], Callable[[], bool]]
        ] = []
        self._limits = limits or ServerLimits()
        self._listeners: list[tuple[ListeningSocket, LimitedProtocolFactory, AccessPolicy]] = []
        self._open = ExitStack()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._date = (0, "")
        self._errors = RateLimitedLog(clock.monotonic, log)

    def add_http(
        self, listening: ListeningSocket, handler: Handler, policy: AccessPolicy = OPEN_ACCESS
    ) -> str:
        """Serve HTTP on ``listening``; its address."""
        return self.add(listening, self.http(handler, policy), policy)

    def add(
        self,
        listening: ListeningSocket,
        make: LimitedProtocolFactory,
        policy: AccessPolicy = OPEN_ACCESS,
    ) -> str:
        """Serve the protocols that ``make`` returns on ``listening``; its address.

        They add and remove themselves at the ServerCapacity, and check the tokens of ``policy``;
        TLS is handled here.
        """
        self._open.callback(listening.remove)
        self._open.enter_context(closing(listening.socket))
        self._listeners.append((listening, make, policy))
        return listening.address

    def every(
        self,
        pause: Callable[[], float],
        work: Callable[[], object],
        *,
        due: Callable[[], bool] = lambda: True,
    ) -> None:
        """Run ``work`` in a worker thread at the start, and ``pause()`` seconds after each run.

        It is left out while ``due`` is False. Both functions run in the server's thread.
        """
        self._periodic.append((pause, work, due))

    def start(self) -> None:
        """Serve, in a thread of its own."""
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(ready)),
            name=f"wattspan-{self._name}",
            daemon=True,
        )
        self._thread.start()
        ready.wait()

    def stop(self) -> None:
        """Close everything; running requests have GRACE seconds. Idempotent."""
        if self._thread is not None and self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        self._thread = self._loop = self._stop = None
        self._listeners.clear()
        self._open.close()

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(self._report_error)
        capacity = ServerCapacity(self._limits, self._clock, self._principals, self._pools)
        try:
            self._loop.set_default_executor(_DaemonPool(WORKER_THREADS))
            servers = [
                await self._serving(listening.socket, partial(make, capacity), policy)
                for listening, make, policy in self._listeners
            ]
        finally:
            ready.set()
        repeating = [asyncio.create_task(self._repeat(*each)) for each in self._periodic]
        await self._stop.wait()
        for task in repeating:
            task.cancel()
        # A closed server would leave a connection open that was accepted just now.
        for listening, _, _ in self._listeners:
            self._loop.remove_reader(listening.socket)
        for _ in range(_ACCEPTING):
            await asyncio.sleep(0)
        for server in servers:
            server.close()
        await self._close_connections(capacity)

    async def _repeat(
        self, pause: Callable[[], float], work: Callable[[], object], due: Callable[[], bool]
    ) -> None:
        while True:
            seconds = FAILED_WORK_PAUSE
            try:
                if due():
                    await asyncio.to_thread(work)
                seconds = pause()
            except Exception as error:  # noqa: BLE001 - it must end neither server nor repetition
                self._report_error(None, {"message": "periodic work failed", "exception": error})
            await asyncio.sleep(seconds)

    async def _serving(
        self, listener: socket.socket, make: Callable[[], asyncio.Protocol], policy: AccessPolicy
    ) -> asyncio.Server | TlsAcceptor:
        if policy.tls is not None:
            return TlsAcceptor(
                listener,
                make,
                policy.tls,
                self._clock,
                policy.count_rejection,
                principals=self._principals,
                pools=self._pools,
            )
        return await asyncio.get_running_loop().create_server(make, sock=listener)

    async def _close_connections(self, capacity: ServerCapacity) -> None:
        """Close every connection, those with a running request last."""
        until = asyncio.get_running_loop().time() + GRACE
        while any(connection.answering for connection in capacity.connections):
            for connection in [
                connection for connection in capacity.connections if not connection.answering
            ]:
                connection.close()
            if asyncio.get_running_loop().time() > until:
                break
            await asyncio.sleep(0.01)
        for connection in capacity.connections:
            connection.close()
        await asyncio.sleep(0)  # the loop closes their sockets

    def http(self, handler: Handler, policy: AccessPolicy) -> LimitedProtocolFactory:
        """The HTTP connections of ``handler``, for ``add``."""
        return lambda capacity: HttpConnection(
            handler, capacity, self._date_header, self._log, policy
        )

    def _date_header(self) -> str:
        """The value of the Date header, formatted once a second."""
        second = self._clock.now().wall // SECOND
        if second != self._date[0]:
            self._date = second, formatdate(second, usegmt=True)
        return self._date[1]

    def _report_error(self, _: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        message = f"The web server: {context['message']}{f' ({error!r})' if error else ''}."
        # Without free descriptors, the loop reports this a hundred times a second.
        self._errors.write(message, key=message)


class _DaemonPool(ThreadPoolExecutor):
    """Daemon threads, so that the end of the server or of the agent waits for none of their work.

    The base class, which is not initialised here, joins its threads at the end of the event loop
    and of the interpreter: the decoding of a request would delay both. All threads start at
    once: a thread that is started later and gets no memory blocks its starter for ever
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
            except BaseException as error:  # noqa: BLE001 - the future carries it
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del task, future, work  # no reference is kept while the next task is awaited
