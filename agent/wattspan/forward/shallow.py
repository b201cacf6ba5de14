"""OTLP trace requests with their spans left as bytes.

On the wire a message inside a message is bytes with a length, so the same request can be read by
a schema in which a span is ``bytes``. What is not looked into costs nothing and cannot change,
and one message's bytes with another's appended *are* the two merged: that is protobuf's own law.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from wattspan.forward.schema import Field, message_class


@functools.cache
def shallow() -> Any:
    """The message class for an ExportTraceServiceRequest whose spans are bytes."""
    return message_class(
        "Request",
        {
            "Request": [Field(1, "resource_spans", "ResourceSpans", repeated=True)],
            "ResourceSpans": [
                Field(1, "resource", "bytes"),
                Field(2, "scope_spans", "ScopeSpans", repeated=True),
                Field(3, "schema_url", "bytes"),
            ],
            "ScopeSpans": [
                Field(1, "scope", "bytes"),
                Field(2, "spans", "bytes", repeated=True),
                Field(3, "schema_url", "bytes"),
            ],
        },
    )


def scopes(request: Any) -> Iterator[Any]:
    """Each ScopeSpans of a request, in its order."""
    for resource in request.resource_spans:
        yield from resource.scope_spans


def halves(body: bytes) -> tuple[tuple[bytes, int], tuple[bytes, int]] | None:
    """A request in wire format as two of half its spans each, in order, each with its count.

    None if there are not two spans.
    """
    whole = shallow().FromString(body)
    count = sum(len(scope.spans) for scope in scopes(whole))
    if count < 2:
        return None
    middle = count // 2
    return (_part(body, 0, middle), middle), (_part(body, middle, count), count - middle)


def _part(body: bytes, begin: int, end: int) -> bytes:
    """The request with its spans from ``begin`` up to ``end`` only, and nothing that is empty."""
    request = shallow().FromString(body)
    position = 0
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            first, position = position, position + len(scope.spans)
            scope.spans[:] = scope.spans[max(0, begin - first) : max(0, end - first)]
        _keep(resource.scope_spans, lambda scope: len(scope.spans))
    _keep(request.resource_spans, lambda resource: len(resource.scope_spans))
    part: bytes = request.SerializeToString()
    return part


def _keep(items: Any, wanted: Any) -> None:
    for position in reversed(range(len(items))):
        if not wanted(items[position]):
            del items[position]
