"""Requests side by side: capped as long as their throughput and their tail hold."""

from __future__ import annotations

import pytest
from testbed.saved_state import saved
from testbed.tuned_host import DEFAULT, Host, held
from testbed.tuned_serving import JOB, Server, serve, serving

from wattspan.model import DecisionReason, Move

HOUR = 3600
LIMIT = 0.65


def reason(host: Host) -> DecisionReason | None:
    row = host.row(JOB)
    return row.decision.reason if row is not None else None


@saved
def held_server() -> tuple[Host, Server]:
    host = Host(settings=serving(LIMIT))
    server = serve(host)
    host.run(HOUR, until=lambda: held(host, JOB))
    return host, server


@pytest.mark.exhaustive
def test_server_ends_capped_within_throughput_and_tail_limits() -> None:
    host, server = held_server()
    row = host.row(JOB)
    assert host.gpus[0].cap < server.gpu.draw
    assert 1.0 < server.gpu.slowdown < 1.05
    assert row.held_bound <= 0.05
    server.latencies.clear()
    host.run(300)
    late = sum(one > LIMIT for one in server.latencies)
    assert late <= 0.01 * len(server.latencies)
    assert row.units > 0


def test_unjudged_load_is_compared_then_held() -> None:
    host, server = held_server()
    server.rate = 12.0
    host.run(
        30, until=lambda: reason(host) is DecisionReason.SENTINEL
    )  # otherwise it arrives in a minute
    assert reason(host) is DecisionReason.SENTINEL
    host.run(30, until=lambda: held(host, JOB))
    assert held(host, JOB)


def test_low_request_rate_stops_trials() -> None:
    host = Host(settings=serving(LIMIT))
    serve(host, rate=0.01)
    host.run(HOUR, until=lambda: reason(host) is DecisionReason.TOO_NOISY)
    row = host.row(JOB)
    assert "too few requests arrive" in row.decision.sentence
    assert not any(one.decision.caps for one in host.book.decided)


@pytest.mark.exhaustive
def test_server_that_becomes_busy_is_tuned_after_all() -> None:
    host = Host(settings=serving(LIMIT))
    server = serve(host, rate=0.01)
    host.run(HOUR, until=lambda: reason(host) is DecisionReason.TOO_NOISY)
    server.rate, server.due = 8.0, 0.0
    host.run(HOUR, until=lambda: reason(host) is DecisionReason.SCREENING)
    assert reason(host) is DecisionReason.SCREENING


@pytest.mark.exhaustive
def test_always_changing_load_holds_no_cap() -> None:
    host = Host(settings=serving(LIMIT))
    server = serve(host)
    ended = set()
    for turn in range(400):
        server.rate = (2.0, 15.0)[turn % 2]
        host.run(8)
        row = host.row(JOB)
        assert row.decision.move is not Move.HOLD
        if row.decision.move is not Move.PROBE:
            ended.add(row.decision.reason)
            assert host.gpus[0].cap == DEFAULT
    assert ended
    assert ended <= {DecisionReason.TAIL, DecisionReason.TOO_NOISY}
