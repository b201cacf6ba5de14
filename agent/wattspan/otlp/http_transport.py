"""OTLP/HTTP: protobuf by POST, over one kept connection."""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from typing import BinaryIO

from wattspan.model import SECOND
from wattspan.otlp.destination import Destination
from wattspan.otlp.transport import (
    CONNECT_TIMEOUT,
    IDLE_TIMEOUT,
    MAX_RESPONSE_SIZE,
    RESPONSE_TIMEOUT,
    ExportResult,
    ExportStatus,
    connection_failure,
    describe_os_error,
    result_of_http,
    retry_result,
)
from wattspan.ports import Clock
from wattspan.util.encoding import gzip_compress
from wattspan.util.unix_http import UnixHttpConnection


class HttpTransport:
    """One connection to a collector; a request is sent completely or certainly not accepted."""

    def __init__(
        self,
        destination: Destination,
        headers: Mapping[str, str],
        clock: Clock,
        *,
        agent: str,
        trust: Callable[[], ssl.SSLContext] = ssl.create_default_context,
        answer_within: float = RESPONSE_TIMEOUT,
        compress: bool | None = None,
    ) -> None:
        """``trust`` makes the TLS context. ``compress`` defaults to true for other hosts."""
        self._destination = destination
        self._clock = clock
        self._trust = trust
        self._answer_within = answer_within
        self._headers = {
            "user-agent": agent,
            **headers,
            "content-type": "application/x-protobuf",
        }
        self._compress = not destination.is_local if compress is None else compress
        if self._compress:
            self._headers["content-encoding"] = "gzip"
        self._context: ssl.SSLContext | None = None
        self._connection: http.client.HTTPConnection | None = None
        self._used_at = 0
        self._aborted = False
        self._timed_out = False

    def send(self, body: bytes) -> ExportResult:
        if self._compress:
            body = gzip_compress(body)
        self._close_if_stale()
        reused = self._connection is not None
        failure = self._post(body)
        if failure is not None and reused and not self._aborted:
            # The server had closed the kept connection. Not everything was sent, so nothing was
            # accepted: a new connection is tried.
            failure = self._post(body)
        result = self._receive() if failure is None else failure
        if result.verdict is ExportStatus.AGAIN:
            self._context = None  # certificates may have been replaced since they were read
        return result

    def abort(self) -> None:
        self._aborted = True
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    # ------------------------------------------------------------------------------- one request

    def _post(self, body: bytes) -> ExportResult | None:
        """Send a request; None if all of it was sent."""
        try:
            connection = self._connection = self._connection or self._connect()
        except (OSError, ValueError) as error:
            return connection_failure(error, self._destination.signal)
        try:
            connection.request("POST", self._destination.target, body, self._headers)
        except (OSError, http.client.HTTPException) as error:
            early = self._early_result(connection)
            self.close()
            why = f"it did not take all of a request: {describe_os_error(error)}"
            return early or retry_result(why, unfinished=True)
        return None

    def _early_result(self, connection: http.client.HTTPConnection) -> ExportResult | None:
        """The failure that a collector answered before it read everything, such as 413 or 401."""
        try:
            connection.sock.settimeout(1)
            result = self._read(connection)
        except (OSError, http.client.HTTPException, ValueError, AttributeError):
            return None
        return result if result.verdict is not ExportStatus.TAKEN else None

    def _receive(self) -> ExportResult:
        assert self._connection is not None  # noqa: S101 - the request has just been sent on it
        why = remedy = ""
        # The timeout of the socket is that of a byte, and a response may come byte by byte.
        timer = threading.Timer(self._answer_within, self._time_out, (self._connection.sock,))
        timer.daemon, self._timed_out = True, False
        timer.start()
        try:
            result = self._read(self._connection)
            if not self._timed_out:
                return result
        except http.client.RemoteDisconnected:
            why = "it closed the connection without an answer"
        except http.client.BadStatusLine:
            why = "it answered something that is not HTTP"
            address = self._destination.signal.address
            remedy = f"If that is a port for OTLP/gRPC, write grpc:// in `{address}`."
        except TimeoutError:
            self._timed_out = True
        except http.client.IncompleteRead:
            why = "its answer broke off"
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = f"its answer broke off: {describe_os_error(error)}"
        finally:
            timer.cancel()
        if self._timed_out:
            why = f"it did not answer within {self._answer_within:g} s"
        self.close()
        return retry_result(why, remedy, perhaps_taken=True)

    def _time_out(self, sock: socket.socket) -> None:
        self._timed_out = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _read(self, connection: http.client.HTTPConnection) -> ExportResult:
        response = connection.getresponse()
        body = response.read(MAX_RESPONSE_SIZE)
        # http.client detects truncation of a chunked body only.
        truncated = response.length and len(body) < MAX_RESPONSE_SIZE
        if 200 <= response.status < 300 and truncated:
            raise http.client.IncompleteRead(body, response.length)
        if response.will_close or not response.isclosed():
            self.close()
        self._used_at = self._clock.monotonic()
        return result_of_http(
            response.status,
            body,
            content_type=response.headers.get("content-type", ""),
            retry_after=response.headers.get("retry-after", ""),
            location=response.headers.get("location", ""),
            now=self._clock.now().wall,
            signal=self._destination.signal,
        )

    # ------------------------------------------------------------------------------- connections

    def _connect(self) -> http.client.HTTPConnection:
        connection = self._new_connection()
        connection.response_class = _StrictResponse
        connection.timeout = CONNECT_TIMEOUT
        connection.connect()
        connection.sock.settimeout(self._answer_within)
        if self._aborted:
            connection.close()
            raise ConnectionAbortedError("the agent is stopping")
        return connection

    def _new_connection(self) -> http.client.HTTPConnection:
        destination = self._destination
        if destination.socket:
            return UnixHttpConnection(destination.socket)
        if not destination.tls:
            return http.client.HTTPConnection(destination.host, destination.port)
        if self._context is None:
            self._context = self._trust()
        return http.client.HTTPSConnection(
            destination.host, destination.port, context=self._context
        )

    def _close_if_stale(self) -> None:
        """Close a connection that the server has closed, or may be about to close."""
        if self._connection is None:
            return
        idle = self._clock.monotonic() - self._used_at
        poll = select.poll()
        poll.register(self._connection.sock, select.POLLIN)  # readable between responses: closed
        if idle > IDLE_TIMEOUT * SECOND or poll.poll(0):
            self.close()


class _StrictResponse(http.client.HTTPResponse):
    """A response with a complete head.

    http.client accepts the end of a connection as the end of a head. It would take a truncated
    ``HTTP/1.1 200`` for a success, and the request would be lost.
    """

    def begin(self) -> None:
        stream = self.fp
        self.fp = _HeadReader(stream)  # type: ignore[assignment]
        try:
            super().begin()
        finally:
            if self.fp is not None:
                self.fp = stream


class _HeadReader:
    """Reads the lines of a head; IncompleteRead for a truncated one that has begun."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._begun = False

    def readline(self, limit: int) -> bytes:
        line = self._stream.readline(limit)
        is_http = self._begun or line.startswith(b"HTTP/")
        if is_http and not line.endswith(b"\n") and len(line) < limit:
            raise http.client.IncompleteRead(line)
        self._begun = True
        return line

    def close(self) -> None:
        self._stream.close()
