"""OTLP requests to send, and a sink to send them to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from wattspan.http.messages import HttpRequest, HttpResponse
from wattspan.http.sockets import Peer
from wattspan.ingest.export_request import ExportRequest, RequestedAttributes, WorkAttribute
from wattspan.ingest.otlp_http import OtlpHttpHandler
from wattspan.ingest.request_limits import ReceiverBusyError
from wattspan.ingest.trace_receiver import RejectedSpans, TraceReceiver
from wattspan.testing import ManualClock

PROTOBUF, JSON = "application/x-protobuf", "application/json"
TRACE, BEGIN = bytes(range(16)), 1_700_000_000 * 10**9

Value = str | int | float | bool


class KeptSink:
    """Stores received requests; the first ``busy`` ones get a retry after ``seconds``."""

    def __init__(self) -> None:
        self.deliveries: list[ExportRequest] = []
        self.refused: Counter[str] = Counter()
        self.busy, self.seconds = 0, 3

    def accept(self, delivery: ExportRequest) -> None:
        if self.busy:
            self.busy -= 1
            raise ReceiverBusyError(self.seconds)
        self.deliveries.append(delivery)

    def refuse(self, reason: str, spans: int = 1) -> None:
        self.refused[reason] += spans

    @property
    def count(self) -> int:
        return sum(delivery.count for delivery in self.deliveries)


def attribute(owner: Any, name: str, value: Value) -> None:
    pair = owner.attributes.add(key=name)
    match value:
        case bool():
            pair.value.bool_value = value
        case int():
            pair.value.int_value = value
        case float():
            pair.value.double_value = value
        case str():
            pair.value.string_value = value


def span(number: int = 1, **attributes: Value) -> Span:
    """A span; ``a__b`` is the attribute ``a.b``."""
    made = Span(
        trace_id=TRACE,
        span_id=number.to_bytes(8, "big"),
        name=f"work {number}",
        start_time_unix_nano=BEGIN + number,
        end_time_unix_nano=BEGIN + number + 1000,
    )
    for name, value in attributes.items():
        attribute(made, name.replace("__", "."), value)
    return made


def span_names(message: bytes | None) -> list[str]:
    """The names of all spans of a forwarded request in protobuf."""
    found = ExportTraceServiceRequest.FromString(message or b"")
    return [
        one.name
        for each in found.resource_spans
        for scope in each.scope_spans
        for one in scope.spans
    ]


def request(*spans: Span, resource: Mapping[str, Value] | None = None) -> ExportTraceServiceRequest:
    """A request of one resource and one scope."""
    made = ExportTraceServiceRequest()
    outer = made.resource_spans.add()
    for name, value in (resource or {}).items():
        attribute(outer.resource, name, value)
    outer.scope_spans.add().spans.extend(spans or [span()])
    return made


class Receiver:
    """A handler of OTLP/HTTP without a server around it."""

    def __init__(
        self, max_request: int = 1 << 20, work: Sequence[WorkAttribute] = (), **options: Any
    ) -> None:
        self.sink, self.clock, self.work = KeptSink(), ManualClock(), work
        names = {field.name for field in fields(RequestedAttributes)} & options.keys()
        asked = {name: options.pop(name) for name in names}
        self.traces = TraceReceiver(
            self.sink,
            self.clock,
            RequestedAttributes(work=lambda: self.work, **asked),
            max_request=max_request,
            **options,
        )
        self._handler = OtlpHttpHandler(self.traces)

    def take(self, body: bytes, peer: Peer, *, json: bool = False) -> RejectedSpans:
        """Decode and deliver a request, whatever its size, in this thread."""
        return self.traces.deliver(self.traces.decoder().decode(body, json=json), len(body), peer)

    def ask(
        self,
        body: bytes = b"",
        content_type: str = PROTOBUF,
        encoding: str = "",
        *,
        method: str = "POST",
        path: str = "/v1/traces",
        peer: Peer = Peer(pid=7, uid=0),  # noqa: B008 - a value
    ) -> HttpResponse:
        headers = {"content-type": content_type}
        if encoding:
            headers["content-encoding"] = encoding
        return asyncio.run(self._awaited(HttpRequest(method, path, {}, headers, body, peer)))

    async def _awaited(self, asked: HttpRequest) -> HttpResponse:
        return await self._handler(asked)
