"""Requests on their way to a real collector over OTLP/gRPC, which fails in every way there is."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from testbed.certificates import Authority
from testbed.collector import Break, GrpcCollector, GrpcStatus, HttpCollector, Silence, rejecting
from testbed.forwarding import grpc_to, request
from testbed.grpc_wire import WireServer
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.model import SECOND
from wattspan.otlp.destination import parse_destination
from wattspan.otlp.http_transport import open_transport
from wattspan.otlp.transport import ExportStatus
from wattspan.ports import ConfigError
from wattspan.util.protobuf import encode_status

RESOURCE_EXHAUSTED, UNIMPLEMENTED, UNAVAILABLE, UNAUTHENTICATED = 8, 12, 14, 16


def body(*names: str) -> bytes:
    wire: bytes = request(*names).SerializeToString()
    return wire


def retry_in(seconds: int) -> bytes:
    """google.rpc.Status with a RetryInfo, as a collector writes it."""
    return encode_status(UNAVAILABLE, "", seconds)


def test_requests_arrive_as_they_were_sent():
    with GrpcCollector() as collector, grpc_to(collector.url, {"x-tenant": "a"}) as transport:
        for name in "abc":
            assert transport.send(body(name)).verdict is ExportStatus.TAKEN
    assert collector.taken == [request(name) for name in "abc"]
    assert collector.seen[0].headers["x-tenant"] == "a"


def test_large_request_arrives_whole():
    names = [os.urandom(50).hex() for _ in range(20_000)]
    with GrpcCollector() as collector, grpc_to(collector.url) as transport:
        assert transport.send(body(*names)).verdict is ExportStatus.TAKEN
    assert collector.names == names


def test_unix_socket_is_a_destination(tmp_path: Path):
    with (
        GrpcCollector(path=tmp_path / "c.sock") as collector,
        grpc_to(collector.url) as transport,
    ):
        assert transport.send(body("a")).verdict is ExportStatus.TAKEN
    assert collector.names == ["a"]


def test_rejected_spans_are_counted_separately():
    with GrpcCollector() as collector, grpc_to(collector.url) as transport:
        collector.script(rejecting(2, "no trace id"))
        answer = transport.send(body("a", "b", "c"))
    assert (answer.verdict, answer.rejected) == (ExportStatus.TAKEN, 2)


def test_overloaded_collector_is_retried_after_its_delay():
    with GrpcCollector() as collector, grpc_to(collector.url) as transport:
        collector.script(
            GrpcStatus(UNAVAILABLE, "busy"),
            GrpcStatus(UNAVAILABLE, "busy", retry_in(3)),
            GrpcStatus(RESOURCE_EXHAUSTED, "full", retry_in(4)),
            GrpcStatus(UNAVAILABLE, "odd", b"\xff\xff\xff"),
        )
        answers = [transport.send(body("a")) for _ in range(4)]
    assert [answer.verdict for answer in answers] == [ExportStatus.AGAIN] * 4
    assert [answer.after for answer in answers] == [None, 3 * SECOND, 4 * SECOND, None]
    assert "UNAVAILABLE (busy)" in answers[0].why


def test_exhausted_without_a_delay_is_a_limit_of_size():
    with GrpcCollector() as collector, grpc_to(collector.url) as transport:
        collector.script(GrpcStatus(RESOURCE_EXHAUSTED, "message larger than max"))
        assert transport.send(body("a")).verdict is ExportStatus.TOO_LARGE


@pytest.mark.parametrize("code", [3, 5, 7, UNIMPLEMENTED, 13, UNAUTHENTICATED])
def test_refusal_is_final(code: int):
    with GrpcCollector() as collector, grpc_to(collector.url) as transport:
        collector.script(GrpcStatus(code, "because"))
        answer = transport.send(body("a"))
    assert answer.verdict is ExportStatus.REFUSED
    assert "because" in answer.why


def test_refused_connection_is_retried(free_port: Callable[[], int]):
    with grpc_to(f"grpc://127.0.0.1:{free_port()}") as transport:
        answer = transport.send(body("a"))
    assert (answer.verdict, answer.perhaps_taken) == (ExportStatus.AGAIN, False)
    assert "refused" in answer.why


def test_request_without_response_has_unknown_delivery():
    with GrpcCollector() as collector, grpc_to(collector.url) as transport:
        collector.script(Break())
        answer = transport.send(body("a"))
        assert (answer.verdict, answer.perhaps_taken) == (ExportStatus.AGAIN, True)
        assert transport.send(body("b")).verdict is ExportStatus.TAKEN
    assert collector.names == ["b"]


def test_connection_closed_by_the_collector_is_reopened():
    with GrpcCollector() as collector, grpc_to(collector.url) as transport:
        transport.send(body("a"))
        collector.hang_up()
        answer = transport.send(body("b"))
    assert (answer.verdict, answer.perhaps_taken) == (ExportStatus.TAKEN, False)
    assert collector.names == ["a", "b"]


def test_silent_collector_times_out():
    with GrpcCollector() as collector, grpc_to(collector.url, answer_within=1) as transport:
        collector.script(Silence())
        answer = transport.send(body("a"))
    assert (answer.verdict, answer.perhaps_taken) == (ExportStatus.AGAIN, True)


def test_wait_for_a_response_is_cancellable():
    with GrpcCollector() as collector, grpc_to(collector.url) as transport:
        collector.script(Silence())
        answers = []
        sender = threading.Thread(target=lambda: answers.append(transport.send(body("a"))))
        sender.start()
        eventually(lambda: collector.seen, "the request at the collector")
        transport.abort()
        sender.join(20)
        assert not sender.is_alive()
    assert answers[0].verdict is ExportStatus.AGAIN


def test_tls_is_verified_by_the_authorities_of_this_host(tmp_path: Path):
    authority = Authority(tmp_path)
    with GrpcCollector(certificate=authority.issue("server")) as collector:
        with grpc_to(collector.url) as stranger:
            refused = stranger.send(body("a"))
        with grpc_to(collector.url, trust=authority.client) as friend:
            assert friend.send(body("b")).verdict is ExportStatus.TAKEN
    assert refused.verdict is ExportStatus.AGAIN
    assert "certificate is not trusted" in refused.why
    assert collector.names == ["b"]


def test_http_only_collector_is_retried():
    with (
        HttpCollector() as collector,
        grpc_to(collector.url.replace("http", "grpc"), answer_within=5) as transport,
    ):
        assert transport.send(body("a")).verdict is ExportStatus.AGAIN
    assert collector.taken == []


def test_unknown_http2_frames_are_ignored(caplog: pytest.LogCaptureFixture):
    unknown = b"\0\0\3\xbe\0\0\0\0\0abc"
    elsewhere = b"\0\0\x0e\x0a\0\0\0\0\0\0\x07a.b:443h2=:1"
    with WireServer(frames=unknown + elsewhere) as server, grpc_to(server.url) as transport:
        assert transport.send(body("a")).verdict is ExportStatus.TAKEN
        assert transport.send(body("b")).verdict is ExportStatus.TAKEN
    assert len(server.calls) == 2
    assert caplog.records == []


def test_frames_that_break_http2_end_the_connection_without_a_noise(
    caplog: pytest.LogCaptureFixture,
):
    for frames in (b"\xff" * 100, b"\0\0\1\6\0\0\0\0\0x", b"\0\0\4\3\0\0\0\0\1\0\0\0\0"):
        with WireServer(frames=frames) as server, grpc_to(server.url, answer_within=5) as transport:
            assert transport.send(body("a")).verdict is ExportStatus.AGAIN
    assert caplog.records == []


def test_missing_h2_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "h2.connection", None)
    with pytest.raises(ConfigError, match=r"pip install wattspan\[grpc\]"):
        open_transport(parse_destination("grpc://collector"), {}, SystemClock(), "")
