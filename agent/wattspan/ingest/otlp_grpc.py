"""OTLP/gRPC on grpclib's HTTP/2: an extra, imported only if it is configured.

grpclib's own server has no compression, no limit of a message and no peer credentials. This module
therefore reads and writes gRPC's content of HTTP/2 streams itself: a message after its length, and
trailers with the status.
"""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

import grpclib.protocol
from grpclib.config import Configuration
from grpclib.const import Status
from grpclib.metadata import encode_grpc_message
from h2.config import H2Configuration
from h2.exceptions import H2Error
from h2.settings import SettingCodes

from wattspan.http.access_policy import OPEN_ACCESS, AccessPolicy
from wattspan.http.connection_limiter import RejectionReason
from wattspan.http.limits import ServerCapacity
from wattspan.http.messages import Peer
from wattspan.ingest.export_request import (
    MalformedRequestError,
    ReceiverBusyError,
    RequestTooLargeError,
)
from wattspan.ingest.trace_receiver import RequestReader, TraceReceiver
from wattspan.util.encoding import BodyEncodingError, BodyTooLongError
from wattspan.util.protobuf import encode_export_response, encode_retry_info, encode_status

EXPORT_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"

_UNSUPPORTED_SIGNALS = {
    "metrics": "OTEL_METRICS_EXPORTER=none",
    "logs": "OTEL_LOGS_EXPORTER=none",
}
_PREFIX = struct.Struct(">BI")  # of a message: the compressed flag and the length
_READ_CHUNK = 1 << 16
_FRAME = 1 << 17
_WINDOW = 1 << 20  # bytes a client may send before they are read, on all streams together
_MAX_UNREAD = 1 << 20  # bytes that a client has not read, beyond which it is disconnected
_MAX_MESSAGE = 500  # characters

Log = Callable[[str], None]
Headers = Sequence[tuple[str, str]]


