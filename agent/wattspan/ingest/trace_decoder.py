"""Trace requests in protobuf or OTLP/JSON to span records, decoded no deeper than energy needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf.message import DecodeError

from wattspan.config.settings import SPAN_PRESETS, SpanFigure
from wattspan.ingest.export_request import (
    MAX_NAME,
    InstructionReport,
    LatencyReport,
    ReportedInstruction,
    RequestLatency,
    ResourceSpanRecords,
    SpanRecordColumns,
    WorkAttribute,
    WorkAttributes,
)
from wattspan.ingest.inference_attributes import (
    NO_REPORT,
    TokenReport,
    as_nanoseconds,
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
    too_many_spans,
)
from wattspan.ingest.span_attributes import (
    AttributeFinder,
    AttributeKey,
    Scalar,
    as_count,
    as_decimal,
    attributes_of,
    pairs,
    printable,
    reported_instruction,
    resource_claim,
    scalar,
)
from wattspan.ingest.token_attributes import MARKS, InferenceFigure, inference_attributes
from wattspan.util.protobuf import encode_message, message_class, serialize

if TYPE_CHECKING:
    from wattspan.ingest.otlp_json import JsonRequests

MAX_EVENTS = 4096
"""Events of one span that are searched."""

_NO_TRACE, _NO_SPAN = bytes(16), bytes(8)
_TOGETHER = 64  # spans of a scope with a malformed one that are tried at once

_Request, _ResourceSpans = message_class("FlatRequest"), message_class("FlatResourceSpans")
_ScopeSpans, _ScopeSpanFields = message_class("ScopeSpans"), message_class("ScopeSpanFields")
_Resource, _SpanEvents = message_class("Resource"), message_class("SpanEvents")


class _WorkKey(NamedTuple):
    spans: WorkAttribute
    key: AttributeKey


def _work_keys(attributes: Iterable[WorkAttribute]) -> list[_WorkKey]:
    return [_WorkKey(each, AttributeKey.of(0, each.attribute)) for each in attributes]


class _LatencyKeys(NamedTuple):
    """A report of latencies, and its attributes on the wire: of the first token, and between."""

    report: LatencyReport
    keys: list[AttributeKey]

    @classmethod
    def of(cls, report: LatencyReport) -> _LatencyKeys:
        names = report.first_attribute, report.between_attribute
        return cls(report, [AttributeKey.of(at, name) for at, name in enumerate(names) if name])

    @property
    def has_events(self) -> bool:
        return bool(self.report.first_event or self.report.between_event)


class InstructionKeys(NamedTuple):
    """A report of instructions, and its attributes on the wire.

    These are stage, micro-batch and kind, and the replica if the report has one.
    """

    report: InstructionReport
    keys: list[AttributeKey]

    @classmethod
    def of(cls, report: InstructionReport) -> InstructionKeys:
        names = filter(None, report[1:])
        return cls(report, [AttributeKey.of(at, name) for at, name in enumerate(names)])


class DecoderSettings:
    """The attributes to read, and the limits of a request.

    ``weight`` names the attribute with the weight of a span, "" for none. ``work`` returns
    the spans that report work; the first entry that matches a span counts. ``presets`` name the
    engines whose reports of requests are recognised, ``latencies`` the spans that report latencies
    and ``instructions`` those that report instructions of a pipeline; of both the first matching
    entry counts. A request has at most ``max_spans`` spans, scopes and resources. ``max_fields``
    bounds the fields that the decoder inspects, and so the CPU time of a request: a field costs
    less than a microsecond. ``attributes`` are further names for tokens and other figures; those
    that a request has are removed from ``unseen``. With ``keep_message`` decoded requests contain
    their protobuf bytes, to be forwarded.
    """

    def __init__(
        self,
        *,
        max_spans: int,
        max_fields: int,
        weight: str = "",
        work: WorkAttributes = tuple,
        presets: Collection[str] = SPAN_PRESETS,
        attributes: Mapping[SpanFigure, Iterable[str]] | None = None,
        unseen: set[str] | None = None,
        latencies: Sequence[LatencyReport] = (),
        instructions: Sequence[InstructionReport] = (),
        keep_message: bool = False,
    ) -> None:
        self.max_spans, self.max_fields = max_spans, max_fields
        self.keep_message = keep_message
        self.weight = [AttributeKey.of(0, weight)] if weight else []
        self.inference = [
            AttributeKey.of(int(each.column), each.name)
            for each in inference_attributes(presets, attributes)
        ]
        self._unseen = set() if unseen is None else unseen
        added = [name.encode() for names in (attributes or {}).values() for name in names]
        self._marks = (*MARKS, *added)
        self._beginnings = [b".".join(key.name.split(b".")[:2]) for key in self.inference]
        self.latencies = [_LatencyKeys.of(each) for each in latencies]
        self.instructions = [InstructionKeys.of(each) for each in instructions]
        self._work_attributes, self._work_keys_of = work, work()
        self._work = _work_keys(self._work_keys_of)

    def inference_in(self, body: bytes) -> list[AttributeKey]:
        """The searched attributes of tokens and requests that may be in a protobuf request."""
        if not any(mark in body for mark in self._marks):
            return []
        # Most names are absent, and many begin alike: a search reads the whole request.
        known = {beginning for beginning in set(self._beginnings) if beginning in body}
        found = [
            key
            for key, beginning in zip(self.inference, self._beginnings, strict=True)
            if beginning in known and key.prefix in body
        ]
        self._unseen.difference_update(key.name.decode() for key in found if self._unseen)
        return found

    def work_of(self, service: str) -> list[_WorkKey]:
        attributes = self._work_attributes()
        if attributes is not self._work_keys_of:
            self._work_keys_of, self._work = attributes, _work_keys(attributes)
        return [each for each in self._work if each.spans.service in ("", service)]

    def latencies_of(self, service: str) -> list[_LatencyKeys]:
        return [each for each in self.latencies if each.report.service in ("", service)]

    def instructions_of(self, service: str) -> InstructionKeys | None:
        found = (each for each in self.instructions if each.report.service in ("", service))
        return next(found, None)


class DecodedRequest(NamedTuple):
    """``skipped`` are the flat positions of spans with invalid ids or times.

    ``refused`` counts them, and the spans whose messages are malformed, which are not in
    ``message``.
    """

    parts: list[ResourceSpanRecords]
    skipped: list[int]
    refused: RefusedSpans
    message: bytes | None = None


_CAUSES = {
    "invalid_id": "a trace id has 16 bytes and a span id has 8, and neither is all zeros.",
    "invalid_time": "a span has a start and an end in Unix nanoseconds, and neither is 0.",
}
"""The sentence for the sender, by reason of refusal."""


def _unusable(
    traces: Sequence[bytes], spans: Sequence[bytes], starts: Sequence[int], ends: Sequence[int]
) -> dict[int, str]:
    """The positions of spans with an invalid id or without a time, and the reasons."""
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


class _Reads(NamedTuple):
    """The settings for the spans of one service: work, latencies and instructions."""

    work: Sequence[_WorkKey]
    latencies: Sequence[_LatencyKeys]
    instructions: InstructionKeys | None


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
    """Decodes ExportTraceServiceRequests. For one thread."""

    def __init__(self, settings: DecoderSettings) -> None:
        self._settings, self._limit = settings, settings.max_spans
        self._weights: AttributeFinder[int] = AttributeFinder(lambda _, value: as_count(value))
        self._amounts: AttributeFinder[float] = AttributeFinder(lambda _, value: as_decimal(value))
        self._reports: AttributeFinder[Scalar] = AttributeFinder(read_figure)
        self._values: AttributeFinder[Scalar] = AttributeFinder(lambda _, value: value)
        self._times: AttributeFinder[int] = AttributeFinder(lambda _, value: as_nanoseconds(value))

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
            budget = FieldBudget(self._settings.max_fields)
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
        if self._dropped and not self._spans:
            raise MalformedRequestError(f"the body is malformed: {self._refused.cause}")
        message = None
        if self._settings.keep_message:
            message = _without(body, self._dropped) if self._dropped else body
        return DecodedRequest(parts, self._skipped, self._refused, message)

    def _drop(self, place: tuple[int, ...], error: DecodeError, spans: int = 1) -> None:
        """Refuse a malformed message, which is the first, the second or the third in a request."""
        names = zip(("resource_spans", "scope_spans", "spans"), place, strict=False)
        path = ".".join(f"{name}[{number}]" for name, number in names)
        self._refused.add("malformed", f"{path} is invalid: {error}", spans)
        self._dropped.add(place)

    def _decode(self, body: bytes) -> list[ResourceSpanRecords]:
        parts: list[ResourceSpanRecords] = []
        budget = FieldBudget(self._settings.max_fields)
        self._keys = [each for each in self._settings.weight if each.prefix in body]
        self._present = self._settings.inference_in(body)
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
    ) -> ResourceSpanRecords | None:
        """The spans of a resource; None without any."""
        self._check(raw_scopes)
        scopes: list[tuple[int, bytes, Sequence[bytes]]] = []
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
            scopes.append((place, raw, spans))
        if not scopes:
            return None
        check_fields(resource, RESOURCE, "a resource", budget)
        try:
            attributes = pairs(attributes_of(resource, _Resource))
            claim = resource_claim({name: scalar(value) for name, value in attributes})
        except DecodeError as error:
            self._drop((number,), error, sum(len(spans) for _, _, spans in scopes))
            return None
        reads = _Reads(
            self._settings.work_of(claim.service),
            self._settings.latencies_of(claim.service),
            self._settings.instructions_of(claim.service),
        )
        records = [
            self._scope((number, place), raw, spans, reads, budget) for place, raw, spans in scopes
        ]
        joined = SpanRecordColumns.joined(records)
        return ResourceSpanRecords(claim, joined) if joined else None

    def _scope(
        self,
        place: tuple[int, int],
        raw: bytes,
        spans: Sequence[bytes],
        reads: _Reads,
        budget: FieldBudget,
    ) -> SpanRecordColumns:
        """The spans of one scope; malformed ones are dropped, which takes a second pass."""
        for span in spans:
            if len(span) > MAX_FIELDS:
                check_fields(span, SPAN, "a span", budget)
        try:
            return self._usable(raw, spans, reads, budget)
        except DecodeError:
            pass
        found: list[SpanRecordColumns] = []
        for first in range(0, len(spans), _TOGETHER):
            some = spans[first : first + _TOGETHER]
            try:
                found.append(self._usable_of(some, reads, budget))
                continue
            except DecodeError:
                pass
            for number, span in enumerate(some, first):
                try:
                    found.append(self._usable_of([span], reads, budget))
                except DecodeError as error:
                    self._drop((*place, number), error)
        return SpanRecordColumns.joined(found) if found else SpanRecordColumns.of([])

    def _usable_of(
        self, spans: Sequence[bytes], reads: _Reads, budget: FieldBudget
    ) -> SpanRecordColumns:
        return self._usable(encode_message((2, span) for span in spans), spans, reads, budget)

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
        self, scope: bytes, spans: Sequence[bytes], reads: _Reads, budget: FieldBudget
    ) -> SpanRecordColumns:
        """The spans of one scope with usable ids and times; the others are refused."""
        # All spans of a scope at once take half the time of one by one.
        rows = [
            (
                each.trace_id,
                each.span_id,
                each.parent_span_id,
                each.name,
                each.kind,
                each.start,
                each.end,
            )
            for each in _ScopeSpanFields.FromString(scope).spans
        ]
        if not rows:
            return SpanRecordColumns.of([])
        columns = list(zip(*rows, strict=True))
        refused = _unusable(columns[0], columns[1], columns[5], columns[6])
        if refused:
            valid = [i not in refused for i in range(len(rows))]
            spans = list(compress(spans, valid))
            columns = list(zip(*compress(rows, valid), strict=True))
        records = self._records(columns, spans, reads, budget)
        for i, reason in sorted(refused.items()):
            self._skipped.append(self._position + i)
            self._refused.add(reason, _CAUSES[reason])
        self._position += len(rows)
        return records

    def _records(
        self,
        columns: Sequence[Sequence[Any]],
        spans: Sequence[bytes],
        reads: _Reads,
        budget: FieldBudget,
    ) -> SpanRecordColumns:
        """The records of ``spans``, with the ``columns`` of their own fields."""
        if not columns:
            return SpanRecordColumns.of([])
        traces, ids, parents, raw_names, kinds, starts, ends = columns
        printed = {name: printable(name, MAX_NAME) for name in set(raw_names)}
        names = [printed[name] for name in raw_names]
        (weights,) = self._weights.columns(spans, self._keys, 1, budget)
        reports = self._tokens(spans, kinds, budget)
        return SpanRecordColumns(
            traces,
            ids,
            _valid_parents(parents),
            names,
            starts,
            ends,
            weights,
            [each.tokens_in for each in reports],
            [each.tokens_out for each in reports],
            self._work(spans, names, reads.work, budget),
            [each.details for each in reports],
            self._latencies(spans, names, starts, reads.latencies, budget),
            self._instructions(spans, reads.instructions, budget),
            [each.role for each in reports],
        )

    def _tokens(
        self, spans: Sequence[bytes], kinds: Sequence[int], budget: FieldBudget
    ) -> Sequence[TokenReport]:
        """The tokens of each span, and the reports of requests to language models."""
        if not self._present:
            return [NO_REPORT] * len(spans)
        columns = self._reports.columns(spans, self._present, len(InferenceFigure), budget)
        return list(map(token_report, zip(*columns, strict=True), kinds))

    def _work(
        self,
        spans: Sequence[bytes],
        names: Sequence[str],
        work: Sequence[_WorkKey],
        budget: FieldBudget,
    ) -> list[float | None]:
        """The amount of work that each span reports."""
        amounts: list[float | None] = [None] * len(spans)
        left: Sequence[int] = range(len(spans))
        for (_, _, span), key in work:
            matching = [i for i in left if span in ("", names[i])]
            left = [i for i in left if span not in ("", names[i])]
            (found,) = self._amounts.columns([spans[i] for i in matching], [key], 1, budget)
            for i, amount in zip(matching, found, strict=True):
                amounts[i] = amount
        return amounts

    def _latencies(
        self,
        spans: Sequence[bytes],
        names: Sequence[str],
        starts: Sequence[int],
        latencies: Sequence[_LatencyKeys],
        budget: FieldBudget,
    ) -> list[RequestLatency | None]:
        """The latencies that each span reports."""
        found: list[RequestLatency | None] = [None] * len(spans)
        left: Sequence[int] = range(len(spans))
        for each in latencies:
            matching = [i for i in left if each.report.span == names[i]]
            left = [i for i in left if each.report.span != names[i]]
            raw = [spans[i] for i in matching]
            times = self._times.columns(raw, each.keys, 2, budget)
            for i, span, first, between in zip(matching, raw, *times, strict=True):
                events = _events(span, budget) if each.has_events else ()
                found[i] = each.report.latency(RequestLatency(first, between), starts[i], events)
        return found

    def _instructions(
        self, spans: Sequence[bytes], asked: InstructionKeys | None, budget: FieldBudget
    ) -> list[ReportedInstruction | None]:
        """The instruction of a pipeline that each span reports."""
        if asked is None:
            return [None] * len(spans)
        columns = self._values.columns(spans, asked.keys, len(asked.keys), budget)
        return [reported_instruction(values) for values in zip(*columns, strict=True)]


def _events(span: bytes, budget: FieldBudget) -> list[tuple[int, str]]:
    """Time and name of each event of a span, at most ``MAX_EVENTS`` of them."""
    events = _SpanEvents.FromString(span).events[:MAX_EVENTS]
    budget.spend(len(events))
    return [(each.time, printable(each.name, MAX_NAME)) for each in events]
