"""Frames of HTTP/2 that carry no spans, from a peer that means harm."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest
from testbed.http2 import EXPORT
from testbed.otlp import KeptSink, request, span

from wattspan.http.access_policy import AccessPolicy
from wattspan.http.limits import ServerCapacity, ServerLimits
from wattspan.ingest.otlp_grpc import OtlpGrpcConnection
from wattspan.ingest.trace_receiver import TraceReceiver
from wattspan.testing import ManualClock
from wattspan.util.encoding import frame_message

PROMPT = ServerLimits(rate=1, rejection_delay=0.0)
HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", EXPORT),
    (":authority", "here"),
    ("content-type", "application/grpc"),
]


class Wire(asyncio.Transport):
    """A transport that records whether it is read."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 4317)})
        self.written, self.aborted, self.closed = bytearray(), False, False
        self.reads = asyncio.Event()
        self.reads.set()

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.aborted or self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        self.reads.clear()

    def resume_reading(self) -> None:
        self.reads.set()


class Receiver:
    """A connection on a wire, and the frames of its client."""

    def __init__(self) -> None:
        self.rejections, clock = Counter[str](), ManualClock()
        policy = AccessPolicy(lambda reason: self.rejections.update([reason]))
        self.capacity = ServerCapacity(PROMPT, clock)
        self.sink = KeptSink()
        receiver = TraceReceiver(self.sink, clock, max_request=4096)
        self.connection = OtlpGrpcConnection(receiver, print, policy, self.capacity)
        self.wire = Wire()
        self.client = h2.connection.H2Connection(h2.config.H2Configuration())
        self.client.initiate_connection()
        self.connection.connection_made(self.wire)
        self.send()

    def send(self, more: bytes = b"") -> None:
        self.connection.data_received(self.client.data_to_send() + more)

    def reset_calls(self, number: int) -> None:
        for _ in range(number):
            stream = self.client.get_next_available_stream_id()
            self.client.send_headers(stream, HEADERS)
            self.client.reset_stream(stream)
        self.send()

    def statuses(self) -> list[bytes]:
        """The statuses of the calls that have ended, as the client reads them."""
        events = self.client.receive_data(bytes(self.wire.written))
        ends = [each for each in events if isinstance(each, h2.events.TrailersReceived)]
        return [dict(each.headers)[b"grpc-status"] for each in ends]


def ping() -> bytes:
    return b"\0\0\x08\x06\0\0\0\0\0" + bytes(8)


def settings() -> bytes:
    return b"\0\0\0\x04\0\0\0\0\0"


def window() -> bytes:
    return b"\0\0\4\x08\0\0\0\0\0" + (1).to_bytes(4, "big")


@pytest.mark.parametrize(
    "frame", [ping(), settings(), window()], ids=["ping", "settings", "window"]
)
def test_flood_of_frames_without_content_ends_the_connection_soon(frame: bytes) -> None:
    async def flood() -> None:
        one = Receiver()
        one.send(frame * 100_000)
        assert one.wire.aborted
        assert len(one.wire.written) < 100_000
        assert one.rejections == {"rate": 1}
        assert not one.capacity.connections

    asyncio.run(flood())


def test_flood_of_calls_that_are_reset_ends_the_connection_soon() -> None:
    async def flood() -> None:
        one = Receiver()
        one.reset_calls(2000)
        assert one.wire.aborted
        assert not one.capacity.connections
        one.connection.connection_lost(None)

    asyncio.run(flood())


def test_call_beyond_the_rate_that_is_reset_delays_the_connection_only() -> None:
    async def reset() -> None:
        one = Receiver()
        one.reset_calls(8)
        assert not one.wire.reads.is_set()
        await asyncio.wait_for(one.wire.reads.wait(), 60)
        assert not one.wire.aborted
        one.connection.connection_lost(None)

    asyncio.run(reset())


GOAWAY = b"\0\0\x08\x07\0\0\0\0\0" + bytes(8)


@pytest.mark.parametrize(
    ("header", "more", "closed"),
    [
        # netty leaves so before the answer to its last call, as in grpc-java
        (b"alice", GOAWAY, True),
        (b"alice", b"", False),
        ("Zürich".encode(), b"", False),  # only the token is read of such headers
        ("Zürich".encode("latin-1"), b"", False),
    ],
)
def test_call_is_answered_whatever_its_headers_and_before_a_client_leaves(
    header: bytes, more: bytes, *, closed: bool
) -> None:
    async def export() -> None:
        one = Receiver()
        body = request(*(span(number) for number in range(1, 4))).SerializeToString()
        one.client.send_headers(1, [*HEADERS, ("x-team", header)])
        one.client.send_data(1, frame_message(body), end_stream=True)
        one.wire.written.clear()
        one.send(more)
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
        assert (one.sink.count, one.wire.closed, one.wire.aborted) == (3, closed, False)
        assert one.statuses() == [b"0"]

    asyncio.run(export())


def leaving(code: int = 0) -> bytes:
    """A GOAWAY with debug data."""
    return b"\0\0\x0c\x07\0\0\0\0\0" + bytes(4) + code.to_bytes(4, "big") + b"done"


@pytest.mark.parametrize("size", [1, 7, 20, 1 << 20])
@pytest.mark.parametrize("middle", [False, True])
def test_call_of_a_client_that_leaves_is_answered_whatever_else_it_sends(
    size: int, *, middle: bool
) -> None:
    async def export() -> None:
        one = Receiver()
        message = frame_message(
            request(*(span(number) for number in range(1, 4))).SerializeToString()
        )
        one.client.send_headers(1, HEADERS)
        one.client.send_data(1, message[:50])
        sent = one.client.data_to_send() + (leaving() if middle else b"")
        one.client.send_data(1, message[50:], end_stream=True)
        sent += one.client.data_to_send() + leaving() + b"\0\0\0\x04\1\0\0\0\0" + ping() + leaving()
        one.wire.written.clear()
        for at in range(0, len(sent), size):
            one.connection.data_received(sent[at : at + size])
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
        assert (one.sink.count, one.wire.closed, one.wire.aborted) == (3, True, False)
        assert not one.rejections
        assert one.statuses() == [b"0"]

    asyncio.run(export())


@pytest.mark.parametrize(
    ("frame", "closed", "aborted", "rejections"),
    [
        (leaving(), True, False, {}),
        (leaving(2), False, True, {}),
        (leaving()[:8] + b"\1" + leaving()[9:], False, True, {"malformed": 1}),  # of a stream
        (b"\0\0\4" + leaving()[3:13], False, True, {"malformed": 1}),  # without a code
    ],
)
def test_client_that_leaves_without_a_call_is_disconnected(
    frame: bytes, rejections: dict[str, int], *, closed: bool, aborted: bool
) -> None:
    async def leave() -> None:
        one = Receiver()
        one.send(frame)
        assert (one.wire.closed, one.wire.aborted) == (closed, aborted)
        assert one.rejections == rejections

    asyncio.run(leave())


def test_flood_of_goaways_during_a_call_ends_the_connection_soon() -> None:
    async def flood() -> None:
        one = Receiver()
        one.client.send_headers(1, HEADERS)
        one.send(leaving() * 100_000)
        assert one.wire.aborted
        assert one.rejections == {"rate": 1}
        one.connection.connection_lost(None)

    asyncio.run(flood())
