"""A gRPC client on h2 that writes arbitrary data into HTTP/2 streams."""

from __future__ import annotations

import base64
import socket
import struct
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote

import h2.config
import h2.connection
import h2.events

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def framed(message: bytes, *, compressed: int = 0, length: int | None = None) -> bytes:
    """A message as gRPC frames it."""
    return struct.pack(">BI", compressed, len(message) if length is None else length) + message


@dataclass
class Answer:
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    over: bool = False

    @property
    def status(self) -> int | None:
        told = self.headers.get("grpc-status")
        return None if told is None else int(told)

    @property
    def message(self) -> str:
        return unquote(self.headers.get("grpc-message", ""))

    def binary(self, name: str) -> bytes:
        told = self.headers[name]
        return base64.b64decode(told + "=" * (-len(told) % 4))


class Http2Client:
    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._answers: defaultdict[int, Answer] = defaultdict(Answer)
        self.h2.initiate_connection()
        self.flush()

    def flush(self) -> None:
        self.socket.sendall(self.h2.data_to_send())

    def open(self, *, end: bool = False, path: str = EXPORT, **headers: str) -> int:
        """Begin a call; ``a_b`` is the header ``a-b``, an empty one is left out."""
        stream = self.h2.get_next_available_stream_id()
        told = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "here",
            "te": "trailers",
            "content-type": "application/grpc",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        self.h2.send_headers(stream, [(k, v) for k, v in told.items() if v], end_stream=end)
        self.flush()
        return stream

    def send(self, stream: int, data: bytes, *, end: bool = True) -> None:
        """As fast as the server's windows permit, until the server responds."""
        while data and not self._over(stream):
            window = self.h2.local_flow_control_window(stream)
            room = min(window, self.h2.max_outbound_frame_size, len(data))
            if not room:
                self._receive()
                continue
            self.h2.send_data(stream, data[:room])
            data = data[room:]
            self.flush()
        if end and not self._over(stream):
            self.h2.end_stream(stream)
            self.flush()

    def answer(self, stream: int) -> Answer:
        """Response data of one stream, until the stream or the connection ends."""
        while not self._over(stream) and self._receive():
            pass
        return self._answers[stream]

    def _over(self, stream: int) -> bool:
        return self._answers[stream].over

    def _receive(self) -> bool:
        """Read received data; False at the end of the connection."""
        piece = self.socket.recv(1 << 16)
        for event in self.h2.receive_data(piece) if piece else ():
            answer = self._answers[getattr(event, "stream_id", None) or 0]
            match event:
                case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                    answer.headers.update(event.headers)
                case h2.events.DataReceived():
                    answer.body += event.data
                case h2.events.StreamEnded() | h2.events.StreamReset():
                    answer.over = True
        if piece:
            self.flush()
        return bool(piece)

    def call(self, data: bytes, **headers: str) -> Answer:
        stream = self.open(**headers)
        self.send(stream, data)
        return self.answer(stream)


@contextmanager
def http2(connection: socket.socket) -> Iterator[Http2Client]:
    with closing(connection):
        yield Http2Client(connection)
