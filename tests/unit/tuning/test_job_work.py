"""Requests of a tracked server: in flight by announcements, and their reported latencies."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from testbed.latency_pages import LatencyPages

from wattspan.config import TunedJobSettings
from wattspan.ingest.export_request import LatencyReport
from wattspan.model import MILLISECOND, SECOND, Consumer, Nanoseconds
from wattspan.model.settings import Duration
from wattspan.spans.values import (
    InferenceDetails,
    RequestLatency,
    Span,
    SpanColumns,
    SpanEnd,
    SpanStart,
)
from wattspan.tuning.decisions.load import LoadSample
from wattspan.tuning.decisions.load_cells import RequestTimes
from wattspan.tuning.job_work import (
    MAX_AGE,
    MAX_OPEN,
    InFlightRequests,
    JobRequests,
    JobWork,
    SpansAndPage,
    latency_reports,
)
from wattspan.tuning.work_units import MAX_WAITING_SPANS, ReceivedSpanQueue, ReceivedSpans

SERVER, OTHER = Consumer(1, 1), Consumer(2, 1)


def ident(number: int) -> bytes:
    return number.to_bytes(8, "big")


def starts(number: int, at: float, parent: bytes = b"") -> SpanStart:
    return SpanStart(ident(number), parent, round(at * SECOND), 1, 0)


def ends(number: int, at: float) -> SpanEnd:
    return SpanEnd(ident(number), round(at * SECOND), 1, 0)


def watched() -> InFlightRequests:
    requests = InFlightRequests(0)
    requests.watch(SERVER, 0)
    return requests


def span(number: int, start: float, end: float, name: str = "chat", parent: bytes = b"") -> Span:
    times = round(start * SECOND), round(end * SECOND)
    return Span(b"t" * 16, ident(number), parent, "llm", name, *times)


# ------------------------------------------------------------------------------------ in flight


def test_requests_in_flight_are_the_mean_over_the_sample() -> None:
    requests = watched()
    requests.add(SERVER, [starts(1, 1), starts(2, 2), ends(1, 3)], 4 * SECOND)
    sample = requests.sample(4 * SECOND)
    assert sample.in_flight == pytest.approx((2 + 2) / 4)
    assert (sample.arrivals, sample.completions) == (2, 1)
    assert (sample.start, sample.end) == (0, 4 * SECOND)
    following = requests.sample(6 * SECOND)
    assert following.in_flight == 1
    assert (following.start, following.arrivals, following.completions) == (4 * SECOND, 0, 0)


def test_start_that_is_read_late_counts_from_the_last_sample_on() -> None:
    requests = watched()
    requests.sample(2 * SECOND)
    requests.add(SERVER, [starts(1, 1)], 3 * SECOND)
    assert requests.sample(4 * SECOND).in_flight == 1


def test_start_in_the_future_does_not_make_the_load_negative() -> None:
    requests = watched()
    requests.add(SERVER, [starts(1, 10**6), ends(1, 10**6)], SECOND)
    assert requests.sample(SECOND).in_flight == 0


def test_children_and_other_processes_are_no_requests() -> None:
    requests = watched()
    requests.add(SERVER, [starts(1, 0, parent=ident(9)), ends(9, 0)], SECOND)
    requests.add(OTHER, [starts(2, 0)], SECOND)
    assert len(requests) == 0
    assert requests.sample(SECOND).in_flight == 0


def test_repeated_start_counts_once() -> None:
    requests = watched()
    requests.add(SERVER, [starts(1, 0), starts(1, 0)], SECOND)
    assert requests.sample(SECOND).arrivals == 1


def test_requests_of_an_ended_process_are_dropped() -> None:
    requests = watched()
    requests.watch(OTHER, 0)
    requests.add(SERVER, [starts(1, 0)], SECOND)
    requests.add(OTHER, [starts(2, 0)], SECOND)
    requests.keep([OTHER])
    assert len(requests) == 1
    requests.keep([OTHER])
    requests.add(SERVER, [starts(3, 0)], SECOND)
    assert len(requests) == 1


def test_request_with_a_lost_end_is_dropped_after_an_hour() -> None:
    requests = watched()
    requests.add(SERVER, [starts(1, 0), starts(2, 10)], 10 * SECOND)
    requests.sample(MAX_AGE + SECOND)
    assert len(requests) == 1


def test_received_span_closes_a_request_with_a_lost_end() -> None:
    requests = watched()
    requests.add(SERVER, [starts(1, 1)], SECOND)
    requests.received(SERVER, span(1, 1, 2))
    assert len(requests) == 0
    assert requests.sample(4 * SECOND).in_flight == pytest.approx(0.25)


def test_requests_in_flight_are_bounded() -> None:
    requests = watched()
    requests.add(SERVER, [starts(number, 0) for number in range(MAX_OPEN + 10)], 0)
    assert len(requests) == MAX_OPEN
    requests.add(SERVER, [ends(number, 0) for number in range(MAX_OPEN + 10)], 0)
    assert len(requests) == 0


def test_tokens_of_a_sample_are_those_of_the_requests_that_became_known() -> None:
    work = JobWork("chat", settings(), 0)
    known = span(1, 0, 1)._replace(tokens_in=100, tokens_out=20)
    work.add(received(known, span(2, 0, 1)), SECOND)
    sample = work.read_requests(SECOND).sample
    assert sample is not None
    assert (sample.input_tokens, sample.output_tokens) == (100, 20)


def judged(requests: InFlightRequests, numbers: Iterable[int], delay: float | None) -> None:
    """Requests of a second; ``delay`` of their announced starts, None without any."""
    for number in numbers:
        begin = 1.0 + number
        if delay is not None:
            announced = [starts(number, begin + delay), ends(number, begin + 1)]
            requests.add(SERVER, announced, 10**12)
        requests.received(SERVER, span(number, begin, begin + 1))


def test_requests_are_announced_if_they_are_announced_as_they_begin() -> None:
    requests = watched()
    judged(requests, range(19), 0.01)
    assert requests.announced is None
    judged(requests, [19], 0.01)
    assert requests.announced is True


@pytest.mark.parametrize("delay", [None, 0.9])
def test_requests_that_are_announced_late_or_never_are_not_announced(delay: float | None) -> None:
    """An engine may make the span of a request at its end, with a start in the past."""
    requests = watched()
    judged(requests, range(20), delay)
    assert requests.announced is False


def test_requests_whose_announcements_are_often_lost_are_not_announced() -> None:
    requests = watched()
    for number in range(40):
        judged(requests, [number], None if number % 4 == 0 else 0.01)
    assert requests.announced is False


def test_requests_from_before_their_process_was_known_are_not_judged() -> None:
    requests = InFlightRequests(0)
    requests.watch(SERVER, 30 * SECOND)
    judged(requests, range(25), None)
    assert requests.announced is None


# ------------------------------------------------------------------------------------ latencies


def settings(**more: object) -> TunedJobSettings:
    known: dict[str, object] = {
        "service": "llm",
        "span": "chat",
        "kind": "requests",
        "control": "track",
        "slo": {"ttft_p99": Duration(SECOND), "tbt_p99": Duration(SECOND)},
    }
    return TunedJobSettings(**(known | more))  # type: ignore[arg-type]


def received(*spans: Span, **more: object) -> ReceivedSpans:
    """The spans with ``more``, of one process."""
    return ReceivedSpans(SERVER, "llm", SpanColumns.of([one._replace(**more) for one in spans]))  # type: ignore[arg-type]


def one_request(job: TunedJobSettings, *spans: Span, **more: object) -> RequestTimes:
    requests = JobRequests("chat", job)
    requests.add(received(*spans, **more), 100 * SECOND)
    (found,) = requests.drain()
    assert not requests
    return found


def test_reported_latencies_are_those_of_the_decoder() -> None:
    found = one_request(
        settings(ttft="a", tbt="b"), span(1, 2, 4), latency=RequestLatency(300, 20), inference=None
    )
    assert (found.start, found.end) == (2 * SECOND, 4 * SECOND)
    assert (found.first_token, found.between) == (300, 20)
    assert (found.input_tokens, found.output_tokens) == (None, None)


def test_latencies_of_an_engine_are_used_without_a_configured_source() -> None:
    engine = InferenceDetails("m", 0, None, Nanoseconds(SECOND))
    request = span(1, 2, 5)._replace(tokens_in=7, tokens_out=11)
    found = one_request(settings(), request, inference=engine)
    assert found.first_token == SECOND
    assert found.between == 200 * MILLISECOND  # two seconds for ten further tokens
    assert (found.input_tokens, found.output_tokens) == (7, 11)


def test_configured_source_is_not_replaced_by_the_report_of_an_engine() -> None:
    engine = InferenceDetails("m", 0, None, Nanoseconds(SECOND))
    found = one_request(settings(ttft="a", tbt="b"), span(1, 2, 5), inference=engine)
    assert (found.first_token, found.between) == (None, None)


def test_latencies_of_child_spans() -> None:
    job = settings(ttft="span:prefill", tbt="span:decode")
    request = span(1, 2, 5)._replace(tokens_out=11)
    children = [
        span(2, 2, 2.5, "prefill", ident(1)),
        span(3, 2, 2.7, "prefill", ident(1)),
        span(4, 2.5, 3.5, "decode", ident(1)),
        span(5, 4, 5, "decode", ident(1)),
        span(6, 2, 9, "prefill", ident(7)),
    ]
    found = one_request(job, request, *children)
    assert found.first_token == 500 * MILLISECOND
    assert found.between == 200 * MILLISECOND


def test_request_without_its_child_spans_has_unknown_latencies() -> None:
    found = one_request(settings(ttft="span:prefill", tbt="span:decode"), span(1, 2, 5))
    assert (found.first_token, found.between) == (None, None)


def test_waiting_child_spans_are_bounded() -> None:
    job = settings(ttft="span:prefill", tbt="span:prefill")
    requests = JobRequests("chat", job)
    parts = [span(n, 2, 3, "prefill", ident(n)) for n in range(1, 9000)]
    requests.add(received(*parts), 100 * SECOND)
    requests.add(received(span(1, 2, 5), span(8999, 2, 5)), 100 * SECOND)
    assert [one.first_token for one in requests.drain()] == [None, SECOND]


def test_request_is_counted_once_and_future_ones_never() -> None:
    requests = JobRequests("chat", settings())
    first = span(1, 2, 5)
    assert requests.add(received(first, first, span(2, 5, 200), span(3, 5, 4)), 9 * SECOND) == [
        first
    ]
    assert requests.add(received(first, span(4, 1, 2, "other")), 9 * SECOND) == []
    assert len(requests) == 1


def test_requests_without_latencies_are_missing_the_first_limited_one() -> None:
    requests = JobRequests("chat", settings(ttft="event:first"))
    for number in range(1, 20):
        requests.add(received(span(number, 1, 2)), 9 * SECOND)
    assert requests.missing == ""
    requests.add(received(span(20, 1, 2)), 9 * SECOND)
    assert '"event:first"' in requests.missing
    assert "set `ttft`" in requests.missing


def test_latency_without_a_limit_is_not_missing() -> None:
    only_tbt = settings(slo={"tbt_p99": Duration(SECOND)})
    requests = JobRequests("chat", only_tbt)
    for number in range(1, 30):
        requests.add(received(span(number, 1, 2)), 9 * SECOND)
    assert "as an engine does; set `tbt`" in requests.missing
    one_token = JobRequests("chat", only_tbt)
    for number in range(1, 30):
        single = span(number, 1, 2)._replace(tokens_out=1)
        one_token.add(received(single), 9 * SECOND)
    assert one_token.missing == ""


def test_latency_reports_are_those_of_tracked_jobs_with_attributes_or_events() -> None:
    jobs = (
        settings(ttft="a", tbt="event:token"),
        settings(ttft="span:prefill"),
        TunedJobSettings(service="trainer", span="step"),
    )
    assert latency_reports(jobs) == (LatencyReport("llm", "chat", "a", "", "", "token"),)


# ---------------------------------------------------------------------------------------- queue


def test_queue_keeps_announcements_only_if_they_are_needed() -> None:
    unneeded, needed = ReceivedSpanQueue(), ReceivedSpanQueue(announced=True)
    for queue in (unneeded, needed):
        queue.announce(SERVER, [starts(1, 0)])
        queue.announce(SERVER, [])
    assert not unneeded.drain_announced()
    assert [one.consumer for one in needed.drain_announced()] == [SERVER]
    assert not needed.drain_announced()


def test_waiting_announcements_are_bounded_and_counted() -> None:
    queue = ReceivedSpanQueue(announced=True)
    many = [starts(1, 0)] * (MAX_WAITING_SPANS - 1)
    queue.announce(SERVER, many)
    queue.announce(OTHER, many)
    assert [one.consumer for one in queue.drain_announced()] == [OTHER]
    assert queue.lost == len(many)


# ------------------------------------------------------------------------- spans and the page


def sample(second: int, in_flight: float, ended: int) -> LoadSample:
    return LoadSample(second * SECOND, (second + 1) * SECOND, in_flight, ended, ended)


def test_spans_agree_with_the_page_by_their_share_of_its_requests() -> None:
    both = SpansAndPage()
    both.add(sample(0, 1, 19), sample(0, 1, 19), 1)
    assert both.agree is None
    for second in range(1, 20):
        both.add(sample(second, 1, 9), sample(second, 1, 10), 1)
    assert both.agree is True
    for second in range(20, 40):
        both.add(sample(second, 1, 85), sample(second, 1, 100), 1)
    assert both.agree is True  # 0.8 suffices to stay
    both.add(sample(40, 1, 0), sample(40, 1, 100), 1)
    assert both.agree is False
    for second in range(41, 60):
        both.add(sample(second, 1, 85), sample(second, 1, 100), 1)
    assert both.agree is False  # but not to begin again
    both.add(sample(60, 1, 200), sample(60, 1, 100), 1)
    assert both.agree is True


def test_requests_in_flight_of_the_page_alone_are_timed() -> None:
    both = SpansAndPage()
    for second in range(3):
        both.add(sample(second, 0, 0), None, 2)
    assert both.alone(2 * SECOND)
    both.add(sample(3, 0.1, 0), None, 2)
    assert not both.alone(0)


def test_announcements_of_an_ended_process_are_forgotten() -> None:
    requests = watched()
    requests.watch(OTHER, 0)
    for number in range(30):
        requests.add(OTHER, [starts(number, 1), ends(number, 2)], 3 * SECOND)
        requests.received(OTHER, span(number, 1, 2))
    assert requests.announced
    assert requests.surely_announced
    requests.keep({SERVER})
    assert requests.announced is None
    assert not requests.surely_announced


def test_each_request_is_counted_once_as_spans_replace_the_page() -> None:
    """One that ended after the last page, before enough were announced, is that of its span."""
    job = settings(engine="vllm", slo={"ttft_p99": Duration(SECOND)}, ttft="a")
    work, pages = JobWork("chat", job, 0), LatencyPages()
    work.add(received(), 0)
    counted = by_span = 0
    for second in range(33):
        now = second * SECOND
        if second:
            announced = starts(second, second - 0.9), ends(second, second - 0.5)
            work.in_flight.add(SERVER, announced, now)
            request = span(second, second - 0.9, second - 0.5)
            work.add(received(request, latency=RequestLatency(300, None)), now)
            pages.first.add(0.3)
        if second % 8 == 0:
            work.add_page(pages.read(now, 8 * SECOND, (SERVER,), finished=second), now)
        found = work.read_requests(now)
        counted += sum(one.number for one in found.requests)
        by_span += len(found.requests) if not found.note else 0
    assert 8 < by_span < 24
    assert counted == 32
