"""The HTTP server around the pages: connections, deadlines, TLS.

The standard library's threading server and HTTP parser, as prometheus-client uses them too, with
what a long-lived public port needs besides: a bound on connections, a deadline for each request
that a trickle of bytes does not extend, and a handshake that keeps nobody else waiting.
"""

from __future__ import annotations

import socket
import ssl
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from wattspan.ports import Clock
from wattspan_exporters.prometheus.pages import Page, plain


class Limits(NamedTuple):
    """What one client may ask of the server; times in nanoseconds."""

    connections: int
    request: int
    idle: int


Answer = Callable[[str, str, str], Page]
"""From a path, an Accept and an Accept-Encoding header to a page."""


class MetricsServer(ThreadingMixIn, HTTPServer):
    """Serves pages until told to stop."""

    daemon_threads = True
    block_on_close = False  # stop() waits, and not for ever
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[Any, ...],
        family: int,
        answer: Answer,
        limits: Limits,
        clock: Clock,
        log: Callable[[str], None],
        refused: Callable[[], None],
        tls: ssl.SSLContext | None = None,
        name: str = "wattspan",
    ) -> None:
        self.address_family = socket.AddressFamily(family)
        self.answer, self.limits, self.tls, self.name = answer, limits, tls, name
        self.log, self._clock, self._refused = log, clock, refused
        self._open: dict[socket.socket, _Connection] = {}
        self._changed = threading.Condition()
        self._stopping = False
        super().__init__(address, _Handler)

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
            request = self.tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return request, address

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            full = len(self._open) >= self.limits.connections
            if not full:
                deadline = self._clock.monotonic() + self.limits.request
                self._open[request] = _Connection(deadline, idle=False)
        if full:
            self._refuse(request)
        else:
            super().process_request(request, client_address)

    def _refuse(self, request: Any) -> None:
        """Close at once, saying why where that needs neither a handshake nor waiting."""
        self._refused()
        if self.tls is None:
            request.setblocking(False)
            with suppress(OSError):
                request.recv(65536)  # what is left unread makes the kernel discard the answer
            with suppress(OSError):
                request.send(_BUSY)
        super().shutdown_request(request)

    def expect(self, request: socket.socket, *, idle: bool) -> bool:
        """The connection now waits for a request, or for the rest of one; False: no time."""
        patience = self.limits.idle if idle else self.limits.request
        with self._changed:
            if self._stopping and idle:
                return False
            self._open[request] = _Connection(self._clock.monotonic() + patience, idle)
        return True

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._changed:
            self._open.pop(request, None)
            self._changed.notify_all()

    def service_actions(self) -> None:
        """Called about twice a second by serve_forever: cut whoever is over the deadline."""
        now = self._clock.monotonic()
        self._cut(lambda connection: connection.deadline <= now)

    def _cut(self, which: Callable[[_Connection], bool]) -> None:
        with self._changed:
            overdue = [request for request, state in self._open.items() if which(state)]
        for request in overdue:
            with suppress(OSError):
                # Not request.shutdown(): the thread that reads must find its TLS layer in place.
                socket.socket.shutdown(request, socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error of ours; anything else is told in one line."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.log(f"A request of {client_address[0]} failed: {error!r}.")

    def stop(self, grace_seconds: float) -> None:
        """Accept nobody, let requests in hand finish for a while, then cut what is left."""
        with self._changed:
            self._stopping = True
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


class _Connection(NamedTuple):
    deadline: int
    idle: bool


_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Retry-After: 1\r\nConnection: close\r\nContent-Length: 27\r\n\r\n"
    b"Too many open connections.\n"
)


class _Handler(BaseHTTPRequestHandler):
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
            self.handle_one_request()
            if self.close_connection or not self.server.expect(self.request, idle=True):
                return

    def do_GET(self) -> None:
        accept = ", ".join(self.headers.get_all("Accept", ()))
        encodings = ", ".join(self.headers.get_all("Accept-Encoding", ()))
        path = urlsplit(self.path).path
        try:
            page = self.server.answer(path, accept, encodings)
        except Exception as error:  # noqa: BLE001 - the client must hear of it, and so must we
            self.server.log(f"GET {path} failed: {error!r}.")
            page = plain(500, "This page could not be made; the agent's log says why.")
        self._send(page)

    do_HEAD = do_GET  # noqa: N815 - http.server's naming

    def _method_not_allowed(self) -> None:
        self._send(plain(405, "Use GET or HEAD.", ("Allow", "GET, HEAD")))

    do_POST = do_PUT = do_PATCH = _method_not_allowed  # noqa: N815 - http.server's naming
    do_DELETE = do_OPTIONS = do_TRACE = _method_not_allowed  # noqa: N815 - likewise

    def _send(self, page: Page) -> None:
        self.send_response(page.status)
        for header in page.headers:
            self.send_header(*header)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.send_header("Connection", "close")  # nobody reads the body that follows
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)

    def version_string(self) -> str:
        return self.server.name

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are no news."""
