"""Connections: HTTP/1.1 with its requests, gRPC's HTTP/2, and scrape headers."""

from __future__ import annotations

import asyncio
import re
import types
from collections.abc import Generator
from typing import Any

import h2.config
import h2.connection
from testbed.constant_history import Asked
from testbed.http2 import EXPORT, framed
from testbed.otlp import KeptSink, request, span

from fuzz.registry import target
from fuzz.supply import Supply
from wattspan.http.access_policy import OPEN_ACCESS, is_local_host_header
from wattspan.http.connection import HttpConnection
from wattspan.http.limits import ServerCapacity, ServerLimits
from wattspan.http.messages import HttpRequest, HttpResponse
from wattspan.ingest.otlp_grpc import OtlpGrpcConnection
from wattspan.ingest.otlp_http import OtlpHttpHandler
from wattspan.ingest.trace_receiver import TraceReceiver
from wattspan.testing import ManualClock
from wattspan_exporters.prometheus.exporter import accepts_gzip, choose_format

_LIMITS = ServerLimits(head=2048, body=8192, bodies=16384, connections=4)


class Wire(asyncio.Transport):
    """A transport whose other end is in the target's hands."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 4318)})
        self.written = bytearray()
        self.closed = False

    def write(self, data: Any) -> None:
        if not self.closed:  # a real one takes no notice either
            self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


@types.coroutine
def _turn() -> Generator[None, None, None]:
    """One turn of the loop."""
    yield


async def _told(protocol: asyncio.Protocol, pieces: list[bytes]) -> bytes:
    """Response to ``pieces`` that arrive in order, followed by the end."""
    wire, troubles = Wire(), list[object]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: troubles.append(context))
    protocol.connection_made(wire)
    for piece in pieces:
        if wire.closed:
            break
        protocol.data_received(piece)
        for _ in range(8):
            await _turn()
    if not wire.closed:
        protocol.eof_received()
        for _ in range(12):
            await _turn()
    wire.closed = True
    protocol.connection_lost(None)
    for _ in range(4):
        await _turn()
    assert not troubles, troubles
    return bytes(wire.written)


def _pieces(data: bytes) -> list[bytes]:
    """``data`` cut where its first byte says: parsers that wait for more meet every boundary."""
    every = data[0] if data else 0
    rest = data[1:]
    if not every:
        return [rest]
    return [rest[at : at + every] for at in range(0, len(rest), every)]


_GET = (
    b"\0GET /v1/energy?start=-2s&pid=self&family=1 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\0GET /v1/snapshot HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\7GET /v1/energy?start=mono:5&end=2026-01-31T12:00:00Z&wait=1s HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\0GET /v1/energy?of=devices&start=-2s&hw_id=package-0,dram-0&timeline=1&wait=0s HTTP/1.1\r\n"
    b"Host: a\r\n\r\n",
    b"\0GET /v1/status HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"\0POST /v1/watch?pid=100&started=5000 HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n",
    b"\0POST /v1/traces HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    b'Transfer-Encoding: chunked\r\n\r\n13\r\n{"resourceSpans":[]\r\n1\r\n}\r\n0\r\n\r\n',
    b"\0POST /v1/traces HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Encoding: gzip\r\n"
    b"Content-Type: application/x-protobuf\r\nContent-Length: 3\r\n\r\nabc",
)


@target(
    "http",
    whose="any client",
    holds="every answer is HTTP, no handler fails, and all memory of bodies is released",
    watched=("wattspan.http", "wattspan.api", "wattspan.ingest", "wattspan.model.settings", "h11"),
    samples=_GET,
    words=(b"\r\n\r\n", b"Content-Length: ", b"Transfer-Encoding: chunked", b"mono:", b"%00"),
)
def http(data: bytes) -> None:
    asked, clock, log = Asked(), ManualClock(), list[str]()
    otlp = OtlpHttpHandler(TraceReceiver(KeptSink(), clock, max_request=4096))

    async def handler(asks: HttpRequest) -> HttpResponse:
        is_spans = asks.path.startswith("/v1/traces")
        return await (otlp(asks) if is_spans else asked.service(asks))

    room = ServerCapacity(_LIMITS, clock)
    date = "Thu, 01 Jan 1970 00:00:00 GMT"
    connection = HttpConnection(handler, room, lambda: date, log.append)
    answers = asyncio.run(_told(connection, _pieces(data)))
    assert not log, log
    assert not room.connections
    assert room._bytes.idle, "something of a body is still held"
    assert not answers or re.match(rb"HTTP/1\.1 [1-5][0-9][0-9] ", answers), answers[:80]
    assert b"HTTP/1.1 500" not in answers


def _preface(*frames: bytes) -> bytes:
    client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    client.initiate_connection()
    client.send_headers(
        1,
        [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", EXPORT),
            (":authority", "here"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ],
    )
    for frame in frames:
        client.send_data(1, frame)
    client.end_stream(1)
    return bytes(client.data_to_send())


_BODY = request(span(1)).SerializeToString()
_CALL = _preface(framed(_BODY))


@target(
    "grpc",
    whose="any client",
    holds="no exception leaves the connection, no call fails the agent, all resources are released",
    watched=("wattspan.ingest", "wattspan.http", "h2"),
    samples=(
        b"\0\0" + _CALL,
        b"\0\1" + framed(_BODY),
        b"\3\1" + framed(b"\x1f\x8b", compressed=1),
        b"\0\2\0\0\0\4\0\0\0\0\0\0\0\4\1\0\0\0\0",
    ),
    words=(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0\0\0\4\1", b"\0\0\4\3\0\0\0\0\1", b"\x88\x84"),
)
def grpc(data: bytes) -> None:
    supply = Supply(data)
    every, kind = supply.byte(), supply.byte() % 3
    body = supply.rest()
    if kind == 1:  # a proper call, whose message is the input
        stream = _preface(*([body[:8192]] if body else []))
    elif kind == 2:  # proper beginnings, and frames of the input's own
        head = _preface()
        stream = head[: len(head) - 9] + body
    else:
        stream = body
    clock, log, sink = ManualClock(), list[str](), KeptSink()
    room = ServerCapacity(_LIMITS, clock)
    pieces = _pieces(bytes([every]) + stream)

    async def conversation() -> None:
        await _told(
            OtlpGrpcConnection(
                TraceReceiver(sink, clock, max_request=4096), log.append, OPEN_ACCESS, room
            ),
            pieces,
        )

    asyncio.run(conversation())
    assert not log, log
    assert not room.connections
    assert room._bytes.idle, "something of a body is still held"


@target(
    "scrape-headers",
    whose="any scraper",
    holds="a format, a yes or no; a name of this machine is an address or a loopback name",
    watched=("wattspan_exporters.prometheus.exporter", "wattspan.http.access_policy"),
    samples=(
        b"application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*",
        b"gzip;q=0, *",
        b"localhost:9949",
        b"[::1]:9949",
        b"metrics.example.org",
    ),
    words=(b";q=", b"nan", b"inf", b"1e9", b"[", b"]", b"%", b".localhost"),
)
def scrape_headers(data: bytes) -> None:
    text = data.decode("latin-1")
    assert choose_format(text) is not None
    assert accepts_gzip(text) in (True, False)
    if is_local_host_header(text) and text:
        assert re.search(r"local|loopback|[0-9a-fA-F:.]", text)
