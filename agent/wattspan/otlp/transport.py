"""The connection to a collector, the meaning of its responses, and its health.

OTLP defines which failures may be retried: HTTP 429, 502, 503 and 504; eight codes of gRPC, and
RESOURCE_EXHAUSTED with a delay. All others are final.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Protocol

from wattspan.model import SECOND, Failure, SourceHealth, Trouble
from wattspan.model.settings import Listen
from wattspan.otlp.destination import SPANS, Destination, Signal
from wattspan.ports import Clock
from wattspan.util.encoding import GrpcStatus
from wattspan.util.http_get import client_context
from wattspan.util.protobuf import parse_message, status_message
from wattspan.util.text import printable

CONNECT_TIMEOUT = 5
"""Seconds for a connection to be made."""

RESPONSE_TIMEOUT = 30
"""Seconds for a response. Long, because a request that is given up too early is sent twice."""

IDLE_TIMEOUT = 3
"""Seconds after which a connection is not used again. Servers commonly close idle connections
after 5 s or more, and it is unknown whether a request that meets such a close was accepted."""

MAX_RESPONSE_SIZE = 1 << 20
"""Bytes of a response that are read."""

MAX_BACKOFF = 8 * SECOND
"""Longest delay between attempts, so that a recovered collector is found within ten seconds."""

MAX_RETRY_DELAY = 600 * SECOND
"""Longest delay that a collector can ask for."""

_READ_SIZE = 1 << 16
_MAX_REJECTED = 1 << 32  # more than any request has


class ExportStatus(Enum):
    TAKEN = "taken"
    AGAIN = "again"
    REFUSED = "refused"
    TOO_LARGE = "too large"


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The result of one request.

    ``why`` is a clause, ``remedy`` a sentence. ``after`` is the delay that the collector asks
    for, in nanoseconds. ``perhaps_taken``: everything was sent, and no response denies that it
    was accepted. ``unfinished``: the connection ended before everything was sent.
    """

    verdict: ExportStatus
    why: str = ""
    remedy: str = ""
    rejected: int = 0
    after: int | None = None
    perhaps_taken: bool = False
    unfinished: bool = False


class Transport(Protocol):
    """Sends requests of one signal to a collector, one at a time."""

    def send(self, body: bytes) -> ExportResult:
        """Send a request and return its result. Raises nothing."""
        ...

    def abort(self) -> None:
        """End a ``send`` in progress soon, and all later ones. Safe from any thread."""
        ...

    def close(self) -> None:
        """Close the connection; in the thread that sends."""
        ...


def retry_result(
    why: str, remedy: str = "", *, perhaps_taken: bool = False, unfinished: bool = False
) -> ExportResult:
    return ExportResult(
        ExportStatus.AGAIN, why, remedy, perhaps_taken=perhaps_taken, unfinished=unfinished
    )


