"""Users of one machine: no user starves or observes another, and the kernel identifies each.

Other users are real ones, made by setpriv.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.constant_history import ConstantPast
from testbed.exporting import serving as exporting
from testbed.local_user import asks, greedy
from testbed.query_server import FAR, Living, QueryServer
from testbed.receiving import Receiving, receiving
from testbed.requirements import find_program
from testbed.waiting import eventually
from testbed.web import serving

from wattspan.api.service import MAX_WAITING
from wattspan.http.limits import ServerLimits
from wattspan.ingest.side_channel import SideChannelServer
from wattspan.ingest.trace_receiver import LARGE_REQUEST
from wattspan.model import SECOND
from wattspan.testing import ManualClock

pytestmark = [
    pytest.mark.needs_root,
    pytest.mark.skipif(not find_program("setpriv"), reason="no setpriv; install util-linux"),
]

GREEDY, HONEST = 20_001, 20_002
GET = "GET / HTTP/1.1\r\nHost: here\r\n\r\n"
STATUS = "GET /v1/status HTTP/1.1\r\nHost: here\r\n\r\n"


def hostile(size: int) -> bytes:
    """A request that takes long to decode: a resource of many attributes."""
    one = b'{"key":"a"},'
    body = b'{"resourceSpans":[{"resource":{"attributes":[' + one * (size // len(one))
    return body.rstrip(b",") + b"]}}]}"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="wattspan-") as made:
        path = Path(made)
        path.chmod(0o755)
        yield path


@pytest.mark.parametrize(
    "first", ["", "GET / HTTP/1.1\r\nX-", GET], ids=["silent", "slow", "resting"]
)
def test_user_with_every_connection_does_not_keep_another_out(folder: Path, first: str) -> None:
    with serving(folder, limits=ServerLimits(connections=40)) as site:
        with greedy(GREEDY, site.unix, 100, first):
            for _ in range(3):  # a connection with an active response is not closed

                def answered() -> bool:
                    return asks(HONEST, site.unix, GET).startswith("HTTP/1.1 200")

                eventually(answered, "an answer, before any connection is too old", within=20.0)
        assert all(asked.peer.uid in (GREEDY, HONEST) for asked in site.asked)


SPANS = "POST /v1/traces HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
NO_SPANS = SPANS + 'Content-Length: 20\r\n\r\n{"resourceSpans":[]}'
TRANSPORTS = ["unix", "http"]


def where(running: Receiving, transport: str) -> str:
    return running.http_socket if transport == "unix" else ":".join(map(str, running.http))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("first", ["", SPANS], ids=["silent", "slow"])
def test_slow_clients_of_a_user_refuse_no_connection_of_another(
    folder: Path, transport: str, first: str
) -> None:
    # the clock is stopped: no connection is ever too old.
    with receiving(folder, ServerLimits(connections=40), clock=ManualClock()) as running:
        at = where(running, transport)
        with greedy(GREEDY, at, 100, first):
            answers = [asks(HONEST, at, NO_SPANS).splitlines()[0] for _ in range(3)]
            assert answers == ["HTTP/1.1 200 OK"] * 3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_large_requests_of_a_user_do_not_refuse_another(folder: Path, transport: str) -> None:
    body = hostile(2 * LARGE_REQUEST)
    large = folder / "large"
    large.write_bytes(f"{SPANS}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    with receiving(folder, max_request=64 << 20) as running:
        at = where(running, transport)
        with greedy(GREEDY, at, 32, f"@{large}"):
            assert asks(HONEST, at, f"@{large}").startswith("HTTP/1.1 200")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bodies_of_a_user_leave_room_for_those_of_another(folder: Path, transport: str) -> None:
    half = f"{SPANS}Content-Length: 30000\r\n\r\n" + "x" * 29_000
    with receiving(
        folder, ServerLimits(body=30_000, bodies=100_000), clock=ManualClock()
    ) as running:
        at = where(running, transport)
        with greedy(GREEDY, at, 10, half):
            whole = f"{SPANS}Content-Length: 20000\r\n\r\n" + NO_SPANS[-20:].ljust(20_000)
            assert asks(HONEST, at, whole).startswith("HTTP/1.1 200")


def test_slow_clients_of_a_user_refuse_no_scrape_of_another(folder: Path) -> None:
    with exporting() as served:
        at = f"127.0.0.1:{served.port}"
        with greedy(GREEDY, at, 400, "GET /metrics HTTP/1.1\r\nX-"):
            for path in ("/healthz", "/metrics"):
                request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"
                assert asks(HONEST, at, request).startswith("HTTP/1.1 200")


def test_waiting_queries_of_a_user_do_not_block_another(folder: Path) -> None:
    past = ConstantPast(until=0)  # no window settles
    waits = "GET /v1/energy?start=-1s&wait=60s HTTP/1.1\r\nHost: here\r\n\r\n"
    with QueryServer(folder, past=past), greedy(GREEDY, folder / "api.sock", 60, waits):
        assert asks(HONEST, folder / "api.sock", STATUS).startswith("HTTP/1.1 200")
        short = waits.replace("60s", "50ms")
        assert asks(HONEST, folder / "api.sock", short).startswith("HTTP/1.1 200")
    assert MAX_WAITING // 2 < 60


def test_energy_of_a_process_is_available_to_its_user_and_to_root(folder: Path) -> None:
    past = ConstantPast(until=FAR, others=5_000)
    question = f"GET /v1/energy?start=-1s&pid={os.getpid()} HTTP/1.1\r\nHost: here\r\n\r\n"
    with QueryServer(folder, past=past, directory=Living()):
        refused = asks(HONEST, folder / "api.sock", question)
        assert refused.startswith("HTTP/1.1 403")
        assert "it belongs to another user" in refused
        own = asks(HONEST, folder / "api.sock", question.replace(str(os.getpid()), "self"))
        assert own.startswith("HTTP/1.1 200")
        assert json.loads(own.partition("\n\n")[2])["process"]["joules"]["cpu"] > 0
        assert asks(0, folder / "api.sock", question).startswith("HTTP/1.1 200")


def test_readings_of_cpus_are_available_to_root_only(folder: Path) -> None:
    past = ConstantPast(until=FAR)
    question = "GET /v1/energy?of=devices&start=-5s&timeline=1 HTTP/1.1\r\nHost: here\r\n\r\n"
    with QueryServer(folder, past=past, resolution=SECOND):
        coarse, full = (
            json.loads(asks(user, folder / "api.sock", question).partition("\n\n")[2])
            for user in (HONEST, 0)
        )
    assert (coarse["device_resolution_seconds"], full["device_resolution_seconds"]) == (1.0, None)
    assert {device["timeline"] is None for device in coarse["devices"]} == {True}
    assert {device["timeline"] is None for device in full["devices"]} == {False}
    assert coarse["devices"][0]["joules"] == pytest.approx(full["devices"][0]["joules"])


def test_user_of_the_side_channel_has_half_of_the_places_at_most(folder: Path) -> None:
    feed = SideChannelServer(folder / "feed.sock", max_processes=8, max_windows=0)
    feed.start()
    (folder / "feed.sock").chmod(0o666)
    try:
        with greedy(GREEDY, folder / "feed.sock", 20, ""):
            eventually(lambda: (feed.drain(), feed.counts.crowded_out >= 12)[1], "it is bounded")
            before = feed.counts.admitted
            with socket.socket(socket.AF_UNIX) as mine:
                mine.connect(str(folder / "feed.sock"))
                eventually(lambda: (feed.drain(), feed.counts.admitted > before)[1], "I am heard")
    finally:
        feed.stop()
