"""A request with the energy of its spans added, and nothing else changed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from wattspan.forward.attributes import PREFIX, Attributes
from wattspan.forward.shallow import scopes, shallow
from wattspan.spans.values import SpanEnergy

_PREFIX = PREFIX.encode()

_SEARCHED = 1024
"""Attributes of a span up to which those that are to be replaced are looked for."""


def enrich(message: Any, energies: Sequence[SpanEnergy | None], attributes: Attributes) -> bytes:
    """The ExportTraceServiceRequest ``message``, in wire format, with energies on its spans.

    It is given in wire format, or parsed.

    ``energies`` are those of the message's spans, in its order; a span whose energy is None stays
    as it is. All else stays too: order, unknown fields, and energy that another agent has put
    there, unless ours takes its place. ValueError if the lengths differ.
    """
    body: bytes = message if isinstance(message, bytes) else message.SerializeToString()
    request = shallow().FromString(body)
    add = attributes.of
    replayed = _PREFIX in body
    rest = iter(energies)
    for scope in scopes(request):
        spans: Sequence[bytes] = scope.spans
        mine = [*islice(rest, len(spans))]
        if replayed:
            spans = _without(spans, mine)
        scope.spans[:] = [
            span if energy is None else span + add(energy)
            for span, energy in zip(spans, mine, strict=True)
        ]
    if next(rest, rest) is not rest:
        raise ValueError("there are more energies than spans")
    enriched: bytes = request.SerializeToString()
    return enriched


def _without(spans: Sequence[bytes], energies: Sequence[SpanEnergy | None]) -> Sequence[bytes]:
    """The spans, less the energy attributes that are about to be replaced."""
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    bare = list(spans)
    for position, (span, energy) in enumerate(zip(spans, energies, strict=False)):
        if energy is not None and _PREFIX in span:
            whole = Span.FromString(span)
            if len(whole.attributes) > _SEARCHED:
                continue
            kept = [each for each in whole.attributes if not each.key.startswith(PREFIX)]
            if len(kept) < len(whole.attributes):
                del whole.attributes[:]
                whole.attributes.extend(kept)
                bare[position] = whole.SerializeToString()
    return bare