def connection_failure(error: Exception, signal: Signal) -> ExportResult:
    """The result for an error while a connection was made."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return retry_result(
            f"its certificate is not trusted ({error.verify_message})",
            "Install its authority's certificate on this host, or name it by SSL_CERT_FILE.",
        )
    if isinstance(error, ssl.SSLError):
        return retry_result(
            f"TLS failed ({error.reason or error})",
            "Is TLS enabled at that address of the collector?",
        )
    if isinstance(error, TimeoutError):
        return retry_result(f"no connection within {CONNECT_TIMEOUT} s", signal.away)
    return retry_result(describe_os_error(error), signal.away)


def describe_os_error(error: Exception) -> str:
    """An error as a clause."""
    if isinstance(error, TimeoutError):
        return "it took too long"
    if isinstance(error, socket.gaierror):
        return f"its name cannot be resolved ({error.strerror})"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return " ".join(str(error).split())[:200] or type(error).__name__


class CollectorTransport(ABC):
    """One connection to a collector, reused while it is fresh. Subclasses implement a protocol."""

    alpn = "http/1.1"

    def __init__(
        self,
        destination: Destination,
        headers: Mapping[str, str],
        clock: Clock,
        *,
        agent: str,
        trust: Callable[[], ssl.SSLContext] = client_context,
        answer_within: float = RESPONSE_TIMEOUT,
        compress: bool | None = None,
    ) -> None:
        """``trust`` makes the TLS context. ``compress`` defaults to true for other hosts."""
        self._destination, self._signal = destination, destination.signal
        self._clock, self._trust, self._answer_within = clock, trust, answer_within
        authority = Listen.written(destination.host, destination.port)
        self._authority = "localhost" if destination.socket else authority
        values = {name: value.strip() for name, value in headers.items()}
        self._headers = {"user-agent": agent, **values}
        self._compress = not destination.is_local if compress is None else compress
        self._context: ssl.SSLContext | None = None
        self._socket: socket.socket | None = None
        self._used_at = self._deadline = 0
        self._aborted = False

    @abstractmethod
    def send(self, body: bytes) -> ExportResult:
        """As in Transport."""

    @abstractmethod
    def _open(self) -> None:
        """Prepare the protocol on a new connection."""

    def _is_open(self, unread: bytes) -> bool:
        """True if the connection is usable after ``unread`` arrived between two requests."""
        return False

    def abort(self) -> None:
        self._aborted = True
        if (connection := self._socket) is not None:
            with suppress(OSError):  # SSLSocket.shutdown would switch TLS off under the sender
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _connect(self) -> ExportResult | None:
        """Connect unless a usable connection exists; the failure if that is not possible."""
        if self._socket is not None and not self._is_usable(self._socket):
            self.close()
        try:
            if self._socket is None:
                self._socket = self._new_connection()
                if self._aborted:
                    raise ConnectionAbortedError("the agent is stopping")
                self._deadline_in(self._answer_within)
                self._open()
        except (OSError, ValueError) as error:
            self._disconnect()
            return connection_failure(error, self._signal)
        return None

    def _disconnect(self) -> None:
        """Close a failed connection; certificates may be replaced before the next one."""
        self.close()
        self._context = None

    def _lost(
        self, why: str, remedy: str = "", *, perhaps_taken: bool = False, unfinished: bool = False
    ) -> ExportResult:
        """The result of a request without a response."""
        self._disconnect()
        return retry_result(why, remedy, perhaps_taken=perhaps_taken, unfinished=unfinished)

    def _new_connection(self) -> socket.socket:
        destination = self._destination
        connection: http.client.HTTPConnection
        if destination.socket:
            return _connected(destination.socket)
        if destination.tls:
            self._context = self._context or self._trust()
            self._context.set_alpn_protocols([self.alpn])
            connection = http.client.HTTPSConnection(
                destination.host, destination.port, timeout=CONNECT_TIMEOUT, context=self._context
            )
        else:
            connection = http.client.HTTPConnection(
                destination.host, destination.port, timeout=CONNECT_TIMEOUT
            )
        connection.connect()
        return connection.sock

    def _is_usable(self, connection: socket.socket) -> bool:
        """False if the server has closed the connection, or may be about to close it."""
        if self._clock.monotonic() - self._used_at > IDLE_TIMEOUT * SECOND:
            return False
        connection.settimeout(0)
        try:
            unread = connection.recv(_READ_SIZE)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return bool(unread) and self._is_open(unread)

    def _deadline_in(self, seconds: float) -> None:
        """Limit the next transmissions, together, to ``seconds``."""
        self._deadline = self._clock.monotonic() + round(seconds * SECOND)

    def _timed_socket(self) -> socket.socket:
        """The connection, with the time until the deadline as its timeout. TimeoutError."""
        left = self._deadline - self._clock.monotonic()
        if left <= 0:
            raise TimeoutError
        assert self._socket is not None  # noqa: S101 - _connect has succeeded
        self._socket.settimeout(left / SECOND)
        return self._socket

    def _write(self, data: bytes) -> None:
        if data:
            self._timed_socket().sendall(data)

    def _read(self) -> bytes:
        """The next bytes of the collector; b"" at the end of the connection."""
        return self._timed_socket().recv(_READ_SIZE)


def _connected(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(CONNECT_TIMEOUT)
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


# ---------------------------------------------------------------------------------- responses

_HTTP_RETRYABLE = frozenset((429, 502, 503, 504))
_HTTP_AMBIGUOUS = frozenset((502, 504))  # of a proxy, which may have reached the collector
_HTTP_TOO_LARGE = 413

_GRPC_RETRYABLE = frozenset(
    (
        GrpcStatus.CANCELLED,
        GrpcStatus.DEADLINE_EXCEEDED,
        GrpcStatus.ABORTED,
        GrpcStatus.OUT_OF_RANGE,
        GrpcStatus.UNAVAILABLE,
        GrpcStatus.DATA_LOSS,
    )
)
_GRPC_AMBIGUOUS = frozenset((GrpcStatus.CANCELLED, GrpcStatus.DEADLINE_EXCEEDED))

_RAISE_LIMIT = "Raise the collector's limit of a request."


def result_of_http(
    status: int,
    body: bytes,
    *,
    content_type: str,
    retry_after: str,
    location: str,
    now: int,
    signal: Signal = SPANS,
) -> ExportResult:
    """The result of an HTTP response; ``now`` is Unix nanoseconds."""
    if 200 <= status < 300:
        if "json" in content_type:  # against the specification; its content is not read
            return ExportResult(ExportStatus.TAKEN)
        if body and "protobuf" not in content_type:
            return _invalid_response(signal)
        return result_of_response(body, signal)
    why = f"it answered {status}"
    if text := _error_message(body, content_type):
        why += f" ({text})"
    if status in _HTTP_RETRYABLE:
        return ExportResult(
            ExportStatus.AGAIN,
            why,
            after=parse_retry_after(retry_after, now),
            perhaps_taken=status in _HTTP_AMBIGUOUS,
        )
    if status == _HTTP_TOO_LARGE:
        return ExportResult(ExportStatus.TOO_LARGE, why, _RAISE_LIMIT)
    if 300 <= status < 400:
        where = f" and points to {_single_line(location.partition('?')[0])}" if location else ""
        remedy = f"Write the address it points to as `{signal.address}`."
        return ExportResult(ExportStatus.REFUSED, why + where, remedy)
    remedies = dict.fromkeys((401, 403), signal.credentials)
    remedies |= dict.fromkeys((404, 405), signal.elsewhere)
    return ExportResult(ExportStatus.REFUSED, why, remedies.get(status, ""))


def result_of_grpc(
    code: int, name: str, message: str, after: int | None, signal: Signal = SPANS
) -> ExportResult:
    """The result of a gRPC status other than OK; ``after`` is the delay of its RetryInfo."""
    text = _single_line(message)
    why = f"it answered {name}" + (f" ({text})" if text else "")
    if code in _GRPC_RETRYABLE or (code == GrpcStatus.RESOURCE_EXHAUSTED and after is not None):
        return ExportResult(
            ExportStatus.AGAIN,
            why,
            after=None if after is None else _bounded(after),
            perhaps_taken=code in _GRPC_AMBIGUOUS,
        )
    if code == GrpcStatus.RESOURCE_EXHAUSTED:  # without a delay: a size limit
        return ExportResult(ExportStatus.TOO_LARGE, why, _RAISE_LIMIT)
    remedies: dict[int, str] = {
        GrpcStatus.PERMISSION_DENIED: signal.credentials,
        GrpcStatus.UNAUTHENTICATED: signal.credentials,
        GrpcStatus.UNIMPLEMENTED: f"Is `{signal.address}` the address of an OTLP/gRPC endpoint?",
    }
    return ExportResult(ExportStatus.REFUSED, why, remedies.get(code, ""))


def result_of_response(body: bytes, signal: Signal = SPANS) -> ExportResult:
    """The result of a successful response, which may reject a part of the request.

    The responses of all signals have the same fields.
    """
    response = parse_message("Response", body)
    if response is None:
        return _invalid_response(signal)
    partial = response.partial_success
    message: str | bytes = partial.error_message  # bytes if it is not UTF-8
    text = _single_line(message if isinstance(message, str) else message.decode(errors="replace"))
    why = f"it warns: {text}" if text else ""
    rejected = min(max(0, partial.rejected), _MAX_REJECTED)
    if rejected:
        why = f"it rejected {rejected} {signal.things}" + (f" ({text})" if text else "")
    return ExportResult(ExportStatus.TAKEN, why, rejected=rejected)


def _invalid_response(signal: Signal) -> ExportResult:
    return ExportResult(ExportStatus.TAKEN, "it does not answer as OTLP does", signal.elsewhere)


def parse_retry_after(retry_after: str, now: int) -> int | None:
    """The Retry-After header, seconds or a date, in nanoseconds from ``now``; None if invalid."""
    text = retry_after.strip()
    if text.isascii() and text.isdecimal():
        return _bounded(int(text[:12]) * SECOND)
    try:
        at = parsedate_to_datetime(text)
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    since = at.replace(tzinfo=at.tzinfo or UTC) - datetime.fromtimestamp(now / 1e9, UTC)
    return _bounded(round(since.total_seconds() * 1e9))


def _bounded(delay: int) -> int:
    return min(max(0, delay), MAX_RETRY_DELAY)


def _error_message(body: bytes, content_type: str) -> str:
    """The explanation of a failure: a google.rpc.Status or a line of text; never a web page."""
    if "protobuf" in content_type:
        return _single_line(status_message(body))
    if content_type.startswith(("text/plain", "application/json")):
        return _single_line(body[:2000].decode(errors="replace"))
    return ""


def _single_line(text: str) -> str:
    """Foreign text on one line of bounded length."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= 200 else f"{line[:197]}..."


