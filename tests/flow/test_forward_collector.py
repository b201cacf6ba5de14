"""The forwarder as the agent runs it, before a real collector."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from testbed.collector import (
    Break,
    GrpcCollector,
    GrpcStatus,
    HttpCollector,
    Reply,
    Silence,
    rejecting,
)
from testbed.forwarding import delivery, joules, no_energy, spans_in
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.config import SpansSettings
from wattspan.model import MILLISECOND, SECOND, HwType, Provenance
from wattspan.model.settings import Size
from wattspan.otlp.forwarder import Forwarder
from wattspan.util.throttle import RetryBackoff

CLOCK = SystemClock()


@contextmanager
def forwarding(
    url: str, spool: Path | None = None, *, headers: str = "", queue: str = "8MiB"
) -> Iterator[Forwarder]:
    forwarder = Forwarder(
        SpansSettings(
            forward=url,
            forward_headers=headers,
            forward_queue=Size.parse(queue),
            forward_spool=spool is not None,
        ),
        CLOCK,
        lambda _: None,
        spool,
        provenance=lambda: {HwType.CPU: Provenance.MEASURED},
        version="1.0",
        backoff=RetryBackoff(MILLISECOND, 10 * MILLISECOND),
    )
    forwarder.start()
    try:
        yield forwarder
    finally:
        forwarder.stop()


def offer(forwarder: Forwarder, *names: str) -> None:
    forwarder.offer(delivery(*names), no_energy(len(names)))


def test_spans_reach_the_collector_with_their_energy():
    with HttpCollector() as collector:
        with forwarding(collector.url, headers="x-tenant=a") as forwarder:
            forwarder.offer(delivery("step"), [joules({HwType.CPU: 2_500_000})])
            (span,) = collector.wait_for(1)
        values = {kv.key: kv.value for kv in span.attributes}
        assert values["wattspan.energy.cpu.exclusive"].double_value == 2.5
        assert collector.seen[0].headers["x-tenant"] == "a"
        assert collector.seen[0].headers["user-agent"] == "wattspan/1.0"
        assert forwarder.stats.forwarded == 1


def test_grpc_collector_receives_the_same_spans():
    with GrpcCollector() as collector:
        with forwarding(collector.url, headers="X-Tenant=a") as forwarder:
            for number in range(20):
                offer(forwarder, str(number))
            collector.wait_for(20)
        assert collector.names == [str(number) for number in range(20)]
        assert collector.seen[0].headers["x-tenant"] == "a"


def test_through_every_failure_spans_arrive_in_order():
    names = [str(number) for number in range(60)]
    with HttpCollector() as collector:
        collector.script(
            Reply(503),
            None,
            Reply(429, headers={"Retry-After": "0"}),
            Break("request"),
            Reply(504),
            None,
            Break("answer"),
            Break("in answer"),
        )
        with forwarding(collector.url) as forwarder:
            for name in names:
                offer(forwarder, name)
            collector.wait_for(60)
            eventually(lambda: forwarder.stats.forwarded == 60, "the last answer")
            assert collector.names == names
            assert forwarder.stats.drops == {}


def test_over_grpc_through_every_failure_spans_arrive_in_order():
    names = [str(number) for number in range(60)]
    with GrpcCollector() as collector:
        collector.script(GrpcStatus(14, "busy"), None, Break(), GrpcStatus(4, "slow"), Break())
        with forwarding(collector.url) as forwarder:
            for name in names:
                offer(forwarder, name)
            eventually(lambda: forwarder.stats.forwarded == 60, "the last answer")
        assert collector.names == names


def test_unconfirmed_spans_are_sent_again_and_counted():
    with HttpCollector() as collector:
        collector.script(Break("answer", takes=True))
        with forwarding(collector.url) as forwarder:
            offer(forwarder, "a")
            collector.wait_for(2)
        assert collector.names == ["a", "a"]
        assert collector.taken[0] == collector.taken[1]
        assert forwarder.stats.perhaps_twice == 1


def test_late_collector_receives_every_span(free_port: Callable[[], int]):
    port = free_port()
    with forwarding(f"http://127.0.0.1:{port}") as forwarder:
        offer(forwarder, "a")
        offer(forwarder, "b")
        eventually(lambda: not forwarder.health().up, "a failed attempt")
        with HttpCollector(port=port) as collector:
            assert [span.name for span in collector.wait_for(2)] == ["a", "b"]
            eventually(lambda: forwarder.health().up, "health again")


def test_spans_that_a_collector_rejects_are_counted():
    with HttpCollector() as collector:
        collector.script(rejecting(1))
        with forwarding(collector.url) as forwarder:
            offer(forwarder, "a", "b")
            eventually(lambda: forwarder.stats.forwarded, "an answer")
        assert forwarder.stats.forwarded == 1
        assert forwarder.stats.drops == {"rejected": 1}


def test_waiting_spans_are_sent_at_shutdown():
    with HttpCollector() as collector:
        with forwarding(collector.url) as forwarder:
            for number in range(200):
                offer(forwarder, str(number))
        assert collector.names == [str(number) for number in range(200)]
        assert forwarder.stats.forwarded == 200


def test_collector_that_hangs_does_not_hold_up_the_end():
    with HttpCollector() as collector:
        collector.script(Silence())
        with forwarding(collector.url) as forwarder:
            offer(forwarder, "a")
            eventually(lambda: collector.seen, "the request at the collector")
            offer(forwarder, "b")
            forwarder.stop(CLOCK.monotonic() + 10 * MILLISECOND)
        assert forwarder.stats.drops == {"stopped": 2}
        eventually(lambda: not _running(), "the end of the worker")


def test_collector_that_is_away_does_not_hold_up_the_end(free_port: Callable[[], int]):
    said: list[str] = []
    forwarder = Forwarder(
        SpansSettings(forward=f"http://127.0.0.1:{free_port()}"),
        CLOCK,
        said.append,
        backoff=RetryBackoff(3600 * SECOND, 3600 * SECOND),
    )
    forwarder.start()
    offer(forwarder, "a")
    eventually(lambda: not forwarder.health().up, "a failed attempt")
    forwarder.stop(CLOCK.monotonic() + 600 * SECOND)
    assert forwarder.stats.drops == {"stopped": 1}
    assert said[-1].startswith("1 spans still waited")
    assert "forward_spool = true" in said[-1]


def test_spooled_spans_are_sent_after_a_restart(tmp_path: Path, free_port: Callable[[], int]):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with forwarding(url, tmp_path) as before:
        offer(before, "a", "b")
        offer(before, "c")
        before.stop(CLOCK.monotonic())
    assert before.stats.drops == {}
    with HttpCollector(port=port) as collector, forwarding(url, tmp_path) as after:
        assert after.stats.restored == 3
        offer(after, "d")
        collector.wait_for(4)
        assert collector.names == ["a", "b", "c", "d"]
    assert not list(tmp_path.glob("*.spans"))


def test_offers_from_many_threads_are_all_sent():
    with HttpCollector() as collector:
        with forwarding(collector.url) as forwarder:
            threads = [
                threading.Thread(
                    target=lambda t=t: [offer(forwarder, f"{t}.{n}") for n in range(50)]
                )
                for t in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            collector.wait_for(200)
        for t in range(4):
            own = [name for name in collector.names if name.startswith(f"{t}.")]
            assert own == [f"{t}.{n}" for n in range(50)]


def test_under_pressure_from_many_threads_every_span_is_sent_or_counted(tmp_path: Path):
    long = "x" * 20_000
    with HttpCollector() as collector:
        collector.script(*[Reply(503), None] * 20)
        with forwarding(collector.url, tmp_path, queue="1MiB") as forwarder:
            threads = [
                threading.Thread(
                    target=lambda t=t: [offer(forwarder, f"{t}.{n} {long}") for n in range(100)]
                )
                for t in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            eventually(lambda: not forwarder.stats.queue_spans, "an empty queue")
        stats = forwarder.stats
        assert stats.forwarded == len(collector.names)
        assert stats.forwarded + stats.drops.get("queue_full", 0) == 400
        for t in range(4):
            own = [int(n.split()[0][2:]) for n in collector.names if n.startswith(f"{t}.")]
            assert own == sorted(own)


ENDLESS = """
import sys
from pathlib import Path
from testbed.forwarding import delivery
from testbed.waiting import eventually
from wattspan.clock import SystemClock
from wattspan.config import SpansSettings
from wattspan.otlp.forwarder import Forwarder

