"""Requests by gzip over OTLP/gRPC: to servers that know it, that do not, and that answer so."""

from __future__ import annotations

import gzip
import os
import struct
from dataclasses import replace

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from testbed.collector import GrpcCollector
from testbed.forwarding import request, transport_to
from testbed.grpc_wire import Told, WireServer, failing, saying
from testbed.grpcio_collector import grpcio_collector
from testbed.http2 import framed
from testbed.pushing import pushing
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.config import SpansSettings
from wattspan.otlp.forwarder import Forwarder
from wattspan.otlp.transport import MAX_RESPONSE_SIZE, ExportStatus

UNKNOWN, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, UNAUTHENTICATED = 2, 12, 13, 14, 16
INVALID_ARGUMENT = 3

MANY = request(*["the same name"] * 1000).SerializeToString()


def rejected(spans: int, why: str = "") -> bytes:
    """A response in protobuf that took all but some."""
    response = ExportTraceServiceResponse()
    response.partial_success.rejected_spans = spans
    response.partial_success.error_message = why
    wire: bytes = response.SerializeToString()
    return wire


# --------------------------------------------------------------------------------- sent messages


def test_message_is_compressed_with_its_encoding():
    with WireServer() as server, transport_to(server.url, compress=True) as transport:
        assert transport.send(MANY).verdict is ExportStatus.TAKEN
    (call,) = server.calls
    assert call.headers["grpc-encoding"] == "gzip"
    assert call.headers["grpc-accept-encoding"] == "identity,gzip"
    assert call.flag == 1
    assert gzip.decompress(call.message) == MANY
    assert len(call.message) < len(MANY) / 10


@pytest.mark.parametrize("compress", [None, False])
def test_local_or_configured_messages_are_uncompressed(compress: bool | None):
    with WireServer() as server, transport_to(server.url, compress=compress) as transport:
        assert transport.send(MANY).verdict is ExportStatus.TAKEN
    (call,) = server.calls
    assert "grpc-encoding" not in call.headers
    assert (call.flag, call.message) == (0, MANY)


# ----------------------------------------------------------------------------- compression choice


def elsewhere(server: WireServer) -> str:
    """Its address as if on another machine: Linux takes 0.0.0.0 for itself, and we do not."""
    return server.url.replace("127.0.0.1", "0.0.0.0")


@pytest.mark.parametrize(
    ("compression", "far", "flag"),
    [("auto", True, 1), ("auto", False, 0), ("gzip", False, 1), ("none", True, 0)],
)
def test_push_compression_follows_the_configuration(compression: str, far: bool, flag: int):
    with WireServer() as server:
        url = elsewhere(server) if far else server.url
        with pushing(url, compression=compression):
            eventually(lambda: server.calls, "a push")
        call = server.calls[0]
    assert call.flag == flag
    body = gzip.decompress(call.message) if flag else call.message
    assert ExportMetricsServiceRequest.FromString(body).resource_metrics


def test_receiver_without_gzip_receives_every_push():
    with GrpcCollector() as collector:
        with pushing(collector.url, compression="gzip") as pusher:
            eventually(lambda: len(collector.metrics) >= 3, "three pushes")
            assert pusher.running.health.up
            assert pusher.running.drops == 0
        assert pusher.log == [
            f"{collector.url} takes metrics, but it does not know gzip, and gets them uncompressed."
        ]


def test_forwarded_spans_are_compressed_on_their_way_to_another_machine():
    said: list[str] = []
    with WireServer(failing(UNIMPLEMENTED)) as server:
        forwarder = Forwarder(SpansSettings(forward=elsewhere(server)), SystemClock(), said.append)
        forwarder.start()
        forwarder.put(MANY, 1000)
        eventually(lambda: forwarder.stats.forwarded == 1000, "the spans at the collector")
        forwarder.stop()
    assert [call.flag for call in server.calls] == [1, 0]
    assert server.calls[1].message == MANY
    assert said == [
        f"{elsewhere(server)} takes spans, but it does not know gzip, and gets them uncompressed."
    ]
    assert (forwarder.stats.perhaps_twice, dict(forwarder.stats.drops)) == (0, {})


# --------------------------------------------------------------- a server that does not know gzip


