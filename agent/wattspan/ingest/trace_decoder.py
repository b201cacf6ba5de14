"""Protobuf trace requests to span records, decoded no deeper than energy needs.

Decoding the eight attributes of a typical span takes three times as long as all else of it, and
nearly none of them is needed. An encoder writes an attribute as tag and length of its field, then
the key with tag and length, then the value. The decoder therefore searches a span for the bytes
of a key with its length, and decodes only the attributes of spans that contain them. A match
counts only where it begins an attribute of the span itself, because a text value, such as a
prompt to a model, may contain the same bytes. Other encodings, which protobuf permits, are
decoded completely.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import compress
from typing import Any, Generic, NamedTuple, TypeVar

from google.protobuf.message import DecodeError

from wattspan.config.settings import SPAN_PRESETS, SpanFigure
from wattspan.ingest.export_request import (
    LARGE_REQUEST_REMEDY,
    MAX_NAME,
    InstructionReport,
    LatencyReport,
    MalformedRequestError,
    RefusedSpans,
    ReportedInstruction,
    RequestLatency,
    RequestTooLargeError,
    ResourceClaim,
    ResourceSpanRecords,
    SpanRecordColumns,
    WorkAttribute,
    WorkAttributes,
    too_many_fields,
    too_many_spans,
)
from wattspan.ingest.inference_attributes import (
    NO_REPORT,
    Scalar,
    TokenReport,
    as_nanoseconds,
    read_figure,
    token_report,
)
from wattspan.ingest.token_attributes import MARKS, InferenceFigure, inference_attributes
from wattspan.util.protobuf import encode_message, length_delimited, message_class, serialize

MAX_FIELDS = 1 << 17
"""Fields of one span, resource or scope, at any depth."""

MAX_ATTRIBUTES = 1024
"""Attributes of one span or resource that are searched."""

MAX_EVENTS = 4096
"""Events of one span that are searched."""

_MAX_ID = 128  # characters of a container id or of a time
_LARGEST_PID = 1 << 22
_LARGEST = (1 << 63) - 1
_NO_TRACE, _NO_SPAN = bytes(16), bytes(8)
_DECIMAL = re.compile(rb"-?[0-9]{1,18}(?:\.[0-9]{1,18})?")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")

_Request, _ResourceSpans = message_class("FlatRequest"), message_class("FlatResourceSpans")
_ScopeSpans, _ScopeSpanFields = message_class("ScopeSpans"), message_class("ScopeSpanFields")
_SpanAttributes, _Resource = message_class("SpanAttributes"), message_class("Resource")
_SpanEvents = message_class("SpanEvents")
_KeyValue, _AnyValue = message_class("KeyValue"), message_class("AnyValue")

_INSTRUCTION_KINDS = {
    **dict.fromkeys(("forward", "fwd", "f"), "forward"),
    **dict.fromkeys(("backward", "bwd", "b"), "backward"),
}


class AttributeKey(NamedTuple):
    """A searched attribute: its name, and the bytes with which it begins on the wire.

    The attributes of one ``column`` are alternatives, of which the first present one counts.
    """

    column: int
    name: bytes
    prefix: bytes

    @classmethod
    def of(cls, column: int, name: str) -> AttributeKey:
        raw = name.encode()
        return cls(column, raw, length_delimited(1, raw))


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
            AttributeKey.of(each.column, each.name)
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
        for key in found if self._unseen else ():
            self.note_seen(key.name)
        return found

    def note_seen(self, name: bytes) -> None:
        """Note that a request has the attribute ``name``."""
        self._unseen.discard(name.decode())

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


# ------------------------------------------------------------------------------------- limits


class FieldBudget:
    """The fields of one request that the decoder may still inspect."""

    def __init__(self, fields: int) -> None:
        self._limit = self._left = fields

    def spend(self, fields: int) -> None:
        """RequestTooLargeError once the budget is spent."""
        self._left -= fields
        if self._left < 0:
            raise RequestTooLargeError(
                f"a request has at most {self._limit} fields and attributes; {LARGE_REQUEST_REMEDY}"
            )


_LONGEST_VARINT, _LARGEST_VARINT = 10, (1 << 64) - 1
_VARINT, _FIXED64, _BYTES, _GROUP, _END_GROUP, _FIXED32 = range(6)  # wire types
_WIDTHS = {_FIXED64: 8, _FIXED32: 4, _GROUP: 0, _END_GROUP: 0}

_Layer = Mapping[int, str]  # the fields of a message that are messages, and their types
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


def count_fields(message: bytes, layer: _Layer, limit: int, budget: FieldBudget) -> int:
    """The number of fields of a message, and of the messages in it that ``layer`` names.

    The count ends at the first field beyond ``limit``. A message too short for so many fields
    (a field takes at least two bytes) is not read and counts 0. A malformed message ends the
    count; the parser rejects it.
    """
    if len(message) <= 2 * limit:
        return 0
    count = 0
    pending = [(0, len(message), layer)]
    while pending and count <= limit:
        at, end, layer = pending.pop()
        try:
            while at < end and count <= limit:
                count += 1
                # Nearly all numbers have one or two bytes, and a call takes as long as a field.
                tag, at = (byte, at + 1) if (byte := message[at]) < 128 else _varint(message, at)
                kind = tag & 7
                if kind == _BYTES:
                    if (byte := message[at]) < 128:
                        length, at = byte, at + 1
                    elif (above := message[at + 1]) < 128:
                        length, at = byte & 127 | above << 7, at + 2
                    else:
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
    """The number at ``at``, and the position of the next field.

    IndexError where the message is truncated, OverflowError beyond 10 bytes.
    """
    byte = message[at]
    if byte < 128:
        return byte, at + 1
    value = byte & 127
    for place in range(1, _LONGEST_VARINT):
        byte = message[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value & _LARGEST_VARINT, at + place + 1  # the parser drops further bits, too
    raise OverflowError("a varint has at most 10 bytes")


def _check_fields(raw: bytes, layer: _Layer, subject: str, budget: FieldBudget) -> None:
    """RequestTooLargeError for a message of too many fields at any depth."""
    if count_fields(raw, layer, MAX_FIELDS, budget) > MAX_FIELDS:
        raise too_many_fields(subject, MAX_FIELDS)


# --------------------------------------------------------------------------- attribute values


def _scalar(value: bytes) -> Scalar:
    """An AnyValue message as a scalar; None if it is malformed."""
    try:
        decoded = _AnyValue.FromString(value)
    except DecodeError:
        return None
    for field in ("text", "real", "whole"):
        if decoded.HasField(field):
            scalar: Scalar = getattr(decoded, field)
            return scalar
    return None


def as_count(value: Scalar) -> int | None:
    """A value as a non-negative number; text counts if it is digits."""
    if isinstance(value, bytes):
        value = int(value) if value.isdigit() and len(value) < 20 else None
    if value is None:
        return None
    return round(value) if 0 <= value <= _LARGEST else None  # None for NaN


def as_decimal(value: Scalar) -> float | None:
    """A value as a number of any sign, to nine decimals; integers stay exact integers."""
    if isinstance(value, bytes):
        if not _DECIMAL.fullmatch(value):
            return None
        value = float(value) if b"." in value else int(value)
    if value is None or isinstance(value, int):
        return value
    return round(value, 9) if -_LARGEST <= value <= _LARGEST else None  # None for NaN


def reported_instruction(values: Sequence[Scalar]) -> ReportedInstruction | None:
    """The instruction in stage, micro-batch, kind and, if asked for, the replica.

    None if one is missing or invalid.
    """
    stage, microbatch, kind, *replicas = values
    if not isinstance(kind, bytes):
        return None
    found = _INSTRUCTION_KINDS.get(printable(kind, MAX_NAME).lower())
    numbers = as_count(stage), as_count(microbatch)
    if found is None or numbers[0] is None or numbers[1] is None:
        return None
    replica = _replica_name(replicas[0]) if replicas else ""
    return None if replica is None else ReportedInstruction(numbers[0], numbers[1], found, replica)


def _replica_name(value: Scalar) -> str | None:
    """The name in a text or an integer; None for other values and for an empty name."""
    if isinstance(value, bytes):
        return printable(value, MAX_NAME) or None
    return str(value) if isinstance(value, int) else None


def reported(values: Sequence[Scalar], kind: int) -> TokenReport:
    """The report in the values of all columns of a span of this OTLP ``kind``."""
    model = values[InferenceFigure.MODEL]
    name = printable(model, MAX_NAME) if isinstance(model, bytes) else ""
    return token_report(values, kind, name)


def printable(raw: bytes, limit: int) -> str:
    """UTF-8 as text without control characters, of at most ``limit`` characters."""
    return _printable(raw[: 4 * limit], limit)  # truncated first: the cache is bounded in bytes


@lru_cache(maxsize=2048)
def _printable(raw: bytes, limit: int) -> str:
    text = raw.decode("utf-8", "replace")[:limit]
    return text if text.isprintable() else _CONTROL.sub("", text)


def resource_claim(attributes: Mapping[bytes, Scalar]) -> ResourceClaim:
    """The claims about a process in the attributes of its resource."""
    pid = as_count(attributes.get(b"process.pid"))

    def text(name: bytes, limit: int) -> str:
        value = attributes.get(name)
        return printable(value, limit) if isinstance(value, bytes) else ""

    return ResourceClaim(
        service=text(b"service.name", MAX_NAME),
        pid=pid if pid is not None and 0 < pid <= _LARGEST_PID else None,
        created=text(b"process.creation.time", _MAX_ID),
        container=text(b"container.id", _MAX_ID),
        model=text(b"gen_ai.request.model", MAX_NAME),
    )


CAUSES = {
    "invalid_id": "a trace id has 16 bytes and a span id has 8, and neither is all zeros.",
    "invalid_time": "a span has a start and an end in Unix nanoseconds, and neither is 0.",
}
"""The sentence for the sender, by reason of refusal."""


def unusable(
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


def valid_parents(parents: Sequence[bytes]) -> Sequence[bytes]:
    """The ids of parents; b"" for invalid ones."""
    if {*map(len, parents)} <= {0, 8} and _NO_SPAN not in parents:
        return parents
    return [each if len(each) == 8 and each != _NO_SPAN else b"" for each in parents]


# -------------------------------------------------------------------------------- the decoder

Number = TypeVar("Number")
_MANY_KEYS = 32  # real requests have names of one or two conventions
_TOGETHER = 64  # spans of a scope with a malformed one that are tried at once
_CACHE_ENTRIES, _CACHEABLE_SIZE = 4096, 128  # attributes with known numbers, and their bytes


def _pairs(attributes: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Name and value of each attribute."""
    for raw in attributes:
        pair = _KeyValue.FromString(raw)
        yield pair.key, pair.value


