"""Log records: their wire form, and their handling without a destination."""

from __future__ import annotations

from dataclasses import replace

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord as ProtoLogRecord
from testbed.forwarding import ScriptedTransport

from wattspan.config import SpansSettings
from wattspan.model import SECOND
from wattspan.otlp.destination import LOGS, parse_destination
from wattspan.otlp.logs import QUEUE_SIZE, LogForwarder, LogRecord, LogRecordEncoder
from wattspan.otlp.transport import (
    MAX_BACKOFF,
    ExportResult,
    ExportStatus,
    result_of_response,
    retry_result,
)
from wattspan.testing import ManualClock
from wattspan.util.throttle import RetryBackoff

RECORD = LogRecord("wattspan.test", 10**18, "It was so.", {"text": "a", "whole": 3})
AWAY = retry_result("connection refused", "Is it running?")
REFUSED = ExportResult(ExportStatus.REFUSED, "it answered 404")


def records_in(*bodies: bytes) -> list[ProtoLogRecord]:
    message = ExportLogsServiceRequest.FromString(b"".join(bodies))
    return [
        record
        for resource in message.resource_logs
        for scope in resource.scope_logs
        for record in scope.log_records
    ]


def written(record: LogRecord) -> ProtoLogRecord:
    (found,) = records_in(LogRecordEncoder({}).encode(record, 5))
    return found


class Bench:
    """A way for log records with a scripted collector, turned by hand."""

    def __init__(self, *answers: ExportResult) -> None:
        self.clock = ManualClock()
        self.collector = ScriptedTransport(*answers)
        self.said: list[str] = []
        self.records = LogForwarder(
            SpansSettings(forward="http://collector:4318"),
            self.clock,
            self.said.append,
            {"service.name": "wattspan"},
            transport=self.collector,
            backoff=RetryBackoff(SECOND, MAX_BACKOFF),
        )

    def tell(self, *bodies: str) -> None:
        for body in bodies:
            self.records.offer(replace(RECORD, body=body))

    @property
    def arrived(self) -> list[str]:
        return [record.body.string_value for record in records_in(*self.collector.taken)]


def test_record_has_time_body_severity_and_name():
    record = written(RECORD)
    assert (record.time_unix_nano, record.observed_time_unix_nano) == (10**18, 5)
    assert record.body.string_value == "It was so."
    assert (record.severity_number, record.severity_text) == (9, "INFO")
    assert record.event_name == "wattspan.test"
    assert [pair.key for pair in record.attributes] == ["event.name", "text", "whole"]


@pytest.mark.parametrize(("wall", "told"), [(-1, 0), (2**70, 2**64 - 1)])
def test_times_are_clamped_to_64_bits(wall, told):
    assert written(replace(RECORD, wall=wall)).time_unix_nano == told


def test_warning_has_its_severity():
    record = written(replace(RECORD, warns=True))
    assert (record.severity_number, record.severity_text) == (13, "WARN")


@pytest.mark.parametrize(
    ("value", "kind", "told"),
    [
        ("a", "string_value", "a"),
        ("odd\udc80", "string_value", "odd?"),
        (True, "bool_value", True),
        (3, "int_value", 3),
        (2**63, "string_value", "9223372036854775808"),
        (2.5, "double_value", 2.5),
    ],
)
def test_value_keeps_its_kind(value, kind, told):
    pair = written(replace(RECORD, attributes={"v": value})).attributes[1]
    assert pair.value.WhichOneof("value") == kind
    assert getattr(pair.value, kind) == told


@pytest.mark.parametrize("values", [[], [500.0, 700.0]])
def test_list_keeps_its_values_and_an_empty_one_is_a_list(values):
    pair = written(replace(RECORD, attributes={"v": values})).attributes[1]
    assert pair.value.WhichOneof("value") == "array_value"
    assert [each.double_value for each in pair.value.array_value.values] == values


def test_concatenated_log_requests_are_one_request():
    writer = LogRecordEncoder({"host.name": "h", "wattspan.emulated": True}, "1.2")
    bodies = [writer.encode(replace(RECORD, body=body), 0) for body in "ab"]
    message = ExportLogsServiceRequest.FromString(b"".join(bodies))
    assert [record.body.string_value for record in records_in(*bodies)] == ["a", "b"]
    for told_by in message.resource_logs:
        host, emulated = told_by.resource.attributes
        assert (host.value.string_value, emulated.value.bool_value) == ("h", True)
        assert told_by.scope_logs[0].scope.version == "1.2"


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://c:4318", "/v1/logs"),
        ("http://c/base/", "/base/v1/logs"),
        ("http://c/v1/traces", "/v1/logs"),
        ("https://c/otlp/v1/traces/?key=a", "/otlp/v1/logs?key=a"),
        ("unix:///run/c.sock", "/v1/logs"),
    ],
)
def test_logs_have_their_own_path(url, target):
    assert parse_destination(url, LOGS).target == target


def test_response_about_logs_is_understood():
    response = ExportLogsServiceResponse()
    response.partial_success.rejected_log_records = 2
    result = result_of_response(response.SerializeToString(), LOGS)
    assert result.rejected == 2
    assert result.why == "it rejected 2 log records"


def test_records_arrive_in_order_and_are_counted():
    bench = Bench()
    bench.tell("a", "b")
    assert bench.records.turn() is None
    assert bench.arrived == ["a", "b"]
    assert bench.records.sent == 2
    assert bench.records.drops == {}


def test_log_queue_is_bounded_and_keeps_the_newest():
    bench = Bench(AWAY)
    bench.tell("first")
    bench.records.turn()
    size = len(bench.collector.sent[0])
    told = 2 * int(QUEUE_SIZE) // size
    bench.tell(*(str(number) for number in range(told)))
    dropped = bench.records.drops["queue_full"]
    assert dropped > told // 3
    while (due := bench.records.turn()) is not None:
        bench.clock.sleep_until(due)
    assert bench.arrived[-1] == str(told - 1)
    assert len(bench.arrived) + dropped == told + 1
    assert len(bench.arrived) > 1000
    assert len(bench.said) == 2, "that it is away, and that it is back"


def test_logs_pause_for_an_hour_after_a_refusal():
    bench = Bench(REFUSED, REFUSED)
    for number in range(5):
        bench.tell(str(number))
        bench.records.turn()
    assert len(bench.collector.sent) == 1
    assert bench.records.drops == {"refused": 5}
    (said,) = bench.said
    assert "forward_decisions = false" in said
    assert not bench.records.health().up
    bench.clock.advance(LOGS.refusal_pause / SECOND + 1)
    bench.tell("again")
    bench.records.turn()
    bench.tell("and again")
    bench.records.turn()
    assert len(bench.collector.sent) == 2
    assert len(bench.said) == 2
