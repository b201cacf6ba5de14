"""Frames of HTTP/2 that carry no spans, from a peer that means harm."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import h2.config
import h2.connection
import pytest
from testbed.http2 import EXPORT
from testbed.otlp import KeptSink

from wattspan.http.access_policy import AccessPolicy
from wattspan.http.limits import ServerCapacity, ServerLimits
from wattspan.ingest.otlp_grpc import OtlpGrpcConnection
from wattspan.ingest.trace_receiver import TraceReceiver
from wattspan.testing import ManualClock

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
        self.written, self.aborted = bytearray(), False
        self.reads = asyncio.Event()
        self.reads.set()

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.aborted

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
        receiver = TraceReceiver(KeptSink(), clock, max_request=4096)
        self.connection = OtlpGrpcConnection(receiver, print, policy, self.capacity)
        self.wire = Wire()
        self.client = h2.connection.H2Connection(h2.config.H2Configuration())
        self.client.initiate_connection()
        self.connection.connection_made(self.wire)
        self.send()

    def send(self, more: bytes = b"") -> None:
        self.connection.data_received(self.client.data_to_send() + more)


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
        for _ in range(2000):
            stream = one.client.get_next_available_stream_id()
            one.client.send_headers(stream, HEADERS)
            one.client.reset_stream(stream)
        one.send()
        assert one.wire.aborted
        assert not one.capacity.connections
        one.connection.connection_lost(None)

    asyncio.run(flood())


def test_call_beyond_the_rate_that_is_reset_delays_the_connection_only() -> None:
    async def reset() -> None:
        one = Receiver()
        for _ in range(8):
            stream = one.client.get_next_available_stream_id()
            one.client.send_headers(stream, HEADERS)
            one.client.reset_stream(stream)
        one.send()
        assert not one.wire.reads.is_set()
        await asyncio.wait_for(one.wire.reads.wait(), 60)
        assert not one.wire.aborted
        one.connection.connection_lost(None)

    asyncio.run(reset())
