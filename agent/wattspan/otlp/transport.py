"""Errors of the operating system, for people.

What a collector's answer means: OTLP's rules, without a socket.

OTLP says which failures may be retried: HTTP 429, 502, 503 and 504; eight codes of gRPC, and
RESOURCE_EXHAUSTED where it names a delay. All others are final.

The port behind which a collector is.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Protocol

from wattspan.model import SECOND
from wattspan.otlp.destination import SPANS, Signal
from wattspan.util.protobuf import parse_message, status_message
from wattspan.util.text import printable


def describe_os_error(error: Exception) -> str:
    """An error as a clause."""
    if isinstance(error, TimeoutError):
        return "it took too long"
    if isinstance(error, socket.gaierror):
        return f"its name cannot be resolved ({error.strerror})"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return " ".join(str(error).split())[:200] or type(error).__name__


MAX_RETRY_DELAY = 600 * SECOND
"""A collector that asks to be left alone for longer is tried after this."""

_HTTP_RETRYABLE = frozenset((429, 502, 503, 504))
_HTTP_AMBIGUOUS = frozenset((502, 504))  # a proxy speaks, and knows not what the collector did
_TOO_LARGE = 413
_MOST_REJECTED = 1 << 32  # no request holds as many: who says more is not counted with


class ExportStatus(Enum):
    TAKEN = "taken"
    AGAIN = "again"
    REFUSED = "refused"
    TOO_LARGE = "too large"


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What became of one request.

    ``why`` is a clause for people, with ``remedy`` a sentence. ``after`` is the delay asked for,
    in nanoseconds. ``perhaps_taken``: everything was sent, and nobody said that it was not taken.
    ``unfinished``: there was a connection, and not everything could be sent over it.
    """

    verdict: ExportStatus
    why: str = ""
    remedy: str = ""
    rejected: int = 0
    after: int | None = None
    perhaps_taken: bool = False
    unfinished: bool = False


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
    """The meaning of an HTTP response; ``now`` is Unix nanoseconds."""
    if 200 <= status < 300:
        if "json" in content_type:
            return _accepted(*_partial_success_of_json(body, signal), signal)
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
    if status == _TOO_LARGE:
        return ExportResult(
            ExportStatus.TOO_LARGE, why, "Raise the collector's limit of a request."
        )
    if 300 <= status < 400:
        where = f" and points to {_single_line(location.partition('?')[0])}" if location else ""
        return ExportResult(
            ExportStatus.REFUSED,
            why + where,
            f"Write the address it points to as `{signal.address}`.",
        )
    remedies = dict.fromkeys((401, 403), signal.credentials)
    remedies |= dict.fromkeys((404, 405), signal.elsewhere)
    return ExportResult(ExportStatus.REFUSED, why, remedies.get(status, ""))


def result_of_response(body: bytes, signal: Signal = SPANS) -> ExportResult:
    """The meaning of a response, which may reject some of what was sent.

    Those of all signals are the same on the wire, so that of spans is read for all.
    """
    response = parse_message("Response", body)
    if response is None:
        return _invalid_response(signal)
    partial = response.partial_success
    return _accepted(partial.rejected, partial.error_message, signal)


def _invalid_response(signal: Signal) -> ExportResult:
    return ExportResult(ExportStatus.TAKEN, "it does not answer as OTLP does", signal.elsewhere)


def _partial_success_of_json(body: bytes, signal: Signal) -> tuple[int, str]:
    """How much was rejected, and why, of a response in OTLP/JSON, as some answer to protobuf."""
    try:
        partial = json.loads(body or b"{}")["partialSuccess"]
        return int(partial.get(signal.rejected, 0)), str(partial.get("errorMessage", ""))
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        return 0, ""


def _accepted(rejected: int, message: str, signal: Signal) -> ExportResult:
    said = _single_line(message)
    rejected = min(rejected, _MOST_REJECTED)
    if rejected > 0:
        said = f"it rejected {rejected} {signal.things}" + (f" ({said})" if said else "")
    elif said:
        said = f"it warns: {said}"
    return ExportResult(ExportStatus.TAKEN, said, rejected=max(0, rejected))


