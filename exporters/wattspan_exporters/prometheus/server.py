"""The HTTP server around the pages: connections, deadlines, TLS.

The standard library's server and HTTP parser, as prometheus-client uses them too, with a thread
for each connection, and with what a long-lived public port needs besides: a bound on connections, a
deadline for each request that a trickle of bytes does not extend, a handshake that keeps nobody
else waiting, and that it goes on where memory or descriptors run out.
"""

from __future__ import annotations

import socket
import sys
import threading
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO
from socketserver import TCPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from wattspan.http.connection_limiter import (
    ConnectionLimiter,
    ConnectionState,
    CountRejection,
    FairQuota,
    QuotaOwner,
    RejectionReason,
    UidOf,
    connection_owner,
    endpoint,
    local_user,
    unknown_uid,
)
from wattspan.http.messages import framing_fault
from wattspan.http.rate_limiter import BURST_SECONDS, RateLimiter
from wattspan.http.tls import TlsContexts
from wattspan.model import SECOND
from wattspan.ports import Clock
from wattspan_exporters.page.site import PageRequest, PageResponse, plain_response
from wattspan_exporters.prometheus.pages import HEALTH_PATH


class ScrapeLimits(NamedTuple):
    """What one client may ask of the server; times in nanoseconds."""

    connections: int
    request: int
    idle: int
    rate: int  # requests a second of one host; RESERVE times as many at once
    hold: int = SECOND  # until who asks too often is told so: to refuse costs as much as to answer


RequestHandler = Callable[[PageRequest], PageResponse]


