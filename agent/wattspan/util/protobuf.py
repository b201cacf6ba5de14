"""Protobuf messages without generated code: classes made from a table, and fields as bytes.

A message inside a message is bytes with a length on the wire. A class may therefore declare such
a field as ``bytes``: nothing is built for the inner message, which costs nothing and cannot
change, however large or hostile it is. Reading a trace request with its complete schema takes
twice the time, and a hostile request of two-byte messages takes seventy times its size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_PACKAGE = "wattspan"

_LAYOUT: Mapping[str, Sequence[str]] = {
    # opentelemetry.proto.collector.trace.v1, .trace.v1, .resource.v1 and .common.v1
    "Request": ["repeated ResourceSpans resource_spans = 1"],
    "ResourceSpans": [
        "optional bytes resource = 1",
        "repeated ScopeSpans scope_spans = 2",
        "optional bytes schema_url = 3",
    ],
    "ScopeSpans": [
        "optional bytes scope = 1",
        "repeated bytes spans = 2",
        "optional bytes schema_url = 3",
    ],
    "Scope": ["optional bytes name = 1"],
    "FlatRequest": ["repeated bytes resource_spans = 1"],
    "FlatResourceSpans": [
        "optional bytes resource = 1",
        "repeated bytes scope_spans = 2",
        "optional bytes schema_url = 3",
    ],
    "ScopeSpanFields": ["repeated Span spans = 2"],
    "Span": [
        "optional bytes trace_id = 1",
        "optional bytes span_id = 2",
        "optional bytes parent_span_id = 4",
        "optional bytes name = 5",
        "optional int32 kind = 6",
        "optional fixed64 start = 7",
        "optional fixed64 end = 8",
    ],
    "SpanAttributes": ["repeated bytes attributes = 9"],
    "SpanEvents": ["repeated Event events = 11"],
    "Event": ["optional fixed64 time = 1", "optional bytes name = 2"],
    "Resource": ["repeated bytes attributes = 1"],
    "KeyValue": ["optional bytes key = 1", "optional bytes value = 2"],
    "AnyValue": [
        "optional bytes text = 1",
        "optional int64 whole = 3",
        "optional double real = 4",
    ],
    "PartialSuccess": ["optional int64 rejected = 1", "optional string error_message = 2"],
    "Response": ["optional PartialSuccess partial_success = 1"],
    # podresources/v1 of Kubernetes
    "ListPodResources": ["repeated PodDevices pods = 1"],
    "PodDevices": [
        "optional bytes name = 1",
        "optional bytes namespace = 2",
        "repeated ContainerDevices containers = 3",
    ],
    "ContainerDevices": [
        "optional bytes name = 1",
        "repeated DeviceIds devices = 2",
        "repeated DynamicResource claims = 5",
    ],
    "DynamicResource": ["repeated ClaimedDevice devices = 4"],
    "ClaimedDevice": [
        "repeated CdiDevice cdi = 1",
        "optional bytes driver = 2",
        "optional bytes pool = 3",
        "optional bytes device = 4",
    ],
    "CdiDevice": ["optional bytes name = 1"],
    "DeviceIds": ["optional bytes resource = 1", "repeated bytes ids = 2"],
    # google.rpc and google.protobuf
    "Any": ["optional string type_url = 1", "optional bytes value = 2"],
    "Status": [
        "optional int32 code = 1",
        "optional string message = 2",
        "repeated Any details = 3",
    ],
    "Duration": ["optional int64 seconds = 1", "optional int32 nanos = 2"],
    "RetryInfo": ["optional Duration retry_delay = 1"],
}


@functools.cache
def message_class(name: str) -> Any:
    """The class of a message of the table; the first call imports protobuf."""
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


@functools.cache
def _pool() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name=_PACKAGE, package=_PACKAGE, syntax="proto2")
    for title, fields in _LAYOUT.items():
        message = file.message_type.add(name=title)
        for label, kind, name, _, number in map(str.split, fields):
            nested = kind in _LAYOUT
            message.field.add(
                name=name,
                number=int(number),
                label=kinds.Label.Value(f"LABEL_{label.upper()}"),
                type=kinds.TYPE_MESSAGE if nested else kinds.Type.Value(f"TYPE_{kind.upper()}"),
                type_name=f".{_PACKAGE}.{kind}" if nested else None,
            )
    pool = descriptor_pool.DescriptorPool()  # a pool of its own, so that no name can clash
    pool.Add(file)
    return pool


def parse_message(name: str, body: bytes) -> Any:
    """``body`` as a message of the table; None if it is malformed."""
    from google.protobuf.message import DecodeError

    try:
        return message_class(name).FromString(body)
    except (DecodeError, UnicodeDecodeError):
        return None


# ------------------------------------------------------------------------ responses and errors

_RETRY_INFO_TYPE = "type.googleapis.com/google.rpc.RetryInfo"


def encode_export_response(rejected: int = 0, message: str = "") -> bytes:
    """An ExportTraceServiceResponse; the responses of the other signals are the same bytes."""
    response = message_class("Response")()
    if rejected:
        response.partial_success.rejected = rejected
        response.partial_success.error_message = message
    return serialize(response)


def encode_status(code: int, message: str, retry_after: int | None = None) -> bytes:
    """A google.rpc.Status, with the seconds until the next attempt if they are given."""
    status = message_class("Status")(code=code, message=message)
    if retry_after is not None:
        status.details.add(type_url=_RETRY_INFO_TYPE, value=encode_retry_info(retry_after))
    return serialize(status)


def encode_retry_info(seconds: int) -> bytes:
    """A google.rpc.RetryInfo."""
    return serialize(message_class("RetryInfo")(retry_delay={"seconds": seconds}))


def status_message(body: bytes) -> str:
    """The message of a google.rpc.Status; "" if ``body`` is malformed."""
    status = parse_message("Status", body)
    return _text(status.message) if status is not None else ""


def retry_delay(body: bytes) -> int | None:
    """The delay in nanoseconds that a google.rpc.Status requests by RetryInfo; None if none."""
    status = parse_message("Status", body)
    for detail in status.details if status is not None else ():
        if _text(detail.type_url).endswith("/google.rpc.RetryInfo"):
            info = parse_message("RetryInfo", detail.value)
            if info is not None and info.HasField("retry_delay"):
                delay = info.retry_delay
                return max(0, int(delay.seconds) * 10**9 + int(delay.nanos))
    return None


def _text(value: str | bytes) -> str:
    """A string field: protobuf returns bytes where the string is not UTF-8."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def serialize(message: Any) -> bytes:
    body: bytes = message.SerializeToString()
    return body


