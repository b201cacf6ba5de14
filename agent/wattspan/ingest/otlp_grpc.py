"""OTLP/gRPC, on grpclib's HTTP/2: an extra, imported only where it is asked for.

grpclib's own server knows no compression, no limit to a message and no peer credentials, so what
gRPC writes into HTTP/2 streams is read and written here: a message with its length in front, and
trailers that say how it went.
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
_PREFIX = struct.Struct(">BI")  # whether it is compressed, and how long a message is
_READ_CHUNK = 1 << 16
_FRAME = 1 << 17
_WINDOW = 1 << 20  # bytes a client may send before they are read, on all streams together
_UNREAD = 1 << 20  # bytes that wait for a client to read them before it is given up
_MAX_REASON = 500  # characters

Log = Callable[[str], None]
Headers = Sequence[tuple[str, str]]


class GrpcStatusError(Exception):
    """A call ends with this status."""

    def __init__(
        self, status: Status, why: str, *, retry_after: int | None = None, headers: Headers = ()
    ) -> None:
        super().__init__(why)
        self.status, self.why = status, why[:_MAX_REASON]
        self.retry_after, self.headers = retry_after, headers


class OtlpGrpcFactory:
    """Makes a connection for each client; what the web server is given to speak gRPC."""

    def __init__(self, intake: TraceReceiver, log: Log, door: AccessPolicy = OPEN_ACCESS) -> None:
        self._reader, self._log, self._door = RequestReader(intake), log, door
        self._config = Configuration(
            http2_connection_window_size=_WINDOW, http2_stream_window_size=_WINDOW
        ).__for_server__()
        self._h2_config = H2Configuration(client_side=False, header_encoding="ascii")

    def __call__(self, room: ServerCapacity) -> asyncio.Protocol:
        calls = _GrpcCallHandler(self._reader, room, self._log, self._door)
        return _GrpcServerConnection(calls, self._config, self._h2_config)


class _GrpcServerConnection(grpclib.protocol.H2Protocol):  # type: ignore[misc]
    """One client's connection, a guest of the server's room."""

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
        self._calls.quiet = lambda: self._calls.room.rest(self)
        self._calls.hold = transport.pause_reading
        self._calls.let_go = transport.resume_reading
        super().connection_made(transport)
        # A batch in one frame takes less time than one in frames of the usual 16 KiB.
        h2_connection = self.connection._connection  # noqa: SLF001 - grpclib has no setting for it
        h2_connection.update_settings({SettingCodes.MAX_FRAME_SIZE: _FRAME})
        # Otherwise h2 refuses such a frame that comes together with the setting's acknowledgement.
        h2_connection.max_inbound_frame_size = _FRAME
        self.connection.flush()
        if self._calls.room.enter(self, self._calls.peer.whose):
            self._calls.room.rest(self)
        else:
            self._calls.door.refused(RejectionReason.CROWDED)
            self.close()

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except Exception:  # noqa: BLE001 - whatever h2 and grpclib make of a hostile client's frames
            self._calls.door.refused(RejectionReason.MALFORMED)
            self.close()
        if self._calls.tasks:
            self._calls.room.wake(self)
        if self._transport.get_write_buffer_size() > _UNREAD:
            self.close()  # it asks and does not listen

    def connection_lost(self, exc: Exception | None) -> None:
        self._calls.room.leave(self)
        super().connection_lost(exc)

    def close(self) -> None:
        self._calls.room.leave(self)
        self._transport.abort()


class _GrpcCallHandler(grpclib.protocol.AbstractHandler):  # type: ignore[misc]
    """The calls of one connection."""

    def __init__(
        self, reader: RequestReader, room: ServerCapacity, log: Log, door: AccessPolicy
    ) -> None:
        self._reader, self.room, self._log, self.door = reader, room, log, door
        self.peer = Peer()
        self.tasks: dict[Any, asyncio.Task[None]] = {}
        self.answering = 0  # of them, those whose message is taken
        self.quiet: Callable[[], None] = lambda: None
        self.hold: Callable[[], None] = lambda: None
        self.let_go: Callable[[], None] = lambda: None

    # ------------------------------------------------------------------- what grpclib tells

    def accept(
        self,
        stream: grpclib.protocol.Stream,
        headers: Headers,
        release_stream: Callable[[], None],
    ) -> None:
        heard = self.room.hears(self.peer.whose)
        if not heard:
            self.hold()  # what else it sends waits with this call
        task = asyncio.get_running_loop().create_task(self._call(stream, dict(headers), heard))
        self.tasks[stream] = task

        def done(_: object) -> None:
            self.tasks.pop(stream, None)
            release_stream()
            if not self.tasks and not stream.connection.is_closing():
                self.quiet()

        task.add_done_callback(done)

    def cancel(self, stream: grpclib.protocol.Stream) -> None:
        if stream in self.tasks:
            self.tasks[stream].cancel()

    def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()

    # ------------------------------------------------------------------------------ one call

    async def _call(
        self, stream: grpclib.protocol.Stream, headers: dict[str, str], heard: bool
    ) -> None:
        with suppress(H2Error, TimeoutError, ConnectionError):  # it is gone, or as good as
            try:
                if not heard:
                    await self._put_off()
                answer = await self._answer(stream, headers)
            except GrpcStatusError as failure:
                await self._fail(stream, failure)
            except Exception as error:  # noqa: BLE001 - one call's trouble is not the server's
                self._log(f"A call could not be answered: {error!r}.")
                await self._fail(
                    stream,
                    GrpcStatusError(
                        Status.INTERNAL, "something went wrong in the agent; its log says what"
                    ),
                )
            else:
                await self._succeed(stream, answer)

    async def _put_off(self) -> None:
        """Of a peer that asks too often: refused, but not at once."""
        await asyncio.sleep(self.room.limits.hold)
        self.let_go()
        self.door.refused(RejectionReason.RATE)
        # By OTLP it is to be sent again only because of the delay.
        raise GrpcStatusError(Status.RESOURCE_EXHAUSTED, self.room.too_often, retry_after=1)

    async def _answer(self, stream: grpclib.protocol.Stream, headers: dict[str, str]) -> bytes:
        _check_method(headers)
        if not self.door.admits(headers.get("authorization", "")):
            self.door.refused(RejectionReason.TOKEN)
            raise GrpcStatusError(
                Status.UNAUTHENTICATED,
                "a token of the agent's token_file is needed, as metadata "
                '"authorization: Bearer TOKEN"',
            )
        held = _BodyReservation(self.room, self.peer.whose)
        try:
            async with asyncio.timeout(self.room.limits.receive):
                compressed, body = await self._message(stream, held)
            gzipped = bool(compressed) and _is_gzip(headers)
            async with self.room.turn(self.peer.whose):
                refused = await self._reader.take(body, self.peer, gzipped=gzipped)
        except TimeoutError:
            raise GrpcStatusError(
                Status.DEADLINE_EXCEEDED, "the call took too long to arrive"
            ) from None
        except ReceiverBusyError as busy:
            why = "too many spans wait for their energy"
            raise GrpcStatusError(Status.UNAVAILABLE, why, retry_after=busy.seconds) from None
        except (RequestTooLargeError, BodyTooLongError) as error:
            self._reader.receiver.sink.refuse("too_large")
            raise GrpcStatusError(Status.RESOURCE_EXHAUSTED, str(error)) from None
        except (MalformedRequestError, BodyEncodingError) as error:
            self._reader.receiver.sink.refuse("malformed")
            raise GrpcStatusError(Status.INVALID_ARGUMENT, str(error)) from None
        finally:
            held.give_back()
        return encode_export_response(*refused)

    async def _message(
        self, stream: grpclib.protocol.Stream, held: _BodyReservation
    ) -> tuple[int, bytes]:
        """The call's one message, and whether it is compressed."""
        try:
            prefix = await stream.recv_data(_PREFIX.size)
            if len(prefix) < _PREFIX.size:
                raise MalformedRequestError("the call has no message")
            compressed, length = _PREFIX.unpack(prefix)
            if compressed > 1:
                raise MalformedRequestError("the message's flags are not known")
            if length > self._reader.receiver.max_request:
                raise RequestTooLargeError(
                    f"a request has at most {self._reader.receiver.max_request} bytes"
                )
            body = bytearray()
            while len(body) < length:
                piece = await stream.recv_data(min(_READ_CHUNK, length - len(body)))
                if not piece:
                    raise MalformedRequestError("the message ends too early")
                if not held.take(len(piece)):
                    raise ReceiverBusyError
                body += piece
        except AssertionError:  # grpclib's word for a stream that ends too early
            raise MalformedRequestError("the message ends too early") from None
        return compressed, bytes(body)

    async def _succeed(self, stream: grpclib.protocol.Stream, answer: bytes) -> None:
        self.answering += 1
        try:
            async with asyncio.timeout(self.room.limits.send):
                await stream.send_headers(_HEAD)
                await stream.send_data(_PREFIX.pack(0, len(answer)) + answer)
                await stream.send_headers([("grpc-status", "0")], end_stream=True)
        finally:
            self.answering -= 1

    async def _fail(self, stream: grpclib.protocol.Stream, failure: GrpcStatusError) -> None:
        status, why, after = failure.status.value, failure.why, failure.retry_after
        trailers = [
            *_HEAD,
            ("grpc-status", str(status)),
            ("grpc-message", encode_grpc_message(why)),
            ("grpc-status-details-bin", _binary(encode_status(status, why, after))),
            *failure.headers,
        ]
        if after is not None:
            # Python's exporter looks for the delay here, and nowhere else.
            trailers.append(("google.rpc.retryinfo-bin", _binary(encode_retry_info(after))))
        async with asyncio.timeout(self.room.limits.send):
            await stream.send_headers(trailers, end_stream=True)
            if stream.closable:
                stream.reset_nowait()  # what is still to come of it is not wanted