class GrpcStatusError(Exception):
    """Ends a call with a status."""

    def __init__(self, status: Status, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message = status, message[:_MAX_MESSAGE]
        self.retry_after = retry_after


class OtlpGrpcFactory:
    """Makes the protocol of each connection, for the HTTP server."""

    def __init__(
        self, receiver: TraceReceiver, log: Log, policy: AccessPolicy = OPEN_ACCESS
    ) -> None:
        self._reader, self._log, self._policy = RequestReader(receiver), log, policy
        self._config = Configuration(
            http2_connection_window_size=_WINDOW, http2_stream_window_size=_WINDOW
        ).__for_server__()
        self._h2_config = H2Configuration(client_side=False, header_encoding="ascii")

    def __call__(self, room: ServerCapacity) -> asyncio.Protocol:
        calls = _GrpcCallHandler(self._reader, room, self._log, self._policy)
        return _GrpcServerConnection(calls, self._config, self._h2_config)


class _GrpcServerConnection(grpclib.protocol.H2Protocol):  # type: ignore[misc]
    """The connection of one client."""

    def __init__(
        self, calls: _GrpcCallHandler, config: Configuration, h2_config: H2Configuration
    ) -> None:
        super().__init__(calls, config, h2_config)
        self._calls = calls

    @property
    def answering(self) -> bool:
        return self._calls.answering > 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._calls.peer = self._calls.room.peer(transport)
        self._calls.on_idle = lambda: self._calls.room.set_idle(self)
        self._calls.pause_reading = transport.pause_reading
        self._calls.resume_reading = transport.resume_reading
        super().connection_made(transport)
        # A batch in one frame takes less time than in frames of the default 16 KiB.
        h2_connection = self.connection._connection  # noqa: SLF001 - grpclib has no setting for it
        h2_connection.update_settings({SettingCodes.MAX_FRAME_SIZE: _FRAME})
        # Otherwise h2 rejects such a frame that arrives with the acknowledgement of the setting.
        h2_connection.max_inbound_frame_size = _FRAME
        self.connection.flush()
        if self._calls.room.add(
            self, self._calls.peer.quota_owner, self._calls.policy.count_rejection
        ):
            self._calls.room.set_idle(self)
        else:
            self.close()

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except Exception:  # noqa: BLE001 - any error of h2 and grpclib on hostile frames
            self._calls.policy.count_rejection(RejectionReason.MALFORMED)
            self.close()
        if self._calls.tasks:
            self._calls.room.set_waiting(self)
        if self._transport.get_write_buffer_size() > _MAX_UNREAD:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._calls.room.remove(self)
        super().connection_lost(exc)

    def close(self) -> None:
        self._calls.room.remove(self)
        self._transport.abort()


class _GrpcCallHandler(grpclib.protocol.AbstractHandler):  # type: ignore[misc]
    """The calls of one connection."""

    def __init__(
        self, reader: RequestReader, room: ServerCapacity, log: Log, policy: AccessPolicy
    ) -> None:
        self._reader, self.room, self._log, self.policy = reader, room, log, policy
        self.peer = Peer()
        self.tasks: dict[Any, asyncio.Task[None]] = {}
        self.answering = 0  # calls whose response is being sent
        self.on_idle: Callable[[], None] = lambda: None
        self.pause_reading: Callable[[], None] = lambda: None
        self.resume_reading: Callable[[], None] = lambda: None

    # ------------------------------------------------------------------ called by grpclib

    def accept(
        self,
        stream: grpclib.protocol.Stream,
        headers: Headers,
        release_stream: Callable[[], None],
    ) -> None:
        within_rate = self.room.admits(self.peer.quota_owner)
        if not within_rate:
            self.pause_reading()  # further data waits with this call
        task = asyncio.get_running_loop().create_task(
            self._call(stream, dict(headers), within_rate)
        )
        self.tasks[stream] = task

        def done(_: object) -> None:
            self.tasks.pop(stream, None)
            release_stream()
            if not self.tasks and not stream.connection.is_closing():
                self.on_idle()

        task.add_done_callback(done)

    def cancel(self, stream: grpclib.protocol.Stream) -> None:
        if stream in self.tasks:
            self.tasks[stream].cancel()

    def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()

    # ------------------------------------------------------------------------------ one call

    async def _call(
        self, stream: grpclib.protocol.Stream, headers: dict[str, str], within_rate: bool
    ) -> None:
        with suppress(
            H2Error, TimeoutError, ConnectionError
        ):  # the client is gone or does not read
            try:
                if not within_rate:
                    await self._reject_late()
                response = await self._respond(stream, headers)
            except GrpcStatusError as failure:
                await self._fail(stream, failure)
            except Exception as error:  # noqa: BLE001 - an error ends one call only
                self._log(f"An OTLP/gRPC call failed: {error!r}. Please report this.")
                await self._fail(
                    stream,
                    GrpcStatusError(Status.INTERNAL, "internal error; see the agent's log"),
                )
            else:
                await self._succeed(stream, response)

    async def _reject_late(self) -> None:
        """Reject the call of a peer that exceeds its rate, after a delay."""
        await asyncio.sleep(self.room.limits.rejection_delay)
        self.resume_reading()
        self.policy.count_rejection(RejectionReason.RATE)
        # OTLP clients retry this status only because of its delay.
        raise GrpcStatusError(Status.RESOURCE_EXHAUSTED, self.room.rate_message, retry_after=1)

    async def _respond(self, stream: grpclib.protocol.Stream, headers: dict[str, str]) -> bytes:
        _check_method(headers)
        if not self.policy.admits(headers.get("authorization", "")):
            self.policy.count_rejection(RejectionReason.TOKEN)
            raise GrpcStatusError(
                Status.UNAUTHENTICATED,
                "a token of the agent's token_file is needed, as metadata "
                '"authorization: Bearer TOKEN"',
            )
        reservation = _BodyReservation(self.room, self.peer.quota_owner)
        try:
            async with asyncio.timeout(self.room.limits.receive):
                compressed, body = await self._message(stream, reservation)
            gzipped = bool(compressed) and _is_gzip(headers)
            async with self.room.turn(self.peer.quota_owner):
                rejected = await self._reader.take(body, self.peer, gzipped=gzipped)
        except TimeoutError:
            raise GrpcStatusError(
                Status.DEADLINE_EXCEEDED, "the call took too long to arrive"
            ) from None
        except ReceiverBusyError as busy:
            message = "too many spans wait for their energy"
            raise GrpcStatusError(Status.UNAVAILABLE, message, retry_after=busy.seconds) from None
        except (RequestTooLargeError, BodyTooLongError) as error:
            self._reader.receiver.sink.refuse("too_large")
            raise GrpcStatusError(Status.RESOURCE_EXHAUSTED, str(error)) from None
        except (MalformedRequestError, BodyEncodingError) as error:
            self._reader.receiver.sink.refuse("malformed")
            raise GrpcStatusError(Status.INVALID_ARGUMENT, str(error)) from None
        finally:
            reservation.give_back()
        return encode_export_response(*rejected)

    async def _message(
        self, stream: grpclib.protocol.Stream, reservation: _BodyReservation
    ) -> tuple[int, bytes]:
        """The compressed flag and the message of the call."""
        try:
            prefix = await stream.recv_data(_PREFIX.size)
            if len(prefix) < _PREFIX.size:
                raise MalformedRequestError("the call has no message")
            compressed, length = _PREFIX.unpack(prefix)
            if compressed > 1:
                raise MalformedRequestError("the message has unknown flags")
            if length > self._reader.receiver.max_request:
                raise RequestTooLargeError(
                    f"a request has at most {self._reader.receiver.max_request} bytes"
                )
            body = bytearray()
            while len(body) < length:
                piece = await stream.recv_data(min(_READ_CHUNK, length - len(body)))
                if not piece:
                    raise MalformedRequestError("the message ends too early")
                if not reservation.take(len(piece)):
                    raise ReceiverBusyError
                body += piece
        except AssertionError:  # grpclib's error for a truncated stream
            raise MalformedRequestError("the message ends too early") from None
        return compressed, bytes(body)

    async def _succeed(self, stream: grpclib.protocol.Stream, response: bytes) -> None:
        self.answering += 1
        try:
            async with asyncio.timeout(self.room.limits.send):
                await stream.send_headers(_HEAD)
                await stream.send_data(_PREFIX.pack(0, len(response)) + response)
                await stream.send_headers([("grpc-status", "0")], end_stream=True)
        finally:
            self.answering -= 1

    async def _fail(self, stream: grpclib.protocol.Stream, failure: GrpcStatusError) -> None:
        status, message, after = failure.status.value, failure.message, failure.retry_after
        trailers = [
            *_HEAD,
            ("grpc-status", str(status)),
            ("grpc-message", encode_grpc_message(message)),
            ("grpc-status-details-bin", _base64(encode_status(status, message, after))),
        ]
        if after is not None:
            # The exporter for Python reads the delay only here.
            trailers.append(("google.rpc.retryinfo-bin", _base64(encode_retry_info(after))))
        async with asyncio.timeout(self.room.limits.send):
            await stream.send_headers(trailers, end_stream=True)
            if stream.closable:
                stream.reset_nowait()  # the rest of the request is not read


_HEAD = (
    (":status", "200"),
    ("content-type", "application/grpc"),
    ("grpc-accept-encoding", "identity,gzip"),
)


class _BodyReservation:
    """The bytes of one call within the limit of the server for bodies."""

    def __init__(self, room: ServerCapacity, whose: Hashable) -> None:
        self._room, self._whose, self._size = room, whose, 0

    def take(self, size: int) -> bool:
        if not self._room.reserve(size, self._whose):
            return False
        self._size += size
        return True

    def give_back(self) -> None:
        self._room.release(self._size, self._whose)


def _check_method(headers: dict[str, str]) -> None:
    """GrpcStatusError for any other method."""
    path = headers.get(":path", "")
    kind = headers.get("content-type", "")
    if headers.get(":method") != "POST" or not kind.startswith("application/grpc"):
        raise GrpcStatusError(Status.INVALID_ARGUMENT, "this is no gRPC call")
    if path == EXPORT_METHOD:
        return
    for signal, remedy in _UNSUPPORTED_SIGNALS.items():
        if path.startswith(f"/opentelemetry.proto.collector.{signal}."):
            message = f"wattspan takes spans only, no {signal}: set {remedy} in the application"
            raise GrpcStatusError(Status.UNIMPLEMENTED, message)
    raise GrpcStatusError(Status.UNIMPLEMENTED, f"the only method is {EXPORT_METHOD}")


def _is_gzip(headers: dict[str, str]) -> bool:
    """True if the encoding of a compressed message is gzip; GrpcStatusError for any other."""
    encoding = headers.get("grpc-encoding", "identity")
    if encoding == "gzip":
        return True
    if encoding == "identity":
        raise GrpcStatusError(
            Status.INTERNAL, "the message is compressed, but grpc-encoding names no encoding"
        )
    raise GrpcStatusError(
        Status.UNIMPLEMENTED, "send messages uncompressed or compressed with gzip"
    )


def _base64(value: bytes) -> str:
    return base64.b64encode(value).rstrip(b"=").decode()