def test_server_without_gzip_receives_uncompressed_messages():
    refusal = failing(UNIMPLEMENTED, "no decompressor", grpc_accept_encoding="identity,deflate")
    with WireServer(refusal) as server, transport_to(server.url, compress=True) as transport:
        answers = [transport.send(MANY) for _ in range(3)]
    assert [answer.verdict for answer in answers] == [ExportStatus.TAKEN] * 3
    assert [answer.why for answer in answers] == [
        "it does not know gzip, and gets them uncompressed",
        "",
        "",
    ]
    assert [call.flag for call in server.calls] == [1, 0, 0, 0]
    assert [call.message for call in server.calls[1:]] == [MANY] * 3


def test_grpclib_server_without_compression_receives_every_message():
    with GrpcCollector() as collector, transport_to(collector.url, compress=True) as transport:
        answers = [transport.send(request(name).SerializeToString()) for name in "ab"]
    assert [answer.verdict for answer in answers] == [ExportStatus.TAKEN] * 2
    assert collector.names == ["a", "b"]


def test_server_advertising_gzip_is_trusted():
    refusal = failing(UNIMPLEMENTED, "no such service", grpc_accept_encoding="identity, gzip")
    with WireServer(refusal) as server, transport_to(server.url, compress=True) as transport:
        answer = transport.send(MANY)
    assert answer.verdict is ExportStatus.REFUSED
    assert len(server.calls) == 1


def test_refusal_of_both_encodings_does_not_disable_gzip():
    refusal = failing(UNIMPLEMENTED, "unknown service")
    with (
        WireServer(refusal, refusal) as server,
        transport_to(server.url, compress=True) as transport,
    ):
        first, second = transport.send(MANY), transport.send(MANY)
    assert (first.verdict, second.verdict) == (ExportStatus.REFUSED, ExportStatus.TAKEN)
    assert "unknown service" in first.why
    assert second.why == ""
    assert [call.flag for call in server.calls] == [1, 0, 1]


@pytest.mark.parametrize("code", [UNKNOWN, UNIMPLEMENTED, INTERNAL])
def test_refusal_after_accepted_gzip_is_final(code: int):
    with WireServer(Told(), failing(code)) as server, transport_to(server.url, compress=True) as it:
        answers = [it.send(MANY) for _ in range(3)]
    verdicts = [answer.verdict for answer in answers]
    assert verdicts == [ExportStatus.TAKEN, ExportStatus.REFUSED, ExportStatus.TAKEN]
    assert [call.flag for call in server.calls] == [1, 1, 1]


@pytest.mark.parametrize("code", [INVALID_ARGUMENT, UNAUTHENTICATED, UNAVAILABLE])
def test_other_failures_are_not_laid_to_gzip(code: int):
    with WireServer(failing(code)) as server, transport_to(server.url, compress=True) as transport:
        transport.send(MANY)
    assert [call.flag for call in server.calls] == [1]


def test_busy_server_is_retried_without_gzip():
    refusal, busy = failing(UNIMPLEMENTED), failing(UNAVAILABLE, "busy")
    with WireServer(refusal, busy) as server, transport_to(server.url, compress=True) as transport:
        first = transport.send(MANY)
        assert (first.verdict, first.perhaps_taken) == (ExportStatus.AGAIN, False)
        assert transport.send(MANY).verdict is ExportStatus.TAKEN
    assert [call.flag for call in server.calls] == [1, 0, 1]


def test_partial_rejection_is_reported_with_the_missing_gzip():
    partial = saying(framed(rejected(2, "too old")))
    with (
        WireServer(failing(UNIMPLEMENTED), partial) as server,
        transport_to(server.url, compress=True) as transport,
    ):
        answer = transport.send(MANY)
    assert (answer.verdict, answer.rejected) == (ExportStatus.TAKEN, 2)
    assert answer.why == (
        "it rejected 2 spans (too old), and it does not know gzip, and gets them uncompressed"
    )


@pytest.mark.parametrize("code", [UNIMPLEMENTED, UNAUTHENTICATED, UNAVAILABLE])
def test_early_grpc_refusal_is_read(code: int):
    large = request(*(os.urandom(50).hex() for _ in range(5000))).SerializeToString()
    early = replace(failing(code, "not so"), early=True)
    with WireServer(early, early) as server, transport_to(server.url, compress=True) as transport:
        answer = transport.send(large)
        assert (answer.perhaps_taken, answer.unfinished) == (False, False)
        assert "(not so)" in answer.why
        transport.send(large)
        assert transport.send(large).verdict is ExportStatus.TAKEN
    assert gzip.decompress(server.calls[-1].message) == large


