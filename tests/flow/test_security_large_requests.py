"""While a large request is read, everybody else at the same server is answered."""

from __future__ import annotations

import threading
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest
from testbed.hostile_otlp import PERMITTED_JSON
from testbed.receiving import Receiving, receiving
from testbed.web import PATIENCE

from wattspan.clock import SystemClock
from wattspan.http.limits import ServerLimits
from wattspan.ingest.trace_receiver import LARGE_REQUEST

pytestmark = pytest.mark.alone

JSON = {"Content-Type": "application/json"}
OFTEN = ServerLimits(rate=100_000)  # consecutive small requests are not refused here


def hostile() -> bytes:
    """A request that takes as long to read as any that is taken."""
    return PERMITTED_JSON["permitted lists"](8 << 20)


def answered(running: Receiving, body: bytes) -> tuple[int, float]:
    """The status, and the seconds that it took."""
    clock = SystemClock()
    begun = clock.monotonic()
    with closing(HTTPConnection(*running.http, timeout=6 * PATIENCE)) as client:
        client.request("POST", "/v1/traces", body, JSON)
        status = client.getresponse().status
    return status, (clock.monotonic() - begun) / 1e9


def test_small_request_does_not_wait_for_a_large_one(tmp_path: Path) -> None:
    with receiving(tmp_path, OFTEN, max_request=64 << 20) as running:
        assert delays(running) == []


def delays(running: Receiving) -> list[str]:
    """Latency of small requests while a large one is read."""
    large: list[tuple[int, float]] = []
    sender = threading.Thread(target=lambda: large.append(answered(running, hostile())))
    sender.start()
    small: list[float] = []
    while sender.is_alive():
        status, seconds = answered(running, b'{"resourceSpans":[]}')
        assert status == 200
        small.append(seconds)
    sender.join()
    ((status, seconds),) = large
    assert status == 200
    if len(small) <= 3:
        return ["the others waited for the large one"]
    slowest = max(small[1:-1])
    return [] if slowest < seconds / 2 else [f"one of {slowest:.2f} s beside {seconds:.2f} s"]


@pytest.mark.parametrize("max_request", [4 << 20, 24 << 20])
def test_json_requests_have_the_bound_of_the_setting(tmp_path: Path, max_request: int) -> None:
    with receiving(tmp_path, ServerLimits(body=64 << 20), max_request=max_request) as running:
        around = len(b'{"resourceSpans":[],"padding":""}')
        for size, status in ((max_request, 200), (max_request + 1, 413)):
            body = b'{"resourceSpans":[],"padding":"%b"}' % (b"x" * (size - around))
            assert len(body) == size
            assert answered(running, body)[0] == status
    assert max_request > LARGE_REQUEST
