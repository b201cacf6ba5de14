"""The forwarder's decisions, one attempt at a time, on a manual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testbed.forwarding import (
    TAKEN,
    ScriptedTransport,
    delivery,
    joules,
    names_in,
    no_energy,
    spans_in,
)

from wattspan.config import SpansSettings
from wattspan.http.sockets import Peer
from wattspan.model import SECOND, HwType, Principal, Provenance
from wattspan.model.settings import Size
from wattspan.otlp.forwarder import MAX_BATCH_REQUESTS, Forwarder
from wattspan.otlp.transport import MAX_BACKOFF, ExportResult, ExportStatus, retry_result
from wattspan.ports import ConfigError
from wattspan.testing import ManualClock
from wattspan.util.throttle import RetryBackoff

AWAY = retry_result("connection refused", "Is it running?")
BUSY = ExportResult(ExportStatus.AGAIN, "it answered 429", after=7 * SECOND)
UNANSWERED = retry_result("no answer", perhaps_taken=True)
REFUSED = ExportResult(ExportStatus.REFUSED, "it answered 400")
TOO_LARGE = ExportResult(ExportStatus.TOO_LARGE, "it answered 413")


class Bench:
    """A forwarder with a scripted collector, turned by hand."""

    def __init__(self, *answers: ExportResult, queue: str = "1MiB", provenance=dict) -> None:
        self.clock = ManualClock()
        self.collector = ScriptedTransport(*answers)
        self.said: list[str] = []
        self.forwarder = Forwarder(
            SpansSettings(forward="http://collector:4318", forward_queue=Size.parse(queue)),
            self.clock,
            self.said.append,
            provenance=provenance,
            transport=self.collector,
            backoff=RetryBackoff(SECOND, MAX_BACKOFF),
        )

    def offer(self, *names: str) -> None:
        self.forwarder.offer(delivery(*names), no_energy(len(names)))

    def settle(self, turns: int = 100) -> None:
        """Turn until nothing waits, letting the time pass that is asked for."""
        for _ in range(turns):
            due = self.forwarder.turn()
            if due is None:
                return
            self.clock.sleep_until(due)
        raise AssertionError("it does not settle")

    @property
    def arrived(self) -> list[str]:
        return names_in(self.collector.taken)


def test_spans_arrive_in_order_and_are_counted():
    bench = Bench()
    bench.offer("a", "b")
    bench.offer("c")
    bench.settle()
    assert bench.arrived == ["a", "b", "c"]
    assert bench.forwarder.stats.forwarded == 3
    assert bench.forwarder.stats.drops == {}
    assert bench.forwarder.stats.queue_bytes == 0


def test_forwarded_spans_have_energy_and_provenance():
    bench = Bench(provenance=lambda: {HwType.CPU: Provenance.EMULATED})
    bench.forwarder.offer(delivery("a"), [joules({HwType.CPU: 1_000_000})])
    bench.settle()
    (span,) = spans_in(bench.collector.taken[0])
    values = {kv.key: kv.value for kv in span.attributes}
    assert values["wattspan.energy.cpu.exclusive"].double_value == 1.0
    assert values["wattspan.energy.provenance"].string_value == "emulated"


def test_request_without_message_is_not_forwarded():
    bench = Bench()
    bench.forwarder.offer(replace(delivery("a"), message=None), [None])
    bench.settle()
    assert bench.collector.sent == []


def test_waiting_requests_are_joined():
    bench = Bench()
    for number in range(MAX_BATCH_REQUESTS + 1):
        bench.offer(str(number))
    bench.settle()
    assert len(bench.collector.sent) == 2
    assert bench.arrived == [str(number) for number in range(MAX_BATCH_REQUESTS + 1)]


def test_joined_requests_are_bounded():
    bench = Bench(queue="16MiB")
    for number in range(4):
        bench.offer(str(number) + "x" * 900_000)
    bench.settle()
    assert [len(names_in([body])) for body in bench.collector.sent] == [2, 2]


def test_flood_of_a_user_drops_no_waiting_spans_of_another_user():
    bench = Bench(AWAY)
    for name in ("a", *("x" * 100_000 for _ in range(20))):
        one = replace(delivery(name), peer=Peer(principal=Principal(1000 + len(name))))
        bench.forwarder.offer(one, no_energy(1))
    bench.settle()
    assert bench.arrived[0] == "a"
    assert bench.forwarder.stats.drops == {"queue_full": 20 - (len(bench.arrived) - 1)}


def test_recovered_collector_gets_all_waiting_spans():
    bench = Bench(*[AWAY] * 8)
    bench.offer("a")
    bench.offer("b")
    bench.settle()
    assert bench.arrived == ["a", "b"]
    assert bench.forwarder.stats.drops == {}
    assert bench.forwarder.stats.perhaps_twice == 0


def test_delays_double_up_to_a_limit():
    bench = Bench(*[AWAY] * 8)
    bench.offer("a")
    delays = []
    for _ in range(8):
        due = bench.forwarder.turn()
        delays.append((due - bench.clock.monotonic()) / SECOND)
        bench.clock.sleep_until(due)
    assert delays == [1, 2, 4, 8, 8, 8, 8, 8]


def test_batch_is_not_sent_before_it_is_due():
    bench = Bench(AWAY)
    bench.offer("a")
    due = bench.forwarder.turn()
    bench.offer("b")
    assert bench.forwarder.turn() == due
    assert len(bench.collector.sent) == 1


def test_requested_delay_is_respected():
    bench = Bench(BUSY)
    bench.offer("a")
    assert bench.forwarder.turn() == bench.clock.monotonic() + 7 * SECOND


def test_request_without_response_is_repeated_and_counted():
    bench = Bench(UNANSWERED)
    bench.offer("a", "b")
    bench.settle()
    assert bench.arrived == ["a", "b"]
    assert bench.collector.sent[0] == bench.collector.sent[1]
    assert bench.forwarder.stats.perhaps_twice == 2


def test_refused_spans_are_dropped_and_later_ones_sent():
    bench = Bench(REFUSED)
    bench.offer("bad", "worse")
    bench.settle()
    bench.offer("good")
    bench.settle()
    assert bench.arrived == ["good"]
    assert bench.forwarder.stats.drops == {"refused": 2}


def test_one_bad_request_is_isolated_and_the_others_arrive():
    bench = Bench()

    def picky(body: bytes) -> ExportResult:
        return REFUSED if "bad" in names_in([body]) else TAKEN

    bench.collector.answers.extend([picky] * 20)
    for name in ("a", "b", "bad", "c", "d"):
        bench.offer(name)
    bench.settle()
    assert bench.arrived == ["a", "b", "c", "d"]
    assert bench.forwarder.stats.drops == {"refused": 1}


def test_requests_are_joined_again_after_a_bad_one():
    bench = Bench(REFUSED, REFUSED)
    bench.offer("a")
    bench.offer("b")
    bench.settle()
    for name in "cdef":
        bench.offer(name)
    bench.settle()
    assert len(bench.collector.sent) == 4


def test_oversized_request_is_halved_until_accepted():
    bench = Bench()

    def small(body: bytes) -> ExportResult:
        return TOO_LARGE if len(names_in([body])) > 2 else TAKEN

    bench.collector.answers.extend([small] * 50)
    bench.offer(*"abcdefg")
    bench.offer("h")
    bench.settle()
    assert bench.arrived == list("abcdefgh")
    assert bench.forwarder.stats.drops == {}
    assert bench.forwarder.stats.forwarded == 8


def test_single_span_that_is_too_large_is_dropped_and_counted():
    bench = Bench(TOO_LARGE)
    bench.offer("huge")
    bench.settle()
    assert bench.forwarder.stats.drops == {"too_large": 1}


def test_repeatedly_unfinished_request_is_sent_in_parts():
    bench = Bench()

    def slow(body: bytes) -> ExportResult:
        return retry_result("timed out", unfinished=True) if len(names_in([body])) > 3 else TAKEN

    bench.collector.answers.extend([slow] * 50)
    bench.offer("a")
    bench.offer(*"bcdefghi")
    bench.settle()
    assert bench.arrived == list("abcdefghi")
    assert bench.forwarder.stats.drops == {}


@pytest.mark.parametrize(
    ("sent", "rejected", "counted"), [("abc", 2, 2), ("a", 99, 1)], ids=["some", "more than sent"]
)
def test_spans_that_a_collector_rejects_are_not_counted_as_forwarded(sent, rejected, counted):
    bench = Bench(ExportResult(ExportStatus.TAKEN, "it rejected spans", rejected=rejected))
    bench.offer(*sent)
    bench.settle()
    assert bench.forwarder.stats.forwarded == len(sent) - counted
    assert bench.forwarder.stats.drops == {"rejected": counted}


def test_full_queue_drops_its_oldest_requests_whole():
    bench = Bench(AWAY)
    for number in range(5):
        bench.offer(f"{number}" + "x" * 300_000, f"{number}")
    bench.settle()
    assert [name[0] for name in bench.arrived] == ["2", "2", "3", "3", "4", "4"]
    assert bench.forwarder.stats.drops == {"queue_full": 4}


def test_request_larger_than_the_queue_drops_no_other():
    bench = Bench(AWAY)
    bench.offer("a")
    bench.offer("x" * 2_000_000)
    bench.settle()
    assert bench.arrived == ["a"]
    assert bench.forwarder.stats.drops == {"queue_full": 1}


def test_request_being_sent_is_not_dropped():
    bench = Bench()

    def crowd(body: bytes) -> ExportResult:
        for number in range(1, 6):
            bench.offer(f"{number}" + "x" * 300_000)
        return TAKEN

    bench.collector.answers.append(crowd)
    bench.offer("0" + "x" * 300_000, "0")
    bench.settle()
    assert [name[0] for name in bench.arrived] == ["0", "0", "4", "5"]
    assert bench.forwarder.stats.drops == {"queue_full": 3}


def test_stats_have_the_size_of_the_queue():
    bench = Bench(AWAY)
    bench.offer("a", "b")
    bench.forwarder.turn()
    assert bench.forwarder.stats.queue_spans == 2
    assert bench.forwarder.stats.queue_bytes > len(bench.collector.sent[0])


def test_outage_is_logged_once_with_its_end():
    bench = Bench(*[AWAY] * 5)
    bench.offer("a")
    bench.settle()
    bench.offer("b")
    bench.settle()
    assert len(bench.said) == 2
    assert "http://collector:4318/v1/traces: connection refused. Is it running?" in bench.said[0]
    assert "forward_queue" in bench.said[0]
    assert "takes spans again, after 23 s" in bench.said[1]


def test_refusals_are_logged_at_most_once_an_interval():
    bench = Bench(*[REFUSED] * 3)
    for _ in range(2):
        bench.offer("a")
        bench.settle()
    assert len(bench.said) == 1
    assert "it answered 400" in bench.said[0]
    assert "dropped" in bench.said[0]
    bench.clock.advance(601)
    bench.offer("a")
    bench.settle()
    assert len(bench.said) == 2


def test_health_has_the_failure_while_it_lasts():
    bench = Bench(AWAY, AWAY)
    assert bench.forwarder.health().up
    bench.offer("a")
    bench.forwarder.turn()
    health = bench.forwarder.health()
    assert (health.source, health.up, health.reads, health.failed) == ("forward", False, 1, 1)
    assert str(health.failures[0]).startswith("Cannot forward spans to http://collector:4318")
    bench.settle()
    assert bench.forwarder.health().up
    assert bench.forwarder.health().failures == ()


def test_headers_are_never_logged():
    said: list[str] = []
    forwarder = Forwarder(
        SpansSettings(forward="http://collector:4318", forward_headers="authorization=s3cret"),
        ManualClock(),
        said.append,
        transport=ScriptedTransport(REFUSED),
    )
    forwarder.offer(delivery("a"), [None])
    forwarder.turn()
    assert said
    assert "s3cret" not in "".join(said) + str(forwarder.health())


def test_invalid_address_is_an_error_before_the_start():
    with pytest.raises(ConfigError, match="forward"):
        Forwarder(SpansSettings(forward="collector"), ManualClock(), print)


def test_spans_waiting_at_the_end_are_counted():
    bench = Bench(AWAY)
    bench.offer("a", "b")
    bench.forwarder.turn()
    bench.forwarder.stop()
    bench.offer("c")
    assert bench.forwarder.stats.drops == {"stopped": 3}
    assert bench.collector.closed