# ---------------------------------------------------------------------------- answers by gzip


def test_compressed_response_is_read():
    zipped = saying(framed(gzip.compress(rejected(3)), compressed=1), grpc_encoding="gzip")
    with WireServer(zipped) as server, transport_to(server.url) as transport:
        answer = transport.send(MANY)
    assert (answer.verdict, answer.rejected) == (ExportStatus.TAKEN, 3)
    assert server.calls[0].headers["grpc-accept-encoding"] == "identity,gzip"


BOMB = gzip.compress(bytes(100 * MAX_RESPONSE_SIZE))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (saying(framed(BOMB, compressed=1), grpc_encoding="gzip"), "once it is decompressed"),
        (saying(framed(gzip.compress(b""), compressed=1)), "grpc-encoding names no encoding"),
        (saying(framed(b"x", compressed=1), grpc_encoding="snappy"), "that was not offered"),
        (saying(framed(b"x", compressed=1), grpc_encoding="gzip"), "the body is not gzip"),
        (saying(framed(b"", compressed=2)), "unknown flags"),
    ],
    ids=["bomb", "no encoding", "another", "no gzip", "flags"],
)
def test_undecodable_response_keeps_its_status(told: Told, said: str):
    with WireServer(told) as server, transport_to(server.url) as transport:
        answer = transport.send(MANY)
        assert transport.send(MANY).verdict is ExportStatus.TAKEN
    assert (answer.verdict, answer.rejected) == (ExportStatus.TAKEN, 0)
    assert said in answer.why
    assert len(server.calls) == 2


def test_failure_after_an_answer_that_cannot_be_read_is_a_failure():
    bad = saying(framed(b"x", compressed=1), code=UNAVAILABLE, grpc_encoding="gzip")
    with WireServer(bad) as server, transport_to(server.url) as transport:
        answer = transport.send(MANY)
    assert (answer.verdict, answer.perhaps_taken) == (ExportStatus.AGAIN, False)
    assert server.calls


def test_oversized_response_is_not_read():
    endless = saying(struct.pack(">BI", 0, MAX_RESPONSE_SIZE + 1) + bytes(1000))
    with WireServer(endless) as server, transport_to(server.url) as transport:
        answer = transport.send(MANY)
        assert transport.send(MANY).verdict is ExportStatus.TAKEN
    assert (answer.verdict, answer.perhaps_taken) == (ExportStatus.AGAIN, True)
    assert answer.why == f"its answer has {MAX_RESPONSE_SIZE + 1} bytes"
    assert server.calls


def test_truncated_response_has_unknown_delivery():
    half = saying(struct.pack(">BI", 0, 100) + b"half")
    with WireServer(half) as server, transport_to(server.url) as transport:
        answer = transport.send(MANY)
    assert (answer.verdict, answer.perhaps_taken) == (ExportStatus.AGAIN, True)
    assert server.calls


# -------------------------------------------------------------------------- gRPC's own library


@pytest.mark.needs_apps
def test_grpcio_server_reads_the_messages():
    with grpcio_collector() as collector, transport_to(collector.url, compress=True) as transport:
        answers = [transport.send(MANY) for _ in range(2)]
        collector.has(MANY, MANY)
        sent = len(collector.relay.there)
    assert [answer.why for answer in answers] == ["", ""]
    assert sent < len(MANY) / 5


@pytest.mark.needs_apps
def test_grpcio_server_without_gzip_receives_uncompressed_messages():
    with (
        grpcio_collector(knows_gzip=False) as collector,
        transport_to(collector.url, compress=True) as transport,
    ):
        answers = [transport.send(MANY) for _ in range(2)]
        collector.has(MANY, MANY)
    assert [answer.verdict for answer in answers] == [ExportStatus.TAKEN] * 2
    assert [answer.why for answer in answers] == [
        "it does not know gzip, and gets them uncompressed",
        "",
    ]


@pytest.mark.needs_apps
def test_response_compressed_by_grpcio_is_read():
    why = "too old, " * 200
    with (
        grpcio_collector(zips=True, answer=rejected(3, why)) as collector,
        transport_to(collector.url) as transport,
    ):
        answer = transport.send(MANY)
        collector.has(MANY)
        back = bytes(collector.relay.back)
    assert (answer.verdict, answer.rejected) == (ExportStatus.TAKEN, 3)
    assert "too old, too old" in answer.why
    assert b"too old, too old" not in back
