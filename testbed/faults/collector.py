"""A collector that can be made to behave badly, and knows which spans have reached it."""

from __future__ import annotations

import bisect
import contextlib
import gzip
import socket
import struct
import threading
import time
from typing import Self

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n"
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)
LINGER = struct.Struct("ii")


class Collector:
    """Receives OTLP over HTTP on a port of loopback. ``mode`` says how it behaves:

    ``takes``; ``silent`` (accepts the request and never responds); ``trickles`` (sends a byte a
    second); ``resets`` (resets each connection after reading); ``busy`` (503, retry after a
    second); ``gone`` (no listener).
    """

    def __init__(self) -> None:
        self.spans: set[bytes] = set()
        self.received = self.repeated = self.refused = 0
        self._parts: set[bytes] = set()
        self._arrivals: list[tuple[int, int]] = []  # when, and how many spans by then
        self._mode = "takes"
        self._changed = threading.Condition()
        self._closed = False
        self._open: set[socket.socket] = set()
        self._taking = threading.Lock()
        # Never listens: reserves the port while no listener exists
        self._keeper = socket.socket()
        self._keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._keeper.bind(("127.0.0.1", 0))
        self.port = int(self._keeper.getsockname()[1])
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def mode(self) -> str:
        return self._mode

    def arrived(self, by: int) -> int:
        """Number of spans received by a monotonic time, without the agent's repetitions.

        A repetition of the agent's is the same bytes. A span that a sender repeated because
        of a late response counts as two spans here and in the agent: its id is the same.
        """
        place = bisect.bisect_right(self._arrivals, by, key=lambda one: one[0])
        return self._arrivals[place - 1][1] if place else 0

    def behave(self, mode: str) -> None:
        """From now on; open connections are closed."""
        with self._changed:
            before, self._mode = self._mode, mode
            self._changed.notify_all()
            for connection in list(self._open):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        if mode == "gone":
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        elif before == "gone":
            self._listener = socket.create_server(("127.0.0.1", self.port))
            threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self.behave("gone")
        self._keeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._open.add(connection)
            threading.Thread(target=self._attend, args=(connection,), daemon=True).start()

    def _attend(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as stream:
                while self._one(connection, stream):
                    pass
        except (OSError, ValueError):
            pass
        finally:
            self._open.discard(connection)

    def _one(self, connection: socket.socket, stream: object) -> bool:
        head, body = _request(stream)
        if not head:
            return False
        mode = self._mode
        if mode == "takes":
            with self._taking:
                self._take(head, body)
            connection.sendall(ANSWER)
            return True
        self.refused += 1
        if mode == "busy":
            connection.sendall(BUSY)
        elif mode == "resets":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER.pack(1, 0))
        elif mode == "trickles":
            for byte in ANSWER:
                connection.sendall(bytes([byte]))
                if self._wait(mode, 1.0):
                    break
        else:
            self._wait(mode, 3600)
        return False

    def _wait(self, mode: str, seconds: float) -> bool:
        """Until the behaviour changes; False if it does not."""
        with self._changed:
            return self._changed.wait_for(lambda: self._mode != mode, seconds)

    def _take(self, head: bytes, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        if b"gzip" in head:
            body = gzip.decompress(body)
        if b"/v1/traces" not in head:
            return
        told = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
        taken = self._arrivals[-1][1] if self._arrivals else 0
        for resource in told.resource_spans:
            part = resource.SerializeToString(deterministic=True)
            if part not in self._parts:
                self._parts.add(part)
                taken += sum(len(scope.spans) for scope in resource.scope_spans)
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.received += 1
                    self.repeated += span.span_id in self.spans
                    self.spans.add(span.span_id)
        self._arrivals.append((time.monotonic_ns(), taken))


def _request(stream: object) -> tuple[bytes, bytes]:
    """Head and body of the next request; an empty head at the end, and for truncated requests."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = stream.readline(65536)  # type: ignore[attr-defined]
        if not line:
            return b"", b""
        head += line
    lower = head.lower()
    if b"content-length:" in lower:
        length = int(lower.split(b"content-length:")[1].split(b"\r\n")[0])
        body = stream.read(length)  # type: ignore[attr-defined]
        return (head, body) if len(body) == length else (b"", b"")
    body = b""
    while size := int(stream.readline(), 16):  # type: ignore[attr-defined]
        body += stream.read(size)  # type: ignore[attr-defined]
        stream.readline()  # type: ignore[attr-defined]
    stream.readline()  # type: ignore[attr-defined]
    return head, body
