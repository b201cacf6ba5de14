"""A collector for tests: takes OTLP over HTTP and gRPC, and fails as scripted.

``script`` lists the responses to the next requests, one each; later requests are accepted.
``taken`` has the accepted requests in order, parsed, ``logs`` those with log records, ``metrics``
those with metrics; ``seen`` has every completely read request.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import socketserver
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from grpclib.const import Cardinality, Handler, Status
from grpclib.encoding.base import StatusDetailsCodecBase
from grpclib.encoding.proto import ProtoCodec
from grpclib.server import Server
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from testbed.certificates import Pair
from testbed.waiting import eventually

PROTOBUF = "application/x-protobuf"


# ----------------------------------------------------------------------- scripted failures


@dataclass(frozen=True)
class Reply:
    """An answer; ``takes`` says whether the collector has the spans nonetheless."""

    status: int = 200
    body: bytes = b""
    content_type: str = PROTOBUF
    headers: dict[str, str] = field(default_factory=dict)
    takes: bool = False


def rejecting(spans: int, why: str = "bad span") -> Reply:
    """Takes the request but for some of its spans."""
    response = ExportTraceServiceResponse()
    response.partial_success.rejected_spans = spans
    response.partial_success.error_message = why
    return Reply(200, response.SerializeToString(), takes=True)


@dataclass(frozen=True)
class Silence:
    """Never answers, until it is closed."""

    takes: bool = False


@dataclass(frozen=True)
class Break:
    """Resets the connection: in the middle of the request, or in place of the answer."""

    when: str = "answer"  # "request", "answer", "in answer"
    takes: bool = False


@dataclass(frozen=True)
class Garbage:
    """Answers with something that is not HTTP."""

    takes: bool = False


@dataclass(frozen=True)
class CutShort:
    """Answers no more than this, and closes the connection as if it were all."""

    answer: bytes
    takes: bool = False


@dataclass(frozen=True)
class EarlyRefusal:
    """Refuse a request after its headers, without reading the body, and close the connection."""

    status: int = 413


@dataclass(frozen=True)
class GrpcStatus:
    """Fails with a gRPC status, by number; ``details`` are those of google.rpc.Status, in bytes."""

    code: int
    message: str = ""
    details: bytes | None = None
    takes: bool = False


Fault = Reply | Silence | Break | Garbage | CutShort | EarlyRefusal | GrpcStatus


@dataclass
class Seen:
    """One request that was read whole."""

    message: ExportTraceServiceRequest | ExportLogsServiceRequest | ExportMetricsServiceRequest
    headers: dict[str, str]
    path: str
    size: int  # on the wire
    arrived: float = field(default_factory=time.monotonic)  # seconds


# ------------------------------------------------------------------------------- records


class Memory:
    """Requests that a collector received and accepted, for both protocols."""

    def __init__(self) -> None:
        self._script: deque[Fault | None] = deque()
        self.seen: list[Seen] = []
        self.taken: list[ExportTraceServiceRequest] = []
        self.logs: list[ExportLogsServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.attempts = 0
        self.released = threading.Event()

    def script(self, *faults: Fault | None) -> None:
        """Responses to the next requests; None accepts one."""
        self._script.extend(faults)

    def next_fault(self) -> Fault | None:
        self.attempts += 1
        return self._script.popleft() if self._script else None

    def saw(self, seen: Seen, fault: Fault | None) -> None:
        self.seen.append(seen)
        if fault is None or getattr(fault, "takes", False):
            if isinstance(seen.message, ExportLogsServiceRequest):
                self.logs.append(seen.message)
            elif isinstance(seen.message, ExportMetricsServiceRequest):
                self.metrics.append(seen.message)
            else:
                self.taken.append(seen.message)

    @property
    def records(self) -> list[LogRecord]:
        """Every log record that was taken, in order."""
        return [
            record
            for message in list(self.logs)
            for resource in message.resource_logs
            for scope in resource.scope_logs
            for record in scope.log_records
        ]

    @property
    def spans(self) -> list[Span]:
        """Every span that was taken, in order."""
        return [
            span
            for message in list(self.taken)
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def wait_for(self, spans: int) -> list[Span]:
        """The spans, once there are so many."""
        eventually(lambda: len(self.spans) >= spans, f"{spans} spans at the collector")
        return self.spans


# ---------------------------------------------------------------------------------------- HTTP


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        memory = self.server.memory
        fault = memory.next_fault()
        size = int(self.headers.get("content-length", "0"))
        if isinstance(fault, EarlyRefusal):
            self._reply(Reply(fault.status))
            self.close_connection = True
            # unread data would turn the close into a reset
            self.connection.shutdown(socket.SHUT_WR)
            memory.released.wait(0.2)
            return
        if isinstance(fault, Break) and fault.when == "request":
            self.rfile.read(size // 20)  # the rest exceeds the buffers of sockets
            self._reset()
            return
        body = self.rfile.read(size)
        if len(body) < size:
            self.close_connection = True
            return
        plain = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
        headers = {name.lower(): value for name, value in self.headers.items()}
        kinds = {"logs": ExportLogsServiceRequest, "metrics": ExportMetricsServiceRequest}
        kind = kinds.get(self.path.rpartition("/")[2], ExportTraceServiceRequest)
        message = kind.FromString(plain)
        memory.saw(Seen(message, headers, self.path, size), fault)
        self._answer(fault)

    def _answer(self, fault: Fault | None) -> None:
        match fault:
            case None:
                self._reply(Reply())
            case Reply():
                self._reply(fault)
            case Silence():
                self.server.memory.released.wait()
                self.close_connection = True
            case Break(when="in answer"):
                self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
                self._reset()
            case Break():
                self._reset()
            case Garbage():
                self.wfile.write(b"\x00\xff no protocol at all\r\n\r\n")
                self.close_connection = True
            case CutShort(answer):
                self.wfile.write(answer)
                self.close_connection = True
            case _:
                raise AssertionError(fault)

    def _reply(self, reply: Reply) -> None:
        self.send_response(reply.status)
        self.send_header("content-type", reply.content_type)
        self.send_header("content-length", str(len(reply.body)))
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply.body)

    def _reset(self) -> None:
        """End with a reset rather than politely."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()

    def address_string(self) -> str:
        return "client"

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = False
    block_on_close = True
    allow_reuse_address = True
    memory: Memory

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._connections: list[socket.socket] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.append(request)
        super().process_request(request, client_address)

    def hang_up(self) -> None:
        """Close every connection, as a restart does."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._connections.clear()

    def shutdown_request(self, request: Any) -> None:
        # A socket set to reset on close must not be shut down first.
        if not request._closed:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_WR)
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the test closes the client


class _UnixServer(_Server):
    address_family = socket.AF_UNIX


class HttpCollector(Memory):
    """OTLP/HTTP on a loopback port, or on a Unix socket, with TLS or without."""

    def __init__(
        self,
        *,
        port: int = 0,
        path: Path | None = None,
        certificate: Pair | None = None,
        clients: Path | None = None,
    ) -> None:
        """``clients`` is the authority whose clients alone are let in."""
        super().__init__()
        self._server: _Server
        if path is not None:
            self._server = _UnixServer(str(path), _Handler)
            self.url = f"unix://{path}"
        else:
            self._server = _Server(("127.0.0.1", port), _Handler)
            self.port = int(self._server.server_address[1])
            scheme = "https" if certificate else "http"
            self.url = f"{scheme}://127.0.0.1:{self.port}"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate.certificate, certificate.key)
            if clients is not None:
                context.load_verify_locations(clients)
                context.verify_mode = ssl.CERT_REQUIRED
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._server.memory = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )

    def __enter__(self) -> HttpCollector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.hang_up()
        self._server.server_close()

    @property
    def connections(self) -> int:
        """Connections so far, since the last ``hang_up``."""
        return len(self._server._connections)

    def hang_up(self) -> None:
        """Close all connections, which are idle as far as a client can know."""
        self._server.hang_up()


# ---------------------------------------------------------------------------------------- gRPC


_LAST_TURNS = 8


class GrpcCollector(Memory):
    """OTLP/gRPC on a loopback port, by grpclib in a thread of its own."""

    def __init__(
        self,
        *,
        certificate: Pair | None = None,
        path: Path | None = None,
        clients: Path | None = None,
    ) -> None:
        super().__init__()
        self._certificate, self._path, self._clients = certificate, path, clients
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._over: asyncio.Event
        self._server: _GrpcServer
        self.url = ""

    def __enter__(self) -> GrpcCollector:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def hang_up(self) -> None:
        """Close all connections, which are idle as far as a client can know."""
        closed = threading.Event()

        def close() -> None:
            for transport in self._server.transports:
                transport.close()
            self._loop.call_soon(closed.set)  # after the sockets, which close in this turn's wake

        self._loop.call_soon_threadsafe(close)
        assert closed.wait(20)

    def __mapping__(self) -> dict[str, Any]:
        return {
            "/opentelemetry.proto.collector.trace.v1.TraceService/Export": Handler(
                self._export,
                Cardinality.UNARY_UNARY,
                ExportTraceServiceRequest,
                ExportTraceServiceResponse,
            ),
            "/opentelemetry.proto.collector.logs.v1.LogsService/Export": Handler(
                self._export,
                Cardinality.UNARY_UNARY,
                ExportLogsServiceRequest,
                ExportLogsServiceResponse,
            ),
            "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export": Handler(
                self._export,
                Cardinality.UNARY_UNARY,
                ExportMetricsServiceRequest,
                ExportMetricsServiceResponse,
            ),
        }

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        context = None
        if self._certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._certificate.certificate, self._certificate.key)
            context.set_alpn_protocols(["h2"])
            if self._clients is not None:
                context.load_verify_locations(self._clients)
                context.verify_mode = ssl.CERT_REQUIRED
        server = self._server = _GrpcServer(
            [self], codec=ProtoCodec(), status_details_codec=_AsTheyAre()
        )
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(str(self._path))
            await server.start(sock=listening, ssl=context)
            self.url = f"grpc+unix://{self._path}"
        else:
            listening = socket.create_server(("127.0.0.1", 0))
            await server.start(sock=listening, ssl=context)
            self.port = int(listening.getsockname()[1])
            self.url = f"grpc{'s' if context else ''}://127.0.0.1:{self.port}"
        self._ready.set()
        await self._over.wait()
        # A closed server would leave a connection open that was accepted just now.
        self._loop.remove_reader(listening)
        await self._turns(lambda: None)
        server.close()
        await server.wait_closed()
        # grpclib leaves the connections open that its clients have not closed.
        await self._turns(self._abort)

    async def _turns(self, each: Callable[[], None]) -> None:
        """Some turns of the loop, with ``each`` at the start of every one."""
        for _ in range(_LAST_TURNS):
            each()
            turned = self._loop.create_future()
            self._loop.call_soon(turned.set_result, None)
            await turned

    def _abort(self) -> None:
        for transport in self._server.transports:
            transport.abort()

    async def _export(self, stream: Any) -> None:
        message = await stream.recv_message()
        fault = self.next_fault()
        headers = {name: str(value) for name, value in stream.metadata.items()}
        self.saw(Seen(message, headers, "", message.ByteSize()), fault)
        match fault:
            case None:
                await stream.send_message(_answer_to(message)())
            case Reply(status=200):
                await stream.send_message(_answer_to(message).FromString(fault.body))
            case GrpcStatus():
                await stream.send_trailing_metadata(
                    status=Status(fault.code),
                    status_message=fault.message,
                    status_details=fault.details,
                )
            case Silence():
                await self._over.wait()
            case Break():
                stream._stream._transport.abort()
            case _:
                raise AssertionError(fault)


def _answer_to(message: object) -> Any:
    match message:
        case ExportLogsServiceRequest():
            return ExportLogsServiceResponse
        case ExportMetricsServiceRequest():
            return ExportMetricsServiceResponse
        case _:
            return ExportTraceServiceResponse


class _GrpcServer(Server):  # type: ignore[misc]
    """Remembers its connections."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.transports: list[asyncio.Transport] = []

    def _protocol_factory(self) -> Any:
        protocol = super()._protocol_factory()
        made = protocol.connection_made

        def connection_made(transport: asyncio.Transport) -> None:
            self.transports.append(transport)
            made(transport)

        protocol.connection_made = connection_made
        return protocol


class _AsTheyAre(StatusDetailsCodecBase):  # type: ignore[misc]
    """Details that are bytes already."""

    def encode(self, status: object, message: object, details: bytes) -> bytes:
        return details

    def decode(self, status: object, message: object, data: bytes) -> bytes:
        return data
