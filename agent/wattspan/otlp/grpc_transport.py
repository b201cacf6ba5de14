"""OTLP/gRPC on h2's HTTP/2: an extra, imported only where the address requires it.

The flag before a message marks it as compressed, the header ``grpc-encoding`` names the encoding.
An endpoint that cannot read the encoding should answer UNIMPLEMENTED; libraries without
compression answer other errors.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection

from wattspan.otlp.destination import SPANS, Signal
from wattspan.otlp.transport import (
    MAX_RESPONSE_SIZE,
    CollectorTransport,
    ExportResult,
    ExportStatus,
    describe_os_error,
    result_of_grpc,
    result_of_response,
)
from wattspan.util.encoding import (
    FRAME_PREFIX,
    BodyEncodingError,
    BodyTooLongError,
    GrpcStatus,
    frame_message,
    gzip_compress,
    gzip_decompress,
)
from wattspan.util.protobuf import retry_delay

# ------------------------------------------------------------------------------------ replies

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
_NO_GZIP = "does not know gzip, and gets them uncompressed"

_Headers = Mapping[str, str]


class _ResponseTooLargeError(Exception):
    """The announced response exceeds MAX_RESPONSE_SIZE."""


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


def result_of_reply(reply: GrpcReply, signal: Signal = SPANS) -> ExportResult:
    """The result of a complete reply."""
    code, message = reply.status
    if code != 0:
        return result_of_grpc(code, code.name, message, _retry_delay(reply), signal)
    try:
        return result_of_response(_decompressed(reply), signal)
    except (BodyEncodingError, BodyTooLongError) as error:
        # The status confirms the request; its rejected part is unknown.
        return ExportResult(
            ExportStatus.TAKEN, f"its answer cannot be read ({error})", signal.elsewhere
        )


def _decompressed(reply: GrpcReply) -> bytes:
    if reply.flag == 0:
        return reply.message
    if reply.flag > 1:
        raise BodyEncodingError("its message has unknown flags")
    encoding = reply.headers.get("grpc-encoding", "identity")
    if encoding == "identity":
        raise BodyEncodingError("it is compressed, but grpc-encoding names no encoding")
    if encoding != "gzip":
        raise BodyEncodingError("it is compressed in a way that was not offered")
    return gzip_decompress(reply.message, MAX_RESPONSE_SIZE)


def _is_grpc(headers: _Headers) -> bool:
    is_ok = headers.get(":status", "200") == "200"
    return is_ok and headers.get("content-type", "").startswith("application/grpc")


def _retry_delay(reply: GrpcReply) -> int | None:
    """The delay that the details of a failure ask for, in nanoseconds."""
    details = {**reply.headers, **reply.trailers}.get("grpc-status-details-bin", "")
    try:
        return retry_delay(base64.b64decode(details + "=" * (-len(details) % 4)))
    except (binascii.Error, ValueError):
        return None


# ---------------------------------------------------------------------------------- transport


class GrpcTransport(CollectorTransport):
    """OTLP/gRPC, one call at a time."""

    alpn = "h2"
    _takes_gzip: bool | None = None  # None until it has been tried
    _report_no_gzip = False
    _stream = 0

    def _open(self) -> None:
        if self._takes_gzip:  # gzip that was refused is not tried again on each connection
            self._takes_gzip = None
        self._http2 = H2Connection(H2Configuration(header_encoding="utf-8"))
        self._http2.initiate_connection()
        self._terminated = False
        self._flush()

    def _disconnect(self) -> None:
        super()._disconnect()
        self._takes_gzip = None  # the next connection may reach another collector

    def _is_open(self, unread: bytes) -> bool:
        self._deadline_in(self._answer_within)
        try:
            self._process(unread)
        except Exception:  # noqa: BLE001 - as in _call
            return False
        return not self._terminated

    # ------------------------------------------------------------------------------- one request

    def send(self, body: bytes) -> ExportResult:
        if not self._compress or self._takes_gzip is False:
            result, _ = self._call(body, zipped=False)
            return self._with_gzip_report(result)
        result, reply = self._call(gzip_compress(body), zipped=True)
        if self._takes_gzip is None and reply is not None and reply.blames_encoding:
            return self._with_gzip_report(self._retry_without_gzip(body, reply))
        if result.verdict is ExportStatus.TAKEN:
            self._takes_gzip = True
        return result

    def _retry_without_gzip(self, body: bytes, refused: GrpcReply) -> ExportResult:
        """Send uncompressed what was refused, and so not accepted, when it was compressed."""
        result, reply = self._call(body, zipped=False)
        differs = reply is not None and reply.status[0] != refused.status[0]
        if result.verdict is not ExportStatus.AGAIN and differs:
            self._takes_gzip, self._report_no_gzip = False, True
        return result

    def _with_gzip_report(self, result: ExportResult) -> ExportResult:
        """The result; the first accepted one without gzip says so."""
        if not self._report_no_gzip or result.verdict is not ExportStatus.TAKEN:
            return result
        self._report_no_gzip = False
        why = f"{result.why}, and it {_NO_GZIP}" if result.why else f"it {_NO_GZIP}"
        return replace(result, why=why)

    def _call(self, message: bytes, *, zipped: bool) -> tuple[ExportResult, GrpcReply | None]:
        """The result of one call, and the reply unless there is none."""
        if (failure := self._connect()) is not None:
            return failure, None
        self._reply, self._message, self._over = GrpcReply(), bytearray(), False
        self._deadline_in(self._answer_within)
        sent, remedy = False, ""
        try:
            sent = self._send_call(frame_message(message, zipped=zipped), zipped=zipped)
            while not self._over:
                self._process(self._read())
            reply = self._reply = _with_message(self._reply, bytes(self._message))
        except TimeoutError:
            why = f"it did not answer within {self._answer_within:g} s"
        except _ResponseTooLargeError as error:
            why = str(error)
        except OSError as error:
            why = f"the connection was lost: {describe_os_error(error)}"
        except Exception as error:  # noqa: BLE001 - h2 and hpack have errors of their own
            why, remedy = f"its protocol is not gRPC: {describe_os_error(error)}", self._signal.away
        else:
            self._used_at = self._clock.monotonic()
            if not sent or self._terminated or self._http2.open_outbound_streams:
                self.close()
            return result_of_reply(reply, self._signal), reply
        if self._reply.failed:  # the collector answered before it read everything
            self.close()
            return result_of_reply(self._reply, self._signal), self._reply
        return self._lost(why, remedy, perhaps_taken=sent, unfinished=not sent), None

    def _send_call(self, frame: bytes, *, zipped: bool) -> bool:
        """Send a request as fast as the windows permit; False if the reply came first."""
        http2 = self._http2
        self._stream = stream = http2.get_next_available_stream_id()
        headers = {
            ":method": "POST",
            ":scheme": "https" if self._destination.tls else "http",
            ":path": self._signal.method,
            ":authority": self._authority,
            **self._headers,
            "te": "trailers",  # codespell:ignore te
            "content-type": "application/grpc",
            "grpc-accept-encoding": "identity,gzip",
        }
        if zipped:
            headers["grpc-encoding"] = "gzip"
        http2.send_headers(stream, headers.items())
        at = 0
        while at < len(frame):
            size = min(http2.local_flow_control_window(stream), http2.max_outbound_frame_size)
            if size > 0:
                part = frame[at : at + size]
                at += len(part)
                http2.send_data(stream, part, end_stream=at == len(frame))
                self._flush()
            else:
                self._process(self._read())
            if self._over:
                return False
        return True

    def _process(self, received: bytes) -> None:
        """Apply frames of the collector to the call. ConnectionError at the end of either."""
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

    def _apply(self, event: Any) -> None:
        headers: Any = getattr(event, "headers", None)
        match event:
            case events.ResponseReceived():
                self._reply = replace(self._reply, headers=dict(headers))
                self._over = self._reply.headers_say_all
            case events.TrailersReceived():
                self._reply = replace(self._reply, trailers=dict(headers))
            case events.DataReceived():
                self._http2.acknowledge_received_data(event.flow_controlled_length, self._stream)
                self._message += event.data
                if len(self._message) >= FRAME_PREFIX.size:
                    _, length = FRAME_PREFIX.unpack_from(self._message)
                    if max(length, len(self._message) - FRAME_PREFIX.size) > MAX_RESPONSE_SIZE:
                        raise _ResponseTooLargeError(f"its answer has {length} bytes")
            case events.StreamEnded():
                self._over = True
            case events.StreamReset() if not self._over:
                raise ConnectionError("it ended the call")

    def _flush(self) -> None:
        self._write(self._http2.data_to_send())


def _with_message(reply: GrpcReply, data: bytes) -> GrpcReply:
    """``reply`` with the message in ``data``, if any. ValueError if it is incomplete."""
    if not data or reply.headers_say_all:
        return reply  # a failure may have no message
    flag, length = FRAME_PREFIX.unpack_from(data.ljust(FRAME_PREFIX.size, b"\0"))
    message = data[FRAME_PREFIX.size :]
    if len(message) != length:
        raise ValueError("its answer is incomplete")
    return replace(reply, flag=flag, message=message)
