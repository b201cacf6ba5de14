"""Trace requests in wire format whose spans stay bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from wattspan.util.protobuf import message_class


def scope_spans(request: Any) -> Iterator[Any]:
    """Each ScopeSpans of a request, in its order."""
    for resource in request.resource_spans:
        yield from resource.scope_spans


def slice_spans(body: bytes, begin: int, end: int) -> bytes:
    """A request in wire format with its spans from ``begin`` up to ``end`` only.

    Scopes and resources of which nothing is left are left out.
    """
    request = message_class("Request").FromString(body)
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
