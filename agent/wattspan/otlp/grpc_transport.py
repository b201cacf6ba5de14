"""OTLP/gRPC on grpclib's HTTP/2: an extra, imported only where the address requires it.

grpclib's own calls have neither compression nor a limit of the response, so this module reads and
writes the frames of messages itself, on the data of an HTTP/2 stream. The flag before a message
tells whether it is compressed, the header ``grpc-encoding`` how. An endpoint that cannot read the
encoding should answer UNIMPLEMENTED; libraries without compression answer other errors.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import ssl
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

from grpclib.client import Channel, Handler
from grpclib.const import Status
from grpclib.exceptions import ProtocolError, StreamTerminatedError
from grpclib.metadata import USER_AGENT
from grpclib.protocol import H2Protocol
from grpclib.utils import Wrapper
from h2 import events

from wattspan.model import SECOND
from wattspan.model.settings import Listen
from wattspan.otlp.destination import SPANS, Destination, Signal
from wattspan.otlp.transport import (
    CONNECT_TIMEOUT,
    IDLE_TIMEOUT,
    MAX_RESPONSE_SIZE,
    RESPONSE_TIMEOUT,
    ExportResult,
    ExportStatus,
    connection_failure,
    describe_os_error,
    result_of_grpc,
    result_of_response,
    retry_result,
)
from wattspan.ports import Clock
from wattspan.util.encoding import (
    BodyEncodingError,
    BodyTooLongError,
    gzip_compress,
    gzip_decompress,
)
from wattspan.util.protobuf import retry_delay

# ------------------------------------------------------------------------------------ replies

FRAME_PREFIX = struct.Struct(">BI")
"""Before each message: the compressed flag, and the length as sent."""

_STATUSES = {str(status.value): status for status in Status}
_OF_HTTP = {
    "400": Status.INTERNAL,
    "401": Status.UNAUTHENTICATED,
    "403": Status.PERMISSION_DENIED,
    "404": Status.UNIMPLEMENTED,
    **dict.fromkeys(("429", "502", "503", "504"), Status.UNAVAILABLE),
}
"""The gRPC status of an HTTP status, where a proxy without gRPC answers."""

_MAY_BE_ENCODING = {Status.UNIMPLEMENTED.value, Status.UNKNOWN.value, Status.INTERNAL.value}
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
    def status(self) -> tuple[int, str]:
        """The gRPC status code and its message; UNKNOWN for a reply that is not gRPC."""
        unknown = Status.UNKNOWN.value
        http = self.headers.get(":status", "200")
        if http != "200":
            return _OF_HTTP.get(http, Status.UNKNOWN).value, f"HTTP {http}"
        if not _is_grpc(self.headers):
            return unknown, f"its content is {self.headers.get('content-type', 'of no type')}"
        code = self._final.get("grpc-status", "")
        if code not in _STATUSES:
            return unknown, "it tells no gRPC status"
        return int(code), unquote(self._final.get("grpc-message", ""), errors="replace")

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


def frame_message(message: bytes, *, zipped: bool) -> bytes:
    return FRAME_PREFIX.pack(zipped, len(message)) + message


def result_of_reply(reply: GrpcReply, signal: Signal = SPANS) -> ExportResult:
    """The result of a complete reply."""
    code, message = reply.status
    if code != 0:
        return result_of_grpc(code, Status(code).name, message, _retry_delay(reply), signal)
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


# --------------------------------------------------------------------------------- connection


class _Call:
    """One call. ``reply`` has the parts received so far, however the call ended."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = list(headers.items())
        self.sent = False  # a server may accept a complete message, never a part of it
        self.reply = GrpcReply()

    async def make(self, protocol: Any, frame: bytes) -> None:
        """Send ``frame`` and receive the reply; raises the errors of grpclib, h2 and sockets."""
        wrapper = Wrapper()  # raises the end of the stream in the code that waits for data
        stream = protocol.processor.connection.create_stream(wrapper=wrapper)
        with wrapper:
            release = await stream.send_request(self._headers, _processor=protocol.processor)
        try:
            with wrapper:
                await stream.send_data(frame, end_stream=True)
                self.sent = True
                await self._receive(stream)
        finally:
            if self.reply == GrpcReply():
                self.reply = _received_headers(stream)
            if stream.closable:
                stream.reset_nowait()
            release()

    async def _receive(self, stream: Any) -> None:
        await stream.recv_headers()
        reply = _received_headers(stream)
        if reply.headers_say_all:
            self.reply = reply
            return
        flag, message = 0, b""
        prefix = await stream.recv_data(FRAME_PREFIX.size)
        if prefix:  # a failure may have no message
            flag, length = FRAME_PREFIX.unpack(prefix)
            if length > MAX_RESPONSE_SIZE:
                raise _ResponseTooLargeError(f"its answer has {length} bytes")
            message = await stream.recv_data(length)
        await stream.recv_trailers()
        self.reply = replace(_received_headers(stream), flag=flag, message=message)


