"""Spans coming in over gRPC, from a well-behaved client and from one that is not."""

from __future__ import annotations

import asyncio
import gzip
import os
import socket
import struct
import threading
import zlib
from contextlib import ExitStack, closing
from pathlib import Path

import grpclib.client
import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from testbed.fixtures import entered_in
from testbed.http2 import EXPORT, Answer, framed, http2
from testbed.otlp import request, span
from testbed.receiving import Receiving, receiving
from testbed.waiting import eventually

from wattspan.http.limits import ServerLimits
from wattspan.util.protobuf import encode_retry_info, encode_status

WHOLE = request(*(span(number) for number in range(1, 65)))
BODY = WHOLE.SerializeToString()
MANY = request(*(span(number, text="x" * 100) for number in range(1, 3000))).SerializeToString()


running = entered_in(receiving)


def call(running: Receiving, data: bytes, **headers: str) -> Answer:
    with http2(running.connect("grpc")) as client:
        return client.call(data, **headers)


def export(
    message: ExportTraceServiceRequest,
    *,
    path: str | None = None,
    at: tuple[str, int] | tuple[()] = (),
) -> ExportTraceServiceResponse:
    """As grpclib's client does."""

    async def exported() -> ExportTraceServiceResponse:
        with closing(grpclib.client.Channel(*at, path=path)) as channel:
            method = grpclib.client.UnaryUnaryMethod(
                channel, EXPORT, ExportTraceServiceRequest, ExportTraceServiceResponse
            )
            return await method(message, timeout=20)

    return asyncio.run(exported())


# ---------------------------------------------------------------------------------- accepted
# calls


def test_spans_come_in_over_tcp(running: Receiving) -> None:
    assert export(WHOLE, at=running.grpc) == ExportTraceServiceResponse()
    (delivery,) = running.sink.deliveries
    assert (delivery.count, delivery.peer.pid, delivery.peer.local) == (64, None, running.grpc)


def test_spans_come_in_over_a_unix_socket_that_proves_their_sender(running: Receiving) -> None:
    export(WHOLE, path=running.grpc_socket)
    peer = running.sink.deliveries[0].peer
    assert (peer.pid, peer.uid) == (os.getpid(), os.getuid())


def test_messages_may_be_compressed_by_gzip(running: Receiving) -> None:
    answer = call(running, framed(gzip.compress(BODY), compressed=1), grpc_encoding="gzip")
    assert (answer.status, answer.headers["grpc-accept-encoding"]) == (0, "identity,gzip,deflate")
    assert answer.body == framed(b"")
    assert running.sink.count == 64


def test_message_may_be_larger_than_the_windows(running: Receiving) -> None:
    whole = framed(MANY)
    with http2(running.connect("grpc")) as client:
        assert len(whole) > 5 * client.h2.local_flow_control_window(client.open())
        assert client.call(whole).status == 0
    assert running.sink.count == 2999


def test_calls_follow_each_other_on_one_connection_errors_in_between(running: Receiving) -> None:
    with http2(running.connect("grpc")) as client:
        bodies = [BODY, b"garbage", BODY]
        assert [client.call(framed(body)).status for body in bodies] == [0, 3, 0]
    assert running.sink.count == 128


def test_refused_spans_are_partial_success(running: Receiving) -> None:
    bad = span(2)
    bad.span_id = b""
    answer = export(request(span(1), bad), at=running.grpc)
    assert answer.partial_success.rejected_spans == 1
    assert running.sink.refused == {"invalid_id": 1}


# --------------------------------------------------------------------------------- refused calls


def test_busy_sink_is_unavailable_with_the_time_to_come_again(running: Receiving) -> None:
    running.sink.busy = 1
    answer = call(running, framed(BODY))
    assert (answer.status, answer.message) == (14, "too many spans wait for their energy")
    assert answer.binary("grpc-status-details-bin") == encode_status(14, answer.message, 3)
    assert answer.binary("google.rpc.retryinfo-bin") == encode_retry_info(3)
    assert call(running, framed(BODY)).status == 0
    assert running.sink.count == 64


def test_client_receives_grpc_status_errors(running: Receiving) -> None:
    running.sink.busy = 1
    with pytest.raises(GRPCError) as caught:
        export(WHOLE, at=running.grpc)
    assert caught.value.status is Status.UNAVAILABLE


@pytest.mark.parametrize(
    ("data", "headers", "status", "sentence"),
    [
        (framed(b"garbage"), {}, 3, "no ExportTraceServiceRequest"),
        (framed(BODY[:-3]), {}, 3, "no ExportTraceServiceRequest"),
        (framed(BODY)[:-3], {}, 3, "ends too early"),
        (framed(BODY, length=len(BODY) + 1), {}, 3, "ends too early"),
        (b"", {}, 3, "no message"),
        (b"\0\0", {}, 3, "ends too early"),
        (framed(BODY, compressed=7), {}, 3, "unknown flags"),
        (framed(BODY, compressed=1), {}, 13, "grpc-encoding names no encoding"),
        (framed(BODY, compressed=1), {"grpc_encoding": "gzip"}, 3, "not gzip"),
        (framed(zlib.compress(BODY), compressed=1), {"grpc_encoding": "snappy"}, 12, "gzip"),
        (framed(b"", length=2**32 - 1), {}, 8, "at most 1048576 bytes"),
        (
            framed(gzip.compress(bytes(2 << 20)), compressed=1),
            {"grpc_encoding": "gzip"},
            8,
            "more than 1048576 bytes",
        ),
        (framed(BODY), {"path": "/x/Y"}, 12, f"the only method is {EXPORT}"),
        (
            framed(b""),
            {"path": EXPORT.replace("trace", "metrics").replace("Trace", "Metrics")},
            12,
            "set OTEL_METRICS_EXPORTER=none in the application",
        ),
        (framed(BODY), {"content_type": "application/json"}, 3, "no gRPC call"),
        (framed(BODY), {"content_type": ""}, 3, "no gRPC call"),
    ],
)
def test_unacceptable_call_is_refused_with_its_cause(
    running: Receiving, data: bytes, headers: dict[str, str], status: int, sentence: str
) -> None:
    answer = call(running, data, **headers)
    assert (answer.status, answer.headers[":status"]) == (status, "200")
    assert sentence in answer.message
    assert answer.binary("grpc-status-details-bin")[1] == status
    assert running.sink.deliveries == []
    assert running.log == []


