"""Spans on their way in, over every way there is."""

from __future__ import annotations

import gzip
import http.client
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed.fixtures import entered_in
from testbed.otlp import PROTOBUF, request, span
from testbed.receiving import Receiving, receiving
from testbed.requirements import APPS
from testbed.waiting import eventually
from testbed.web import post, read_all, read_answer, statuses

from wattspan.clock import SystemClock
from wattspan.config.settings import SpansSettings
from wattspan.http.limits import ServerLimits
from wattspan.http.server import HttpServer
from wattspan.http.sockets import other_loopback
from wattspan.ingest.listeners import open_receivers
from wattspan.model.settings import Listen
from wattspan.ports import ListenError

BODY = request(*(span(number) for number in range(1, 65))).SerializeToString()
TRACES = "/v1/traces"
TYPE = f"Content-Type: {PROTOBUF}"


running = entered_in(receiving)


# ------------------------------------------------------------------------------------ OTLP/HTTP


def test_spans_come_in_over_tcp(running: Receiving) -> None:
    with closing(http.client.HTTPConnection(*running.http)) as client:
        client.request("POST", TRACES, BODY, {"Content-Type": PROTOBUF})
        assert client.getresponse().status == 200
    (delivery,) = running.sink.deliveries
    assert (delivery.count, delivery.peer.local) == (64, running.http)


def test_spans_come_in_over_a_unix_socket_that_proves_their_sender(running: Receiving) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as client:
        client.connect(running.http_socket)
        client.sendall(post(BODY, TYPE, path=TRACES))
        assert read_answer(client)[0] == 200
    peer = running.sink.deliveries[0].peer
    assert (peer.pid, peer.uid) == (os.getpid(), os.getuid())


def test_invalid_requests_affect_only_themselves(running: Receiving) -> None:
    with closing(running.connect()) as client:
        bodies = [BODY, b"garbage", BODY, BODY[:-7], BODY]
        client.sendall(b"".join(post(body, TYPE, path=TRACES) for body in bodies))
        client.shutdown(socket.SHUT_WR)
        assert statuses(read_all(client)) == [200, 400, 200, 400, 200]
    assert running.sink.count == 3 * 64


def test_busy_receiver_asks_for_a_retry_without_loss(running: Receiving) -> None:
    running.sink.busy = 2
    with closing(http.client.HTTPConnection(*running.http)) as client:
        answers = []
        for _ in range(3):
            client.request("POST", TRACES, BODY, {"Content-Type": PROTOBUF})
            answer = client.getresponse()
            answer.read()
            answers.append((answer.status, answer.headers["Retry-After"]))
    assert answers == [(503, "3"), (503, "3"), (200, None)]
    assert running.sink.count == 64


def test_two_hundred_senders_at_once_are_all_heard(tmp_path: Path) -> None:
    with receiving(tmp_path, ServerLimits(connections=256)) as running, ExitStack() as stack:
        senders = [stack.enter_context(closing(running.connect())) for _ in range(200)]
        whole = post(BODY, TYPE, path=TRACES)
        for part in (slice(0, 100), slice(100, 1000), slice(1000, None)):
            for sender in senders:
                sender.sendall(whole[part])
        assert {read_answer(sender)[0] for sender in senders} == {200}
        assert running.sink.count == 200 * 64


def test_excess_senders_do_not_block_others(tmp_path: Path) -> None:
    with receiving(tmp_path, ServerLimits(connections=8)) as running:

        def sent() -> bool:
            try:
                with closing(http.client.HTTPConnection(*running.http, timeout=20)) as client:
                    client.request("POST", TRACES, BODY, {"Content-Type": PROTOBUF})
                    return client.getresponse().status == 200
            except (http.client.HTTPException, OSError):
                return False

        def send(number: int) -> bool:
            return eventually(sent, f"sender {number} is heard")

        with ThreadPoolExecutor(24) as pool:
            assert all(pool.map(send, range(96)))
        assert running.sink.count == 96 * 64


def test_bomb_is_refused(running: Receiving) -> None:
    bomb = gzip.compress(bytes(64 << 20))
    with closing(running.connect()) as client:
        client.sendall(post(bomb, TYPE, "Content-Encoding: gzip", path=TRACES))
        assert read_answer(client)[0] == 413
    assert running.sink.refused == {"too_large": 1}


