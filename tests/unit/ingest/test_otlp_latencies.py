"""Latencies that requests report in attributes and events, in both encodings."""

from __future__ import annotations

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from testbed.otlp import BEGIN, request, span
from testbed.otlp_reference import records_in_both_encodings

from wattspan.ingest.export_request import LatencyReport, RequestedAttributes
from wattspan.ingest.request_limits import RequestTooLargeError
from wattspan.ingest.trace_decoder import MAX_EVENTS, TraceDecoder
from wattspan.spans.values import RequestLatency

REPORT = LatencyReport("llm", "work 1", "ttft", "first", "tbt", "token")
START = BEGIN + 1


def told(*spans: Span, reports: tuple[LatencyReport, ...] = (REPORT,), service: str = "llm"):
    """The latencies of the spans; the same in both encodings."""
    whole = request(*spans, resource={"service.name": service})
    return [one.latency for one in records_in_both_encodings(whole, latencies=reports)]


def with_events(one: Span, *events: tuple[int, str]) -> Span:
    for at, name in events:
        one.events.add(time_unix_nano=at, name=name)
    return one


@pytest.mark.parametrize(
    ("value", "time"),
    [
        (0.25, 250_000_000),
        (3, 3_000_000_000),
        ("340ms", 340_000_000),
        ("2.5s", 2_500_000_000),
        ("soon", None),
        (-1, None),
        (float("nan"), None),
        (True, None),
    ],
)
def test_latency_is_read_from_an_attribute(value: str | float, time: int | None) -> None:
    assert told(span(1, ttft=value)) == [RequestLatency(time, None)]
    assert told(span(1, tbt=value)) == [RequestLatency(None, time)]


def test_time_of_the_first_event_and_mean_time_between_events() -> None:
    one = with_events(
        span(1), (START + 70, "first"), (START + 50, "first"), (START - 5, "first"),
        (START + 10, "token"), (START + 40, "token"), (START + 90, "token"), (START + 7, "other"),
    )  # fmt: skip
    assert told(one) == [RequestLatency(50, 40)]


def test_single_event_has_no_time_between() -> None:
    one = with_events(span(1), (START + 10, "token"))
    assert told(one) == [RequestLatency(None, None)]


def test_attribute_counts_before_an_event() -> None:
    one = with_events(span(1, ttft=1.0), (START + 50, "first"))
    assert told(one) == [RequestLatency(1_000_000_000, None)]


def test_latencies_are_read_from_the_named_spans_of_the_service_only() -> None:
    assert told(span(1, ttft=1), span(2, ttft=1)) == [RequestLatency(1_000_000_000), None]
    assert told(span(1, ttft=1), service="other") == [None]
    assert told(span(1, ttft=1), reports=()) == [None]


def test_first_report_of_a_span_counts() -> None:
    reports = (LatencyReport("", "work 1", "a"), REPORT, LatencyReport("", "work 2", "ttft"))
    assert told(span(1, a=1, ttft=2), span(2, ttft=3), reports=reports) == [
        RequestLatency(1_000_000_000),
        RequestLatency(3_000_000_000),
    ]


def test_events_of_a_span_are_searched_up_to_a_limit() -> None:
    many = [(START + 1, "noise")] * MAX_EVENTS
    assert told(with_events(span(1), *many, (START + 50, "first"))) == [RequestLatency()]


def test_events_count_towards_the_fields_of_a_request() -> None:
    one = with_events(span(1), *[(START + 1, "first")] * 200)
    body = request(one, resource={"service.name": "llm"}).SerializeToString()
    for reports in ((), (REPORT,)):
        decoder = TraceDecoder(RequestedAttributes(latencies=reports), max_spans=9, max_fields=100)
        if not reports:
            assert decoder.decode(body).parts
            continue
        with pytest.raises(RequestTooLargeError, match="at most 100 fields"):
            decoder.decode(body)
