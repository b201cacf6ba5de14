"""Spans of a training run: recorded without the SDK's machinery, and sent to the agent.

A span of the SDK takes 0.1 ms and more of CPU time once the training has evicted the caches: it
asks a sampler, and makes locks, bounded lists and copies. Nothing of it is needed for spans with
three attributes that go to the agent of this host by OTLP/HTTP on its Unix socket. The socket needs
no port, no token and no TLS, and the kernel proves the sender's identity to the agent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.client import OK  # now: no thread may import while the program forks
from time import time_ns
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace.status import Status, StatusCode
from opentelemetry.util.types import Attributes

from wattspan import otel
from wattspan.sdk import OTLP_HTTP_SOCKET, OTLP_TRACES_PATH, run_directories
from wattspan.util.text import pip_command
from wattspan.util.unix_sockets import unix_request

_TIMEOUT = 2.0  # seconds for one request; an agent on the same host answers in milliseconds
_ENCODER = "opentelemetry-exporter-otlp-proto-common"
_HEADERS = {"content-type": "application/x-protobuf"}

Encoder = Callable[[Sequence[ReadableSpan]], bytes]


def otlp_encoder() -> Encoder:
    """OpenTelemetry's own encoder. ImportError with the command that installs it."""
    try:
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    except ImportError as error:
        raise ImportError(
            f"Spans of a training run need the package {_ENCODER}, "
            f"which cannot be imported ({error}); run {pip_command(_ENCODER)}."
        ) from error
    return lambda spans: encode_spans(spans).SerializeToString()


class AgentSpanExporter(SpanExporter):
    """Sends spans to the first agent that answers. Spans that no agent takes are dropped.

    Raises nothing and logs nothing: a training run goes on without an agent.
    """

    def __init__(
        self, encode: Encoder, directories: Callable[[], Iterable[str]] = run_directories
    ) -> None:
        self._encode = encode
        self._directories = directories

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        body = self._encode(spans)
        sent = any(_post(f"{each}/{OTLP_HTTP_SOCKET}", body) for each in self._directories())
        return SpanExportResult.SUCCESS if sent else SpanExportResult.FAILURE


def _post(socket_path: str, body: bytes) -> bool:
    """True if the agent at ``socket_path`` has taken the request."""
    try:
        status, _ = unix_request(
            socket_path, "POST", OTLP_TRACES_PATH, body, _HEADERS, patience=_TIMEOUT
        )
    except OSError:
        return False
    return status == OK


# ------------------------------------------------------------------------------------- light spans


SCOPE = "wattspan.training"

MAX_ATTRIBUTES = 128
"""Attributes of one span, those of the application included; the SDK's default."""

_SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope(SCOPE)


class UnseededIdGenerator(IdGenerator):
    """Ids from the kernel instead of Python's ``random``, which trainers seed.

    The ranks of a job have the same seed, and would give different spans the same ids. The
    random numbers of the training remain as they are without spans.
    """

    def generate_span_id(self) -> int:
        while not (number := int.from_bytes(os.urandom(8))):  # zero is no id
            pass
        return number

    def generate_trace_id(self) -> int:
        while not (number := int.from_bytes(os.urandom(16))):
            pass
        return number

    def is_trace_id_random(self) -> bool:
        return True


class LightSpan(trace.Span):
    """An open span of a ``LightTracer``. Its events and exceptions are not recorded.

    ``context`` and ``parent`` are as in spans of the SDK.
    """

    __slots__ = ("_attributes", "_name", "_start", "_status", "_tracer", "context", "parent")

    def __init__(
        self,
        tracer: LightTracer,
        name: str,
        context: trace.SpanContext,
        parent: trace.SpanContext | None,
    ) -> None:
        self._tracer: LightTracer | None = tracer
        self._name, self.context, self.parent = name, context, parent
        self._attributes: dict[str, Any] = {}
        self._status = Status(StatusCode.UNSET)
        self._start = time_ns()

    def get_span_context(self) -> trace.SpanContext:
        return self.context

    def is_recording(self) -> bool:
        return self._tracer is not None

    def update_name(self, name: str) -> None:
        self._name = name

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes; beyond ``MAX_ATTRIBUTES`` the oldest ones are dropped."""
        found = self._attributes
        found |= attributes
        while len(found) > MAX_ATTRIBUTES:
            del found[next(iter(found))]

    def set_attribute(self, key: str, value: Any) -> None:
        self.set_attributes({key: value})

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        self._status = status if isinstance(status, Status) else Status(status, description)

    def add_event(
        self, name: str, attributes: Attributes = None, timestamp: int | None = None
    ) -> None:
        """Not recorded."""

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        """Not recorded."""

    def end(self, end_time: int | None = None) -> None:
        """End the span now, or at this Unix time in nanoseconds. Idempotent."""
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            ended = ReadableSpan(
                self._name,
                self.context,
                self.parent,
                tracer.resource,
                self._attributes,
                status=self._status,
                start_time=self._start,
                end_time=end_time or time_ns(),
                instrumentation_scope=_SCOPE,
            )
            tracer.export(self, ended)


class LightTracer:
    """Starts spans that go to the agent of this host through ``exporting``.

    ``ring`` announces their starts and ends. The resource of ``provider`` is theirs.
    """

    def __init__(
        self, provider: TracerProvider, exporting: BatchSpanProcessor, ring: otel.SpanProcessor
    ) -> None:
        self.resource, self._exporting = provider.resource, exporting
        self._ring: Any = ring  # which reads the ids of a span only
        self._ids = UnseededIdGenerator()

    def start_span(self, name: str, context: Context | None = None) -> LightSpan:
        parent: trace.SpanContext | None = trace.get_current_span(context).get_span_context()
        if parent is not None and parent.is_valid:
            trace_id = parent.trace_id
        else:
            parent, trace_id = None, self._ids.generate_trace_id()
        span_id = self._ids.generate_span_id()
        span = LightSpan(self, name, trace.SpanContext(trace_id, span_id, False, _SAMPLED), parent)
        self._ring.on_start(span, context)
        return span

    def export(self, span: LightSpan, ended: ReadableSpan) -> None:
        """Send a span that has ended."""
        self._ring.record_end(span)
        self._exporting.on_end(ended)