# --------------------------------------------------------------------------------- attributes

AttributeValue = str | bool | int | float | list[str] | list[float]
Attributes = Mapping[str, AttributeValue]


def add_attributes(pairs: Any, attributes: Attributes) -> None:
    """Append ``attributes`` to ``pairs``, the KeyValues of a message of OpenTelemetry."""
    for key, value in attributes.items():
        pair = pairs.add(key=key)
        if isinstance(value, list):
            pair.value.array_value.SetInParent()  # keeps an empty list
            for each in value:
                _set(pair.value.array_value.values.add(), each)
        else:
            _set(pair.value, value)


def _set(target: Any, value: str | bool | int | float) -> None:
    if isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        target.int_value = value
    elif isinstance(value, float):
        target.double_value = value
    else:
        target.string_value = valid_text(value)


def valid_text(text: object) -> str:
    """Valid Unicode for protobuf: names from applications may contain lone surrogates."""
    return str(text).encode("utf-8", "replace").decode()


# ---------------------------------------------------------------------------- fields as bytes

_LENGTH_DELIMITED = 2  # the wire type
_ONE_BYTE_VARINTS = [bytes((number,)) for number in range(128)]


def varint(number: int) -> bytes:
    if number < len(_ONE_BYTE_VARINTS):
        return _ONE_BYTE_VARINTS[number]
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def length_delimited(number: int, payload: bytes) -> bytes:
    """A field that holds text, or another message."""
    return varint(number << 3 | _LENGTH_DELIMITED) + varint(len(payload)) + payload


def encode_message(fields: Iterable[tuple[int, bytes]]) -> bytes:
    """A message of length-delimited fields, each with its number.

    Protobuf's own library aborts the process where it gets no memory for a message of thousands
    of fields (seen with 7.36: it does not check the allocation).
    """
    parts: list[bytes] = []
    for number, payload in fields:
        parts += (varint(number << 3 | _LENGTH_DELIMITED), varint(len(payload)), payload)
    return b"".join(parts)
