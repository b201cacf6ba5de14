"""OTLP/gRPC on h2's HTTP/2: an extra, imported only if it is configured.

Each call has one message, which is received whole before it is decoded. Its response is small, so
a client whose windows do not admit it is disconnected.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from typing import Any, cast
from urllib.parse import quote

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import FlowControlError, H2Error
from h2.settings import SettingCodes, Settings

from wattspan.http.access_policy import AccessPolicy
from wattspan.http.limits import ConnectionState, RejectionReason, ServerCapacity
from wattspan.ingest.request_limits import MalformedRequestError, ReceiverBusyError, too_many_bytes
from wattspan.ingest.trace_receiver import TraceReceiver
from wattspan.util.encoding import (
    CODINGS,
    FRAME_PREFIX,
    GrpcStatus,
    InvalidBodyError,
    frame_message,
)
from wattspan.util.protobuf import encode_export_response, encode_retry_info, encode_status

EXPORT_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"

_UNSUPPORTED_SIGNALS = {
    "metrics": "OTEL_METRICS_EXPORTER=none",
    "logs": "OTEL_LOGS_EXPORTER=none",
}
_WINDOW = 1 << 20  # bytes a client may send before they are read, on all streams together
_DEFAULT_WINDOW = (1 << 16) - 1
_SETTINGS = {
    SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW,
    SettingCodes.MAX_CONCURRENT_STREAMS: 100,
    # A batch in one frame takes less time than in frames of the default 16 KiB.
    SettingCodes.MAX_FRAME_SIZE: 1 << 17,
}
_AT_ONCE = 1 << 14  # bytes: a whole read of small frames would take h2 a second
_FRAMES = 16  # without content, such as pings and resets, that count as one call
_MAX_UNREAD = 1 << 20  # bytes that a client has not read, beyond which it is disconnected
_MAX_MESSAGE = 500  # characters
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEADER, _GOAWAY, _STREAM = 9, 7, 0x7FFFFFFF  # RFC 9113, 4.1 and 6.8

Log = Callable[[str], None]
Headers = Sequence[tuple[str, str]]


class GrpcStatusError(Exception):
    """Ends a call with a status."""

    def __init__(self, status: GrpcStatus, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message = status, message[:_MAX_MESSAGE]
        self.retry_after = retry_after


class _Call:
    """One call: its headers, what it has sent so far, and its timer or task."""

    def __init__(self, stream: int, headers: dict[str, str]) -> None:
        self.stream, self.headers = stream, headers
        self.data = bytearray()
        self.reserved = 0
        self.delayed = False  # the call exceeds the rate, and its rejection is delayed
        self.timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None


class _FrameFilter:
    """Takes GOAWAY frames out of what a client sends.

    A client that leaves may wait for the answers to its calls, but h2 has ended the connection
    after such a frame, refuses all that follows, and forgets what came before it in the same read.
    """

    def __init__(self) -> None:
        self._rest = len(_PREFACE)  # bytes of the present frame, or of the preface
        self._dropped = False
        self._head = b""  # of a frame, too short to be known

    def without_goaways(self, data: bytes) -> tuple[bytes, list[int]]:
        """The part of ``data`` for h2, and the error codes of valid GOAWAY frames."""
        passed, codes, at = bytearray(), list[int](), 0
        data = self._head + data
        while True:
            end = min(at + self._rest, len(data))
            if not self._dropped:
                passed += data[at:end]
            self._rest -= end - at
            at = end
            if self._rest or len(data) - at < _FRAME_HEADER:
                break
            length = int.from_bytes(data[at : at + 3], "big")
            stream = int.from_bytes(data[at + 5 : at + 9], "big") & _STREAM
            largest = _SETTINGS[SettingCodes.MAX_FRAME_SIZE]
            # h2 refuses any other.
            self._dropped = data[at + 3] == _GOAWAY and stream == 0 and 8 <= length <= largest
            if self._dropped:
                if len(data) - at < _FRAME_HEADER + 8:
                    break
                codes.append(int.from_bytes(data[at + 13 : at + 17], "big"))
            self._rest = _FRAME_HEADER + length
        self._head = data[at:]
        return bytes(passed), codes


class OtlpGrpcConnection(asyncio.Protocol):
    """The connection of one client. Used in the server's thread only."""

    def __init__(
        self, receiver: TraceReceiver, log: Log, policy: AccessPolicy, capacity: ServerCapacity
    ) -> None:
        self._receiver, self._log = receiver, log
        self._policy, self._capacity = policy, capacity
        self._calls: dict[int, _Call] = {}
        self._frames = 0  # without content, since the last that counted as a call
        self._leaving = False  # the client begins no further call
        self._filter = _FrameFilter()
        self._transport = cast(asyncio.Transport, None)  # set by connection_made
        self._http2 = H2Connection(H2Configuration(client_side=False, header_encoding="latin-1"))
        self._http2.local_settings = Settings(client=False, initial_values=_SETTINGS)
        self._http2.max_inbound_frame_size = _SETTINGS[SettingCodes.MAX_FRAME_SIZE]

    @property
    def answering(self) -> bool:
        return any(call.task is not None for call in self._calls.values())

    # ------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._peer = self._capacity.peer(transport)
        self._owner = self._peer.quota_owner
        self._http2.initiate_connection()
        self._http2.increment_flow_control_window(_WINDOW - _DEFAULT_WINDOW)
        self._flush()
        if self._capacity.add(self, self._owner, self._policy.count_rejection):
            self._capacity.set_state(self, ConnectionState.IDLE)
        else:
            self.close()

    def data_received(self, data: bytes) -> None:
        try:
            for at in range(0, len(data), _AT_ONCE):
                if self._transport.is_closing():
                    break
                passed, codes = self._filter.without_goaways(data[at : at + _AT_ONCE])
                found = self._http2.receive_data(passed)
                for event in found:
                    self._handle(event)
                self._frames += len(codes)
                self._charge(found)
                self._leaving = self._leaving or bool(codes)
                if any(codes):
                    self.close()
            self._flush()
            if self._leaving and not self._calls and not self._transport.is_closing():
                self._transport.close()
        except Exception:  # noqa: BLE001 - any error of h2 and hpack on hostile frames
            self._policy.count_rejection(RejectionReason.MALFORMED)
            self.close()
        if self._calls:
            self._capacity.set_state(self, ConnectionState.WAITING)
        if self._transport.get_write_buffer_size() > _MAX_UNREAD:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._capacity.remove(self)
        for call in list(self._calls.values()):
            self._cancel(call)

    def close(self) -> None:
        """Abort the connection."""
        self._capacity.remove(self)
        self._transport.abort()

    # ------------------------------------------------------------------------- receiving

    def _charge(self, found: Sequence[events.Event]) -> None:
        """Charge frames without content to the rate of the peer, and disconnect it beyond that."""
        self._frames += sum(not _has_content(event) for event in found)
        waiting = sum(call.delayed for call in self._calls.values())
        excessive = waiting > _SETTINGS[SettingCodes.MAX_CONCURRENT_STREAMS]
        while self._frames >= _FRAMES and not excessive:
            self._frames -= _FRAMES
            excessive = not self._capacity.admits(self._owner)
        if excessive:
            self._policy.count_rejection(RejectionReason.RATE)
            self.close()

    def _handle(self, event: Any) -> None:
        if isinstance(event, events.RequestReceived):
            self._start(_Call(event.stream_id, dict(cast(Any, event.headers))))
            return
        call = self._calls.get(getattr(event, "stream_id", 0))
        if isinstance(event, events.DataReceived):
            self._http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if call is not None and not call.delayed:
                self._receive(call, event.data)
        elif isinstance(event, events.StreamEnded) and call is not None and not call.delayed:
            call.task = asyncio.get_running_loop().create_task(self._answer(call))
        elif isinstance(event, events.StreamReset) and call is not None and not call.delayed:
            self._cancel(call)  # a delayed call lasts until reading goes on

    def _start(self, call: _Call) -> None:
        self._calls[call.stream] = call
        limits, call_later = self._capacity.limits, asyncio.get_running_loop().call_later
        if not self._capacity.admits(self._owner):
            call.delayed = True
            self._transport.pause_reading()  # further data waits with this call
            call.timer = call_later(limits.rejection_delay, self._reject_late, call)
            return
        slow = GrpcStatusError(GrpcStatus.DEADLINE_EXCEEDED, "the call took too long to arrive")
        call.timer = call_later(limits.receive, self._fail, call, slow)
        if failure := _method_fault(call.headers) or self._token_fault(call.headers):
            self._fail(call, failure)

    def _token_fault(self, headers: dict[str, str]) -> GrpcStatusError | None:
        if self._policy.admits(headers.get("authorization", "")):
            return None
        self._policy.count_rejection(RejectionReason.TOKEN)
        return GrpcStatusError(
            GrpcStatus.UNAUTHENTICATED,
            "a token of the agent's token_file is needed, as metadata "
            '"authorization: Bearer TOKEN"',
        )

    def _reject_late(self, call: _Call) -> None:
        """Reject the call of a peer that exceeds its rate, after a delay."""
        self._transport.resume_reading()
        self._policy.count_rejection(RejectionReason.RATE)
        # OTLP clients retry this status only because of its delay.
        message = self._capacity.rate_message
        self._fail(call, GrpcStatusError(GrpcStatus.RESOURCE_EXHAUSTED, message, retry_after=1))

    def _receive(self, call: _Call, data: bytes) -> None:
        if data and not self._capacity.reserve(len(data), self._owner):
            self._fail(call, _busy(1))
            return
        call.reserved += len(data)
        call.data += data
        try:
            self._check_prefix(call)
        except InvalidBodyError as error:
            self._refuse(call, error)

    def _check_prefix(self, call: _Call) -> int:
        """The length of the message, 0 while it is unknown. InvalidBodyError."""
        if len(call.data) < FRAME_PREFIX.size:
            return 0
        compressed, length = FRAME_PREFIX.unpack_from(call.data)
        if compressed > 1:
            raise MalformedRequestError("the message has unknown flags")
        if length > self._receiver.max_request:
            raise too_many_bytes(self._receiver.max_request)
        if len(call.data) > FRAME_PREFIX.size + length:
            raise MalformedRequestError("the call has more than one message")
        return int(length)

    # ------------------------------------------------------------------------- answering

    async def _answer(self, call: _Call) -> None:
        try:
            body = self._message(call)
            coding = _coding(call.headers) if call.data[0] else ""
            call.data.clear()
            async with self._capacity.turn(self._owner):
                rejected = await self._receiver.receive(body, self._peer, coding=coding)
        except ReceiverBusyError as busy:
            self._fail(call, _busy(busy.seconds))
        except InvalidBodyError as error:
            self._refuse(call, error)
        except GrpcStatusError as failure:
            self._fail(call, failure)
        except Exception as error:  # noqa: BLE001 - an error ends one call only
            self._log(f"An OTLP/gRPC call failed: {error!r}. Please report this.")
            self._fail(
                call, GrpcStatusError(GrpcStatus.INTERNAL, "internal error; see the agent's log")
            )
        else:
            response = frame_message(encode_export_response(*rejected))
            self._send(call, _HEAD, response, [("grpc-status", "0")])

    def _message(self, call: _Call) -> bytes:
        """The message of a call that the client has ended. MalformedRequestError."""
        if not call.data:
            raise MalformedRequestError("the call has no message")
        body = bytes(call.data[FRAME_PREFIX.size :])
        if len(call.data) < FRAME_PREFIX.size or len(body) < self._check_prefix(call):
            raise MalformedRequestError("the message ends too early")
        return body

    def _refuse(self, call: _Call, error: InvalidBodyError) -> None:
        self._receiver.sink.refuse(error.reason)
        self._fail(call, GrpcStatusError(_OF_REASON[error.reason], str(error)))

    def _fail(self, call: _Call, failure: GrpcStatusError) -> None:
        status, message, after = failure.status, failure.message, failure.retry_after
        trailers = [
            *_HEAD,
            ("grpc-status", str(status.value)),
            ("grpc-message", quote(message, safe=_UNQUOTED)),
            ("grpc-status-details-bin", _base64(encode_status(status, message, after))),
        ]
        if after is not None:
            # The exporter for Python reads the delay only here.
            trailers.append(("google.rpc.retryinfo-bin", _base64(encode_retry_info(after))))
        self._send(call, trailers)

    def _send(
        self, call: _Call, headers: Headers, message: bytes = b"", trailers: Headers = ()
    ) -> None:
        """Send a response and forget the call; without ``trailers``, the headers are all of it."""
        try:
            self._http2.send_headers(call.stream, headers, end_stream=not trailers)
            if trailers:
                self._http2.send_data(call.stream, message)
                self._http2.send_headers(call.stream, trailers, end_stream=True)
            self._http2.reset_stream(call.stream, ErrorCodes.NO_ERROR)  # the rest is not read
        except H2Error as error:  # otherwise the client has ended the call
            if isinstance(error, FlowControlError):
                self.close()
        self._flush()
        self._forget(call)

    def _forget(self, call: _Call) -> None:
        if call.timer is not None:
            call.timer.cancel()
        self._capacity.release(call.reserved, self._owner)
        call.reserved = 0
        self._calls.pop(call.stream, None)
        if not self._calls and not self._transport.is_closing():
            self._capacity.set_state(self, ConnectionState.IDLE)
            if self._leaving:
                self._transport.close()

    def _cancel(self, call: _Call) -> None:
        if call.task is not None:
            call.task.cancel()
        self._forget(call)

    def _flush(self) -> None:
        self._transport.write(self._http2.data_to_send())