# ------------------------------------------------------------------------------------ hard times


def test_call_that_does_not_arrive_in_time_ends(tmp_path: Path) -> None:
    with (
        receiving(tmp_path, ServerLimits(receive=0.05)) as running,
        http2(running.connect("grpc")) as client,
    ):
        stream = client.open()
        client.send(stream, framed(BODY)[:100], end=False)
        assert client.answer(stream).status == 4
        eventually(lambda: client.call(framed(BODY)).status == 0, "another call is in time")


def test_cancelled_calls_leave_no_state(tmp_path: Path) -> None:
    limits = ServerLimits(body=0, bodies=len(BODY) + 1000)
    with receiving(tmp_path, limits) as running, http2(running.connect("grpc")) as client:
        for _ in range(20):
            stream = client.open()
            client.send(stream, framed(BODY)[:-1], end=False)
            client.h2.reset_stream(stream)
            client.flush()
        assert eventually(lambda: client.call(framed(BODY)).status == 0, "there is room again")
        assert running.log == []


def test_calls_together_have_the_same_bound_as_bodies(tmp_path: Path) -> None:
    limits = ServerLimits(body=0, bodies=3 * len(MANY))
    with receiving(tmp_path, limits) as running, http2(running.connect("grpc")) as client:
        first = client.open()
        client.send(first, framed(MANY)[:-1], end=False)
        assert client.call(framed(MANY)).status == 14
        client.send(first, MANY[-1:])
        assert client.answer(first).status == 0


def test_longest_idle_grpc_connection_is_closed_first(tmp_path: Path) -> None:
    with receiving(tmp_path, ServerLimits(connections=3)) as running, ExitStack() as stack:
        clients = [stack.enter_context(http2(running.connect("grpc"))) for _ in range(3)]
        for client in clients:
            assert client.call(framed(BODY)).status == 0
        late = stack.enter_context(http2(running.connect("grpc")))
        assert late.call(framed(BODY)).status == 0
        assert clients[1].call(framed(BODY)).status == 0


def test_abandoned_partial_call_is_tolerated(running: Receiving) -> None:
    for _ in range(10):
        with http2(running.connect("grpc")) as client:
            client.send(client.open(), framed(BODY)[:-1], end=False)
    assert call(running, framed(BODY)).status == 0
    assert running.log == []


preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
frame = st.builds(
    lambda kind, flags, stream, payload: (
        struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload
    ),
    st.integers(0, 12),
    st.integers(0, 255),
    st.integers(0, 9),
    st.binary(max_size=60),
)
frames = st.lists(frame, max_size=6).map(b"".join)


def test_arbitrary_frames_do_not_affect_the_next_client(tmp_path: Path) -> None:
    with receiving(tmp_path, ServerLimits(receive=0.2)) as running:

        @given(st.one_of(frames.map(lambda told: preface + told), st.binary(max_size=100)))
        def property_of(told: bytes) -> None:
            with closing(running.connect("grpc")) as client:
                client.sendall(told)

        property_of()
        eventually(lambda: call(running, framed(BODY)).status == 0, "a call is in time")
        assert running.log == []


def test_nonreading_grpc_client_is_disconnected(running: Receiving) -> None:
    ping = struct.pack(">I", 8)[1:] + struct.pack(">BBI", 6, 0, 0) + bytes(8)
    with closing(socket.socket(socket.AF_UNIX)) as client:
        client.settimeout(120)  # for all that is sent
        client.connect(running.grpc_socket)
        client.sendall(preface + struct.pack(">I", 0)[1:] + struct.pack(">BBI", 4, 0, 0))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            client.sendall(ping * 2_000_000)
    assert call(running, framed(BODY)).status == 0


def test_server_shutdown_leaves_no_files(tmp_path: Path) -> None:
    def open_files() -> set[str]:
        found = list(Path("/proc/self/fd").iterdir())
        return {f"{each.name} {each.readlink()}" for each in found if each.is_symlink()}

    before, threads = open_files(), set(threading.enumerate())
    with ExitStack() as clients, receiving(tmp_path) as running:
        client = clients.enter_context(http2(running.connect("grpc")))
        assert client.call(framed(BODY)).status == 0
        half = clients.enter_context(http2(running.connect("grpc")))
        half.send(half.open(), framed(BODY)[:-1], end=False)
    assert open_files() <= before
    assert set(threading.enumerate()) <= threads
    assert list(tmp_path.iterdir()) == []
