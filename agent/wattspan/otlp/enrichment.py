"""``wattspan.energy.*``: what a span spent, as span attributes in wire format.

Joules are doubles. Per kind of hardware (``cpu``, ``gpu``, ``memory``, ``enclosure``) there are
``exclusive``, ``inclusive`` and ``uncertainty``; the same three over all kinds stand beside them,
for the kinds are disjoint. A kind that was not measured has no attributes: absent is unknown.

A request with the energy of its spans added, and nothing else changed.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from wattspan.model import HwType, Provenance
from wattspan.otlp.messages import scope_spans
from wattspan.spans.values import Outcome, SpanEnergy
from wattspan.util.protobuf import message_class

ATTRIBUTE_PREFIX = "wattspan.energy."

_VALUE_NAMES = ("exclusive", "inclusive", "uncertainty")
_KNOWN_SHAPES = 1024

_Shape = tuple[tuple[HwType, ...], tuple[HwType, ...], tuple[HwType, ...], Outcome]


class EnergyAttributeEncoder:
    """Writes the attributes of one span after the other, under one set of provenances.

    Nearly all spans are of a few shapes: the same kinds, the same outcome. Everything but the
    figures is written once for each shape.
    """

    def __init__(self, provenance: Mapping[HwType, Provenance]) -> None:
        self.provenance = dict(provenance)
        self._layouts: dict[_Shape, _AttributeTemplate] = {}

    def of(self, energy: SpanEnergy) -> bytes:
        """The attributes of a span: fields of a Span message, to be appended to its bytes."""
        _, exclusive, (inclusive, uncertainty, _), outcome = energy
        shape = (tuple(exclusive), tuple(inclusive), tuple(uncertainty), outcome)
        layout = self._layouts.get(shape)
        if layout is None:
            if len(self._layouts) >= _KNOWN_SHAPES:
                self._layouts.clear()
            layout = self._layouts[shape] = _AttributeTemplate(shape, self.provenance)
        figures: list[int] = [*exclusive.values(), *inclusive.values(), *uncertainty.values()]
        figures += [sum(each.values()) for each in (exclusive, inclusive, uncertainty) if each]
        return layout.filled(energy.coverage, figures)


class _AttributeTemplate:
    """The attributes of one shape, with room for the figures."""

    def __init__(self, shape: _Shape, provenance: Mapping[HwType, Provenance]) -> None:
        *by_figure, outcome = shape
        names = [
            f"{kind}.{figure}"
            for figure, kinds in zip(_VALUE_NAMES, by_figure, strict=True)
            for kind in kinds
        ]
        names += [figure for figure, kinds in zip(_VALUE_NAMES, by_figure, strict=True) if kinds]
        keys = [_double_key(ATTRIBUTE_PREFIX + name) for name in ("coverage", *names)]
        words = text_attribute(f"{ATTRIBUTE_PREFIX}outcome", outcome)
        words += _provenances({kind for kinds in by_figure for kind in kinds}, provenance)
        self._pack = struct.Struct(
            "<" + "".join(f"{len(key)}sd" for key in keys) + f"{len(words)}s"
        ).pack
        self._parts: list[bytes | float] = [part for key in keys for part in (key, 0.0)] + [words]

    def filled(self, coverage: float, microjoules: list[int]) -> bytes:
        parts = self._parts
        parts[1] = coverage
        parts[3:-1:2] = [energy / 1e6 for energy in microjoules]
        return self._pack(*parts)


def text_attribute(key: str, value: str) -> bytes:
    """One attribute with a string for its value, as a field of a Span message."""
    return _attribute(key, _delimited(1, value.encode()))


def _provenances(kinds: set[HwType], provenance: Mapping[HwType, Provenance]) -> bytes:
    """How the figures were obtained: the worst of all, and each kind that is not measured."""
    told = {kind: provenance[kind] for kind in sorted(kinds) if kind in provenance}
    if not told:
        return b""
    worst = max(told.values(), key=lambda each: each.rank)
    return text_attribute(f"{ATTRIBUTE_PREFIX}provenance", worst) + b"".join(
        text_attribute(f"{ATTRIBUTE_PREFIX}{kind}.provenance", each)
        for kind, each in told.items()
        if each is not Provenance.MEASURED
    )


def _double_key(key: str) -> bytes:
    """An attribute up to its value, which is the eight bytes of a double."""
    return _attribute(key, b"\x21" + bytes(8))[:-8]


def _attribute(key: str, value: bytes) -> bytes:
    """Span.attributes = 9, KeyValue.key = 1, KeyValue.value = 2."""
    return _delimited(9, _delimited(1, key.encode()) + _delimited(2, value))


def _delimited(field: int, content: bytes) -> bytes:
    """A field that is bytes with a length. All of ours are shorter than 128 bytes."""
    return bytes((field << 3 | 2, len(content))) + content


_ATTRIBUTE_PREFIX_BYTES = ATTRIBUTE_PREFIX.encode()

_MAX_SEARCHED = 1024
"""Attributes of a span up to which those that are to be replaced are looked for."""


def enrich(
    message: Any, energies: Sequence[SpanEnergy | None], attributes: EnergyAttributeEncoder
) -> bytes:
    """The ExportTraceServiceRequest ``message``, in wire format, with energies on its spans.

    It is given in wire format, or parsed.

    ``energies`` are those of the message's spans, in its order; a span whose energy is None stays
    as it is. All else stays too: order, unknown fields, and energy that another agent has put
    there, unless ours takes its place. ValueError if the lengths differ.
    """
    body: bytes = message if isinstance(message, bytes) else message.SerializeToString()
    request = message_class("Request").FromString(body)
    add = attributes.of
    replayed = _ATTRIBUTE_PREFIX_BYTES in body
    rest = iter(energies)
    for scope in scope_spans(request):
        spans: Sequence[bytes] = scope.spans
        mine = [*islice(rest, len(spans))]
        if replayed:
            spans = _without_energy_attributes(spans, mine)
        scope.spans[:] = [
            span if energy is None else span + add(energy)
            for span, energy in zip(spans, mine, strict=True)
        ]
    if next(rest, rest) is not rest:
        raise ValueError("there are more energies than spans")
    enriched: bytes = request.SerializeToString()
    return enriched


def _without_energy_attributes(
    spans: Sequence[bytes], energies: Sequence[SpanEnergy | None]
) -> Sequence[bytes]:
    """The spans, less the energy attributes that are about to be replaced."""
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    bare = list(spans)
    for position, (span, energy) in enumerate(zip(spans, energies, strict=False)):
        if energy is not None and _ATTRIBUTE_PREFIX_BYTES in span:
            whole = Span.FromString(span)
            if len(whole.attributes) > _MAX_SEARCHED:
                continue
            kept = [each for each in whole.attributes if not each.key.startswith(ATTRIBUTE_PREFIX)]
            if len(kept) < len(whole.attributes):
                del whole.attributes[:]
                whole.attributes.extend(kept)
                bare[position] = whole.SerializeToString()
    return bare
