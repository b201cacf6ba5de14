"""Request rate of one peer, and handling of excess requests."""

from __future__ import annotations

import http.client
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from testbed.exporting import Served, serving
from testbed.http2 import framed, http2
from testbed.local_user import asks
from testbed.otlp import PROTOBUF, request, span
from testbed.program import Running
from testbed.receiving import Receiving, receiving
from testbed.requirements import APPS, find_program
from testbed.waiting import eventually
from testbed.web import post, read_all, read_answer, statuses

from wattspan.http.limits import RejectionCounter, ServerLimits
from wattspan.sharing.pools import BURST_SECONDS
from wattspan.testing import ManualClock
from wattspan.util.protobuf import encode_retry_info

BODY = request(span()).SerializeToString()
SPANS = post(BODY, f"Content-Type: {PROTOBUF}", path="/v1/traces")
PROMPT = ServerLimits(rate=1, rejection_delay=0.0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def refusals() -> RejectionCounter:
    return RejectionCounter()


@pytest.fixture
def running(tmp_path: Path, clock: ManualClock, refusals: RejectionCounter) -> Iterator[Receiving]:
    with receiving(tmp_path, PROMPT, clock=clock, refusals=refusals) as receivers:
        yield receivers


def sent(running: Receiving, data: bytes = SPANS) -> int:
    """The status of one request on a connection of its own."""
    with closing(running.connect()) as connection:
        connection.sendall(data)
        return read_answer(connection)[0]


# ------------------------------------------------------------------------------ spans, questions


def test_request_beyond_the_rate_is_refused_for_a_second(
    running: Receiving, clock: ManualClock, refusals: RejectionCounter
) -> None:
    assert [sent(running) for _ in range(BURST_SECONDS)] == [200] * BURST_SECONDS
    with closing(http.client.HTTPConnection(*running.http, timeout=20)) as client:
        client.request("POST", "/v1/traces", BODY, {"Content-Type": PROTOBUF})
        answer = client.getresponse()
        assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        assert answer.headers["Connection"] == "close"
        assert b"More than 1 requests a second" in answer.read()
    assert refusals.counts()["http", "rate"] == 1
    clock.advance(1)
    assert [sent(running) for _ in range(2)] == [200, 429]
    assert running.sink.count == BURST_SECONDS + 1


def test_rate_limit_applies_to_one_connection(running: Receiving) -> None:
    with closing(running.connect()) as connection:
        for _ in range(BURST_SECONDS):
            connection.sendall(SPANS)
            assert read_answer(connection)[0] == 200
        connection.sendall(SPANS)
        assert statuses(read_all(connection)) == [429]


def test_requests_sent_all_at_once_are_counted_each(running: Receiving) -> None:
    with closing(running.connect()) as connection:
        connection.sendall(SPANS * (BURST_SECONDS + 3))
        assert statuses(read_all(connection)) == [200] * BURST_SECONDS + [429]
    assert running.sink.count == BURST_SECONDS


def test_malformed_requests_count_for_the_rate(running: Receiving) -> None:
    assert [sent(running, b"?\r\n\r\n") for _ in range(BURST_SECONDS + 1)] == [
        400
    ] * BURST_SECONDS + [429]


def test_body_beyond_the_rate_is_not_requested(running: Receiving) -> None:
    for _ in range(BURST_SECONDS):
        sent(running)
    with closing(running.connect()) as connection:
        connection.sendall(post(b"", "Expect: 100-continue", "Content-Length: 1000000"))
        assert read_all(connection).startswith(b"HTTP/1.1 429 ")


@pytest.mark.needs_root
@pytest.mark.skipif(not find_program("setpriv"), reason="no setpriv; install util-linux")
def test_others_are_heard_meanwhile(running: Receiving) -> None:
    assert [sent(running) for _ in range(BURST_SECONDS + 1)][-1] == 429
    spans = post(b'{"resourceSpans":[]}', "Content-Type: application/json", path="/v1/traces")
    at = ":".join(map(str, running.http))
    assert asks(20_001, at, spans.decode()).startswith("HTTP/1.1 200 ")


def test_user_is_one_sender_on_every_listener(running: Receiving) -> None:
    assert [sent(running) for _ in range(BURST_SECONDS + 1)][-1] == 429
    with closing(socket.socket(socket.AF_UNIX)) as other:
        other.settimeout(20)
        other.connect(running.http_socket)
        other.sendall(SPANS)
        assert read_answer(other)[0] == 429


def test_refusal_is_delayed_and_does_not_delay_the_stop(tmp_path: Path) -> None:
    held = ServerLimits(rate=1, rejection_delay=3600.0)
    with receiving(tmp_path, held, clock=ManualClock()) as running:
        assert [sent(running) for _ in range(BURST_SECONDS)] == [200] * BURST_SECONDS
        waiting = running.connect()
        waiting.sendall(SPANS)
        with http2(running.connect("grpc")) as client:
            client.open(end=True)
            waiting.settimeout(0.2)
            with pytest.raises(TimeoutError):
                waiting.recv(1)
    with closing(waiting):
        waiting.settimeout(20)
        assert read_all(waiting) == b"", "it was ended, not answered"


def test_excess_grpc_call_is_delayed_as_otlp_specifies(
    running: Receiving, clock: ManualClock, refusals: RejectionCounter
) -> None:
    with http2(running.connect("grpc")) as client:
        answers = [client.call(framed(BODY)) for _ in range(BURST_SECONDS + 1)]
        assert [answer.status for answer in answers] == [0] * BURST_SECONDS + [8]
        assert "More than 1 requests a second" in answers[-1].message
        assert answers[-1].binary("google.rpc.retryinfo-bin") == encode_retry_info(1)
        assert refusals.counts()["grpc", "rate"] == 1
        clock.advance(1)
        assert [client.call(framed(BODY)).status for _ in range(2)] == [0, 8]
    assert running.sink.count == BURST_SECONDS + 1


def test_configured_rate_is_enforced_and_reported(tmp_path: Path) -> None:
    with Running(tmp_path, agent__max_rate=1, spans__http="127.0.0.1:0") as agent:
        metrics = f"127.0.0.1:{urlsplit(agent.address()).port}"
        spans = re.search(r"Serving http://(\S+)/v1/traces", agent.said)
        assert spans is not None

        def asked(at: str, path: str) -> tuple[int, str]:
            with closing(http.client.HTTPConnection(at, timeout=20)) as client:
                client.request("GET", path)
                answer = client.getresponse()
                return answer.status, answer.read().decode()

        eventually(lambda: asked(spans[1], "/")[0] == 429, "it is refused")
        counted = re.compile(r'refusals_total\{listener="http",reason="rate"\} [1-9]')
        eventually(lambda: counted.search(asked(metrics, "/metrics")[1]), "it is counted")
        assert agent.end() == 0


EXPORTER = """
from opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter({where!r})))
provider.get_tracer("test").start_span("put off").end()
provider.shutdown()
"""


@pytest.mark.needs_apps
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_opentelemetry_exporters_retry_without_loss(
    tmp_path: Path, clock: ManualClock, refusals: RejectionCounter, protocol: str
) -> None:
    with receiving(tmp_path, PROMPT, clock=clock, refusals=refusals) as running:
        assert [sent(running) for _ in range(BURST_SECONDS)] == [200] * BURST_SECONDS
        at = running.http if protocol == "http" else running.grpc
        where = f"http://{at[0]}:{at[1]}" + ("/v1/traces" if protocol == "http" else "")
        with subprocess.Popen(
            [APPS, "-c", EXPORTER.format(protocol=protocol, where=where)],
            stderr=subprocess.PIPE,
            text=True,
        ) as exporter:
            eventually(lambda: refusals.counts()[protocol, "rate"], "it is refused", within=60)
            clock.advance(1)
            assert exporter.communicate(timeout=60)[1].count("retrying in") >= 1
        assert running.sink.count == BURST_SECONDS + 1


# --------------------------------------------------------------------------------------- metrics


@pytest.fixture
def served(clock: ManualClock) -> Iterator[Served]:
    with serving(clock, max_rate=1) as exporter:
        yield exporter


def test_scrape_beyond_the_rate_is_refused_for_a_second(served: Served, clock: ManualClock) -> None:
    assert [served.ask().status for _ in range(BURST_SECONDS)] == [200] * BURST_SECONDS
    late = served.ask()
    assert (late.status, late.headers["Retry-After"]) == (429, "1")
    assert late.headers["Connection"] == "close"
    assert late.body == (
        b"More than 1 requests a second: ask less often, or have max_rate raised in "
        b"[exporters.prometheus].\n"
    )
    clock.advance(1)
    assert served.ask().status == 200


def test_health_is_answered_beyond_the_rate(served: Served, clock: ManualClock) -> None:
    asked = [served.ask(path).status for path in ["/metrics"] * (BURST_SECONDS + 1) + ["/healthz"]]
    assert asked == [200] * BURST_SECONDS + [429, 200]