HOSTILE = """
import asyncio, gzip, sys
from pathlib import Path
from testbed.otlp import PROTOBUF, Receiver, request

MOST = 16 << 20
receiver = Receiver(MOST)

def around(tag, message):
    length, value = bytearray(), len(message)
    while value > 127:
        length.append(value & 127 | 128)
        value >>= 7
    return bytes([tag, *length, value]) + message

def told(name):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if name in line]
    return int(line.split()[1]) << 10

tiny = bytes([18, 0]) * (MOST // 2 - 20)
requests = {
    "bomb": (gzip.compress(bytes(4 * MOST)), "gzip"),
    "resources": (bytes([10, 0]) * (MOST // 2), ""),
    "scopes": (around(10, tiny), ""),
    "spans": (around(10, around(18, tiny)), ""),
    "attributes": (around(10, around(18, around(18, bytes([74, 0]) * (MOST // 2 - 20)))), ""),
    "of a resource": (around(10, around(10, bytes([10, 0]) * (MOST // 2 - 20))), ""),
}
receiver.ask(request().SerializeToString())
for name, (body, encoding) in requests.items():
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = told("VmRSS:")
    receiver.ask(body, encoding=encoding)
    print(name, (told("VmHWM:") - before) / MOST, sep=",")
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no peak to be had")
def test_request_memory_is_proportional_to_its_size() -> None:
    """With the complete schema, a request of two-byte messages takes seventy times its size."""
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    ratios = {
        name: float(ratio) for name, ratio in (line.split(",") for line in done.stdout.splitlines())
    }
    assert len(ratios) == 6
    assert {name: ratio for name, ratio in ratios.items() if ratio > 8} == {}


garbage = st.one_of(
    st.binary(max_size=400),
    st.tuples(st.sampled_from(["POST", "GET", "PUT"]), st.binary(max_size=100)).map(
        lambda told: f"{told[0]} {TRACES} HTTP/1.1\r\nHost: a\r\n".encode() + told[1]
    ),
    st.binary(max_size=100).map(
        lambda chunks: post(chunks, TYPE, "Transfer-Encoding: chunked", path=TRACES)
    ),
    st.binary(max_size=100).map(
        lambda body: post(body, TYPE, "Content-Encoding: gzip", path=TRACES)
    ),
)


def test_arbitrary_input_gets_an_http_response_or_none(tmp_path: Path) -> None:
    with receiving(tmp_path) as running:

        @given(st.lists(garbage, max_size=3))
        def property_of(told: list[bytes]) -> None:
            with closing(running.connect()) as client:
                client.sendall(b"".join(told))
                client.shutdown(socket.SHUT_WR)
                assert all(200 <= status < 600 for status in statuses(read_all(client)))

        property_of()
        with closing(running.connect()) as client:
            client.sendall(post(BODY, TYPE, path=TRACES))
            assert read_answer(client)[0] == 200
        assert running.log == []


# ----------------------------------------------------------------------------------- listeners


def opened(
    run_dir: Path, settings: SpansSettings, *asked: str, second: Listen | None = None
) -> tuple[tuple[str, ...], list[str]]:
    clock, log = SystemClock(), []
    server = HttpServer(clock, log=log.append)
    try:
        addresses = open_receivers(
            server,
            settings,
            run_dir,
            None,
            clock,
            is_set=asked.__contains__,
            log=log.append,
            second=second,
        )
    finally:
        server.stop()
    return addresses, log


def test_disabled_spans_open_no_listener(tmp_path: Path) -> None:
    assert opened(tmp_path, SpansSettings(enabled=False)) == ((), [])
    assert opened(tmp_path, SpansSettings(http=Listen(""), unix=False)) == ((), [])


def test_default_that_cannot_be_had_is_done_without(running: Receiving, tmp_path: Path) -> None:
    taken = Listen(Listen.written(*running.http))
    addresses, log = opened(tmp_path / "other", SpansSettings(http=taken))
    assert addresses == (f"http+unix://{tmp_path}/other/otlp.sock",)
    assert log[0].startswith(
        "The agent continues without this listener: Cannot receive OTLP/HTTP on 127.0.0.1:"
    )


@pytest.mark.parametrize("taken", [False, True])
def test_default_listener_has_both_addresses_of_localhost(
    tmp_path: Path, free_port: Callable[[], int], *, taken: bool
) -> None:
    """SDKs send to "localhost", and some try ::1 first: whoever listens there has their spans."""
    port = free_port()
    settings = SpansSettings(http=Listen(f"127.0.0.1:{port}"), unix=False)
    if (second := other_loopback(settings.http)) is None:
        pytest.skip("this host has no IPv6")
    ipv4, ipv6 = (f"http://{host}:{port}/v1/traces" for host in ("127.0.0.1", "[::1]"))
    with ExitStack() as held:
        if taken:
            family = socket.AF_INET6
            held.enter_context(socket.create_server(("::1", port), family=family))
        assert opened(tmp_path, settings, "http") == ((ipv4,), [])
        addresses, log = opened(tmp_path, settings, second=second)
    assert addresses == ((ipv4,) if taken else (ipv4, ipv6))
    assert [f"on [::1]:{port}: the port is in use" in line for line in log] == [True] * taken


def test_explicit_listener_is_required(running: Receiving, tmp_path: Path) -> None:
    taken = Listen(Listen.written(*running.http))
    with pytest.raises(ListenError, match="the port is in use"):
        opened(tmp_path / "other", SpansSettings(http=taken), "http")
    with pytest.raises(ListenError, match="another agent listens there"):
        opened(tmp_path, SpansSettings(http=Listen("")), "unix")


def test_grpc_is_imported_only_if_configured(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from wattspan.clock import SystemClock
from wattspan.config.settings import SpansSettings
from wattspan.model.settings import Listen
from wattspan.ingest.listeners import open_receivers
from wattspan.http.server import HttpServer
server = HttpServer(SystemClock(), log=print)
here = Path({str(tmp_path)!r})
open_receivers(
    server, SpansSettings(http=Listen("127.0.0.1:0")),
    here, None, SystemClock(), is_set=bool, log=print
)
print("h2" in sys.modules)
sys.modules["h2"] = None
try:
    open_receivers(
        server, SpansSettings(http=Listen(""), grpc=Listen("127.0.0.1:0"), unix=False), here, None,
        SystemClock(), is_set=bool, log=print,
    )
except Exception as error:
    print(type(error).__name__, error.exit_code, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[0] == "False"
    assert "ConfigError 2 [spans] grpc needs h2, which is not installed" in done.stdout
    assert ' install h2`, or set grpc = "".' in done.stdout


# ----------------------------------------------------------------------------- real exporters

EXPORTS = """
import sys
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter import OTLPSpanExporter

