"""Requests on their way to a real collector over OTLP/HTTP and OTLP/gRPC, which fails in every way.

Tests with ``kind`` hold for both transports.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from testbed.certificates import Authority
from testbed.collector import (
    Break,
    CutShort,
    EarlyRefusal,
    Fault,
    Garbage,
    GrpcCollector,
    GrpcStatus,
    HttpCollector,
    Reply,
    Silence,
    rejecting,
)
from testbed.forwarding import request, transport_to
from testbed.grpc_wire import WireServer
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.model import SECOND
from wattspan.otlp.destination import parse_destination
from wattspan.otlp.http_transport import open_transport
from wattspan.otlp.transport import ExportStatus
from wattspan.ports import ConfigError
from wattspan.util.protobuf import encode_status

Kind = type[HttpCollector] | type[GrpcCollector]

RESOURCE_EXHAUSTED, UNIMPLEMENTED, UNAVAILABLE, UNAUTHENTICATED = 8, 12, 14, 16


@pytest.fixture(params=[HttpCollector, GrpcCollector], ids=["http", "grpc"])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


def body(*names: str) -> bytes:
    wire: bytes = request(*names).SerializeToString()
    return wire


def retry_in(seconds: int) -> bytes:
    """google.rpc.Status with a RetryInfo, as a collector writes it."""
    return encode_status(UNAVAILABLE, "", seconds)


# -------------------------------------------------------------------------------- both transports


def test_requests_arrive_as_they_were_sent(kind: Kind):
    with kind() as collector, transport_to(collector.url, {"x-tenant": "a"}) as transport:
        for name in "abc":
            assert transport.send(body(name)).verdict is ExportStatus.TAKEN
    assert collector.taken == [request(name) for name in "abc"]
    assert collector.seen[0].headers["x-tenant"] == "a"


def test_large_request_arrives_whole(kind: Kind):
    names = [os.urandom(50).hex() for _ in range(20_000)]
    with kind() as collector, transport_to(collector.url) as transport:
        assert transport.send(body(*names)).verdict is ExportStatus.TAKEN
    assert collector.names == names


def test_unix_socket_is_a_destination(kind: Kind, tmp_path: Path):
    with (
        kind(path=tmp_path / "c.sock") as collector,
        transport_to(collector.url) as transport,
    ):
        assert transport.send(body("a")).verdict is ExportStatus.TAKEN
    assert collector.names == ["a"]


def test_rejected_spans_are_counted_separately(kind: Kind):
    with kind() as collector, transport_to(collector.url) as transport:
        collector.script(rejecting(3, "no trace id"))
        answer = transport.send(body("a", "b", "c", "d"))
    assert (answer.verdict, answer.rejected) == (ExportStatus.TAKEN, 3)
    assert "no trace id" in answer.why


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        *((HttpCollector, Reply(n, b"because", "text/plain")) for n in (400, 401, 403, 404, 405)),
        *((HttpCollector, Reply(n, b"because", "text/plain")) for n in (500, 501)),
        *((GrpcCollector, GrpcStatus(n, "because")) for n in (3, 5, 7, 13)),
        (GrpcCollector, GrpcStatus(UNIMPLEMENTED, "because")),
        (GrpcCollector, GrpcStatus(UNAUTHENTICATED, "because")),
    ],
)
def test_refusal_is_final(kind: Kind, fault: Reply | GrpcStatus):
    with kind() as collector, transport_to(collector.url) as transport:
        collector.script(fault)
        answer = transport.send(body("a"))
    assert answer.verdict is ExportStatus.REFUSED
    assert "because" in answer.why
    if isinstance(fault, Reply):
        assert str(fault.status) in answer.why


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (HttpCollector, Reply(413)),
        (GrpcCollector, GrpcStatus(RESOURCE_EXHAUSTED, "message larger than max")),
    ],
)
def test_size_refusal_is_recognised(kind: Kind, fault: Fault):
    with kind() as collector, transport_to(collector.url) as transport:
        collector.script(fault)
        assert transport.send(body("a")).verdict is ExportStatus.TOO_LARGE


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_refused_connection_is_retried(scheme: str, free_port: Callable[[], int]):
    with transport_to(f"{scheme}://127.0.0.1:{free_port()}") as transport:
        answer = transport.send(body("a"))
    assert (answer.verdict, answer.perhaps_taken) == (ExportStatus.AGAIN, False)
    assert "refused" in answer.why


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (HttpCollector, Break("answer")),
        (HttpCollector, Break("in answer")),
        (HttpCollector, Garbage()),
        (GrpcCollector, Break()),
    ],
)
def test_request_without_a_valid_response_has_unknown_delivery(kind: Kind, fault: Fault):
    with kind() as collector, transport_to(collector.url) as transport:
        collector.script(fault)
        answer = transport.send(body("a"))
        assert (answer.verdict, answer.perhaps_taken) == (ExportStatus.AGAIN, True)
        assert transport.send(body("b")).verdict is ExportStatus.TAKEN
    assert collector.names == ["b"]


def test_connection_closed_by_the_collector_is_reopened(kind: Kind):
    with kind() as collector, transport_to(collector.url) as transport:
        transport.send(body("a"))
        collector.hang_up()
        answer = transport.send(body("b"))
        assert (answer.verdict, answer.perhaps_taken) == (ExportStatus.TAKEN, False)
    assert collector.names == ["a", "b"]


def test_silent_collector_times_out(kind: Kind):
    with kind() as collector, transport_to(collector.url, answer_within=1) as transport:
        collector.script(Silence())
        answer = transport.send(body("a"))
    assert (answer.verdict, answer.perhaps_taken) == (ExportStatus.AGAIN, True)
    assert "did not answer within" in answer.why


def test_wait_for_a_response_is_cancellable(kind: Kind):
    with kind() as collector, transport_to(collector.url) as transport:
        collector.script(Silence())
        answers = []
        sender = threading.Thread(target=lambda: answers.append(transport.send(body("a"))))
        sender.start()
        eventually(lambda: collector.seen, "the request at the collector")
        transport.abort()
        sender.join(20)
        assert not sender.is_alive()
    assert answers[0].perhaps_taken


def test_tls_is_verified_by_the_authorities_of_this_host(kind: Kind, tmp_path: Path):
    authority = Authority(tmp_path)
    with kind(certificate=authority.issue("server")) as collector:
        with transport_to(collector.url) as stranger:
            refused = stranger.send(body("a"))
        with transport_to(collector.url, trust=authority.client) as friend:
            assert friend.send(body("b")).verdict is ExportStatus.TAKEN
    assert refused.verdict is ExportStatus.AGAIN
    assert "certificate is not trusted" in refused.why
    assert "SSL_CERT_FILE" in refused.remedy
    assert collector.names == ["b"]


# ------------------------------------------------------------------------------------------ HTTP


def test_path_and_type_are_those_of_otlp_over_http():
    with HttpCollector() as collector, transport_to(collector.url) as transport:
        transport.send(body("a"))
    (seen,) = collector.seen
    assert seen.path == "/v1/traces"
    assert seen.headers["content-type"] == "application/x-protobuf"
    assert seen.headers["user-agent"] == "wattspan/test"


def test_local_requests_are_not_compressed():
    with HttpCollector() as collector, transport_to(collector.url) as transport:
        transport.send(body("a"))
    assert "content-encoding" not in collector.seen[0].headers


def test_remote_requests_are_compressed():
    with HttpCollector() as collector, transport_to(collector.url, compress=True) as far:
        assert far.send(body(*["the same name"] * 100)).verdict is ExportStatus.TAKEN
    (seen,) = collector.seen
    assert seen.headers["content-encoding"] == "gzip"
    assert seen.size < len(body(*["the same name"] * 100)) / 2
    assert len(collector.spans) == 100


def test_one_connection_serves_many_requests():
    with HttpCollector() as collector, transport_to(collector.url) as transport:
        for number in range(5):
            transport.send(body(str(number)))
        assert collector.connections == 1
    assert collector.names == list("01234")


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_overloaded_http_collector_is_retried_after_its_delay(status: int):
    with HttpCollector() as collector, transport_to(collector.url) as transport:
        collector.script(Reply(status, headers={"Retry-After": "7"}))
        answer = transport.send(body("a"))
    assert (answer.verdict, answer.after) == (ExportStatus.AGAIN, 7 * SECOND)
    assert str(status) in answer.why


def test_redirect_is_reported_not_followed():
    with HttpCollector() as collector, transport_to(collector.url) as transport:
        collector.script(Reply(308, headers={"Location": "https://elsewhere/v1/traces?key=s3cret"}))
        answer = transport.send(body("a"))
    assert answer.verdict is ExportStatus.REFUSED
    assert "https://elsewhere/v1/traces" in answer.why
    assert "s3cret" not in answer.why


def test_early_refusal_is_read():
    large = body(*(os.urandom(500).hex() for _ in range(20_000)))  # beyond any socket's buffer
    with HttpCollector() as collector, transport_to(collector.url) as transport:
        collector.script(EarlyRefusal(413))
        assert transport.send(large).verdict is ExportStatus.TOO_LARGE


def test_unknown_host_is_named_and_retried():
    with transport_to("http://no-such-host.invalid:4318") as transport:
        answer = transport.send(body("a"))
    assert answer.verdict is ExportStatus.AGAIN
    assert "name cannot be resolved" in answer.why


def test_partial_request_is_never_accepted():
    large = body(*(os.urandom(500).hex() for _ in range(20_000)))
    with HttpCollector() as collector, transport_to(collector.url) as transport:
        collector.script(Break("request"))
        answer = transport.send(large)
        assert (answer.verdict, answer.perhaps_taken) == (ExportStatus.AGAIN, False)
        assert transport.send(body("b")).verdict is ExportStatus.TAKEN
    assert collector.names == ["b"]


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 2",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\n",
        HEAD + b"content-le",
        HEAD,
        HEAD + b"content-length: 5\r\n\r\n",
        HEAD + b"content-length: 5\r\n\r\n\n\3\x12",
        HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n\n\3",
    ],
)
def test_truncated_success_has_unknown_delivery(answer: bytes):
    with HttpCollector() as collector, transport_to(collector.url) as transport:
        collector.script(CutShort(answer))
        said = transport.send(body("a"))
        assert (said.verdict, said.perhaps_taken) == (ExportStatus.AGAIN, True)
        assert said.why == "its answer broke off"
        assert transport.send(body("a")).verdict is ExportStatus.TAKEN
    assert collector.names == ["a"]


def test_success_that_ends_with_its_connection_is_one():
    with HttpCollector() as collector, transport_to(collector.url) as transport:
        collector.script(CutShort(b"HTTP/1.1 200 OK\r\n\r\n"))
        assert transport.send(body("a")).verdict is ExportStatus.TAKEN


def test_truncated_refusal_is_a_refusal():
    words = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 9\r\n\r\nno "
    with HttpCollector() as collector, transport_to(collector.url) as transport:
        collector.script(CutShort(words))
        assert transport.send(body("a")).verdict is ExportStatus.REFUSED


def test_non_otlp_success_is_accepted_and_logged():
    with HttpCollector() as collector, transport_to(collector.url) as transport:
        collector.script(Reply(200, b"<html>Welcome!</html>", "text/html", takes=True))
        answer = transport.send(body("a"))
    assert answer.verdict is ExportStatus.TAKEN
    assert "OTLP endpoint" in answer.remedy


def test_missing_tls_is_reported(tmp_path: Path):
    with (
        HttpCollector() as collector,
        transport_to(collector.url.replace("http", "https")) as transport,
    ):
        answer = transport.send(body("a"))
    assert answer.verdict is ExportStatus.AGAIN
    assert "TLS" in answer.why + answer.remedy


def test_endless_response_uses_bounded_memory():
    with HttpCollector() as collector, transport_to(collector.url) as transport:
        collector.script(Reply(200, bytes(5 << 20), takes=True), None)
        assert transport.send(body("a")).verdict is ExportStatus.TAKEN
        assert transport.send(body("b")).verdict is ExportStatus.TAKEN
    assert collector.names == ["a", "b"]


def test_slow_response_has_a_total_timeout() -> None:
    over = threading.Event()

    def trickle() -> None:
        connection, _ = listener.accept()
        with connection:
            for byte in b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 60_000:
                try:
                    connection.sendall(bytes([byte]))
                except OSError:
                    return
                if over.wait(0.02):
                    return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with transport_to(url, answer_within=0.5) as transport:
                answer = transport.send(b"")
        finally:
            over.set()
            thread.join()
    assert answer.verdict is ExportStatus.AGAIN
    assert "did not answer within" in answer.why


# ------------------------------------------------------------------------------------------ gRPC


def test_overloaded_grpc_collector_is_retried_after_its_delay():
    with GrpcCollector() as collector, transport_to(collector.url) as transport:
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


def test_http_only_collector_is_retried():
    with (
        HttpCollector() as collector,
        transport_to(collector.url.replace("http", "grpc"), answer_within=5) as transport,
    ):
        assert transport.send(body("a")).verdict is ExportStatus.AGAIN
    assert collector.taken == []


def test_unknown_http2_frames_are_ignored(caplog: pytest.LogCaptureFixture):
    unknown = b"\0\0\3\xbe\0\0\0\0\0abc"
    elsewhere = b"\0\0\x0e\x0a\0\0\0\0\0\0\x07a.b:443h2=:1"
    with WireServer(frames=unknown + elsewhere) as server, transport_to(server.url) as transport:
        assert transport.send(body("a")).verdict is ExportStatus.TAKEN
        assert transport.send(body("b")).verdict is ExportStatus.TAKEN
    assert len(server.calls) == 2
    assert caplog.records == []


def test_frames_that_break_http2_end_the_connection_without_a_noise(
    caplog: pytest.LogCaptureFixture,
):
    for frames in (b"\xff" * 100, b"\0\0\1\6\0\0\0\0\0x", b"\0\0\4\3\0\0\0\0\1\0\0\0\0"):
        with (
            WireServer(frames=frames) as server,
            transport_to(server.url, answer_within=5) as transport,
        ):
            assert transport.send(body("a")).verdict is ExportStatus.AGAIN
    assert caplog.records == []


def test_missing_h2_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "h2.connection", None)
    with pytest.raises(ConfigError, match=r"pip --python \S+ install h2`"):
        open_transport(parse_destination("grpc://collector"), {}, SystemClock(), "")
