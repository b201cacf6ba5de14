"""Requests on their way to a real collector over OTLP/HTTP, which fails in every way there is."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from testbed.certificates import Authority
from testbed.collector import (
    Break,
    CutShort,
    EarlyRefusal,
    Garbage,
    HttpCollector,
    Reply,
    Silence,
    rejecting,
)
from testbed.forwarding import http_to, request
from testbed.waiting import eventually

from wattspan.model import SECOND
from wattspan.otlp.transport import ExportStatus


def body(*names: str) -> bytes:
    wire: bytes = request(*names).SerializeToString()
    return wire


def test_request_arrives_unchanged():
    with HttpCollector() as collector, http_to(collector.url, {"x-tenant": "a"}) as transport:
        assert transport.send(body("a", "b")).verdict is ExportStatus.TAKEN
    assert collector.taken == [request("a", "b")]
    (seen,) = collector.seen
    assert seen.path == "/v1/traces"
    assert seen.headers["content-type"] == "application/x-protobuf"
    assert seen.headers["x-tenant"] == "a"
    assert seen.headers["user-agent"] == "wattspan/test"


def test_local_requests_are_not_compressed():
    with HttpCollector() as collector, http_to(collector.url) as transport:
        transport.send(body("a"))
    assert "content-encoding" not in collector.seen[0].headers


def test_remote_requests_are_compressed():
    with HttpCollector() as collector, http_to(collector.url, compress=True) as far:
        assert far.send(body(*["the same name"] * 100)).verdict is ExportStatus.TAKEN
    (seen,) = collector.seen
    assert seen.headers["content-encoding"] == "gzip"
    assert seen.size < len(body(*["the same name"] * 100)) / 2
    assert len(collector.spans) == 100


def test_one_connection_serves_many_requests():
    with HttpCollector() as collector, http_to(collector.url) as transport:
        for number in range(5):
            transport.send(body(str(number)))
        assert collector.connections == 1
    assert collector.names == list("01234")


def test_connection_closed_by_the_collector_is_reopened():
    with HttpCollector() as collector, http_to(collector.url) as transport:
        transport.send(body("a"))
        collector.hang_up()
        answer = transport.send(body("b"))
        assert (answer.verdict, answer.perhaps_taken) == (ExportStatus.TAKEN, False)
    assert collector.names == ["a", "b"]


def test_unix_socket_is_a_destination(tmp_path: Path):
    with (
        HttpCollector(path=tmp_path / "c.sock") as collector,
        http_to(collector.url) as transport,
    ):
        assert transport.send(body("a")).verdict is ExportStatus.TAKEN
    assert collector.names == ["a"]


def test_rejected_spans_are_counted_separately():
    with HttpCollector() as collector, http_to(collector.url) as transport:
        collector.script(rejecting(3, "no trace id"))
        answer = transport.send(body("a", "b", "c", "d"))
    assert (answer.verdict, answer.rejected) == (ExportStatus.TAKEN, 3)
    assert "no trace id" in answer.why


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_overloaded_collector_is_retried_after_its_delay(status: int):
    with HttpCollector() as collector, http_to(collector.url) as transport:
        collector.script(Reply(status, headers={"Retry-After": "7"}))
        answer = transport.send(body("a"))
    assert (answer.verdict, answer.after) == (ExportStatus.AGAIN, 7 * SECOND)
    assert str(status) in answer.why


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 500, 501])
def test_refusal_is_final(status: int):
    with HttpCollector() as collector, http_to(collector.url) as transport:
        collector.script(Reply(status, b"because", "text/plain"))
        answer = transport.send(body("a"))
    assert answer.verdict is ExportStatus.REFUSED
    assert str(status) in answer.why
    assert "because" in answer.why


def test_redirect_is_reported_not_followed():
    with HttpCollector() as collector, http_to(collector.url) as transport:
        collector.script(Reply(308, headers={"Location": "https://elsewhere/v1/traces?key=s3cret"}))
        answer = transport.send(body("a"))
    assert answer.verdict is ExportStatus.REFUSED
    assert "https://elsewhere/v1/traces" in answer.why
    assert "s3cret" not in answer.why


def test_size_refusal_is_recognised():
    with HttpCollector() as collector, http_to(collector.url) as transport:
        collector.script(Reply(413))
        assert transport.send(body("a")).verdict is ExportStatus.TOO_LARGE


def test_early_refusal_is_read():
    large = body(*(os.urandom(500).hex() for _ in range(20_000)))  # beyond any socket's buffer
    with HttpCollector() as collector, http_to(collector.url) as transport:
        collector.script(EarlyRefusal(413))
        assert transport.send(large).verdict is ExportStatus.TOO_LARGE


def test_refused_connection_is_retried(free_port: Callable[[], int]):
    with http_to(f"http://127.0.0.1:{free_port()}") as transport:
        answer = transport.send(body("a"))
    assert (answer.verdict, answer.perhaps_taken) == (ExportStatus.AGAIN, False)
    assert "refused" in answer.why


def test_unknown_host_is_named_and_retried():
    with http_to("http://no-such-host.invalid:4318") as transport:
        answer = transport.send(body("a"))
    assert answer.verdict is ExportStatus.AGAIN
    assert "name cannot be resolved" in answer.why


def test_partial_request_is_never_accepted():
    large = body(*(os.urandom(500).hex() for _ in range(20_000)))
    with HttpCollector() as collector, http_to(collector.url) as transport:
        collector.script(Break("request"))
        answer = transport.send(large)
        assert (answer.verdict, answer.perhaps_taken) == (ExportStatus.AGAIN, False)
        assert transport.send(body("b")).verdict is ExportStatus.TAKEN
    assert collector.names == ["b"]


@pytest.mark.parametrize("fault", [Break("answer"), Break("in answer"), Garbage()])
def test_request_with_an_invalid_response_has_unknown_delivery(fault: Break | Garbage):
    with HttpCollector() as collector, http_to(collector.url) as transport:
        collector.script(fault)
        answer = transport.send(body("a"))
        assert (answer.verdict, answer.perhaps_taken) == (ExportStatus.AGAIN, True)
        assert transport.send(body("b")).verdict is ExportStatus.TAKEN


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
    with HttpCollector() as collector, http_to(collector.url) as transport:
        collector.script(CutShort(answer))
        said = transport.send(body("a"))
        assert (said.verdict, said.perhaps_taken) == (ExportStatus.AGAIN, True)
        assert said.why == "its answer broke off"
        assert transport.send(body("a")).verdict is ExportStatus.TAKEN
    assert collector.names == ["a"]


def test_success_that_ends_with_its_connection_is_one():
    with HttpCollector() as collector, http_to(collector.url) as transport:
        collector.script(CutShort(b"HTTP/1.1 200 OK\r\n\r\n"))
        assert transport.send(body("a")).verdict is ExportStatus.TAKEN


def test_truncated_refusal_is_a_refusal():
    words = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 9\r\n\r\nno "
    with HttpCollector() as collector, http_to(collector.url) as transport:
        collector.script(CutShort(words))
        assert transport.send(body("a")).verdict is ExportStatus.REFUSED


def test_silent_collector_times_out():
    with HttpCollector() as collector, http_to(collector.url, answer_within=1) as transport:
        collector.script(Silence())
        answer = transport.send(body("a"))
    assert (answer.verdict, answer.perhaps_taken) == (ExportStatus.AGAIN, True)
    assert "did not answer within" in answer.why


def test_wait_for_a_response_is_cancellable():
    with HttpCollector() as collector, http_to(collector.url) as transport:
        collector.script(Silence())
        answers = []
        sender = threading.Thread(target=lambda: answers.append(transport.send(body("a"))))
        sender.start()
        eventually(lambda: collector.seen, "the request at the collector")
        transport.abort()
        sender.join(20)
        assert not sender.is_alive()
    assert answers[0].perhaps_taken


def test_non_otlp_success_is_accepted_and_logged():
    with HttpCollector() as collector, http_to(collector.url) as transport:
        collector.script(Reply(200, b"<html>Welcome!</html>", "text/html", takes=True))
        answer = transport.send(body("a"))
    assert answer.verdict is ExportStatus.TAKEN
    assert "OTLP endpoint" in answer.remedy


def test_tls_is_verified_by_the_authorities_of_this_host(tmp_path: Path):
    authority = Authority(tmp_path)
    with HttpCollector(certificate=authority.issue("server")) as collector:
        with http_to(collector.url) as stranger:
            refused = stranger.send(body("a"))
        with http_to(collector.url, trust=authority.client) as friend:
            assert friend.send(body("b")).verdict is ExportStatus.TAKEN
    assert refused.verdict is ExportStatus.AGAIN
    assert "certificate is not trusted" in refused.why
    assert "SSL_CERT_FILE" in refused.remedy
    assert collector.names == ["b"]


def test_missing_tls_is_reported(tmp_path: Path):
    with (
        HttpCollector() as collector,
        http_to(collector.url.replace("http", "https")) as transport,
    ):
        answer = transport.send(body("a"))
    assert answer.verdict is ExportStatus.AGAIN
    assert "TLS" in answer.why + answer.remedy


def test_endless_response_uses_bounded_memory():
    with HttpCollector() as collector, http_to(collector.url) as transport:
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
            with http_to(url, answer_within=0.5) as transport:
                answer = transport.send(b"")
        finally:
            over.set()
            thread.join()
    assert answer.verdict is ExportStatus.AGAIN
    assert "did not answer within" in answer.why