def _attributes_of(raw: bytes, kind: Any) -> Sequence[bytes]:
    """The searched attributes of a span or a resource."""
    attributes: Sequence[bytes] = kind.FromString(raw).attributes
    return attributes if len(attributes) <= MAX_ATTRIBUTES else attributes[:MAX_ATTRIBUTES]


class _AttributeFinder(Generic[Number]):
    """Finds numbers among the attributes of spans; remembers those of recent attributes.

    ``read`` has the number of a column and a value. A name belongs to one column of a finder.
    """

    def __init__(self, read: Callable[[int, Scalar], Number | None]) -> None:
        self._read = read
        self._numbers: dict[bytes, Number | None] = {}  # by attribute

    def columns(
        self,
        spans: Sequence[bytes],
        keys: Sequence[AttributeKey],
        count: int,
        budget: FieldBudget,
    ) -> list[list[Number | None]]:
        """``count`` columns with the number of each span, None where it has none."""
        columns: list[list[Number | None]] = [[None] * len(spans) for _ in range(count)]
        numbers = self._numbers
        if not keys:
            return columns
        if len(keys) > _MANY_KEYS:
            self._read_all(spans, keys, columns, budget)
            return columns
        for i, span in enumerate(spans):
            attributes: Sequence[bytes] | None = None  # decoded at most once a span
            values: dict[bytes, bytes] = {}
            for column_number, name, prefix in keys:
                at, column = span.find(prefix), columns[column_number]
                if at < 1 or column[i] is not None:
                    continue
                if attributes is None:
                    attributes = _attributes_of(span, _SpanAttributes)
                    budget.spend(len(attributes))
                attribute = span[at : at + span[at - 1]]
                if attribute not in attributes:
                    attribute = b""
                try:
                    column[i] = numbers[attribute]
                except KeyError:
                    pair = _short_pair(attribute)
                    if pair is None or pair[0] != name:
                        column[i] = self._search(attributes, name, values, budget, column_number)
                    else:
                        column[i] = self._remember(attribute, pair[1], column_number)
        return columns

    def _read_all(
        self,
        spans: Sequence[bytes],
        keys: Sequence[AttributeKey],
        columns: Sequence[list[Number | None]],
        budget: FieldBudget,
    ) -> None:
        """Read every attribute: so many searches of each span would take longer."""
        order = {key.name: at for at, key in enumerate(keys)}
        for i, span in enumerate(spans):
            attributes = _attributes_of(span, _SpanAttributes)
            budget.spend(len(attributes))
            values = dict(reversed([*_pairs(attributes)]))
            for at in sorted(order[name] for name in values.keys() & order.keys()):
                column = keys[at].column
                if columns[column][i] is None:
                    columns[column][i] = self._read(column, _scalar(values[keys[at].name]))

    def _search(
        self,
        attributes: Sequence[bytes],
        name: bytes,
        values: dict[bytes, bytes],
        budget: FieldBudget,
        column: int,
    ) -> Number | None:
        """The number of the first attribute ``name``; ``values`` are filled once a span."""
        if not values:
            budget.spend(len(attributes))
            values.update(reversed([*_pairs(attributes)]))
        value = values.get(name)
        return None if value is None else self._read(column, _scalar(value))

    def _remember(self, attribute: bytes, value: bytes, column: int) -> Number | None:
        number = self._read(column, _scalar(value))
        if len(self._numbers) >= _CACHE_ENTRIES:
            self._numbers.clear()
        self._numbers[attribute] = number
        return number