provider = TracerProvider(resource=Resource.create({{"service.name": "foreign"}}))
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
tracer = provider.get_tracer("t")
for number in range(100):
    with tracer.start_as_current_span("work", attributes={{"gen_ai.usage.input_tokens": 77}}):
        pass
print(provider.force_flush())
provider.shutdown()
"""


def foreign_exporter(protocol: str, endpoint: str, **settings: str) -> str:
    """Result of OpenTelemetry's own exporter for a hundred spans."""
    module = f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter"
    if subprocess.run([APPS, "-c", f"import {module}"], capture_output=True).returncode:
        pytest.skip(f"the example applications have no {module}")
    environ = {
        "PATH": os.environ["PATH"],
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_INSECURE": "true",
        **settings,
    }
    program = EXPORTS.format(protocol=protocol)
    done = subprocess.run(
        [APPS, "-c", program], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "True\n", done.stderr
    return done.stderr


@pytest.mark.needs_apps
@pytest.mark.parametrize("compression", ["", "gzip"])
@pytest.mark.parametrize("way", ["http", "grpc", "grpc on a socket"])
def test_opentelemetry_exporters_are_accepted(
    running: Receiving, way: str, compression: str
) -> None:
    endpoint = {
        "http": "http://{}:{}".format(*running.http),
        "grpc": "http://{}:{}".format(*running.grpc),
        "grpc on a socket": f"unix://{running.grpc_socket}",
    }[way]
    settings = {"OTEL_EXPORTER_OTLP_COMPRESSION": compression} if compression else {}
    assert foreign_exporter(way.split()[0], endpoint, **settings) == ""
    delivery = running.sink.deliveries[0]
    assert (running.sink.count, delivery.parts[0].claim.service) == (100, "foreign")
    assert delivery.parts[0].spans[0].tokens_in == 77
    assert (delivery.peer.pid is not None) == ("socket" in way)


@pytest.mark.needs_apps
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_opentelemetry_exporters_retry_on_request(running: Receiving, protocol: str) -> None:
    running.sink.busy, running.sink.seconds = 1, 2
    host, port = running.http if protocol == "http" else running.grpc
    told = foreign_exporter(protocol, f"http://{host}:{port}")
    assert "retrying in 2.00s" in told
    assert running.sink.count == 100
