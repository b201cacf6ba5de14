"""OTLP trace requests on the wire, read no deeper than energy needs.

On the wire a message inside a message is bytes with a length. So the same request can be read by
a schema in which what is not looked into is ``bytes``: nothing is built for it, however much
there is. Read by the whole schema a request costs twice the time, and a hostile one, of messages
of two bytes, seventy times its size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from wattspan.ingest.export_request import RequestTooLargeError

_PACKAGE = "wattspan.ingest"

_LAYOUT: Mapping[str, Sequence[str]] = {
    # of opentelemetry.proto.collector.trace.v1, .trace.v1, .resource.v1 and .common.v1
    "Request": ["repeated bytes resource_spans = 1"],
    "ResourceSpans": [
        "optional bytes resource = 1",
        "repeated bytes scope_spans = 2",
        "optional string schema_url = 3",
    ],
    "ScopeSpans": [
        "optional bytes scope = 1",
        "repeated bytes spans = 2",
        "optional string schema_url = 3",
    ],
    "Span": [
        "optional bytes trace_id = 1",
        "optional bytes span_id = 2",
        "optional bytes parent_span_id = 4",
        "optional bytes name = 5",
        "optional fixed64 start = 7",
        "optional fixed64 end = 8",
    ],
    "SpanAttributes": ["repeated bytes attributes = 9"],
    "Resource": ["repeated bytes attributes = 1"],
    "KeyValue": ["optional bytes key = 1", "optional bytes value = 2"],
    "AnyValue": [
        "optional bytes text = 1",
        "optional int64 whole = 3",
        "optional double real = 4",
    ],
    "PartialSuccess": ["optional int64 rejected_spans = 1", "optional string error_message = 2"],
    "Response": ["optional PartialSuccess partial_success = 1"],
    # of google.rpc and google.protobuf
    "Any": ["optional string type_url = 1", "optional bytes value = 2"],
    "Status": [
        "optional int32 code = 1",
        "optional string message = 2",
        "repeated Any details = 3",
    ],
    "Duration": ["optional int64 seconds = 1"],
    "RetryInfo": ["optional Duration retry_delay = 1"],
}


def _classes() -> dict[str, Any]:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name=_PACKAGE, package=_PACKAGE, syntax="proto2")
    for title, fields in _LAYOUT.items():
        message = file.message_type.add(name=title)
        for label, kind, name, _, number in map(str.split, fields):
            other = kind in _LAYOUT
            message.field.add(
                name=name,
                number=int(number),
                label=kinds.Label.Value(f"LABEL_{label.upper()}"),
                type=kinds.TYPE_MESSAGE if other else kinds.Type.Value(f"TYPE_{kind.upper()}"),
                type_name=f".{_PACKAGE}.{kind}" if other else None,
            )
    pool = descriptor_pool.DescriptorPool()  # a pool of our own, so that no name can clash
    pool.Add(file)
    return {
        title: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{title}"))
        for title in _LAYOUT
    }


_CLASS = _classes()
Request, ResourceSpans, ScopeSpans = (
    _CLASS["Request"],
    _CLASS["ResourceSpans"],
    _CLASS["ScopeSpans"],
)
Span, SpanAttributes, Resource = _CLASS["Span"], _CLASS["SpanAttributes"], _CLASS["Resource"]
KeyValue, AnyValue = _CLASS["KeyValue"], _CLASS["AnyValue"]
MAX_FIELDS = 1 << 17
"""Fields of one span, resource or scope, those of its attributes, events and links included."""

_BYTES_PER_FIELD = 2  # the fewest bytes of a field: a tag of one byte and an empty payload
_LONGEST_VARINT, _LARGEST = 10, (1 << 64) - 1
_VARINT, _FIXED64, _BYTES, _GROUP, _END_GROUP, _FIXED32 = range(6)  # wire types
_WIDTHS = {_FIXED64: 8, _FIXED32: 4, _GROUP: 0, _END_GROUP: 0}

_Layer = Mapping[int, str]  # of a message: the fields that are messages, and their types
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


class FieldBudget:
    """The fields that one request may still have the decoder look at.

    It bounds the CPU time of a request: each field costs less than a microsecond.
    """

    def __init__(self, fields: int) -> None:
        self._most = self._left = fields

    def spend(self, fields: int) -> None:
        """TooLargeError once the request has used up its fields."""
        self._left -= fields
        if self._left < 0:
            raise RequestTooLargeError(
                f"a request has at most {self._most} fields and attributes; send fewer spans in "
                "each request"
            )


def count_fields(message: bytes, layer: _Layer, most: int, budget: FieldBudget) -> int:
    """The fields of a message and of the messages that ``layer`` names in it.

    The count ends at the first field beyond ``most``. A message too short for so many fields is
    not read and counts 0. What is malformed ends the count of its message: the parser refuses it.
    """
    if len(message) <= _BYTES_PER_FIELD * most:
        return 0
    count = 0
    pending = [(0, len(message), layer)]
    while pending and count <= most:
        at, end, layer = pending.pop()
        try:
            while at < end and count <= most:
                count += 1
                tag, at = _varint(message, at)
                kind = tag & 7
                if kind == _BYTES:
                    length, at = _varint(message, at)
                    if (inner := layer.get(tag >> 3)) is not None:
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
    """A number that begins at ``at``, and where the next field begins.

    IndexError where the message ends too early, OverflowError beyond 10 bytes.
    """
    byte = message[at]
    if byte < 128:
        return byte, at + 1
    value = byte & 127
    for place in range(1, _LONGEST_VARINT):
        byte = message[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value & _LARGEST, at + place + 1  # the parser drops further bits, too
    raise OverflowError("a varint has at most 10 bytes")


_TYPES = "type.googleapis.com/"


def response(rejected: int = 0, why: str = "") -> bytes:
    """An ExportTraceServiceResponse."""
    answer = _CLASS["Response"]()
    if rejected:
        answer.partial_success.rejected_spans = rejected
        answer.partial_success.error_message = why
    return encoded(answer)


def status(code: int, message: str, retry_after: int | None = None) -> bytes:
    """A google.rpc.Status, with the seconds after which to try again, if they are told."""
    told = _CLASS["Status"](code=code, message=message)
    if retry_after is not None:
        told.details.add(type_url=f"{_TYPES}google.rpc.RetryInfo", value=retry_info(retry_after))
    return encoded(told)


def retry_info(seconds: int) -> bytes:
    """A google.rpc.RetryInfo."""
    told = _CLASS["RetryInfo"]()
    told.retry_delay.seconds = seconds
    return encoded(told)


def encoded(message: Any) -> bytes:
    """The bytes of a message."""
    body: bytes = message.SerializeToString()
    return body
