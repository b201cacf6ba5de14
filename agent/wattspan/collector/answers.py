"""What a collector's answer means: OTLP's rules, without a socket.

OTLP says which failures may be retried: HTTP 429, 502, 503 and 504; eight codes of gRPC, and
RESOURCE_EXHAUSTED where it names a delay. All others are final.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum

from wattspan.collector.schema import parsed
from wattspan.collector.signals import SPANS, Signal
from wattspan.collector.status import status_message
from wattspan.model import SECOND
from wattspan.util.text import printable

LONGEST_DELAY = 600 * SECOND
"""A collector that asks to be left alone for longer is tried after this."""

_AGAIN = frozenset((429, 502, 503, 504))
_PERHAPS_TAKEN = frozenset((502, 504))  # a proxy speaks, and knows not what the collector did
_TOO_LARGE = 413
_MOST_REJECTED = 1 << 32  # no request holds as many: who says more is not counted with


class Verdict(Enum):
    TAKEN = "taken"
    AGAIN = "again"
    REFUSED = "refused"
    TOO_LARGE = "too large"


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request.

    ``why`` is a clause for people, with ``remedy`` a sentence. ``after`` is the delay asked for,
    in nanoseconds. ``perhaps_taken``: everything was sent, and nobody said that it was not taken.
    ``unfinished``: there was a connection, and not everything could be sent over it.
    """

    verdict: Verdict
    why: str = ""
    remedy: str = ""
    rejected: int = 0
    after: int | None = None
    perhaps_taken: bool = False
    unfinished: bool = False


def of_http(
    status: int,
    body: bytes,
    *,
    content_type: str,
    retry_after: str,
    location: str,
    now: int,
    signal: Signal = SPANS,
) -> Answer:
    """The meaning of an HTTP response; ``now`` is Unix nanoseconds."""
    if 200 <= status < 300:
        if "json" in content_type:
            return _taken(*_partial_of_json(body, signal), signal)
        if body and "protobuf" not in content_type:
            return _strange(signal)
        return of_response(body, signal)
    why = f"it answered {status}"
    if text := _said(body, content_type):
        why += f" ({text})"
    if status in _AGAIN:
        return Answer(
            Verdict.AGAIN,
            why,
            after=delay_of(retry_after, now),
            perhaps_taken=status in _PERHAPS_TAKEN,
        )
    if status == _TOO_LARGE:
        return Answer(Verdict.TOO_LARGE, why, "Raise the collector's limit of a request.")
    if 300 <= status < 400:
        where = f" and points to {_clause(location.partition('?')[0])}" if location else ""
        return Answer(
            Verdict.REFUSED, why + where, f"Write the address it points to as `{signal.address}`."
        )
    remedies = dict.fromkeys((401, 403), signal.credentials)
    remedies |= dict.fromkeys((404, 405), signal.elsewhere)
    return Answer(Verdict.REFUSED, why, remedies.get(status, ""))


def of_response(body: bytes, signal: Signal = SPANS) -> Answer:
    """The meaning of a response, which may reject some of what was sent.

    Those of all signals are the same on the wire, so that of spans is read for all.
    """
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

    response = parsed(trace_service_pb2.ExportTraceServiceResponse, body)
    if response is None:
        return _strange(signal)
    partial = response.partial_success
    return _taken(partial.rejected_spans, partial.error_message, signal)


def _strange(signal: Signal) -> Answer:
    return Answer(Verdict.TAKEN, "it does not answer as OTLP does", signal.elsewhere)


def _partial_of_json(body: bytes, signal: Signal) -> tuple[int, str]:
    """How much was rejected, and why, of a response in OTLP/JSON, as some answer to protobuf."""
    try:
        partial = json.loads(body or b"{}")["partialSuccess"]
        return int(partial.get(signal.rejected, 0)), str(partial.get("errorMessage", ""))
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        return 0, ""


def _taken(rejected: int, message: str, signal: Signal) -> Answer:
    said = _clause(message)
    rejected = min(rejected, _MOST_REJECTED)
    if rejected > 0:
        said = f"it rejected {rejected} {signal.things}" + (f" ({said})" if said else "")
    elif said:
        said = f"it warns: {said}"
    return Answer(Verdict.TAKEN, said, rejected=max(0, rejected))


# gRPC status codes, as numbers so that no gRPC library is needed to know them.
_CANCELLED, _DEADLINE_EXCEEDED, _RESOURCE_EXHAUSTED = 1, 4, 8
_ABORTED, _OUT_OF_RANGE, _UNAVAILABLE, _DATA_LOSS = 10, 11, 14, 15
_GRPC_AGAIN = frozenset(
    (_CANCELLED, _DEADLINE_EXCEEDED, _ABORTED, _OUT_OF_RANGE, _UNAVAILABLE, _DATA_LOSS)
)
_GRPC_PERHAPS_TAKEN = frozenset((_CANCELLED, _DEADLINE_EXCEEDED))
_PERMISSION_DENIED, _UNIMPLEMENTED, _UNAUTHENTICATED = 7, 12, 16


def of_grpc(
    code: int, name: str, message: str, after: int | None, signal: Signal = SPANS
) -> Answer:
    """The meaning of a gRPC status that is not OK; ``after`` is what its RetryInfo asks for."""
    said = _clause(message)
    why = f"it answered {name}" + (f" ({said})" if said else "")
    if code in _GRPC_AGAIN or (code == _RESOURCE_EXHAUSTED and after is not None):
        return Answer(
            Verdict.AGAIN,
            why,
            after=None if after is None else _bounded(after),
            perhaps_taken=code in _GRPC_PERHAPS_TAKEN,
        )
    if code == _RESOURCE_EXHAUSTED:
        # Without a delay it is a limit: as a rule, of the size of a message.
        return Answer(Verdict.TOO_LARGE, why, "Raise the collector's limit of a request.")
    remedies = dict.fromkeys((_PERMISSION_DENIED, _UNAUTHENTICATED), signal.credentials)
    remedies[_UNIMPLEMENTED] = f"Is `{signal.address}` the address of an OTLP/gRPC endpoint?"
    return Answer(Verdict.REFUSED, why, remedies.get(code, ""))


def again(
    why: str, remedy: str = "", *, perhaps_taken: bool = False, unfinished: bool = False
) -> Answer:
    return Answer(Verdict.AGAIN, why, remedy, perhaps_taken=perhaps_taken, unfinished=unfinished)


# -------------------------------------------------------------------------------- Retry-After


def delay_of(retry_after: str, now: int) -> int | None:
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
    return min(max(0, delay), LONGEST_DELAY)


# -------------------------------------------------------------------- what a collector has to say


def _said(body: bytes, content_type: str) -> str:
    """A failure's explanation: a google.rpc.Status, or a line of text; never a web page."""
    if "protobuf" in content_type:
        return _clause(status_message(body))
    if content_type.startswith(("text/plain", "application/json")):
        return _clause(body[:2000].decode(errors="replace"))
    return ""


def _clause(text: str) -> str:
    """Somebody else's words, on one line and not too long."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= 200 else f"{line[:197]}..."
