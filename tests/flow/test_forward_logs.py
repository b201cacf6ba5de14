"""Decisions and caps at the user's collector, from an agent that tunes an emulated host."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from testbed.collector import GrpcCollector, HttpCollector, Memory, Reply
from testbed.tuned_stack import Tuned, TunedHost
from testbed.waiting import eventually

from wattspan.capper.audit import AuditAction, AuditEvent, AuditLog
from wattspan.clock import SystemClock
from wattspan.config import SpansSettings
from wattspan.model import MILLISECOND
from wattspan.otlp.logs import LogForwarder
from wattspan.service.decision_events import AuditTail, audit_record
from wattspan.util.throttle import RetryBackoff

CLOCK = SystemClock()
Collector = Callable[[], AbstractContextManager[HttpCollector | GrpcCollector]]


@contextmanager
def sending(url: str) -> Iterator[LogForwarder]:
    records = LogForwarder(
        SpansSettings(forward=url, forward_headers="x-tenant=a"),
        CLOCK,
        lambda _: None,
        {"service.name": "wattspan", "host.name": "h"},
        backoff=RetryBackoff(MILLISECOND, 10 * MILLISECOND),
    )
    records.start()
    try:
        yield records
    finally:
        records.stop()


def deed(why: str, kind: AuditAction = AuditAction.FAIL) -> AuditEvent:
    return AuditEvent(at=1, deed=kind, why=why)


def bodies(collector: Memory) -> list[str]:
    return [record.body.string_value for record in collector.records]


def text_of(record: LogRecord, name: str) -> str:
    return next((pair.value.string_value for pair in record.attributes if pair.key == name), "")


@pytest.mark.parametrize("open_collector", [HttpCollector, GrpcCollector])
def test_audit_rows_reach_the_logs_endpoint(tmp_path: Path, open_collector: Collector) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl", 300)
    whys = [f"Reason {number}." for number in range(20)]
    with open_collector() as collector, sending(collector.url) as records:
        tail = AuditTail(audit.path, lambda event: records.offer(audit_record(event)), CLOCK)
        tail.begin()
        for why in whys:
            audit.record(deed(why))
            tail.turn()
        tail.close()
        eventually(lambda: bodies(collector) == whys, "all arrive, once, in order")
        host = collector.logs[0].resource_logs[0]
        assert [pair.value.string_value for pair in host.resource.attributes] == ["wattspan", "h"]
        assert all(seen.headers["x-tenant"] == "a" for seen in collector.seen)
        assert {seen.path for seen in collector.seen} <= {"/v1/logs", ""}


def test_busy_collector_receives_every_record_later(tmp_path: Path) -> None:
    with HttpCollector() as collector, sending(collector.url) as records:
        collector.script(Reply(503), Reply(429), Reply(503))
        for number in range(5):
            records.offer(audit_record(deed(str(number))))
        eventually(lambda: len(collector.records) == 5, "all arrive")
        assert bodies(collector) == [*"01234"]
        assert records.drops == {}


def test_dead_collector_loses_only_counted_records() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # reserved port without a listener
        port = taken.getsockname()[1]
        with sending(f"http://127.0.0.1:{port}") as records:
            for number in range(5000):
                records.offer(audit_record(deed(str(number))))
            dropped = records.drops["queue_full"]
            assert 0 < dropped < 5000
    assert records.drops["queue_full"] + records.drops["stopped"] == 5000
    assert records.sent == 0


def test_tuning_agent_sends_decisions_and_writes_as_logs(
    tmp_path: Path,
) -> None:
    def told(name: str) -> list[LogRecord]:
        return [record for record in collector.records if record.event_name == name]

    with HttpCollector() as collector, TunedHost() as host:
        environ = {"WATTSPAN_SPANS_FORWARD": collector.url}
        with Tuned(host, tmp_path, environ=environ) as agent:
            agent.caps()
            agent.until(lambda: told("wattspan.caps.write"), "a write is told")
            agent.until(lambda: told("wattspan.autotune.decision"), "a decision is told")
            agent.until(
                lambda: agent.metrics("wattspan_logs_forwarded_total").get(""), "it is counted"
            )
            agent.send(signal.SIGTERM)
            assert agent.ended() == 0
        assert told("wattspan.caps.start")
        write, decision = told("wattspan.caps.write")[0], told("wattspan.autotune.decision")[0]
        assert write.body.string_value.startswith(
            "The capper set gpu_power of Emulated NVIDIA H100"
        )
        assert text_of(write, "wattspan.caps.job") == "trainer/train_step"
        assert text_of(decision, "wattspan.autotune.job") == "trainer/train_step"
        assert decision.body.string_value.endswith(".")
        assert told("wattspan.caps.restore"), "what is given back at the end is told as well"
        assert told("wattspan.caps.end"), "and so is the end"
        resource = {
            pair.key: pair.value for pair in collector.logs[0].resource_logs[0].resource.attributes
        }
        assert resource["host.name"].string_value == "emulated-one-socket-h100"
        assert resource["wattspan.emulated"].bool_value