def _short_pair(attribute: bytes) -> tuple[bytes, bytes] | None:
    """Name and value of an attribute; None if it is malformed or long."""
    if not 0 < len(attribute) <= _CACHEABLE_SIZE:
        return None
    try:
        return next(_pairs([attribute]))
    except DecodeError:
        return None


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
        self._weights: _AttributeFinder[int] = _AttributeFinder(lambda _, value: as_count(value))
        self._amounts: _AttributeFinder[float] = _AttributeFinder(
            lambda _, value: as_decimal(value)
        )
        self._reports: _AttributeFinder[Scalar] = _AttributeFinder(read_figure)
        self._values: _AttributeFinder[Scalar] = _AttributeFinder(lambda _, value: value)
        self._times: _AttributeFinder[int] = _AttributeFinder(
            lambda _, value: as_nanoseconds(value)
        )

    def decode(self, body: bytes) -> DecodedRequest:
        """The spans of a request; MalformedRequestError or RequestTooLargeError.

        A malformed message inside the request costs its own spans only; without any readable span
        the request is malformed.
        """
        self._refused = RefusedSpans()
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
            _check_fields(scope, SCOPE, "a scope", budget)
            self._check(spans)
            self._spans += len(spans)
            scopes.append((place, raw, spans))
        if not scopes:
            return None
        _check_fields(resource, RESOURCE, "a resource", budget)
        try:
            attributes = _pairs(_attributes_of(resource, _Resource))
            claim = resource_claim({name: _scalar(value) for name, value in attributes})
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
                _check_fields(span, SPAN, "a span", budget)
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
        refused = unusable(columns[0], columns[1], columns[5], columns[6])
        if refused:
            valid = [i not in refused for i in range(len(rows))]
            spans = list(compress(spans, valid))
            columns = list(zip(*compress(rows, valid), strict=True))
        records = self._records(columns, spans, reads, budget)
        for i, reason in sorted(refused.items()):
            self._skipped.append(self._position + i)
            self._refused.add(reason, CAUSES[reason])
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
            valid_parents(parents),
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
        return list(map(reported, zip(*columns, strict=True), kinds))

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