class MetricsServer(HTTPServer):
    """Serves pages until told to stop."""

    request_queue_size = 128

    def __init__(
        self,
        address: tuple[Any, ...],
        family: int,
        answer: RequestHandler,
        limits: ScrapeLimits,
        clock: Clock,
        log: Callable[[str], None],
        refused: Callable[[], None],
        count: CountRejection,
        tls: TlsContexts | None = None,
        name: str = "wattspan",
        now_and_then: Callable[[], None] = lambda: None,
        uid_of: UidOf = unknown_uid,
    ) -> None:
        self.address_family = socket.AddressFamily(family)
        self.answer, self.limits, self.tls, self.name = answer, limits, tls, name
        self.log, self.count, self._clock, self._refused = log, count, clock, refused
        self._now_and_then, self._uid_of = now_and_then, uid_of
        self._trouble = ""
        self._open: dict[socket.socket, _ScrapeConnection] = {}
        # A request has no body: one that is not whole at once is broken off for any newcomer.
        self._crowd: ConnectionLimiter[socket.socket] = ConnectionLimiter(
            limits.connections, slow=0
        )
        self._answering = FairQuota(limits.connections)
        self._pace = RateLimiter(limits.rate, limits.rate * BURST_SECONDS)
        self._changed = threading.Condition()
        self._stopping = False
        super().__init__(address, _ScrapeHandler)

    def server_bind(self) -> None:
        """Bind without asking the resolver for this host's name, which can take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    # ------------------------------------------------------------------------- connections

    def get_request(self) -> tuple[Any, Any]:
        request, address = super().get_request()
        if self.tls is not None:
            # The handshake is left to the connection's own thread, where a client that is slow
            # to shake hands keeps nobody else waiting.
            request = self.tls().wrap_socket(
                request, server_side=True, do_handshake_on_connect=False
            )
        return request, address

    def process_request(self, request: Any, client_address: Any) -> None:
        remote, local = endpoint(client_address), endpoint(request.getsockname())
        peer = connection_owner(remote, local_user(remote, local, self._uid_of))
        with self._changed:
            now = self._clock.monotonic()
            leaving = self._crowd.makes_way(peer, now)
            full = leaving is None and len(self._crowd) >= self.limits.connections
            if leaving is not None:
                # Its thread takes a moment to notice; its place is free at once.
                self._crowd.leave(leaving)
                _shut(leaving)
                self._refused()
            if not full:
                deadline = now + self.limits.request
                self._open[request] = _ScrapeConnection(peer, deadline, idle=False, begun=False)
                self._crowd.enter(request, peer, now)
        if full or leaving is not None:
            self.count(RejectionReason.CROWDED)
        if full:
            self._refuse(request)
        else:
            # Thread.start() waits until its thread has begun. One that gets no memory for its
            # first step never does, and nobody would be accepted any more (python/cpython#140746).
            start_new_thread(self._serve, (request, client_address))

    def _serve(self, request: Any, client_address: Any) -> None:
        """In the connection's own thread."""
        with self._changed:
            if request not in self._open:
                return  # it began too late
            self._open[request] = self._open[request]._replace(begun=True)
        try:
            self.finish_request(request, client_address)
        except Exception:  # noqa: BLE001 - one connection's trouble is not the server's
            self.handle_error(request, client_address)
        finally:
            self.shutdown_request(request)

    def _refuse(self, request: Any) -> None:
        """Close at once, saying why where that needs neither a handshake nor waiting."""
        self._refused()
        if self.tls is None:
            request.setblocking(False)
            with suppress(OSError):
                request.recv(65536)  # what is left unread makes the kernel discard the answer
            with suppress(OSError):
                request.send(_BUSY_RESPONSE)
        super().shutdown_request(request)

    def expect(self, request: socket.socket, *, idle: bool) -> bool:
        """The connection now waits for a request, or for the rest of one; False: no time."""
        patience = self.limits.idle if idle else self.limits.request
        with self._changed:
            if self._stopping and idle:
                return False
            now = self._clock.monotonic()
            self._open[request] = self._open[request]._replace(deadline=now + patience, idle=idle)
            self._crowd.turn(
                request, ConnectionState.RESTING if idle else ConnectionState.WAITED_FOR, now
            )
        return True

    def hears(self, request: socket.socket) -> bool:
        """True if one more request is answered; a while passes before it is not."""
        with self._changed:
            heard = self._pace.admits(self._open[request].peer, self._clock.monotonic())
            if not heard:
                self._changed.wait_for(lambda: self._stopping, self.limits.hold / SECOND)
        return heard

    @contextmanager
    def turn(self, request: socket.socket) -> Iterator[None]:
        """Answer the connection's request in the block, in which the connection makes no way.

        The requests of one owner that are answered at a time leave places for other owners.
        Afterwards it has to take its answer. Who only asks, and never reads, keeps nobody out.
        """
        with self._changed:
            peer = self._open[request].peer
            self._changed.wait_for(lambda: self._answering.take(peer))
            self._crowd.turn(request, ConnectionState.BUSY, self._clock.monotonic())
        try:
            yield
        finally:
            with self._changed:
                self._answering.give_back(peer)
                self._crowd.turn(request, ConnectionState.WAITED_FOR, self._clock.monotonic())
                self._changed.notify_all()

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._changed:
            self._open.pop(request, None)
            self._crowd.leave(request)
            self._changed.notify_all()

    def service_actions(self) -> None:
        """Called about twice a second by serve_forever: cut whoever is over the deadline."""
        now = self._clock.monotonic()
        for request, late in self._cut(lambda connection: connection.deadline <= now).items():
            if not late.begun:
                self.shutdown_request(request)  # there is no thread that would
            elif not late.idle:
                self.count(RejectionReason.SLOW)
        try:
            self._now_and_then()
        except Exception as error:  # noqa: BLE001 - it must not end the server
            self._complain(f"What is done beside serving failed: {error!r}.")

    def _cut(
        self, which: Callable[[_ScrapeConnection], bool]
    ) -> dict[socket.socket, _ScrapeConnection]:
        with self._changed:
            overdue = {request: state for request, state in self._open.items() if which(state)}
            for request, state in overdue.items():  # once: its thread takes a moment to notice
                self._open[request] = state._replace(deadline=_NEVER)
        for request in overdue:
            _shut(request)
        return overdue

    def serve(self) -> None:
        """Accept until ``stop``, whatever goes wrong meanwhile."""
        while not self._stopping:
            try:
                self.serve_forever()
            except Exception as error:  # noqa: BLE001 - no memory, for one
                self._complain(f"Accepting connections failed: {error!r}.")
                with self._changed:  # it may fail again at once
                    self._changed.wait_for(lambda: self._stopping, _POLL_SECONDS)

    def _complain(self, sentence: str) -> None:
        """Said once, though it may be true twice a second."""
        if sentence != self._trouble:
            self.log(sentence)
        self._trouble = sentence

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error of ours; anything else is told in one line."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.log(f"A request of {client_address[0]} failed: {error!r}.")

    def stop(self, grace_seconds: float) -> None:
        """Accept nobody, let requests in hand finish for a while, then cut what is left."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        with suppress(OSError):
            self.socket.shutdown(
                socket.SHUT_RDWR
            )  # wakes serve_forever, which looks twice a second
        self.shutdown()
        self.server_close()
        self._cut(lambda connection: connection.idle)
        with self._changed:
            self._changed.wait_for(lambda: not self._open, grace_seconds)
        self._cut(lambda connection: True)


_NEGOTIATED = ("Accept", "Accept-Encoding", "If-None-Match", "Host", "Authorization")


_NEVER = 2**63
_POLL_SECONDS = 0.5  # seconds
_LONGEST, _MOST_LINES = 1 << 16, 101  # bytes of a line, lines of a head: the parser's bounds
_LINE_ENDS = (b"\r\n", b"\n", b"")  # the last line of a head; b"" where it ends too early
_HEAD_TOO_LARGE = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE


class _ScrapeConnection(NamedTuple):
    peer: QuotaOwner
    deadline: int
    idle: bool
    begun: bool  # whether its thread has


def _shut(request: socket.socket) -> None:
    with suppress(OSError):
        # Not request.shutdown(): the thread that reads must find its TLS layer in place.
        socket.socket.shutdown(request, socket.SHUT_RDWR)


_BUSY_RESPONSE = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Retry-After: 1\r\nConnection: close\r\nContent-Length: 27\r\n\r\n"
    b"Too many open connections.\n"
)


class _ScrapeHandler(BaseHTTPRequestHandler):
    """One connection."""

    server: MetricsServer
    protocol_version = "HTTP/1.1"
    error_message_format = "%(code)d %(message)s.\n"
    error_content_type = "text/plain; charset=utf-8"
    wbufsize = -1  # head and body leave together

    def setup(self) -> None:
        if self.server.tls is not None:
            self.request.do_handshake()
        super().setup()

    def handle(self) -> None:
        while self.rfile.peek(1):  # type: ignore[attr-defined]
            self.server.expect(self.request, idle=False)
            self.close_connection = True
            self._heard = self.server.hears(self.request)
            self.handle_one_request()
            if self.close_connection or not self.server.expect(self.request, idle=True):
                return

    def handle_one_request(self) -> None:
        """Read the whole head, and have it parsed if its framing is strict."""
        lines = self._read_head()
        head = b"".join(lines)
        if head and lines[-1] in _LINE_ENDS and framing_fault(head):
            self.command, self.requestline, self.request_version = "", "", self.protocol_version
            self.send_error(HTTPStatus.BAD_REQUEST)
            self.wfile.flush()
            return
        connection, self.rfile = self.rfile, BytesIO(head)
        try:
            super().handle_one_request()
        finally:
            self.rfile = connection

    def _read_head(self) -> list[bytes]:
        """The lines of a request's head, the first too many or too long one included."""
        lines = [self.rfile.readline(_LONGEST + 1)]
        while (
            lines[-1] not in _LINE_ENDS and len(lines[-1]) <= _LONGEST and len(lines) <= _MOST_LINES
        ):
            lines.append(self.rfile.readline(_LONGEST + 1))
        return lines

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Of the parser: a request that is none. What was sent is not told back."""
        long = code in (HTTPStatus.REQUEST_URI_TOO_LONG, _HEAD_TOO_LARGE)
        self.server.count(RejectionReason.TOO_LARGE if long else RejectionReason.MALFORMED)
        super().send_error(code)

    def parse_request(self) -> bool:
        """False for what is answered already: what is no request, or one too many."""
        if not super().parse_request():
            return False
        # Whoever asks whether the agent is well must not think it dead because others ask much.
        if self._heard or urlsplit(self.path).path == HEALTH_PATH:
            return True
        self.server.count(RejectionReason.RATE)
        told = f"More than {self.server.limits.rate} requests a second: "
        remedy = "ask less often, or have max_rate raised in [exporters.prometheus]."
        self._send(
            plain_response(429, told + remedy, ("Retry-After", "1"), ("Connection", "close"))
        )
        return False

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        with self.server.turn(self.request):
            try:
                page = self.server.answer(PageRequest(path, *map(self._header, _NEGOTIATED)))
            except Exception as error:  # noqa: BLE001 - the client must hear of it, and so must we
                self.server.log(f"GET {path} failed: {error!r}.")
                page = plain_response(500, "This page could not be made; the agent's log says why.")
        self._send(page)

    def _header(self, name: str) -> str:
        return ", ".join(self.headers.get_all(name, ()))

    do_HEAD = do_GET  # noqa: N815 - http.server's naming

    def _method_not_allowed(self) -> None:
        self._send(plain_response(405, "Use GET or HEAD.", ("Allow", "GET, HEAD")))

    do_POST = do_PUT = do_PATCH = _method_not_allowed  # noqa: N815 - http.server's naming
    do_DELETE = do_OPTIONS = do_TRACE = _method_not_allowed  # noqa: N815 - likewise

    def _send(self, page: PageResponse) -> None:
        self.send_response(page.status)
        for header in page.headers:
            self.send_header(*header)
        if page.status != HTTPStatus.NOT_MODIFIED:  # there it would be that of what is not sent
            self.send_header("Content-Length", str(len(page.body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        body = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        if body and not self.close_connection:
            self.send_header("Connection", "close")  # nobody reads the body that follows
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)

    def version_string(self) -> str:
        return self.server.name

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are no news."""