_HEAD = (
    (":status", "200"),
    ("content-type", "application/grpc"),
    ("grpc-accept-encoding", ",".join(("identity", *CODINGS))),
)
_UNQUOTED = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
_OF_REASON = {
    "malformed": GrpcStatus.INVALID_ARGUMENT,
    "too_large": GrpcStatus.RESOURCE_EXHAUSTED,
}


def _busy(seconds: int) -> GrpcStatusError:
    message = "too many spans wait for their energy"
    return GrpcStatusError(GrpcStatus.UNAVAILABLE, message, retry_after=seconds)


def _has_content(event: events.Event) -> bool:
    if isinstance(event, events.DataReceived):
        return bool(event.data)
    return isinstance(event, events.RequestReceived | events.StreamEnded)


def _method_fault(headers: dict[str, str]) -> GrpcStatusError | None:
    """The failure of a call of any other method."""
    path = headers.get(":path", "")
    kind = headers.get("content-type", "")
    if headers.get(":method") != "POST" or not kind.startswith("application/grpc"):
        return GrpcStatusError(GrpcStatus.INVALID_ARGUMENT, "this is no gRPC call")
    if path == EXPORT_METHOD:
        return None
    message = f"the only method is {EXPORT_METHOD}"
    for signal, remedy in _UNSUPPORTED_SIGNALS.items():
        if path.startswith(f"/opentelemetry.proto.collector.{signal}."):
            message = f"wattspan takes spans only, no {signal}: set {remedy} in the application"
    return GrpcStatusError(GrpcStatus.UNIMPLEMENTED, message)


def _coding(headers: dict[str, str]) -> str:
    """The encoding of a compressed message, one of CODINGS; GrpcStatusError for any other."""
    encoding = headers.get("grpc-encoding", "identity")
    if encoding in CODINGS:
        return encoding
    if encoding == "identity":
        raise GrpcStatusError(
            GrpcStatus.INTERNAL, "the message is compressed, but grpc-encoding names no encoding"
        )
    raise GrpcStatusError(
        GrpcStatus.UNIMPLEMENTED,
        f"send messages uncompressed or compressed with {' or '.join(CODINGS)}",
    )


def _base64(value: bytes) -> str:
    return base64.b64encode(value).rstrip(b"=").decode()
