"""Trace requests in protobuf or OTLP/JSON to span records, decoded no deeper than energy needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf.message import DecodeError

from wattspan.ingest.export_request import (
    MAX_NAME,
    NOTHING_REQUESTED,
    InstructionReport,
    LatencyReport,
    RequestedAttributes,
    ResourceSpans,
    WorkAttribute,
)
from wattspan.ingest.inference_attributes import (
    MARKS,
    InferenceFigure,
    as_nanoseconds,
    inference_attributes,
    read_figure,
    token_report,
)
from wattspan.ingest.request_limits import (
    FLAT,
    MAX_FIELDS,
    RESOURCE,
    SCOPE,
    SPAN,
    FieldBudget,
    MalformedRequestError,
    RefusedSpans,
    check_fields,
    count_fields,
    too_many_fields,
    too_many_spans,
)
from wattspan.ingest.span_attributes import (
    MAX_RESOURCE_ATTRIBUTES,
    AttributeFinder,
    AttributeKey,
    as_count,
    as_decimal,
    attributes_of,
    pairs,
    printable,
    reported_instruction,
    resource_claim,
    scalar,
)
from wattspan.spans.values import RequestLatency, SpanColumns
from wattspan.util.protobuf import encode_message, message_class, parse_message, serialize

if TYPE_CHECKING:
    from wattspan.ingest.otlp_json import JsonRequests

MAX_EVENTS = 4096
"""Events of one span that are searched."""

_NO_TRACE, _NO_SPAN = bytes(16), bytes(8)
_TOGETHER = 64  # spans of a scope with a malformed one that are tried at once

_Request, _ResourceSpans = message_class("FlatRequest"), message_class("FlatResourceSpans")
_ScopeSpans, _ScopeSpanFields = message_class("ScopeSpans"), message_class("ScopeSpanFields")
_Resource, _SpanEvents = message_class("Resource"), message_class("SpanEvents")
_FIELDS = [
    attrgetter(name) for name in ("trace_id", "span_id", "parent_span_id", "name", "start", "end")
]


class _RequestedColumn(NamedTuple):
    """The attributes with an optional column in the spans of a service and name, "" for all.

    ``value`` makes the value of a span of ``width`` values of attributes, the bytes of the span and
    its start.
    """

    service: str
    span: str
    keys: Sequence[AttributeKey]
    width: int
    value: Callable[[Sequence[Any], bytes, int, FieldBudget], Any]

    @classmethod
    def of_work(cls, asked: WorkAttribute) -> _RequestedColumn:
        keys = [AttributeKey.of(0, asked.attribute)]
        return cls(asked.service, asked.span, keys, 1, lambda values, *_: values[0])

    @classmethod
    def of_latency(cls, asked: LatencyReport) -> _RequestedColumn:
        names = asked.first_attribute, asked.between_attribute
        keys = [AttributeKey.of(at, name) for at, name in enumerate(names) if name]
        has_events = bool(asked.first_event or asked.between_event)

        def value(
            values: Sequence[Any], span: bytes, start: int, budget: FieldBudget
        ) -> RequestLatency:
            events = _events(span, budget) if has_events else ()
            return asked.latency(RequestLatency(*values), start, events)

        return cls(asked.service, asked.span, keys, 2, value)

    @classmethod
    def of_instruction(cls, asked: InstructionReport) -> _RequestedColumn:
        keys = [AttributeKey.of(at, name) for at, name in enumerate(filter(None, asked[1:]))]
        return cls(
            asked.service, "", keys, len(keys), lambda values, *_: reported_instruction(values)
        )


_Requested = Mapping[str, Sequence[_RequestedColumn]]  # by the name of the column


class DecodedRequest(NamedTuple):
    """``skipped`` are the flat positions of spans with invalid ids or times.

    ``refused`` counts them, and the spans whose messages are malformed, which are not in
    ``message``.
    """

    parts: list[ResourceSpans]
    skipped: list[int]
    refused: RefusedSpans
    message: bytes | None = None


_CAUSES = {
    "invalid_id": "a trace id has 16 bytes and a span id has 8, and neither is all zeros.",
    "invalid_time": "a span has a start and an end in Unix nanoseconds, and neither is 0.",
}
"""The sentence for the sender, by reason of refusal."""


def _unusable(columns: Sequence[Sequence[Any]]) -> dict[int, str]:
    """The positions of spans with an invalid id or without a time, and the reasons."""
    traces, spans, *_, starts, ends = columns
    found = dict.fromkeys(_invalid_ids(traces, spans), "invalid_id")
    if 0 in starts or 0 in ends:
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if not (start and end):
                found.setdefault(i, "invalid_time")
    return found


def _invalid_ids(traces: Sequence[bytes], spans: Sequence[bytes]) -> list[int]:
    """The positions of spans whose trace or span id is invalid."""
    lengths = {*map(len, traces)}, {*map(len, spans)}
    if lengths == ({16}, {8}) and _NO_TRACE not in traces and _NO_SPAN not in spans:
        return []
    return [
        i
        for i, (trace, span) in enumerate(zip(traces, spans, strict=True))
        if len(trace) != 16 or len(span) != 8 or trace == _NO_TRACE or span == _NO_SPAN
    ]


def _valid_parents(parents: Sequence[bytes]) -> Sequence[bytes]:
    """The ids of parents; b"" for invalid ones."""
    if {*map(len, parents)} <= {0, 8} and _NO_SPAN not in parents:
        return parents
    return [each if len(each) == 8 and each != _NO_SPAN else b"" for each in parents]


def _without(body: bytes, dropped: Collection[tuple[int, ...]]) -> bytes:
    """A request without the messages at these places; all else is as it was."""

    def kept(raw: bytes, kinds: Sequence[tuple[Any, str]], place: tuple[int, ...] = ()) -> bytes:
        if not kinds:
            return raw
        (kind, field), *inner = kinds
        message = kind.FromString(raw)
        parts: Any = getattr(message, field)
        parts[:] = [
            kept(part, inner, at)
            for number, part in enumerate(parts)
            if (at := (*place, number)) not in dropped
        ]
        return serialize(message)

    layers = (_Request, "resource_spans"), (_ResourceSpans, "scope_spans"), (_ScopeSpans, "spans")
    return kept(body, layers)


class TraceDecoder:
    """Decodes ExportTraceServiceRequests. For one thread.

    A request has at most ``max_spans`` spans, scopes and resources. ``max_fields`` bounds the
    fields that the decoder inspects, and so the CPU time of a request: a field costs less than a
    microsecond. Names of the settings that a request has are removed from ``unseen``. With
    ``keep_message`` decoded requests contain their protobuf bytes, to be forwarded.
    """

    def __init__(
        self,
        asked: RequestedAttributes = NOTHING_REQUESTED,
        *,
        max_spans: int,
        max_fields: int,
        unseen: set[str] | None = None,
        keep_message: bool = False,
    ) -> None:
        self._limit, self._max_fields, self._keep_message = max_spans, max_fields, keep_message
        self._weight = [AttributeKey.of(0, asked.weight)] if asked.weight else []
        self._inference = [
            AttributeKey.of(int(each.column), each.name)
            for each in inference_attributes(asked.presets, asked.names)
        ]
        self._unseen = set() if unseen is None else unseen
        added = [name.encode() for names in asked.names.values() for name in names]
        self._marks = (*MARKS, *added)
        self._beginnings = [b".".join(key.name.split(b".")[:2]) for key in self._inference]
        self._asked = asked
        self._work: Sequence[WorkAttribute] = ()
        self._requested: _Requested = {
            "work": (),
            "latency": list(map(_RequestedColumn.of_latency, asked.latencies)),
            "instruction": list(map(_RequestedColumn.of_instruction, asked.instructions)),
        }
        self._finders: Mapping[str, AttributeFinder[Any]] = {
            "weight": AttributeFinder(lambda _, value: as_count(value)),
            "tokens": AttributeFinder(read_figure),
            "work": AttributeFinder(lambda _, value: as_decimal(value)),
            "latency": AttributeFinder(lambda _, value: as_nanoseconds(value)),
            "instruction": AttributeFinder(lambda _, value: value),
        }

    def _inference_in(self, body: bytes) -> list[AttributeKey]:
        """The searched attributes of tokens and requests that may be in a request."""
        if not any(mark in body for mark in self._marks):
            return []
        # Most names are absent, and many begin alike: a search reads the whole request.
        known = {beginning for beginning in set(self._beginnings) if beginning in body}
        return [
            key
            for key, beginning in zip(self._inference, self._beginnings, strict=True)
            if beginning in known and key.prefix in body
        ]

    def _requested_of(self, service: str) -> _Requested:
        """The optional columns that are asked for in the spans of ``service``."""
        work = self._asked.work()
        if work is not self._work:
            self._work = work
            self._requested = {
                **self._requested,
                "work": list(map(_RequestedColumn.of_work, work)),
            }
        found = {
            name: [each for each in columns if each.service in ("", service)]
            for name, columns in self._requested.items()
        }
        return {name: columns for name, columns in found.items() if columns}

    @cached_property
    def _json(self) -> JsonRequests:
        from wattspan.ingest.otlp_json import JsonRequests  # opentelemetry-proto takes 3 MB

        return JsonRequests(self._limit)

    def decode(self, body: bytes, *, json: bool = False) -> DecodedRequest:
        """The spans of a request; MalformedRequestError or RequestTooLargeError.

        A malformed message inside the request costs its own spans only; without any readable span
        the request is malformed.
        """
        self._refused = RefusedSpans()
        if json:
            budget = FieldBudget(self._max_fields)
            body = self._json.to_protobuf(body, budget, self._refused)
        self._skipped: list[int] = []
        self._dropped: set[tuple[int, ...]] = set()
        self._position = self._seen = self._spans = 0
        try:
            parts = self._decode(body)
        except DecodeError as error:
            raise MalformedRequestError(
                f"the body is no ExportTraceServiceRequest: {error}"
            ) from None
        if self._dropped:
            self._refused.check(self._spans)
        message = None
        if self._keep_message:
            message = _without(body, self._dropped) if self._dropped else body
        return DecodedRequest(parts, self._skipped, self._refused, message)

    def _drop(self, place: tuple[int, ...], error: Exception, spans: int = 1) -> None:
        """Refuse a message. Its place: the numbers of the resource, the scope and the span."""
        names = zip(("resource_spans", "scope_spans", "spans"), place, strict=False)
        path = ".".join(f"{name}[{number}]" for name, number in names)
        reason = getattr(error, "reason", "malformed")
        self._refused.add(reason, f"{path} is invalid: {error}", spans)
        self._dropped.add(place)

    def _decode(self, body: bytes) -> list[ResourceSpans]:
        parts: list[ResourceSpans] = []
        budget = FieldBudget(self._max_fields)
        self._keys = [each for each in self._weight if each.prefix in body]
        self._present = self._inference_in(body)
        if self._unseen:
            found = (*self._keys, *self._present)
            self._unseen.difference_update(key.name.decode() for key in found)
        # Slices: the parser's own copy of a message is released as soon as its parts are read.
        resources = self._parse(body, _Request, budget).resource_spans[:]
        self._check(resources)
        for number, each in enumerate(resources):
            try:
                outer = self._parse(each, _ResourceSpans, budget)
            except DecodeError as error:
                self._drop((number,), error)
                continue
            resource, scopes = outer.resource, outer.scope_spans[:]
            del outer
            part = self._resource(number, resource, scopes, budget)
            if part is not None:
                parts.append(part)
        return parts

    def _resource(
        self, number: int, resource: bytes, raw_scopes: Sequence[bytes], budget: FieldBudget
    ) -> ResourceSpans | None:
        """The spans of a resource; None without any."""
        self._check(raw_scopes)
        scopes: list[tuple[int, bytes, bytes, Sequence[bytes]]] = []
        for place, raw in enumerate(raw_scopes):
            try:
                inner = self._parse(raw, _ScopeSpans, budget)
            except DecodeError as error:
                self._drop((number, place), error)
                continue
            scope, spans = inner.scope, inner.spans[:]
            del inner
            check_fields(scope, SCOPE, "a scope", budget)
            self._check(spans)
            self._spans += len(spans)
            scopes.append((place, scope, raw, spans))
        if not scopes:
            return None
        check_fields(resource, RESOURCE, "a resource", budget)
        try:
            attributes = pairs(attributes_of(resource, _Resource, MAX_RESOURCE_ATTRIBUTES))
            claim = resource_claim({name: scalar(value) for name, value in attributes})
        except DecodeError as error:
            self._drop((number,), error, sum(len(spans) for *_, spans in scopes))
            return None
        self._claim, asked = claim, self._requested_of(claim.service)
        records = [
            self._scope((number, place), scope, raw, spans, asked, budget)
            for place, scope, raw, spans in scopes
            if spans
        ]
        joined = SpanColumns.joined(records)
        return ResourceSpans(claim, joined) if joined else None

    def _scope(
        self,
        place: tuple[int, int],
        scope: bytes,
        raw: bytes,
        spans: Sequence[bytes],
        asked: _Requested,
        budget: FieldBudget,
    ) -> SpanColumns:
        """The spans of one scope; malformed ones are dropped, which takes a second pass."""
        library = parse_message("Scope", scope) if self._present else None
        self._library = printable(library.name, MAX_NAME) if library is not None else ""
        left = [*range(len(spans))]
        for number, span in enumerate(spans):
            if len(span) > MAX_FIELDS and count_fields(span, SPAN, MAX_FIELDS, budget) > MAX_FIELDS:
                self._drop((*place, number), too_many_fields("a span", MAX_FIELDS))
                left.remove(number)
        with suppress(DecodeError):
            if len(left) == len(spans):
                return self._usable(raw, spans, asked, budget)
        found: list[SpanColumns] = []
        for first in range(0, len(left), _TOGETHER):
            some = left[first : first + _TOGETHER]
            with suppress(DecodeError):
                found.append(self._usable_of([spans[number] for number in some], asked, budget))
                continue
            for number in some:
                try:
                    found.append(self._usable_of([spans[number]], asked, budget))
                except DecodeError as error:
                    self._drop((*place, number), error)
        return SpanColumns.joined(found) if found else SpanColumns.of([])

    def _usable_of(
        self, spans: Sequence[bytes], asked: _Requested, budget: FieldBudget
    ) -> SpanColumns:
        return self._usable(encode_message((2, span) for span in spans), spans, asked, budget)

    def _parse(self, raw: bytes, kind: Any, budget: FieldBudget) -> Any:
        if count_fields(raw, FLAT, self._limit, budget) > self._limit:
            raise too_many_spans(self._limit)
        return kind.FromString(raw)

    def _check(self, more: Sequence[bytes]) -> None:
        """Count resources, scopes and spans; RequestTooLargeError for too many."""
        self._seen += len(more)
        if self._seen > self._limit:
            raise too_many_spans(self._limit)

    def _usable(
        self, scope: bytes, spans: Sequence[bytes], asked: _Requested, budget: FieldBudget
    ) -> SpanColumns:
        """The spans of one scope with usable ids and times; the others are refused."""
        # All spans of a scope at once take half the time of one by one.
        rows = _ScopeSpanFields.FromString(scope).spans[:]
        columns = [list(map(field, rows)) for field in _FIELDS]
        refused = _unusable(columns)
        count = len(rows)
        if refused:
            valid = [i not in refused for i in range(count)]
            spans, rows = list(compress(spans, valid)), list(compress(rows, valid))
            columns = [list(compress(column, valid)) for column in columns]
        records = self._records(columns, rows, spans, asked, budget)
        for i, reason in sorted(refused.items()):
            self._skipped.append(self._position + i)
            self._refused.add(reason, _CAUSES[reason])
        self._position += count
        return records

    def _records(
        self,
        columns: Sequence[Sequence[Any]],
        rows: Sequence[Any],
        spans: Sequence[bytes],
        asked: _Requested,
        budget: FieldBudget,
    ) -> SpanColumns:
        """The records of ``spans``, with the ``columns`` of their own fields."""
        if not spans:
            return SpanColumns.of([])
        traces, ids, parents, raw_names, starts, ends = columns
        printed = {name: printable(name, MAX_NAME) for name in set(raw_names)}
        names = [printed[name] for name in raw_names]
        optional: dict[str, Sequence[Any]] = {
            name: self._column(name, some, spans, names, starts, budget)
            for name, some in asked.items()
        }
        if self._keys:
            (optional["weight"],) = self._finders["weight"].columns(spans, self._keys, 1, budget)
        if self._present:
            optional |= self._tokens(spans, [row.kind for row in rows], budget)
        service = [self._claim.service] * len(names)
        own = traces, ids, _valid_parents(parents), service, names, starts, ends
        return SpanColumns(*own, **optional)

    def _tokens(
        self, spans: Sequence[bytes], kinds: Sequence[int], budget: FieldBudget
    ) -> dict[str, Sequence[Any]]:
        """The columns of tokens, and of the reports of requests to language models."""
        width = len(InferenceFigure)
        columns = self._finders["tokens"].columns(spans, self._present, width, budget)
        reports = list(map(token_report, zip(*columns, strict=True), kinds))
        model = self._claim.model
        return {
            "scope": [self._library] * len(spans) if self._library else (),
            "tokens_in": [each.tokens_in for each in reports],
            "tokens_out": [each.tokens_out for each in reports],
            "role": [each.role for each in reports],
            "inference": [
                details._replace(model=model)
                if (details := each.details) and not details.model
                else details
                for each in reports
            ],
        }

    def _column(
        self,
        name: str,
        asked: Sequence[_RequestedColumn],
        spans: Sequence[bytes],
        names: Sequence[str],
        starts: Sequence[int],
        budget: FieldBudget,
    ) -> list[Any]:
        """An optional column; of those that are asked for, the first that matches a span counts."""
        found: list[Any] = [None] * len(spans)
        left: Sequence[int] = range(len(spans))
        for _, span, keys, width, value in asked:
            matching = [i for i in left if span in ("", names[i])]
            left = [i for i in left if span not in ("", names[i])]
            some = [spans[i] for i in matching]
            columns = self._finders[name].columns(some, keys, width, budget)
            for i, raw, values in zip(matching, some, zip(*columns, strict=True), strict=True):
                found[i] = value(values, raw, starts[i], budget)
        return found


def _events(span: bytes, budget: FieldBudget) -> list[tuple[int, str]]:
    """Time and name of each event of a span, at most ``MAX_EVENTS`` of them."""
    events = _SpanEvents.FromString(span).events[:MAX_EVENTS]
    budget.spend(len(events))
    return [(each.time, printable(each.name, MAX_NAME)) for each in events]
