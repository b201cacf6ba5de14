"""The agent's web server on real sockets, and raw clients of it."""

from __future__ import annotations

import http.client
import io
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from wattspan.clock import SystemClock
from wattspan.http.limits import ServerLimits
from wattspan.http.messages import Handler, HttpRequest, HttpResponse
from wattspan.http.server import HttpServer
from wattspan.http.sockets import listen_tcp, listen_unix

PATIENCE = 20.0  # seconds, for the hopeless case only

GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


def post(body: bytes, *headers: str, path: str = "/") -> bytes:
    """A POST as bytes, with its Content-Length unless a header says how long it is."""
    sized = any(each.lower().startswith(("content-length", "transfer-")) for each in headers)
    length = () if sized else (f"Content-Length: {len(body)}",)
    head = "\r\n".join((f"POST {path} HTTP/1.1", "Host: here", *headers, *length))
    return head.encode() + b"\r\n\r\n" + body


@dataclass
class Site:
    """A running server. ``asked`` lists the requests of its handler."""

    server: HttpServer
    tcp: tuple[str, int]
    unix: Path
    asked: list[HttpRequest] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def connect(self) -> socket.socket:
        connection = socket.create_connection(self.tcp, timeout=PATIENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def connect_unix(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE)
        connection.connect(str(self.unix))
        return connection

    def client(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.tcp, timeout=PATIENCE)

    def tell(self, data: bytes) -> bytes:
        """Send ``data``, shut down the writing side, and return the whole response."""
        with closing(self.connect()) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    """Data received until the peer closes."""
    received = bytearray()
    while piece := connection.recv(1 << 16):
        received += piece
    return bytes(received)


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of one answer."""
    with closing(http.client.HTTPResponse(connection)) as answer:
        answer.begin()
        return answer.status, answer.read()


class _Recorded(io.BytesIO):
    """Answers to read one after the other, where a connection is expected."""

    def makefile(self, _: str) -> io.BytesIO:
        return self

    def close(self) -> None:
        """There may be another answer."""


def statuses(received: bytes) -> list[int]:
    """The statuses of the answers in ``received``, as Python's own client reads them."""
    recorded, found = _Recorded(received), []
    while recorded.tell() < len(received):
        answer = http.client.HTTPResponse(recorded)  # type: ignore[arg-type]
        answer.begin()
        answer.read()
        found.append(answer.status)
    return found


@contextmanager
def serving(
    path: Path,
    handler: Callable[[list[HttpRequest]], Handler] | None = None,
    limits: ServerLimits | None = None,
) -> Iterator[Site]:
    """A server on a free port and on ``path``; its handler echoes the request."""
    asked: list[HttpRequest] = []
    log: list[str] = []

    async def echo(request: HttpRequest) -> HttpResponse:
        asked.append(request)
        return HttpResponse(200, request.body)

    chosen = handler(asked) if handler else echo
    server = HttpServer(SystemClock(), log=log.append, limits=limits)
    tcp = listen_tcp("127.0.0.1", 0, what="things", setting="[test] http")
    host, _, port = server.add_http(tcp, chosen).rpartition(":")
    unix = path / "web.sock"
    server.add_http(listen_unix(unix, what="things"), chosen)
    server.start()
    try:
        yield Site(server, (host, int(port)), unix, asked, log)
    finally:
        server.stop()
