"""From the bytes of an ExportTraceServiceRequest to a delivery.

The protocol's own part, whatever it came by. What is wrong with a whole request is an error that
the transports put into their own words; what is wrong with a single span costs that span.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from wattspan.http.limits import FairLock
from wattspan.http.messages import Peer
from wattspan.ports import Clock
from wattspan.spanfeed import wire
from wattspan.spanfeed.attributes import (
    Finder,
    Key,
    as_amount,
    as_count,
    as_text,
    attributes_of,
    key,
    pairs,
    printable,
)
from wattspan.spanfeed.delivery import Claim, Counted, Delivery, Part, SpanSink, Told
from wattspan.spanfeed.errors import MalformedError, too_many, too_many_fields

NAME = 200
"""Characters of a service's or a span's name that are kept."""

_ID = 128  # characters of a container's id or of a time
_LARGEST_PID = 1 << 22
_NO_TRACE, _NO_SPAN = bytes(16), bytes(8)
_BYTES_PER_SPAN = 256
_BYTES_PER_FIELD = 16
_MANY, _MANY_FIELDS = 8192, 1 << 17
_MAKE: Any = tuple.__new__  # takes a quarter of Told()'s own time

_THREAD, _WEIGHT, _TOKENS_IN, _TOKENS_OUT = range(_PLACES := 4)
_KEYS = (
    key(_THREAD, "thread.id"),
    key(_TOKENS_IN, "gen_ai.usage.input_tokens"),
    key(_TOKENS_IN, "gen_ai.usage.prompt_tokens"),  # as it was called until 2024
    key(_TOKENS_OUT, "gen_ai.usage.output_tokens"),
    key(_TOKENS_OUT, "gen_ai.usage.completion_tokens"),
)


class Refused(NamedTuple):
    """What of an accepted request was not taken, and why, in words; "" for nothing."""

    spans: int = 0
    why: str = ""


class Intake:
    """Decodes requests and hands them to a sink. Used in the receivers' thread only.

    ``weight`` names the span attribute that is a span's claim beside others, "" for none.
    ``work`` says which spans count their work, and in which attribute; the first that matches
    a span is asked. ``keep`` has the request handed on as well, to be forwarded.
    """

    def __init__(
        self,
        sink: SpanSink,
        clock: Clock,
        *,
        max_request: int,
        weight: str = "",
        work: Collection[Counted] = (),
        keep: bool = False,
    ) -> None:
        self.sink, self._clock, self._keep = sink, clock, keep
        self.max_request = int(max_request)
        self._most = max(_MANY, max_request // _BYTES_PER_SPAN)
        self._fields = max(_MANY_FIELDS, max_request // _BYTES_PER_FIELD)
        self._weight, self._work = weight, work
        self._decoder = self.decoder()
        self.turn = FairLock()  # of large requests, one of which is decoded at a time

    def decoder(self) -> Decoder:
        """One more, for another thread."""
        return Decoder(self._weight, self._most, self._work, fields=self._fields)

    def take_json(self, body: bytes, peer: Peer) -> Refused:
        """Take a request in OTLP's JSON, as ``take`` does."""
        return self.deliver(self.read(body, json=True), peer)

    def take(self, body: bytes, peer: Peer) -> Refused:
        """Take a request. MalformedError, TooLargeError, or the sink's BusyError."""
        return self.deliver(self.read(body), peer)

    def read(self, body: bytes, *, json: bool = False, decoder: Decoder | None = None) -> Read:
        """What is in a request; with a ``decoder`` of its own, in any thread."""
        if json:
            from wattspan.spanfeed.json import to_protobuf

            body = to_protobuf(body, self._most, self._fields)
        try:
            return Read(body, (decoder or self._decoder).decode(body))
        except DecodeError as error:
            raise MalformedError(f"the body is no ExportTraceServiceRequest: {error}") from None

    def deliver(self, read: Read, peer: Peer) -> Refused:
        """Hand on what was read. The sink's BusyError."""
        body, decoded = read
        if decoded.parts:
            self.sink.accept(
                Delivery(
                    peer=peer,
                    received=self._clock.monotonic(),
                    size=len(body),
                    parts=tuple(decoded.parts),
                    message=body if self._keep else None,
                    skipped=frozenset(decoded.skipped),
                )
            )
        if not decoded.skipped:
            return Refused()
        count = len(decoded.skipped)
        self.sink.refuse("invalid_id", count)
        return Refused(
            count,
            f"{count} spans were refused: a trace id has 16 bytes and a span id has 8, "
            "and neither is all zeros.",
        )


class _Work(NamedTuple):
    counted: Counted
    key: Key


class Decoded(NamedTuple):
    parts: list[Part]
    skipped: list[int]  # flat positions of spans with unusable ids


class Read(NamedTuple):
    """A request in protobuf, and what is in it."""

    message: bytes
    decoded: Decoded