def _received_headers(stream: Any) -> GrpcReply:
    return GrpcReply(dict(stream.headers or ()), trailers=dict(stream.trailers or ()))


_IGNORED_EVENTS = (
    events.AlternativeServiceAvailable,
    events.InformationalResponseReceived,
    events.UnknownFrameReceived,
)


class _LenientChannel(Channel):  # type: ignore[misc]
    """A channel that ignores unknown frames, as HTTP/2 requires.

    Proxies announce features by such frames; grpclib drops the connection and asyncio logs a
    traceback.
    """

    def _protocol_factory(self) -> asyncio.Protocol:
        return _LenientProtocol(Handler(), self._config, self._h2_config)


class _LenientProtocol(H2Protocol):  # type: ignore[misc]
    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        super().connection_made(transport)
        for event in _IGNORED_EVENTS:
            self.processor.processors.setdefault(event, lambda _: None)

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except Exception as error:  # noqa: BLE001 - any error of h2 and grpclib on invalid frames
            self.processor.close(f"it does not keep to HTTP/2 ({type(error).__name__})")
            self._transport.abort()


# ---------------------------------------------------------------------------------- transport


class GrpcTransport:
    """One channel to a collector, on an event loop that runs only during ``send``."""

    def __init__(
        self,
        destination: Destination,
        headers: Mapping[str, str],
        clock: Clock,
        *,
        trust: Callable[[], ssl.SSLContext] = ssl.create_default_context,
        answer_within: float = RESPONSE_TIMEOUT,
        compress: bool | None = None,
    ) -> None:
        """``trust`` makes the TLS context. ``compress`` defaults to true for other hosts."""
        self._destination = destination
        self._headers = _request_headers(destination, headers)
        self._compress = not destination.is_local if compress is None else compress
        self._takes_gzip: bool | None = None  # None until it has been tried
        self._report_no_gzip = False
        self._clock = clock
        self._used_at = 0
        self._trust = trust
        self._answer_within = answer_within
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: Any = None
        self._task: asyncio.Task[ExportResult] | None = None
        self._aborted = False

    def send(self, body: bytes) -> ExportResult:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._send(body))
        if self._aborted:
            self._task.cancel()
        try:
            return self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            self._disconnect()
            return retry_result("the agent is stopping", perhaps_taken=True)
        finally:
            self._task = None

    def abort(self) -> None:
        self._aborted = True
        task, loop = self._task, self._loop
        if task is not None and loop is not None:
            with contextlib.suppress(RuntimeError):  # the task has just finished
                loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        if self._loop is not None:
            self._disconnect()
            self._loop.run_until_complete(_run_pending_events())  # closes the sockets
            self._loop.close()
        self._loop = None

    # ------------------------------------------------------------------------------- one request

    async def _send(self, body: bytes) -> ExportResult:
        if not self._compress or self._takes_gzip is False:
            result, _ = await self._request(body, zipped=False)
            return self._with_gzip_report(result)
        result, reply = await self._request(gzip_compress(body), zipped=True)
        if self._takes_gzip is None and reply is not None and reply.blames_encoding:
            return self._with_gzip_report(await self._retry_without_gzip(body, reply))
        if result.verdict is ExportStatus.TAKEN:
            self._takes_gzip = True
        return result

    async def _retry_without_gzip(self, body: bytes, refused: GrpcReply) -> ExportResult:
        """Send uncompressed what was refused, and so not accepted, when it was compressed."""
        result, reply = await self._request(body, zipped=False)
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

    async def _request(
        self, message: bytes, *, zipped: bool
    ) -> tuple[ExportResult, GrpcReply | None]:
        """The result of one request, and the reply unless there is none."""
        if (failure := await self._connect()) is not None:
            return failure, None
        encoding = {"grpc-encoding": "gzip"} if zipped else {}
        call = _Call(self._headers | encoding)
        signal, remedy = self._destination.signal, ""
        try:
            async with asyncio.timeout(self._answer_within):
                protocol = await self._channel.__connect__()
                await call.make(protocol, frame_message(message, zipped=zipped))
        except TimeoutError:
            why = f"it did not answer within {self._answer_within:g} s"
        except _ResponseTooLargeError as error:
            why = str(error)
        except (StreamTerminatedError, ProtocolError, OSError, ValueError) as error:
            why = f"the connection was lost: {describe_os_error(error)}"
        except Exception as error:  # noqa: BLE001 - h2 and hpack have errors of their own
            why, remedy = f"it does not speak gRPC: {describe_os_error(error)}", signal.away
        else:
            self._used_at = self._clock.monotonic()
            return result_of_reply(call.reply, signal), call.reply
        if call.reply.failed:  # the collector answered before it read everything
            return result_of_reply(call.reply, signal), call.reply
        self._disconnect()
        return retry_result(why, remedy, perhaps_taken=call.sent, unfinished=not call.sent), None

    async def _connect(self) -> ExportResult | None:
        """Connect unless connected; the failure if that is not possible."""
        if self._clock.monotonic() - self._used_at > IDLE_TIMEOUT * SECOND:
            self._close_channel()
        try:
            if self._channel is None:
                self._channel = self._new_channel()
            await _run_pending_events()
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await self._channel.__connect__()
        except (OSError, ValueError) as error:
            self._disconnect()
            return connection_failure(error, self._destination.signal)
        return None

    def _new_channel(self) -> Any:
        destination = self._destination
        if destination.socket:
            return _LenientChannel(path=destination.socket)
        context: ssl.SSLContext | None = None
        if destination.tls:
            context = self._trust()
            context.set_alpn_protocols(["h2"])
        return _LenientChannel(destination.host, destination.port, ssl=context)

    def _disconnect(self) -> None:
        """Close a failed connection; the next one may reach another collector."""
        self._takes_gzip = None
        self._close_channel()

    def _close_channel(self) -> None:
        if self._takes_gzip:  # that gzip is not accepted is not tried again on each connection
            self._takes_gzip = None
        channel, self._channel = self._channel, None
        if channel is None:
            return
        # grpclib closes gracefully, and TLS would wait for the other side on a loop that does not
        # run. grpclib has no public access to the transport.
        protocol = channel._protocol  # noqa: SLF001
        transport = getattr(getattr(protocol, "connection", None), "_transport", None)
        channel.close()
        if transport is not None:
            transport.abort()


async def _run_pending_events() -> None:
    """Let the loop process the events of its connections since it last ran.

    A close is noticed in the first turn, passed to the transport in the second and to grpclib in
    the third.
    """
    for _ in range(4):
        await asyncio.sleep(0)


def _request_headers(destination: Destination, headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a call, those of HTTP/2 first."""
    authority = "localhost"
    if not destination.socket:
        authority = Listen.written(destination.host, destination.port)
    return {
        ":method": "POST",
        ":scheme": "https" if destination.tls else "http",
        ":path": destination.signal.method,
        ":authority": authority,
        "user-agent": USER_AGENT,
        **headers,
        "te": "trailers",  # codespell:ignore te
        "content-type": "application/grpc",
        "grpc-accept-encoding": "identity,gzip",
    }