# ------------------------------------------------------------------------------------- health


class DestinationHealth:
    """The health of a collector from its last responses; logs changes, not every attempt.

    Written by one thread; ``health`` is safe from any.
    """

    def __init__(self, destination: Destination, clock: Clock, log: Callable[[str], None]) -> None:
        self._destination, self._signal = destination, destination.signal
        self._clock = clock
        self._log = log
        self._failure: Failure | None = None
        self._away_since: int | None = None
        self._attempts = self._failed = 0
        self._logged_at: dict[ExportStatus, int] = {}

    def health(self) -> SourceHealth:
        failure = self._failure
        return SourceHealth(
            self._signal.name,
            up=failure is None,
            reads=self._attempts,
            failed=self._failed,
            failures=() if failure is None else (failure,),
        )

    def failed(self, result: ExportResult) -> None:
        """Record a request that will be sent again."""
        self._record(result, Trouble.RETRY, self._signal.patience)
        if self._away_since is None:
            self._away_since = self._clock.monotonic()
            self._write(result.verdict, str(self._failure))

    def answered(self, result: ExportResult, count: int) -> None:
        """Record the final result of a request with ``count`` spans, records or points."""
        things = self._signal.things
        if result.verdict is not ExportStatus.TAKEN:
            self._record(result, Trouble.MALFORMED, f"The {things} are dropped.")
            self._write(result.verdict, f"{self._failure} ({count} of them now.)")
            self._away_since = None
            return
        self._attempts += 1
        self._failure = None
        if self._away_since is not None:
            away = (self._clock.monotonic() - self._away_since) // SECOND
            self._away_since = None
            if self._logged_at.pop(ExportStatus.AGAIN, None) is not None:
                self._log(f"{self._destination} takes {things} again, after {away} s.")
        if result.why:
            sentence = f"{self._destination} takes {things}, but {result.why}. {result.remedy}"
            self._write(result.verdict, sentence.strip())

    def ended(self, lost: int) -> None:
        """Log the items that were still in memory at the end of the agent."""
        if lost:
            self._log(
                f"{lost} {self._signal.things} still waited for {self._destination} at the end, "
                f"and are dropped; {self._signal.loss}"
            )

    def _record(self, result: ExportResult, trouble: Trouble, consequence: str) -> None:
        self._attempts += 1
        self._failed += 1
        self._failure = Failure(
            self._signal.name,
            f"{self._signal.things} to {self._destination}",
            trouble,
            result.why,
            f"{result.remedy} {consequence}".strip(),
            verb=self._signal.verb,
        )

    def _write(self, status: ExportStatus, sentence: str) -> None:
        """Log at most one message of a status per interval."""
        now = self._clock.monotonic()
        last = self._logged_at.get(status)
        if last is None or now - last >= self._signal.quiet:
            self._logged_at[status] = now
            self._log(sentence)