# gRPC status codes, as numbers so that no gRPC library is needed to know them.
_CANCELLED, _DEADLINE_EXCEEDED, _RESOURCE_EXHAUSTED = 1, 4, 8
_ABORTED, _OUT_OF_RANGE, _UNAVAILABLE, _DATA_LOSS = 10, 11, 14, 15
_GRPC_RETRYABLE = frozenset(
    (_CANCELLED, _DEADLINE_EXCEEDED, _ABORTED, _OUT_OF_RANGE, _UNAVAILABLE, _DATA_LOSS)
)
_GRPC_AMBIGUOUS = frozenset((_CANCELLED, _DEADLINE_EXCEEDED))
_PERMISSION_DENIED, _UNIMPLEMENTED, _UNAUTHENTICATED = 7, 12, 16


def result_of_grpc(
    code: int, name: str, message: str, after: int | None, signal: Signal = SPANS
) -> ExportResult:
    """The meaning of a gRPC status that is not OK; ``after`` is what its RetryInfo asks for."""
    said = _single_line(message)
    why = f"it answered {name}" + (f" ({said})" if said else "")
    if code in _GRPC_RETRYABLE or (code == _RESOURCE_EXHAUSTED and after is not None):
        return ExportResult(
            ExportStatus.AGAIN,
            why,
            after=None if after is None else _bounded(after),
            perhaps_taken=code in _GRPC_AMBIGUOUS,
        )
    if code == _RESOURCE_EXHAUSTED:
        # Without a delay it is a limit: as a rule, of the size of a message.
        return ExportResult(
            ExportStatus.TOO_LARGE, why, "Raise the collector's limit of a request."
        )
    remedies = dict.fromkeys((_PERMISSION_DENIED, _UNAUTHENTICATED), signal.credentials)
    remedies[_UNIMPLEMENTED] = f"Is `{signal.address}` the address of an OTLP/gRPC endpoint?"
    return ExportResult(ExportStatus.REFUSED, why, remedies.get(code, ""))


def retry_result(
    why: str, remedy: str = "", *, perhaps_taken: bool = False, unfinished: bool = False
) -> ExportResult:
    return ExportResult(
        ExportStatus.AGAIN, why, remedy, perhaps_taken=perhaps_taken, unfinished=unfinished
    )


# -------------------------------------------------------------------------------- Retry-After


def parse_retry_after(retry_after: str, now: int) -> int | None:
    """Retry-After, seconds or a date, as nanoseconds from ``now``; None if it says nothing."""
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


# -------------------------------------------------------------------- what a collector has to say


def _error_message(body: bytes, content_type: str) -> str:
    """A failure's explanation: a google.rpc.Status, or a line of text; never a web page."""
    if "protobuf" in content_type:
        return _single_line(status_message(body))
    if content_type.startswith(("text/plain", "application/json")):
        return _single_line(body[:2000].decode(errors="replace"))
    return ""


def _single_line(text: str) -> str:
    """Somebody else's words, on one line and not too long."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= 200 else f"{line[:197]}..."


CONNECT_TIMEOUT = 5
"""Seconds for a connection to be made."""

RESPONSE_TIMEOUT = 30
"""Seconds for an answer. Generous: a request given up too early is sent, and taken, twice."""

IDLE_TIMEOUT = 3
"""Seconds after which a connection is not used again. Servers close idle ones, commonly after 5 s
or more, and a request that meets such a close on its way may or may not have been taken."""

MAX_RESPONSE_SIZE = 1 << 20
"""Bytes of an answer that are looked at."""


class Transport(Protocol):
    """Takes requests to a collector, one at a time."""

    def send(self, body: bytes) -> ExportResult:
        """Send a request, of one signal always, and say what became of it. Raises nothing."""
        ...

    def abort(self) -> None:
        """Make a ``send`` under way return soon. Called from any thread, and final."""
        ...

    def close(self) -> None:
        """Let go of the connection; called in the thread that sends."""
        ...
