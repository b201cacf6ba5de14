"""A gRPC server that stores received messages as on the wire and sends scripted responses."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events

_PREFIX = struct.Struct(">BI")


def failing(code: int, message: str = "", **headers: str) -> Told:
    """A trailers-only failure response."""
    return Told({"grpc-status": str(code), "grpc-message": message, **_dashed(headers)}, b"", None)


def saying(data: bytes, *, code: int = 0, **headers: str) -> Told:
    """``data``, frame and all, and how it went after it; ``a_b`` is the header ``a-b``."""
    return Told(_dashed(headers), data, {"grpc-status": str(code)})


def _dashed(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


@dataclass(frozen=True)
class Told:
    """An answer: without trailers the headers are all of it.

    ``early`` is one that comes before anything of the message is read, and nothing will be.
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    data: bytes = _PREFIX.pack(0, 0)
    trailers: Mapping[str, str] | None = field(default_factory=lambda: {"grpc-status": "0"})
    early: bool = False


@dataclass
class Call:
    """One call as it was on the wire."""

    headers: dict[str, str]
    data: bytes = b""

    @property
    def flag(self) -> int:
        return int(_PREFIX.unpack_from(self.data)[0])

    @property
    def message(self) -> bytes:
        length = _PREFIX.unpack_from(self.data)[1]
        message = self.data[_PREFIX.size :]
        assert len(message) == length
        return message


class WireServer:
    """One connection after the other. ``answers`` are one a call; after them all are taken.

    ``frames`` are the first frames of each connection, after the HTTP/2 preface.
    """

    def __init__(self, *answers: Told | Callable[[Call], Told], frames: bytes = b"") -> None:
        self.calls: list[Call] = []
        self._frames = frames
        self._answers = deque(answers)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.url = f"grpc://127.0.0.1:{self._listening.getsockname()[1]}"

    def __enter__(self) -> WireServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._listening, self._connection):
            with contextlib.suppress(OSError):
                if each is not None:
                    each.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()

    def _serve(self) -> None:
        while True:
            try:
                self._connection, _ = self._listening.accept()
            except OSError:
                return
            with self._connection, contextlib.suppress(OSError):
                self._speak(self._connection)

    def _speak(self, connection: socket.socket) -> None:
        config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        http2 = h2.connection.H2Connection(config)
        http2.initiate_connection()
        calls: dict[int, Call] = {}
        left: deque[tuple[int, bytes, Sequence[tuple[str, str]]]] = deque()
        connection.sendall(http2.data_to_send() + self._frames)
        while piece := connection.recv(1 << 16):
            for event in http2.receive_data(piece):
                match event:
                    case h2.events.RequestReceived(stream_id=int(stream)):
                        calls[stream] = Call(dict(event.headers or ()))
                        if self._answers and getattr(self._answers[0], "early", False):
                            self._answer(http2, stream, calls.pop(stream))
                            http2.reset_stream(stream, 0)
                    case h2.events.DataReceived(stream_id=int(stream)) if stream in calls:
                        calls[stream].data += event.data or b""
                        length = event.flow_controlled_length or 0
                        http2.acknowledge_received_data(length, stream)
                    case h2.events.StreamEnded(stream_id=int(stream)) if stream in calls:
                        left.append(self._answer(http2, stream, calls.pop(stream)))
                    case h2.events.StreamReset(stream_id=stream):
                        left = deque(each for each in left if each[0] != stream)
            self._send(http2, left)
            connection.sendall(http2.data_to_send())

    def _answer(
        self, http2: h2.connection.H2Connection, stream: int, call: Call
    ) -> tuple[int, bytes, Sequence[tuple[str, str]]]:
        self.calls.append(call)
        told = self._answers.popleft() if self._answers else Told()
        if callable(told):
            told = told(call)
        head = {":status": "200", "content-type": "application/grpc", **told.headers}
        http2.send_headers(stream, list(head.items()), end_stream=told.trailers is None)
        return stream, told.data, list((told.trailers or {}).items())

    @staticmethod
    def _send(
        http2: h2.connection.H2Connection,
        left: deque[tuple[int, bytes, Sequence[tuple[str, str]]]],
    ) -> None:
        """As much data as the client's flow-control windows permit."""
        while left:
            stream, data, trailers = left.popleft()
            while data and (room := http2.local_flow_control_window(stream)):
                size = min(room, http2.max_outbound_frame_size)
                http2.send_data(stream, data[:size])
                data = data[size:]
            if data:
                left.appendleft((stream, data, trailers))
                return
            if trailers:
                http2.send_headers(stream, trailers, end_stream=True)
