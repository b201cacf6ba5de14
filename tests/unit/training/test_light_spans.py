"""Spans that are recorded without the machinery of the SDK."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace.status import StatusCode

from wattspan.otel import SpanProcessor
from wattspan.training.session import TrainingSession, start_session
from wattspan.training.session import TuningRequest as Wish
from wattspan.training.spans import MAX_ATTRIBUTES, LightTracer
from wattspan.training.units import StepWork


@dataclass
class Recorded:
    tracer: LightTracer
    processor: BatchSpanProcessor
    exporter: InMemorySpanExporter

    def spans(self) -> list[ReadableSpan]:
        self.processor.force_flush()
        return list(self.exporter.get_finished_spans())


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    exporter = InMemorySpanExporter()
    processor, ring = BatchSpanProcessor(exporter), SpanProcessor()
    provider = TracerProvider(resource=Resource({"service.name": "t"}), shutdown_on_exit=False)
    yield Recorded(LightTracer(provider, processor, ring), processor, exporter)
    processor.shutdown()
    ring.shutdown()


def test_steps_are_children_of_their_epoch_with_number_and_work(recorded: Recorded) -> None:
    session = TrainingSession(recorded.tracer)
    session.begin_epoch()
    for _ in range(2):
        session.begin_step()
        session.complete_step(StepWork(8, "samples"))
    session.stop()
    *steps, epoch = recorded.spans()
    assert [dict(one.attributes or {}) for one in (*steps, epoch)] == [
        {"wattspan.step": 1, "wattspan.work": 8, "wattspan.work_unit": "samples"},
        {"wattspan.step": 2, "wattspan.work": 8, "wattspan.work_unit": "samples"},
        {"wattspan.epoch": 1},
    ]
    assert epoch.parent is None
    for step in steps:
        assert step.parent == epoch.context
        assert step.resource.attributes["service.name"] == "t"
        assert (step.start_time or 0) <= (step.end_time or 0)
    assert len({one.context.span_id for one in (*steps, epoch) if one.context}) == 3
    assert not trace.get_current_span().get_span_context().is_valid


def test_open_span_is_the_current_one_of_the_application(recorded: Recorded) -> None:
    session = TrainingSession(recorded.tracer)
    session.begin_step()
    current = trace.get_current_span()
    assert current.is_recording()
    current.set_attribute("loss", 0.5)
    current.set_status(StatusCode.ERROR, "not finite")
    current.add_event("dropped")
    current.record_exception(ValueError("dropped"))
    session.complete_step()
    session.stop()
    (step,) = recorded.spans()
    assert (step.attributes or {})["loss"] == 0.5
    assert (step.status.status_code, step.status.description) == (StatusCode.ERROR, "not finite")
    assert not step.events
    assert not current.is_recording()


def test_span_ends_once_at_the_given_time(recorded: Recorded) -> None:
    span = recorded.tracer.start_span("epoch")
    span.end(5)
    span.end(6)
    (found,) = recorded.spans()
    assert found.end_time == 5


def test_attributes_of_a_span_are_bounded(recorded: Recorded) -> None:
    span = recorded.tracer.start_span("epoch")
    for number in range(2 * MAX_ATTRIBUTES):
        span.set_attribute(f"key{number}", number)
    span.end()
    (found,) = recorded.spans()
    keys = list(found.attributes or {})
    assert (len(keys), keys[-1]) == (MAX_ATTRIBUTES, f"key{2 * MAX_ATTRIBUTES - 1}")


def test_parent_of_the_application_is_kept(recorded: Recorded) -> None:
    outer = trace.SpanContext(7, 9, is_remote=True)
    span = recorded.tracer.start_span(
        "epoch", trace.set_span_in_context(trace.NonRecordingSpan(outer))
    )
    span.end()
    (found,) = recorded.spans()
    assert (found.parent, found.context.trace_id) == (outer, 7)


def test_disabled_sdk_starts_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    session = start_session(Wish(), service="t", declares=False)
    session.begin_step()
    assert not trace.get_current_span().is_recording()
    session.stop()
