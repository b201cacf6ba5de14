"""The limits of a trace request: errors that reject all of it, and the fields that are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from wattspan.util.encoding import InvalidBodyError

MAX_FIELDS = 1 << 17
"""Fields of one span, resource or scope, at any depth."""


class MalformedRequestError(InvalidBodyError):
    """The body is not a trace request; the message names the position."""


class RequestTooLargeError(InvalidBodyError):
    """The request exceeds a limit."""

    reason = "too_large"


class ReceiverBusyError(Exception):
    """The agent has no room for the request; the sender may retry after ``seconds``."""

    def __init__(self, seconds: int = 1) -> None:
        super().__init__(f"retry after {seconds} s")
        self.seconds = seconds


class RefusedSpans:
    """The spans of one request that are refused alone: their number by reason, and a cause.

    Reasons, labels of a metric: ``invalid_id``, ``invalid_time``, ``malformed``, ``too_large``.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.cause = ""
        """The cause of the first refusal, with the place of the span if its message is invalid."""

    def add(self, reason: str, cause: str, spans: int = 1) -> None:
        """Refuse ``spans`` spans."""
        if spans:
            self.counts[reason] += spans
        self.cause = self.cause or cause

    def check(self, spans: int) -> None:
        """RequestTooLargeError or MalformedRequestError if none of ``spans`` spans is left."""
        if self.cause and spans <= (large := self.counts["too_large"]):
            raise (RequestTooLargeError if large else MalformedRequestError)(self.cause)

    @property
    def total(self) -> int:
        return self.counts.total()


def too_many_bytes(limit: int) -> RequestTooLargeError:
    """The request has more than ``limit`` bytes, the operator's ``max_request``."""
    return RequestTooLargeError(f"a request has at most {limit} bytes; {LARGE_REQUEST_REMEDY}")


LARGE_REQUEST_REMEDY = "send fewer spans in each, or have max_request raised in [spans]"


def too_many_spans(limit: int) -> RequestTooLargeError:
    """The request has more than ``limit`` spans, scopes and resources together."""
    return RequestTooLargeError(f"a request has at most {limit} spans; {LARGE_REQUEST_REMEDY}")


def too_many_fields(subject: str, limit: int) -> RequestTooLargeError:
    """``subject``, such as "a span", has more than ``limit`` fields at any depth."""
    return RequestTooLargeError(
        f"{subject} has at most {limit} fields, attributes, events and links together"
    )


class FieldBudget:
    """The fields of one request that the decoder may still inspect."""

    def __init__(self, fields: int) -> None:
        self.limit = self._left = fields

    def spend(self, fields: int) -> None:
        """RequestTooLargeError once the budget is spent."""
        self._left -= fields
        if self._left < 0:
            raise RequestTooLargeError(
                f"a request has at most {self.limit} fields and attributes; {LARGE_REQUEST_REMEDY}"
            )


_LONGEST_VARINT, _LARGEST_VARINT = 10, (1 << 64) - 1
_VARINT, _FIXED64, _BYTES, _GROUP, _END_GROUP, _FIXED32 = range(6)  # wire types
_WIDTHS = {_FIXED64: 8, _FIXED32: 4, _GROUP: 0, _END_GROUP: 0}

_Layer = Mapping[int, str]  # the fields of a message that are messages, and their types
FLAT: _Layer = {}
_NESTED: Mapping[str, _Layer] = {
    "Resource": {1: "KeyValue"},
    "Scope": {3: "KeyValue"},
    "Span": {9: "KeyValue", 11: "Event", 13: "Link"},
    "Event": {3: "KeyValue"},
    "Link": {4: "KeyValue"},
    "KeyValue": {2: "AnyValue"},
    "AnyValue": {5: "ArrayValue", 6: "KeyValueList"},
    "ArrayValue": {1: "AnyValue"},
    "KeyValueList": {1: "KeyValue"},
}
RESOURCE, SCOPE, SPAN = _NESTED["Resource"], _NESTED["Scope"], _NESTED["Span"]


def count_fields(message: bytes, layer: _Layer, limit: int, budget: FieldBudget) -> int:
    """The number of fields of a message, and of the messages in it that ``layer`` names.

    The count ends at the first field beyond ``limit``. A message too short for so many fields
    (a field takes at least two bytes) is not read and counts 0. A malformed message ends the
    count; the parser rejects it.
    """
    if len(message) <= 2 * limit:
        return 0
    count = 0
    pending = [(0, len(message), layer)]
    while pending and count <= limit:
        at, end, layer = pending.pop()
        try:
            while at < end and count <= limit:
                count += 1
                # Nearly all numbers have one or two bytes, and a call takes as long as a field.
                tag, at = message[at], at + 1
                if tag > 127:
                    tag, at = _varint(message, at - 1)
                kind = tag & 7
                if kind == _BYTES:
                    if (byte := message[at]) < 128:
                        length, at = byte, at + 1
                    elif (above := message[at + 1]) < 128:
                        length, at = byte & 127 | above << 7, at + 2
                    else:
                        length, at = _varint(message, at)
                    if layer and (inner := layer.get(tag >> 3)) is not None:
                        pending.append((at, min(at + length, end), _NESTED[inner]))
                    at += length
                elif kind == _VARINT:
                    _, at = _varint(message, at)
                else:
                    at += _WIDTHS[kind]
        except (IndexError, KeyError, OverflowError):
            continue
    budget.spend(count)
    return count


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The number at ``at``, and the position of the next field.

    IndexError where the message is truncated, OverflowError beyond 10 bytes.
    """
    byte = message[at]
    if byte < 128:
        return byte, at + 1
    value = byte & 127
    for place in range(1, _LONGEST_VARINT):
        byte = message[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value & _LARGEST_VARINT, at + place + 1  # the parser drops further bits, too
    raise OverflowError("a varint has at most 10 bytes")


def check_fields(raw: bytes, layer: _Layer, subject: str, budget: FieldBudget) -> None:
    """RequestTooLargeError for a message of too many fields at any depth."""
    if count_fields(raw, layer, MAX_FIELDS, budget) > MAX_FIELDS:
        raise too_many_fields(subject, MAX_FIELDS)