class Decoder:
    """Reads requests of at most ``most`` spans and ``fields`` fields; the rest is Intake's.

    ``fields`` bounds what the decoder itself looks at, and so the CPU time of a request.
    """

    def __init__(
        self, weight: str, most: int, work: Collection[Counted] = (), *, fields: int
    ) -> None:
        self._keys = (*_KEYS, key(_WEIGHT, weight)) if weight else _KEYS
        self._work = tuple(_Work(each, key(0, each.attribute)) for each in work)
        self._most, self._fields = most, fields
        self._finder, self._amounts = Finder(as_count), Finder(as_amount)

    def decode(self, body: bytes) -> Decoded:
        """The spans of a request. DecodeError or TooLargeError."""
        decoded = Decoded([], [])
        budget = wire.Budget(self._fields)
        keys = [each for each in self._keys if each.begin in body]
        # Slices: the parser's own copy of a message is released as soon as its parts are read.
        resources = self._of(body, wire.Request, budget).resource_spans[:]
        seen, at = self._counted(0, resources), 0
        for each in resources:
            outer = self._of(each, wire.ResourceSpans, budget)
            resource, scopes = outer.resource, outer.scope_spans[:]
            del outer
            seen = self._counted(seen, scopes)
            if not scopes:
                continue
            _check_fields(resource, wire.RESOURCE, "a resource", budget)
            claim = _claim(resource)
            own = [each for each in self._work if each.counted.service in ("", claim.service)]
            told: list[Told] = []
            for raw in scopes:
                inner = self._of(raw, wire.ScopeSpans, budget)
                scope, spans = inner.scope, inner.spans[:]
                del inner
                _check_fields(scope, wire.SCOPE, "a scope", budget)
                seen = self._counted(seen, spans)
                told += self._told(spans, keys, own, at, decoded.skipped, budget)
                at += len(spans)
            if told:
                decoded.parts.append(Part(claim, told))
        return decoded

    def _of(self, raw: bytes, kind: Any, budget: wire.Budget) -> Any:
        """A message of some kind."""
        if wire.count_fields(raw, wire.FLAT, self._most, budget) > self._most:
            raise too_many(self._most)
        return kind.FromString(raw)

    def _counted(self, seen: int, more: Sequence[bytes]) -> int:
        """How much there is to go through by now: of spans, and of what they are wrapped in."""
        seen += len(more)
        if seen > self._most:
            raise too_many(self._most)
        return seen

    def _told(
        self,
        spans: Sequence[bytes],
        keys: Sequence[Key],
        work: Sequence[_Work],
        at: int,
        skipped: list[int],
        budget: wire.Budget,
    ) -> list[Told]:
        """The spans of one scope, the first of which has the flat position ``at``."""
        parse = wire.Span.FromString
        usable: list[bytes] = []
        read: list[tuple[bytes, bytes, bytes, str, int, int]] = []
        names: dict[bytes, str] = {}
        for position, raw in enumerate(spans, at):
            if len(raw) > wire.MOST_FIELDS:
                _check_fields(raw, wire.SPAN, "a span", budget)
            span = parse(raw)
            trace, own, parent = span.trace_id, span.span_id, span.parent_span_id
            if len(trace) != 16 or len(own) != 8 or trace == _NO_TRACE or own == _NO_SPAN:
                skipped.append(position)
                continue
            usable.append(raw)
            name = span.name
            if name not in names:
                names[name] = printable(name, NAME)
            if len(parent) != 8 or parent == _NO_SPAN:
                parent = b""
            read.append((trace, own, parent, names[name], span.start, span.end))
        counts = self._finder.numbers(usable, keys, _PLACES, budget)
        shown = [each[3] for each in read]
        done = self._done(usable, shown, work, budget) if work else [None] * len(read)
        return [
            _MAKE(Told, (*each, thread or 0, weight, tokens_in or 0, tokens_out or 0, amount))
            for each, thread, weight, tokens_in, tokens_out, amount in zip(
                read, *counts, done, strict=True
            )
        ]

    def _done(
        self,
        spans: Sequence[bytes],
        names: Sequence[str],
        work: Sequence[_Work],
        budget: wire.Budget,
    ) -> list[float | None]:
        """How much work each of some spans says it did."""
        done: list[float | None] = [None] * len(spans)
        left: Sequence[int] = range(len(spans))
        for counted, its in work:
            asked = [i for i in left if counted.span in ("", names[i])]
            left = [i for i in left if counted.span not in ("", names[i])]
            (amounts,) = self._amounts.numbers([spans[i] for i in asked], [its], 1, budget)
            for i, amount in zip(asked, amounts, strict=True):
                done[i] = amount
        return done


def _check_fields(raw: bytes, layer: Any, what: str, budget: wire.Budget) -> None:
    """TooLargeError for a message of too many fields, whatever their nesting."""
    if wire.count_fields(raw, layer, wire.MOST_FIELDS, budget) > wire.MOST_FIELDS:
        raise too_many_fields(what, wire.MOST_FIELDS)


def _claim(raw: bytes) -> Claim:
    """What a resource says of its process."""
    told = dict(pairs(attributes_of(raw, wire.Resource)))
    pid = as_count(told.get(b"process.pid", b""))
    return Claim(
        service=as_text(told.get(b"service.name", b""), NAME),
        pid=pid if pid is not None and 0 < pid <= _LARGEST_PID else None,
        created=as_text(told.get(b"process.creation.time", b""), _ID),
        container=as_text(told.get(b"container.id", b""), _ID),
    )
