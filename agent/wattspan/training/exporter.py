"""A span exporter to the agent of this host, by OTLP/HTTP on the agent's Unix socket.

The socket needs no port, no token and no TLS, and the kernel proves the sender's identity to the
agent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from http.client import OK, HTTPException

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from wattspan.sdk import OTLP_HTTP_SOCKET, OTLP_TRACES_PATH, run_directories
from wattspan.util.unix_sockets import unix_http_connection

_TIMEOUT = 2.0  # seconds for one request; an agent on the same host answers in milliseconds
_HEADERS = {"content-type": "application/x-protobuf", "connection": "close"}

Encoder = Callable[[Sequence[ReadableSpan]], bytes]


def otlp_encoder() -> Encoder:
    """OpenTelemetry's own encoder. ImportError with the extra that installs it."""
    try:
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    except ImportError as error:
        raise ImportError(
            "Spans of a training run need the package opentelemetry-exporter-otlp-proto-common, "
            f'which cannot be imported ({error}); run `pip install "wattspan[training]"`.'
        ) from error
    return lambda spans: encode_spans(spans).SerializeToString()


class AgentSpanExporter(SpanExporter):
    """Sends spans to the first agent that answers. Spans that no agent takes are dropped.

    Raises nothing and logs nothing: a training run goes on without an agent.
    """

    def __init__(
        self,
        encode: Encoder,
        directories: Callable[[], Iterable[str]] = run_directories,
    ) -> None:
        self._encode = encode
        self._directories = directories

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        body = self._encode(spans)
        sent = any(_post(f"{each}/{OTLP_HTTP_SOCKET}", body) for each in self._directories())
        return SpanExportResult.SUCCESS if sent else SpanExportResult.FAILURE


def _post(socket_path: str, body: bytes) -> bool:
    """True if the agent at ``socket_path`` has taken the request."""
    connection = unix_http_connection(socket_path, _TIMEOUT)
    try:
        connection.request("POST", OTLP_TRACES_PATH, body, _HEADERS)
        return connection.getresponse().status == OK
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
