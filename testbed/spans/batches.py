"""Requests full of spans, made fast: one is encoded by protobuf, the rest is that one patched.

Run as a process it sends them: ``python testbed/spans/batches.py WHERE SECONDS [SPANS]``, where
WHERE is the path of a Unix socket or ``host:port``. It prints a line of JSON at its end.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
import time
import zlib
from typing import Any

SPANS = 512
SERVICE = "flood"
NAMES = ("GET /", "GET /cart", "POST /order", "chat", "embed", "query", "render", "auth")
_PREFIX = b"\xf0wsp"  # ids in the template, located by this pattern


class Batches:
    """Requests of ``count`` spans with eight attributes each, new ids and recent times."""

    def __init__(self, count: int = SPANS, *, pid: int | None = None, level: int = 1) -> None:
        self.count = count
        self._level = level
        self._body = bytearray(self._template(pid or os.getpid()))
        self._ids = [self._body.index(_PREFIX + i.to_bytes(4, "big")) for i in range(count)]
        # start and end are fixed64 fields 7 and 8, after tags 0x39 and 0x41
        self._times = [self._body.index(b"\x39", at + 8) + 1 for at in self._ids]
        self._number = int.from_bytes(os.urandom(3), "big") << 32

    def raw(self) -> bytes:
        """The next request, as protobuf."""
        body, number = self._body, self._number
        now = time.time_ns()
        for i, (span, times) in enumerate(zip(self._ids, self._times, strict=True)):
            body[span : span + 8] = (number + i).to_bytes(8, "big")
            start = now - 30_000_000 + i * 40_000
            body[times : times + 8] = start.to_bytes(8, "little")
            body[times + 9 : times + 17] = (start + 5_000_000).to_bytes(8, "little")
        self._number += self.count
        return bytes(body)

    def packed(self) -> bytes:
        """The next request, compressed."""
        packer = zlib.compressobj(self._level, wbits=31)
        return packer.compress(self.raw()) + packer.flush()

    def _template(self, pid: int) -> bytes:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        request = ExportTraceServiceRequest()
        resource = request.resource_spans.add()
        _attribute(resource.resource.attributes, "service.name", SERVICE)
        _attribute(resource.resource.attributes, "process.pid", pid)
        spans = resource.scope_spans.add().spans
        for i in range(self.count):
            span = spans.add()
            span.trace_id = b"\x11" * 16
            span.span_id = _PREFIX + i.to_bytes(4, "big")
            span.name = NAMES[i % len(NAMES)]
            span.kind = 2
            span.start_time_unix_nano = span.end_time_unix_nano = 1
            _attribute(span.attributes, "http.request.method", "GET")
            _attribute(span.attributes, "http.route", f"/items/{i % 7}")
            _attribute(span.attributes, "http.response.status_code", 200)
            _attribute(span.attributes, "server.address", "shop.example.com")
            _attribute(span.attributes, "server.port", 8080)
            _attribute(span.attributes, "user_agent.original", "Mozilla/5.0 (X11; Linux x86_64)")
            _attribute(span.attributes, "thread.id", 4242)
            _attribute(span.attributes, "network.protocol.version", "1.1")
        return request.SerializeToString()


def _attribute(attributes: Any, key: str, value: str | int) -> None:
    one = attributes.add()
    one.key = key
    if isinstance(value, int):
        one.value.int_value = value
    else:
        one.value.string_value = value


class Connection(http.client.HTTPConnection):
    """To a Unix socket, or to host:port."""

    def __init__(self, where: str) -> None:
        super().__init__("localhost" if "/" in where else where, timeout=60)
        self._where = where

    def connect(self) -> None:
        if "/" in self._where:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.connect(self._where)
        else:
            super().connect()

    def post(self, body: bytes) -> tuple[int, float]:
        """Status, and the seconds after which to come again, 0 if it does not say."""
        headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}
        self.request("POST", "/v1/traces", body, headers)
        answer = self.getresponse()
        answer.read()
        return answer.status, float(answer.headers.get("Retry-After", 0))


def flood(where: str, seconds: float, count: int) -> dict[str, float]:
    """Send at the rate that the agent accepts; retry after its Retry-After."""
    batches, connection = Batches(count), Connection(where)
    accepted = refused = 0
    began = time.monotonic()
    used = time.process_time()
    while time.monotonic() - began < seconds:
        body = batches.packed()
        while time.monotonic() - began < seconds + 10:
            status, again = connection.post(body)
            if status == 200:
                accepted += count
                break
            if status not in {429, 503}:
                raise RuntimeError(f"the agent answered {status}")
            refused += 1
            time.sleep(min(again, 0.05))  # an exporter would wait as requested
    lasted = time.monotonic() - began
    return {
        "spans": accepted,
        "seconds": lasted,
        "refused": refused,
        "sender_cpu": time.process_time() - used,
        "pid": os.getpid(),
    }


def main() -> None:
    where, seconds = sys.argv[1], float(sys.argv[2])
    count = int(sys.argv[3]) if len(sys.argv) > 3 else SPANS
    print(json.dumps(flood(where, seconds, count)), flush=True)
    sys.stdin.read()  # stay, so that the process is not considered gone before it is counted


if __name__ == "__main__":
    main()
