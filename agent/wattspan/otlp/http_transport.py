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
    describe_os_error,
    result_of_http,
    retry_result,
)
from wattspan.ports import Clock
from wattspan.util.encoding import gzip_compress


class HttpTransport:
    """One connection to one collector; a request is either wholly sent or certainly not taken."""

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
        """``compress`` is by default whether the collector is on another machine."""
        self._to = destination
        self._clock = clock
        self._trust = trust
        self._answer_within = answer_within
        self._headers = {
            "user-agent": agent,
            **headers,
            "content-type": "application/x-protobuf",
        }
        self._compress = not destination.here if compress is None else compress
        if self._compress:
            self._headers["content-encoding"] = "gzip"
        self._context: ssl.SSLContext | None = None
        self._connection: http.client.HTTPConnection | None = None
        self._used = 0
        self._aborted = False
        self._late = False

    def send(self, body: bytes) -> ExportResult:
        if self._compress:
            body = gzip_compress(body)
        self._let_go_if_stale()
        reused = self._connection is not None
        unsent = self._post(body)
        if unsent is not None and reused and not self._aborted:
            # The other side had closed a connection kept from earlier. Not everything was sent,
            # so nothing was taken, and nothing is wrong: try a new one.
            unsent = self._post(body)
        answer = self._answer() if unsent is None else unsent
        if answer.verdict is ExportStatus.AGAIN:
            self._context = None  # certificates may have been replaced since they were read
        return answer

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
        """Send everything; None when it is done, an answer when it could not be."""
        try:
            connection = self._connection = self._connection or self._connected()
        except ssl.SSLCertVerificationError as error:
            return retry_result(
                f"its certificate is not trusted ({error.verify_message})",
                "Install its authority's certificate on this host, or name it by SSL_CERT_FILE.",
            )
        except ssl.SSLError as error:
            return retry_result(
                f"TLS failed ({error.reason or error})", "Does the collector speak TLS there?"
            )
        except TimeoutError:
            return retry_result(f"no connection within {CONNECT_TIMEOUT} s", self._to.signal.away)
        except (OSError, ValueError) as error:
            return retry_result(describe_os_error(error), self._to.signal.away)
        try:
            connection.request("POST", self._to.target, body, self._headers)
        except (OSError, http.client.HTTPException) as error:
            early = self._early_answer(connection)
            self.close()
            why = f"it did not take all of a request: {describe_os_error(error)}"
            return early or retry_result(why, unfinished=True)
        return None

    def _early_answer(self, connection: http.client.HTTPConnection) -> ExportResult | None:
        """The answer of a collector that did not care to read everything, as 413 and 401 can be."""
        try:
            connection.sock.settimeout(1)
            answer = self._read(connection)
        except (OSError, http.client.HTTPException, ValueError, AttributeError):
            return None
        return answer if answer.verdict is not ExportStatus.TAKEN else None

    def _answer(self) -> ExportResult:
        assert self._connection is not None  # noqa: S101 - it has just been sent on
        remedy = ""
        # The socket's own limit is that of a byte: an answer may come in one byte after the other.
        late = threading.Timer(self._answer_within, self._cut, (self._connection.sock,))
        late.daemon, self._late = True, False
        late.start()
        try:
            answer = self._read(self._connection)
            if not self._late:
                return answer
            why = ""
        except http.client.RemoteDisconnected:
            why = "it closed the connection without an answer"
        except http.client.BadStatusLine:
            why = "it answered something that is not HTTP"
            remedy = (
                f"If that is a port for OTLP/gRPC, write grpc:// in `{self._to.signal.address}`."
            )
        except TimeoutError:
            why = f"it did not answer within {self._answer_within:g} s"
        except http.client.IncompleteRead:
            why = "its answer broke off"
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = f"its answer broke off: {describe_os_error(error)}"
        finally:
            late.cancel()
        if self._late:
            why = f"it did not answer within {self._answer_within:g} s"
        self.close()
        return retry_result(why, remedy, perhaps_taken=True)

    def _cut(self, sock: socket.socket) -> None:
        self._late = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _read(self, connection: http.client.HTTPConnection) -> ExportResult:
        response = connection.getresponse()
        body = response.read(MAX_RESPONSE_SIZE)
        if 200 <= response.status < 300 and _is_truncated(response, body):
            raise http.client.IncompleteRead(body, response.length)
        if response.will_close or not response.isclosed():
            self.close()
        self._used = self._clock.monotonic()
        return result_of_http(
            response.status,
            body,
            content_type=response.headers.get("content-type", ""),
            retry_after=response.headers.get("retry-after", ""),
            location=response.headers.get("location", ""),
            now=self._clock.now().wall,
            signal=self._to.signal,
        )

    # ------------------------------------------------------------------------------- connections

    def _connected(self) -> http.client.HTTPConnection:
        connection = self._new()
        connection.response_class = _StrictResponse
        connection.timeout = CONNECT_TIMEOUT
        connection.connect()
        connection.sock.settimeout(self._answer_within)
        if self._aborted:
            connection.close()
            raise ConnectionAbortedError("the agent is stopping")
        return connection

    def _new(self) -> http.client.HTTPConnection:
        to = self._to
        if to.socket:
            return _UnixHttpConnection(to.socket)
        if not to.tls:
            return http.client.HTTPConnection(to.host, to.port)
        if self._context is None:
            self._context = self._trust()
        return http.client.HTTPSConnection(to.host, to.port, context=self._context)

    def _let_go_if_stale(self) -> None:
        """Do not send on a connection that the other side has closed, or may be about to."""
        if self._connection is None:
            return
        idle = self._clock.monotonic() - self._used
        if idle > IDLE_TIMEOUT * SECOND or _readable(self._connection.sock):
            self.close()


class _StrictResponse(http.client.HTTPResponse):
    """An answer whose head must come whole.

    The library takes the end of a connection for the end of a head: of `HTTP/1.1 200` alone it
    would make a success, and the request would be lost that nobody took.
    """

    def begin(self) -> None:
        stream = self.fp
        self.fp = _HeaderReader(stream)  # type: ignore[assignment]
        try:
            super().begin()
        finally:
            if self.fp is not None:
                self.fp = stream


class _HeaderReader:
    """The lines of a head; IncompleteRead if they break off. No line at all is left as it is."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._begun = False

    def readline(self, most: int) -> bytes:
        line = self._stream.readline(most)
        of_http = self._begun or line.startswith(b"HTTP/")
        if of_http and not line.endswith(b"\n") and len(line) < most:
            raise http.client.IncompleteRead(line)
        self._begun = True
        return line

    def close(self) -> None:
        self._stream.close()


def _is_truncated(response: http.client.HTTPResponse, body: bytes) -> bool:
    """Whether less came than was announced; a body in chunks sees to that itself."""
    return bool(response.length) and len(body) < MAX_RESPONSE_SIZE


class _UnixHttpConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _readable(sock: socket.socket) -> bool:
    """Whether there is something to read where nothing should be: as a rule, the end."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
