"""Deliveries, energies and transports for tests of forwarding."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from wattspan.clock import SystemClock
from wattspan.http.sockets import Peer
from wattspan.ingest.export_request import ExportRequest
from wattspan.model import HwType, Microjoules
from wattspan.otlp.destination import parse_destination
from wattspan.otlp.http_transport import open_transport
from wattspan.otlp.queue import AsyncSpool
from wattspan.otlp.spool import Spool, SpooledRequest
from wattspan.otlp.transport import ExportResult, ExportStatus, Transport
from wattspan.spans.values import IntervalEnergy, Outcome, Span, SpanEnergy

MILLISECOND = 10**6
TAKEN = ExportResult(ExportStatus.TAKEN)


def request(*names: str, service: str = "shop") -> ExportTraceServiceRequest:
    """One request with a span of each name."""
    message = ExportTraceServiceRequest()
    resource = message.resource_spans.add()
    attribute = resource.resource.attributes.add()
    attribute.key, attribute.value.string_value = "service.name", service
    scope = resource.scope_spans.add()
    scope.scope.name = "test"
    for number, name in enumerate(names):
        scope.spans.add(
            name=name,
            trace_id=bytes([7]) * 16,
            span_id=(number + 1).to_bytes(8, "big"),
            start_time_unix_nano=10**18,
            end_time_unix_nano=10**18 + MILLISECOND,
        )
    return message


def delivery(*names: str) -> ExportRequest:
    message = request(*names)
    return ExportRequest(Peer(), 0, message.ByteSize(), (), message.SerializeToString())


def joules(
    exclusive: dict[HwType, int],
    inclusive: dict[HwType, int] | None = None,
    uncertainty: dict[HwType, int] | None = None,
    *,
    outcome: Outcome = Outcome.JOINED,
    covered: int = MILLISECOND,
) -> SpanEnergy:
    """Energy of a span of one millisecond in microjoules."""
    span = Span(bytes(16), bytes(8), b"", "shop", "span", 0, MILLISECOND)
    own = {kind: Microjoules(energy) for kind, energy in exclusive.items()}
    whole = {k: Microjoules(v) for k, v in (inclusive or exclusive).items()}
    doubt = {k: Microjoules(v) for k, v in (uncertainty or dict.fromkeys(whole, 1)).items()}
    return SpanEnergy(span, own, IntervalEnergy(whole, doubt, covered), outcome)


def names_in(bodies: Iterable[bytes]) -> list[str]:
    """The names of the spans of requests in wire format, in order."""
    return [span.name for body in bodies for span in spans_in(body)]


def spans_in(body: bytes) -> list[OtlpSpan]:
    message = ExportTraceServiceRequest.FromString(body)
    return [
        span
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


class ScriptedTransport:
    """A collector of answers given in advance; after them, all are taken."""

    def __init__(self, *answers: ExportResult | Callable[[bytes], ExportResult]) -> None:
        self.answers = deque(answers)
        self.sent: list[bytes] = []
        self.taken: list[bytes] = []
        self.aborted = self.closed = False

    def send(self, body: bytes) -> ExportResult:
        self.sent.append(body)
        answer = self.answers.popleft() if self.answers else TAKEN
        if callable(answer):
            answer = answer(body)
        if answer.verdict is ExportStatus.TAKEN:
            self.taken.append(body)
        return answer

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True


@contextlib.contextmanager
def transport_to(
    url: str, headers: dict[str, str] | None = None, **options: Any
) -> Iterator[Transport]:
    """The transport of an address, with the ``options`` of a CollectorTransport."""
    transport = open_transport(
        parse_destination(url), headers or {}, SystemClock(), "test", **options
    )
    with contextlib.closing(transport):
        yield transport


class HangingSpool(Spool):
    """The disk responds unless it hangs, which happens in a write. The content remains readable."""

    def __init__(self, folder: Path, limit: int, log: Callable[[str], None]) -> None:
        super().__init__(folder, limit, log)
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Semaphore(0)
        self.writes = 0

    def keep(self, body: bytes, spans: int, settled: int = 0) -> SpooledRequest | None:
        self.writes += 1
        if not self.answers.is_set():
            self.asked.release()
            assert self.answers.wait(60)
        return super().keep(body, spans, settled)

    def hang(self) -> None:
        """Starting with the next write."""
        self.answers.clear()

    def hangs(self) -> None:
        """Return as soon as a write hangs."""
        assert self.asked.acquire(timeout=60)


def kill(disk: AsyncSpool) -> None:
    """End the spooling process after all writes; data in the kernel is lost."""
    disk._writer.close(60)
    disk._spool._lock.release()
    for segment in disk._spool._segments:
        segment.close()


def no_energy(count: int) -> Sequence[None]:
    return [None] * count
