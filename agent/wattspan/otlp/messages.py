"""Protobuf message classes made from a table, where the usual ones do not fit or are not there.

``google.rpc.Status`` and its ``RetryInfo``, with which collectors explain a failure.

OTLP trace requests with their spans left as bytes.

On the wire a message inside a message is bytes with a length, so the same request can be read by
a schema in which a span is ``bytes``. What is not looked into costs nothing and cannot change,
and one message's bytes with another's appended *are* the two merged: that is protobuf's own law.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from wattspan.model import SECOND

_PACKAGE = "wattspan.otlp"


class MessageField(NamedTuple):
    """One field. ``kind`` is bytes, string, int32, int64, or the name of another message."""

    number: int
    name: str
    kind: str
    repeated: bool = False


def message_class(name: str, layout: Mapping[str, Sequence[MessageField]]) -> Any:
    """The class of the message ``name``; ``layout`` has it and all that it is made of."""
    from google.protobuf import (
        descriptor_pb2,
        descriptor_pool,
        message_factory,
    )

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{_PACKAGE}.{name}", package=_PACKAGE, syntax="proto2"
    )
    for title, fields in layout.items():
        message = file.message_type.add(name=title)
        for field in fields:
            other = field.kind in layout
            message.field.add(
                number=field.number,
                name=field.name,
                label=kinds.LABEL_REPEATED if field.repeated else kinds.LABEL_OPTIONAL,
                type=kinds.TYPE_MESSAGE
                if other
                else kinds.Type.Value(f"TYPE_{field.kind.upper()}"),
                type_name=f".{_PACKAGE}.{field.kind}" if other else None,
            )
    pool = descriptor_pool.DescriptorPool()  # ours alone, so that no name can clash
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


def parse_message(kind: Any, body: bytes) -> Any:
    """``body`` as a message of ``kind``; None if it is none."""
    from google.protobuf.message import DecodeError

    try:
        return kind.FromString(body)
    except (DecodeError, UnicodeDecodeError):
        return None


def decode_text(value: str | bytes) -> str:
    """A string of a message: protobuf hands it over as bytes where they are no UTF-8."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def status_message(body: bytes) -> str:
    """What a Status says in words; "" if it is none."""
    status = parse_message(_status_class(), body)
    return decode_text(status.message) if status is not None else ""


def retry_delay(body: bytes) -> int | None:
    """The delay in nanoseconds that a Status asks for by RetryInfo; None if by none."""
    status = parse_message(_status_class(), body)
    for detail in status.details if status is not None else ():
        if decode_text(detail.type_url).endswith("/google.rpc.RetryInfo"):
            info = parse_message(_retry_info_class(), detail.value)
            if info is not None and info.HasField("retry_delay"):
                delay = info.retry_delay
                return max(0, int(delay.seconds) * SECOND + int(delay.nanos))
    return None


@functools.cache
def _status_class() -> Any:
    return message_class(
        "Status",
        {
            "Status": [
                MessageField(1, "code", "int32"),
                MessageField(2, "message", "string"),
                MessageField(3, "details", "Detail", repeated=True),
            ],
            "Detail": [MessageField(1, "type_url", "string"), MessageField(2, "value", "bytes")],
        },
    )


@functools.cache
def _retry_info_class() -> Any:
    return message_class(
        "RetryInfo",
        {
            "RetryInfo": [MessageField(1, "retry_delay", "Delay")],
            "Delay": [MessageField(1, "seconds", "int64"), MessageField(2, "nanos", "int32")],
        },
    )


@functools.cache
def trace_request_class() -> Any:
    """The message class for an ExportTraceServiceRequest whose spans are bytes."""
    return message_class(
        "Request",
        {
            "Request": [MessageField(1, "resource_spans", "ResourceSpans", repeated=True)],
            "ResourceSpans": [
                MessageField(1, "resource", "bytes"),
                MessageField(2, "scope_spans", "ScopeSpans", repeated=True),
                MessageField(3, "schema_url", "bytes"),
            ],
            "ScopeSpans": [
                MessageField(1, "scope", "bytes"),
                MessageField(2, "spans", "bytes", repeated=True),
                MessageField(3, "schema_url", "bytes"),
            ],
        },
    )


def scope_spans(request: Any) -> Iterator[Any]:
    """Each ScopeSpans of a request, in its order."""
    for resource in request.resource_spans:
        yield from resource.scope_spans


def slice_spans(body: bytes, begin: int, end: int) -> bytes:
    """A request in wire format with its spans from ``begin`` up to ``end`` only.

    Scopes and resources of which nothing is left are left out.
    """
    request = trace_request_class().FromString(body)
    position = 0
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            first, position = position, position + len(scope.spans)
            scope.spans[:] = scope.spans[max(0, begin - first) : max(0, end - first)]
        _keep_spans(resource.scope_spans, lambda scope: len(scope.spans))
    _keep_spans(request.resource_spans, lambda resource: len(resource.scope_spans))
    wire: bytes = request.SerializeToString()
    return wire


def _keep_spans(items: Any, wanted: Callable[[Any], int]) -> None:
    for position in reversed(range(len(items))):
        if not wanted(items[position]):
            del items[position]
