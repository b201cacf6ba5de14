"""One accepted trace request as span records, and the attributes that are read of its spans."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from wattspan.config.settings import SPAN_PRESETS, SpanFigure
from wattspan.http.sockets import Peer
from wattspan.spans.values import RequestLatency, SpanColumns

MAX_NAME = 200
"""Characters of the name of a service or span that are kept."""


class ResourceClaim(NamedTuple):
    """The claims of a resource about its process and its language model; "" and None for none."""

    service: str = ""
    pid: int | None = None
    created: str = ""  # process.creation.time, ISO 8601
    container: str = ""  # container.id
    model: str = ""  # gen_ai.request.model: of requests whose spans name no model
    host: str = ""  # host.id


class WorkAttribute(NamedTuple):
    """The spans that report work, and the attribute with the amount; "" matches all."""

    attribute: str
    service: str = ""
    span: str = ""


class LatencyReport(NamedTuple):
    """The spans of requests that report latencies, in attributes or events; "" for none.

    An event gives its time since the start of the span as ``first``, and the mean time between
    events of the name as ``between``.
    """

    service: str
    span: str
    first_attribute: str = ""
    first_event: str = ""
    between_attribute: str = ""
    between_event: str = ""

    def of_events(self, start: int, events: Sequence[tuple[int, str]]) -> RequestLatency:
        """The latencies in the events of a span, each with its time and name."""
        times = [at for at, name in events if name == self.first_event and at >= start]
        first = min(times) - start if self.first_event and times else None
        times = [at for at, name in events if name == self.between_event]
        between = None
        if self.between_event and len(times) > 1:
            between = (max(times) - min(times)) // (len(times) - 1)
        return RequestLatency(first, between)

    def latency(
        self, attributes: RequestLatency, start: int, events: Sequence[tuple[int, str]]
    ) -> RequestLatency:
        """The latencies in attributes and events; an attribute counts before an event."""
        of_events = self.of_events(start, events)
        first = of_events.first if attributes.first is None else attributes.first
        between = of_events.between if attributes.between is None else attributes.between
        return RequestLatency(first, between)


class InstructionReport(NamedTuple):
    """The attributes by which spans of a service report instructions; "" matches every service.

    ``replica`` is "" if the service is one pipeline.
    """

    service: str
    stage: str
    microbatch: str
    instruction: str
    replica: str = ""


WorkAttributes = Callable[[], Sequence[WorkAttribute]]
"""Returns the spans that report work now; the same object until they change. Thread-safe."""


@dataclass(frozen=True, slots=True)
class RequestedAttributes:
    """The attributes of spans that are read; all others are skipped.

    ``weight`` is the attribute with the weight of a span, "" for none. ``work``, ``latencies`` and
    ``instructions`` name the spans with these columns; of each the first entry that matches a span
    counts. ``presets`` are the engines whose reports of requests are recognised, and ``names``
    further names of tokens and other figures.
    """

    weight: str = ""
    work: WorkAttributes = tuple
    latencies: Sequence[LatencyReport] = ()
    instructions: Sequence[InstructionReport] = ()
    presets: Collection[str] = SPAN_PRESETS
    names: Mapping[SpanFigure, Iterable[str]] = field(default_factory=dict)


NOTHING_REQUESTED = RequestedAttributes()
"""Only what every span has, and tokens."""


class ResourceSpans(NamedTuple):
    """The spans of one resource, in the order of the request."""

    claim: ResourceClaim
    spans: SpanColumns


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """One accepted request.

    ``message`` is the request as an ExportTraceServiceRequest in protobuf bytes where it is to be
    forwarded, else None. It has the spans of ``parts`` in the same order, and in addition the
    spans with invalid ids or times, whose flat positions are ``skipped``.
    """

    peer: Peer
    received: int  # monotonic nanoseconds
    size: int  # bytes, after decompression
    parts: tuple[ResourceSpans, ...]
    message: bytes | None = None
    skipped: frozenset[int] = frozenset()

    @property
    def count(self) -> int:
        return sum(len(part.spans) for part in self.parts)


class SpanSink(Protocol):
    """Accepts requests in the thread of the receivers; never blocks."""

    def accept(self, delivery: ExportRequest) -> None:
        """Accept a request, or raise ReceiverBusyError. The loss of accepted spans is counted."""
        ...

    def refuse(self, reason: str, spans: int = 1) -> None:
        """Count spans that a receiver rejected: ``invalid_id``, ``malformed``, ..."""
        ...