forwarder = Forwarder(
    SpansSettings(forward=sys.argv[1], forward_spool=True), SystemClock(), print, Path(sys.argv[2])
)
forwarder.start()
for number in range(10**6):
    forwarder.offer(delivery(str(number)), [None])
    eventually(lambda: forwarder.stats.unkept_bytes == 0, "kept")
    print(number, flush=True)
"""


def test_spooled_spans_survive_sigkill(tmp_path: Path, free_port: Callable[[], int]):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS, url, str(tmp_path)], stdout=subprocess.PIPE, env=environment
    ) as agent:
        assert agent.stdout is not None
        while (line := agent.stdout.readline()) != b"200\n":
            assert line
        agent.kill()
        told = 201 + len(agent.stdout.read().splitlines())
    with HttpCollector(port=port) as collector, forwarding(url, tmp_path) as after:
        collector.wait_for(told)
        eventually(lambda: not after.stats.queue_spans, "an empty queue")
        assert collector.names == [str(number) for number in range(len(collector.names))]
        assert after.stats.drops == {}


def test_forwarder_that_never_started_ends_as_well():
    forwarder = Forwarder(SpansSettings(forward="http://127.0.0.1:9"), CLOCK, lambda _: None)
    offer(forwarder, "a")
    forwarder.stop()
    assert forwarder.stats.drops == {"stopped": 1}


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_unix_socket_is_a_collector(tmp_path: Path, scheme: str):
    kind = HttpCollector if scheme == "http" else GrpcCollector
    with kind(path=tmp_path / "collector.sock") as collector:
        with forwarding(collector.url) as forwarder:
            offer(forwarder, "a")
            collector.wait_for(1)
        assert [s.name for s in spans_in(collector.taken[0].SerializeToString())] == ["a"]


def _running() -> bool:
    return any(thread.name == "wattspan-forward" for thread in threading.enumerate())