_HEAD = (
    (":status", "200"),
    ("content-type", "application/grpc"),
    ("grpc-accept-encoding", "identity,gzip"),
)


class _BodyReservation:
    """What one call holds of the room for bodies."""

    def __init__(self, room: ServerCapacity, whose: Hashable) -> None:
        self._room, self._whose, self._size = room, whose, 0

    def take(self, size: int) -> bool:
        if not self._room.take(size, self._whose):
            return False
        self._size += size
        return True

    def give_back(self) -> None:
        self._room.give_back(self._size, self._whose)


def _check_method(headers: dict[str, str]) -> None:
    """Whether this is a call that is known here."""
    path = headers.get(":path", "")
    kind = headers.get("content-type", "")
    if headers.get(":method") != "POST" or not kind.startswith("application/grpc"):
        raise GrpcStatusError(Status.INVALID_ARGUMENT, "this is no gRPC call")
    if path == EXPORT_METHOD:
        return
    for what, remedy in _UNSUPPORTED_SIGNALS.items():
        if path.startswith(f"/opentelemetry.proto.collector.{what}."):
            why = f"wattspan takes spans only, no {what}: set {remedy} in the application"
            raise GrpcStatusError(Status.UNIMPLEMENTED, why)
    raise GrpcStatusError(Status.UNIMPLEMENTED, f"only {EXPORT_METHOD} is known here")


def _is_gzip(headers: dict[str, str]) -> bool:
    """Whether a message that is compressed is so by gzip."""
    encoding = headers.get("grpc-encoding", "identity")
    if encoding == "gzip":
        return True
    if encoding == "identity":
        raise GrpcStatusError(
            Status.INTERNAL, "a message is compressed, and grpc-encoding names no way"
        )
    raise GrpcStatusError(
        Status.UNIMPLEMENTED, "messages are sent as they are or compressed by gzip"
    )


def _binary(value: bytes) -> str:
    return base64.b64encode(value).rstrip(b"=").decode()
