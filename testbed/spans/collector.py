"""A collector of spans for measurements: accepts OTLP/HTTP and stores the requested parts."""

from __future__ import annotations

import gzip
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from wattspan.emulation.control import Closeable


class Collector(Closeable):
    """Takes every span on a loopback port of its own; their attributes by span id, in hex."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        message = trace_service_pb2.ExportTraceServiceRequest
        self.spans: dict[str, dict[str, Any]] = {}
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                match self.headers.get("Content-Encoding"):
                    case "gzip":
                        body = gzip.decompress(body)
                    case "deflate":
                        body = zlib.decompress(body)
                for resource in message.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            spans[span.span_id.hex()] = {
                                one.key: getattr(one.value, one.value.WhichOneof("value") or "")
                                for one in span.attributes
                            }
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
