"""Trace requests in wire format, with the energy of their spans as attributes.

``wattspan.energy.*`` are span attributes; joules are doubles. Each kind of hardware (``cpu``,
``gpu``, ``memory``, ``enclosure``) has ``exclusive``, ``inclusive`` and ``uncertainty``, and the
same three names without a kind are the sums over all kinds, which are disjoint. A kind that was
not measured has no attributes. ``certainty`` is ``lower_bound`` if a part of the energy is unknown,
and absent otherwise. ``quality`` is ``baseline_unknown`` if the
idle power of a kind was unknown when the span began: its energy is then a lower bound.

``static`` is the static part of the exclusive energy of GPUs, and ``static.basis`` the origin of
the static power; both are absent while that is unknown.

``request``, ``request.input`` and ``request.output`` are the GPU energy of a request to a language
model. It settles after the span has been forwarded, so ``request.quality`` is ``provisional``.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import add
from types import MappingProxyType
from typing import Any

from wattspan.inference.estimate import RequestEstimate
from wattspan.model import BaselineQuality, Certainty, HwType, Provenance, StaticBasis
from wattspan.spans.values import Outcome, RequestEnergies, SpanEnergy, SpanEnergyColumns
from wattspan.util.protobuf import length_delimited, message_class, parse_message, serialize

ATTRIBUTE_PREFIX = "wattspan.energy."

_PREFIX_BYTES = ATTRIBUTE_PREFIX.encode()
_FIGURES = ("exclusive", "inclusive", "uncertainty")
_MAX_TEMPLATES = 1024
_MAX_SEARCHED = 1024  # attributes of a span up to which earlier energy attributes are replaced

_Shape = tuple[
    tuple[HwType, ...],
    tuple[HwType, ...],
    tuple[HwType, ...],
    tuple[HwType, ...],
    StaticBasis | None,
    Outcome,
]


class EnergyAttributeEncoder:
    """Encodes the energy attributes of spans.

    Nearly all spans have one of few shapes, the same kinds and outcome. All bytes but the values
    are made once for each shape.
    """

    def __init__(
        self,
        provenance: Mapping[HwType, Provenance],
        baseline_unknown: Mapping[HwType, int] | None = None,
    ) -> None:
        """``baseline_unknown``: monotonic time until which the idle power was unknown, by kind."""
        self.provenance = dict(provenance)
        self.baseline_unknown = dict(baseline_unknown or {})
        self._templates: dict[_Shape, _AttributeTemplate] = {}

    def of(self, energies: SpanEnergyColumns) -> list[bytes]:
        """The attributes of each span as fields of a Span message, to be appended to its bytes."""
        count = len(energies)
        shapes: list[Sequence[Any]] = [
            [tuple(energies.exclusive)] * count
            if energies.known is None
            else list(map(tuple, energies.known)),
            list(map(tuple, energies.inclusive.energy)),
            list(map(tuple, energies.inclusive.uncertainty)),
            self._unknown(energies),
            energies.basis or [None] * count,
            energies.outcome,
        ]
        groups: dict[_Shape, list[int]] = defaultdict(list)
        if count and all(each.count(each[0]) == count for each in shapes):
            groups[next(zip(*shapes, strict=True))] = [*range(count)]
        else:
            for i, shape in enumerate(zip(*shapes, strict=True)):
                groups[shape].append(i)
        found = [b""] * count
        for shape, at in groups.items():
            template = self._templates.get(shape)
            if template is None:
                if len(self._templates) >= _MAX_TEMPLATES:
                    self._templates.clear()
                template = self._templates[shape] = _AttributeTemplate(shape, self.provenance)
            some = energies
            if len(at) < len(energies):
                some = energies.picked(lambda column, at=at: [column[i] for i in at])  # type: ignore[misc]
            for i, attributes in zip(at, template.filled(some), strict=True):
                found[i] = attributes
        return found

    def _unknown(self, energies: SpanEnergyColumns) -> Sequence[tuple[HwType, ...]]:
        """The kinds whose idle power was unknown when each span began."""
        starts, inclusive = energies.spans.start, energies.inclusive.energy
        if min(starts, default=0) >= max(self.baseline_unknown.values(), default=0):
            return [()] * len(starts)
        return [
            tuple(
                kind
                for kind, until in self.baseline_unknown.items()
                if start < until and kind in known
            )
            for start, known in zip(starts, inclusive, strict=True)
        ]


class _AttributeTemplate:
    """The attributes of one shape, with room for the values."""

    def __init__(self, shape: _Shape, provenance: Mapping[HwType, Provenance]) -> None:
        *by_figure, unknown, basis, outcome = shape
        figures = list(zip(_FIGURES, by_figure, strict=True))
        names = [f"{kind}.{figure}" for figure, kinds in figures for kind in kinds]
        names += [figure for figure, kinds in figures if kinds]
        if basis is not None:
            names.append("static")
        keys = [_double_key(ATTRIBUTE_PREFIX + name) for name in ("coverage", *names)]
        texts = text_attribute(f"{ATTRIBUTE_PREFIX}outcome", outcome)
        if basis is not None:
            texts += text_attribute(f"{ATTRIBUTE_PREFIX}static.basis", basis)
        texts += _provenances({kind for kinds in by_figure for kind in kinds}, provenance)
        texts += b"".join(
            text_attribute(f"{ATTRIBUTE_PREFIX}{name}quality", BaselineQuality.UNKNOWN)
            for name in (*("" for _ in unknown[:1]), *(f"{kind}." for kind in unknown))
        )
        if any(by_figure) and (unknown or outcome is not Outcome.JOINED):
            texts += text_attribute(f"{ATTRIBUTE_PREFIX}certainty", Certainty.LOWER_BOUND)
        self._kinds, self._has_static = by_figure, basis is not None
        self._pack = struct.Struct(
            "<" + "".join(f"{len(key)}sd" for key in keys) + f"{len(texts)}s"
        ).pack
        self._keys, self._texts = keys, texts

    def filled(self, energies: SpanEnergyColumns) -> Iterator[bytes]:
        """The attributes of each of ``energies``, which have this shape."""
        exclusive, inclusive, uncertainty = self._kinds
        columns: list[list[Sequence[int]]] = [
            [energies.exclusive[kind] for kind in exclusive],
            [[each[kind] for each in energies.inclusive.energy] for kind in inclusive],
            [[each[kind] for each in energies.inclusive.uncertainty] for kind in uncertainty],
        ]
        values: list[Any] = list(chain.from_iterable(columns))
        values += [list(map(sum, zip(*figure, strict=True))) for figure in columns if figure]
        if self._has_static:
            values.append(energies.static)
        joules = [[energy / 1e6 for energy in column] for column in values]
        parts: list[Iterable[Any]] = []
        for key, column in zip(self._keys, (energies.coverages, *joules), strict=True):
            parts += (repeat(key), column)
        return map(self._pack, *parts, repeat(self._texts))


def text_attribute(key: str, value: str) -> bytes:
    """A string attribute as a field of a Span message."""
    return _attribute(key, length_delimited(1, value.encode()))


def _provenances(kinds: set[HwType], provenance: Mapping[HwType, Provenance]) -> bytes:
    """The worst provenance of all kinds, and that of each kind that is not measured."""
    known = {kind: provenance[kind] for kind in sorted(kinds) if kind in provenance}
    if not known:
        return b""
    worst = max(known.values(), key=lambda each: each.rank)
    return text_attribute(f"{ATTRIBUTE_PREFIX}provenance", worst) + b"".join(
        text_attribute(f"{ATTRIBUTE_PREFIX}{kind}.provenance", each)
        for kind, each in known.items()
        if each is not Provenance.MEASURED
    )


def _double_key(key: str) -> bytes:
    """An attribute up to its value, the eight bytes of a double."""
    return _attribute(key, b"\x21" + bytes(8))[:-8]


def _attribute(key: str, value: bytes) -> bytes:
    """Span.attributes = 9, KeyValue.key = 1, KeyValue.value = 2."""
    return length_delimited(9, length_delimited(1, key.encode()) + length_delimited(2, value))


# ----------------------------------------------------------------------------------- requests


def request_attributes(estimate: RequestEstimate) -> bytes:
    """The provisional energy of a request to a language model as fields of a Span message."""
    figures = {
        "request": estimate.energy,
        "request.input": estimate.input,
        "request.output": estimate.output,
    }
    if estimate.uncertainty is not None:
        figures["request.uncertainty"] = estimate.uncertainty
    doubles = b"".join(
        _double_key(ATTRIBUTE_PREFIX + name) + struct.pack("<d", energy / 1e6)
        for name, energy in figures.items()
    )
    return doubles + text_attribute(f"{ATTRIBUTE_PREFIX}request.quality", "provisional")


def enrich(
    body: bytes,
    energies: Sequence[SpanEnergy | None],
    attributes: EnergyAttributeEncoder,
    estimates: Mapping[int, RequestEstimate] = MappingProxyType({}),
) -> bytes:
    """The ExportTraceServiceRequest ``body`` with ``energies``, those of its spans in order.

    ``estimates`` are the provisional energies of requests to language models, by position.

    A span whose energy is None stays unchanged, as do order, unknown fields, and the energy
    attributes of another agent unless new ones replace them. ValueError if the lengths differ.
    """
    request = message_class("Request").FromString(body)
    encoded = [b""] * len(energies)
    for positions, part in RequestEnergies.of(energies).parts:
        for at, own in zip(positions, attributes.of(part), strict=True):
            encoded[at] = own
            if at in estimates:
                encoded[at] += request_attributes(estimates[at])
    has_energy = _PREFIX_BYTES in body
    position = 0
    for scope in scope_spans(request):
        spans: Sequence[bytes] = scope.spans[:]
        of_scope = encoded[position : position + len(spans)]
        position += len(spans)
        if has_energy:
            spans = _without_energy_attributes(spans, of_scope)
        scope.spans[:] = list(map(add, spans, of_scope))
    if position != len(encoded):
        raise ValueError(f"there are {len(encoded)} energies of {position} spans")
    return serialize(request)


def _without_energy_attributes(
    spans: Sequence[bytes], attributes: Sequence[bytes]
) -> Sequence[bytes]:
    """The spans without the energy attributes that new ``attributes`` replace.

    Texts are not decoded: a span with one that is not UTF-8 is like any other.
    """
    bare = list(spans)
    for position, (raw, own) in enumerate(zip(spans, attributes, strict=False)):
        if own and _PREFIX_BYTES in raw:
            span = message_class("SpanAttributes").FromString(raw)
            if len(span.attributes) > _MAX_SEARCHED:
                continue
            kept = [each for each in span.attributes if not _is_energy(each)]
            if len(kept) < len(span.attributes):
                span.attributes[:] = kept
                bare[position] = serialize(span)
    return bare


def _is_energy(attribute: bytes) -> bool:
    pair = parse_message("KeyValue", attribute) if _PREFIX_BYTES in attribute else None
    return pair is not None and pair.key.startswith(_PREFIX_BYTES)


def scope_spans(request: Any) -> Iterator[Any]:
    """Each ScopeSpans of a request, in its order."""
    for resource in request.resource_spans:
        yield from resource.scope_spans


def slice_spans(body: bytes, begin: int, end: int) -> bytes:
    """The request with its spans from ``begin`` up to ``end`` only, without empty parents."""
    request = message_class("Request").FromString(body)
    position = 0
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            first, position = position, position + len(scope.spans)
            scope.spans[:] = scope.spans[max(0, begin - first) : max(0, end - first)]
        _delete_without(resource.scope_spans, "spans")
    _delete_without(request.resource_spans, "scope_spans")
    return serialize(request)


def _delete_without(messages: Any, field: str) -> None:
    """Delete the messages whose ``field`` is empty."""
    for position in reversed(range(len(messages))):
        if not getattr(messages[position], field):
            del messages[position]
