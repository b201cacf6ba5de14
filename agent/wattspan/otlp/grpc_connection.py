"""One gRPC call on a connection of grpclib's: a message there, and what comes back.

grpclib's own calls know neither compression nor a bound to an answer, so the message's frame is
written and read here, on the data of the HTTP/2 stream.

A connection of grpclib's to a collector, that bears what grpclib does not foresee.

HTTP/2 has receivers pass over frames that they do not know, with which proxies announce things;
grpclib lets go of the connection, and asyncio logs a traceback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from grpclib.client import Channel, Handler
from grpclib.protocol import H2Protocol
from grpclib.utils import Wrapper
from h2 import events

from wattspan.otlp.grpc_response import FRAME_PREFIX, GrpcReply
from wattspan.otlp.transport import MAX_RESPONSE_SIZE


class ResponseTooLargeError(Exception):
    """The answer says that it is longer than one is read."""


class GrpcCall:
    """To be made once. ``reply`` is what has come back so far, however the call ended."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = list(headers.items())
        self.sent = False  # half a message is never taken; once it is whole it may be
        self.reply = GrpcReply()

    async def make(self, protocol: Any, data: bytes) -> None:
        """Send ``data``, which is a message in its frame, and have the whole reply.

        Raises what grpclib, h2 and the connection do.
        """
        wrapper = Wrapper()  # by which the end of the stream is told to who waits for something
        stream = protocol.processor.connection.create_stream(wrapper=wrapper)
        with wrapper:
            release = await stream.send_request(self._headers, _processor=protocol.processor)
        try:
            with wrapper:
                await stream.send_data(data, end_stream=True)
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
        if prefix:  # a failure may come without a message
            flag, length = FRAME_PREFIX.unpack(prefix)
            if length > MAX_RESPONSE_SIZE:
                raise ResponseTooLargeError(f"its answer has {length} bytes")
            message = await stream.recv_data(length)
        await stream.recv_trailers()
        heard = _received_headers(stream)
        self.reply = GrpcReply(heard.headers, flag, message, heard.trailers)


def _received_headers(stream: Any) -> GrpcReply:
    """The headers and trailers that have come."""
    return GrpcReply(dict(stream.headers or ()), trailers=dict(stream.trailers or ()))


_IGNORED_EVENTS = (
    events.AlternativeServiceAvailable,
    events.InformationalResponseReceived,
    events.UnknownFrameReceived,
)


class LenientChannel(Channel):  # type: ignore[misc]
    """A channel whose other side may send whatever it likes."""

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
        except Exception as error:  # noqa: BLE001 - whatever h2 and grpclib make of strange frames
            self.processor.close(f"it does not keep to HTTP/2 ({type(error).__name__})")
            self._transport.abort()
