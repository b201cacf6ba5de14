"""Unary gRPC calls on h2's HTTP/2: an extra, imported only where the address requires it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection

from wattspan.util.encoding import FRAME_PREFIX, GrpcStatus

_OF_HTTP = {
    "400": GrpcStatus.INTERNAL,
    "401": GrpcStatus.UNAUTHENTICATED,
    "403": GrpcStatus.PERMISSION_DENIED,
    "404": GrpcStatus.UNIMPLEMENTED,
    **dict.fromkeys(("429", "502", "503", "504"), GrpcStatus.UNAVAILABLE),
}
"""The gRPC status of an HTTP status, where a proxy without gRPC answers."""

_STATUSES = {str(status.value): status for status in GrpcStatus}
_MAY_BE_ENCODING = {GrpcStatus.UNIMPLEMENTED, GrpcStatus.UNKNOWN, GrpcStatus.INTERNAL}

_Headers = Mapping[str, str]


class ResponseTooLargeError(Exception):
    """The announced response exceeds the limit."""


@dataclass(frozen=True, slots=True)
class GrpcReply:
    """The received parts of a reply.

    ``flag`` and ``message`` are as on the wire. A failure usually has headers only.
    """

    headers: _Headers = field(default_factory=dict)
    flag: int = 0
    message: bytes = b""
    trailers: _Headers = field(default_factory=dict)

    @property
    def headers_say_all(self) -> bool:
        """True if the headers are the complete reply."""
        return "grpc-status" in self.headers or not _is_grpc(self.headers)

    @property
    def status(self) -> tuple[GrpcStatus, str]:
        """The gRPC status code and its message; UNKNOWN for a reply that is not gRPC."""
        unknown = GrpcStatus.UNKNOWN
        http = self.headers.get(":status", "200")
        if http != "200":
            return _OF_HTTP.get(http, unknown), f"HTTP {http}"
        if not _is_grpc(self.headers):
            return unknown, f"its content is {self.headers.get('content-type', 'of no type')}"
        code = self._final.get("grpc-status", "")
        if code not in _STATUSES:
            return unknown, "it has no gRPC status"
        return _STATUSES[code], unquote(self._final.get("grpc-message", ""), errors="replace")

    @property
    def failed(self) -> bool:
        """True if the received parts report a failure of the call."""
        has_status = "grpc-status" in self._final or (self.headers and self.headers_say_all)
        return bool(has_status) and self.status[0] != 0

    @property
    def blames_encoding(self) -> bool:
        """True if the failure may be that of decompressing the request."""
        accepted = {**self.headers, **self.trailers}.get("grpc-accept-encoding", "")
        knows_gzip = "gzip" in (name.strip() for name in accepted.split(","))
        return self.failed and not knows_gzip and self.status[0] in _MAY_BE_ENCODING

    @property
    def _final(self) -> _Headers:
        """The headers or trailers with the status."""
        return self.headers if "grpc-status" in self.headers else self.trailers


def _is_grpc(headers: _Headers) -> bool:
    is_ok = headers.get(":status", "200") == "200"
    return is_ok and headers.get("content-type", "").startswith("application/grpc")


class GrpcConnection:
    """The HTTP/2 of one connection, for one call at a time.

    ``read`` and ``write`` move bytes; ``read`` returns b"" at the end of the connection.
    """

    def __init__(
        self, read: Callable[[], bytes], write: Callable[[bytes], None], largest: int
    ) -> None:
        """Write the preface; ``largest`` limits the bytes of a response."""
        self._read, self._write, self._largest = read, write, largest
        self._http2 = H2Connection(H2Configuration(header_encoding="utf-8"))
        self._http2.initiate_connection()
        self._terminated = False
        self._stream = 0
        self.sent = False
        """The request of the last call was sent completely."""
        self.reply = GrpcReply()
        """The received part of the last call's reply, without its message."""
        self._flush()

    @property
    def is_open(self) -> bool:
        """True if another call is possible after a complete reply."""
        return self.sent and not self._terminated and not self._http2.open_outbound_streams

    def call(self, headers: Mapping[str, str], frame: bytes) -> GrpcReply:
        """The reply to a framed message; it may come before the message was sent completely.

        ``headers`` are ``:path``, ``:scheme``, ``:authority`` and those of the application.
        ConnectionError at the end of the connection or of the call, ResponseTooLargeError,
        ValueError for an incomplete reply; the errors of h2 and of ``read`` and ``write``.
        """
        self.reply, self._message, self._over = GrpcReply(), bytearray(), False
        self.sent = False
        self.sent = self._send(headers, frame)
        while not self._over:
            self.process(self._read())
        return _with_message(self.reply, bytes(self._message))

    def process(self, received: bytes) -> bool:
        """Apply frames to the call, or between two calls; False if no other call is possible."""
        if not received:
            raise ConnectionError("it closed the connection")
        for event in self._http2.receive_data(received):
            if isinstance(event, events.ConnectionTerminated):
                self._terminated = True
            elif getattr(event, "stream_id", None) == self._stream:
                self._apply(event)
        self._flush()
        if self._terminated and not self._over:
            raise ConnectionError("it closed the connection")
        return not self._terminated

    def _send(self, headers: Mapping[str, str], frame: bytes) -> bool:
        """Send a request as fast as the windows permit; False if the reply came first."""
        http2 = self._http2
        self._stream = stream = http2.get_next_available_stream_id()
        fields = {
            ":method": "POST",
            **headers,
            "te": "trailers",  # codespell:ignore te
            "content-type": "application/grpc",
        }
        http2.send_headers(stream, fields.items())
        at = 0
        while at < len(frame):
            size = min(http2.local_flow_control_window(stream), http2.max_outbound_frame_size)
            if size > 0:
                part = frame[at : at + size]
                at += len(part)
                http2.send_data(stream, part, end_stream=at == len(frame))
                self._flush()
            else:
                self.process(self._read())
            if self._over:
                return False
        return True

    def _apply(self, event: Any) -> None:
        headers: Any = getattr(event, "headers", None)
        match event:
            case events.ResponseReceived():
                self.reply = replace(self.reply, headers=dict(headers))
                self._over = self.reply.headers_say_all
            case events.TrailersReceived():
                self.reply = replace(self.reply, trailers=dict(headers))
            case events.DataReceived():
                self._http2.acknowledge_received_data(event.flow_controlled_length, self._stream)
                self._message += event.data
                if len(self._message) >= FRAME_PREFIX.size:
                    _, length = FRAME_PREFIX.unpack_from(self._message)
                    if max(length, len(self._message) - FRAME_PREFIX.size) > self._largest:
                        raise ResponseTooLargeError(f"its answer has {length} bytes")
            case events.StreamEnded():
                self._over = True
            case events.StreamReset() if not self._over:
                raise ConnectionError("it ended the call")

    def _flush(self) -> None:
        if data := self._http2.data_to_send():
            self._write(data)


def _with_message(reply: GrpcReply, data: bytes) -> GrpcReply:
    """``reply`` with the message in ``data``, if any. ValueError if it is incomplete."""
    if not data or reply.headers_say_all:
        return reply  # a failure may have no message
    flag, length = FRAME_PREFIX.unpack_from(data.ljust(FRAME_PREFIX.size, b"\0"))
    message = data[FRAME_PREFIX.size :]
    if len(message) != length:
        raise ValueError("its answer is incomplete")
    return replace(reply, flag=flag, message=message)
