"""What a span processor tells of spans, seen from the agent's end."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from support.telling import ends, listening, processor_of, starts, telling
from wattspan.ingest.side_channel import SideChannelServer
from wattspan.sdk.span_processor import SpanProcessor


@pytest.fixture
def feed(tmp_path: Path) -> Iterator[SideChannelServer]:
    with listening(tmp_path) as feed:
        yield feed


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[TracerProvider]:
    with telling(tmp_path) as provider:
        yield provider


@pytest.fixture
def tracer(feed: SideChannelServer, provider: TracerProvider) -> trace.Tracer:
    return provider.get_tracer("application")


def identity(span: trace.Span) -> bytes:
    return span.get_span_context().span_id.to_bytes(8)


def test_span_is_told_of_when_it_starts_and_again_when_it_ends(
    feed: SideChannelServer, tracer: trace.Tracer
) -> None:
    before = time.monotonic_ns()
    span = tracer.start_span("work")
    (started,) = feed.drain()
    span.end()
    (ended,) = feed.drain()
    assert (started.pid, started.uid) == (os.getpid(), os.getuid())
    assert [s.id for s in starts([started])] == [identity(span)]
    assert [e.id for e in ends([ended])] == [identity(span)]
    (start,), (end,) = starts([started]), ends([ended])
    assert before < start.at < end.at < time.monotonic_ns()
    assert start.thread == end.thread == threading.get_native_id()
    assert not ends([started])
    assert not starts([ended])


def test_what_it_tells_agrees_with_the_spans_own_times(
    feed: SideChannelServer, tracer: trace.Tracer
) -> None:
    offset = time.time_ns() - time.monotonic_ns()
    span = tracer.start_span("work")
    span.end()
    reports = feed.drain()
    (start,), (end,) = starts(reports), ends(reports)
    assert abs(start.at + offset - span.start_time) < 10**9  # type: ignore[attr-defined]
    assert abs(end.at + offset - span.end_time) < 10**9  # type: ignore[attr-defined]


def test_parent_of_the_same_process_is_told(feed: SideChannelServer, tracer: trace.Tracer) -> None:
    with tracer.start_as_current_span("outer") as outer, tracer.start_as_current_span("inner"):
        pass
    assert [s.parent for s in starts(feed.drain())] == [b"", identity(outer)]


def test_parent_in_another_process_is_none(feed: SideChannelServer, tracer: trace.Tracer) -> None:
    remote = SpanContext(7, 9, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    tracer.start_span("work", trace.set_span_in_context(NonRecordingSpan(remote))).end()
    assert [s.parent for s in starts(feed.drain())] == [b""]


def test_span_that_ends_on_another_thread_says_so(
    feed: SideChannelServer, tracer: trace.Tracer
) -> None:
    span = tracer.start_span("work")
    thread = threading.Thread(target=span.end)
    thread.start()
    native = thread.native_id
    thread.join()
    reports = feed.drain()
    assert [s.thread for s in starts(reports)] == [threading.get_native_id()]
    assert [e.thread for e in ends(reports)] == [native]


def test_end_is_told_before_the_span_is_exported(feed: SideChannelServer, tmp_path: Path) -> None:
    told_by_then = []

    class Exporter(InMemorySpanExporter):
        def export(self, spans):  # type: ignore[no-untyped-def]
            told_by_then.extend(ends(feed.drain()))
            return super().export(spans)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WATTSPAN_RUN_DIR", str(tmp_path))
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(Exporter()))
        provider.add_span_processor(SpanProcessor())
        span = provider.get_tracer("application").start_span("work")
        span.end()
        provider.shutdown()
    assert [e.id for e in told_by_then] == [identity(span)]


def test_span_that_is_not_sampled_is_not_told_of(feed: SideChannelServer, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WATTSPAN_RUN_DIR", str(tmp_path))
        provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
        provider.add_span_processor(SpanProcessor())
        provider.get_tracer("application").start_span("work").end()
        provider.shutdown()
    assert feed.drain() == []


# ------------------------------------------------------------------------------ thread CPU time


def test_lone_thread_is_not_asked_for_its_cpu_time(
    feed: SideChannelServer, tracer: trace.Tracer
) -> None:
    tracer.start_span("work").end()
    reports = feed.drain()
    assert [each.cpu for each in [*starts(reports), *ends(reports)]] == [0, 0]


def test_of_several_threads_each_tells_its_own_cpu_time(
    feed: SideChannelServer, tracer: trace.Tracer
) -> None:
    tracer.start_span("first").end()
    feed.drain()
    spent: list[tuple[int, int]] = []

    def work() -> None:
        before = time.thread_time_ns()
        span = tracer.start_span("work")
        while time.thread_time_ns() - before < 20_000_000:
            pass
        span.end()
        spent.append((before, time.thread_time_ns()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    reports = feed.drain()
    (start,), (end,), ((before, after),) = starts(reports), ends(reports), spent
    assert before <= start.cpu < end.cpu <= after
    assert end.cpu - start.cpu >= 15_000_000


def test_cpu_time_that_was_not_asked_for_anew_is_hardly_wrong(
    feed: SideChannelServer, tracer: trace.Tracer
) -> None:
    truths: list[int] = []

    def work() -> None:
        for _ in range(500):
            truths.append(time.thread_time_ns())
            tracer.start_span("work").end()
        truths.append(time.thread_time_ns())

    for _ in range(2):
        truths.clear()
        feed.drain()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    told = [s.cpu for s in starts(feed.drain())]
    for cpu, before, after in zip(told, truths, truths[1:], strict=False):
        assert before <= cpu <= after + 200_000


# ------------------------------------------------------------- agents that come, go and are absent


def test_without_an_agent_a_span_says_on_which_thread_it_began(provider: TracerProvider) -> None:
    span = provider.get_tracer("application").start_span("work")
    assert span.attributes == {"thread.id": threading.get_native_id()}  # type: ignore[attr-defined]
    span.end()


def test_with_an_agent_spans_are_left_as_they_are(tracer: trace.Tracer) -> None:
    span = tracer.start_span("work")
    assert span.attributes == {}  # type: ignore[attr-defined]
    span.end()


def test_thread_that_the_application_names_is_left_alone(provider: TracerProvider) -> None:
    span = provider.get_tracer("application").start_span("work", attributes={"thread.id": 5})
    assert span.attributes == {"thread.id": 5}  # type: ignore[attr-defined]
    span.end()


def test_agent_that_comes_later_is_found(tmp_path: Path, provider: TracerProvider) -> None:
    tracer = provider.get_tracer("application")
    tracer.start_span("unheard").end()
    with listening(tmp_path) as feed:
        processor_of(provider)._due = 0  # its time has come to look again
        span = tracer.start_span("heard")
        assert [s.id for s in starts(feed.drain())] == [identity(span)]
        span.end()


def test_agent_is_not_looked_for_at_every_span(tmp_path: Path, provider: TracerProvider) -> None:
    tracer = provider.get_tracer("application")
    processor_of(provider)._wait = 10**12
    tracer.start_span("unheard").end()
    with listening(tmp_path) as feed:
        for _ in range(100):
            tracer.start_span("unheard").end()
        assert feed.drain() == []


def test_agent_that_was_restarted_is_told_of_the_very_next_span(
    tmp_path: Path, provider: TracerProvider
) -> None:
    tracer = provider.get_tracer("application")
    with listening(tmp_path) as first:
        tracer.start_span("first").end()
        assert len(starts(first.drain())) == 1
        processor_of(provider)._due = 0
        tracer.start_span("a second later").end()
    with listening(tmp_path) as second:
        processor_of(provider)._due = 0
        span = tracer.start_span("second")
        assert [s.id for s in starts(second.drain())] == [identity(span)]
        span.end()


def test_agent_that_went_is_waited_for_ever_longer(
    tmp_path: Path, provider: TracerProvider
) -> None:
    tracer, processor = provider.get_tracer("application"), processor_of(provider)
    waits = []
    for _ in range(6):
        processor._due = 0
        before = time.monotonic_ns()
        tracer.start_span("unheard").end()
        waits.append((processor._due - before) // 10**9)
    assert waits == [1, 2, 4, 8, 10, 10]


def test_agent_that_has_no_room_is_as_good_as_none(
    tmp_path: Path, provider: TracerProvider
) -> None:
    tracer, processor = provider.get_tracer("application"), processor_of(provider)
    with listening(tmp_path, max_processes=0) as feed:
        tracer.start_span("unheard").end()
        feed.drain()
        processor._due = 0
        span = tracer.start_span("unheard")
        assert "thread.id" in span.attributes  # type: ignore[attr-defined]
        span.end()
        assert feed.drain() == []
        assert feed.counts.crowded_out == 1


def test_socket_of_somebody_who_never_answers_holds_nobody_up(
    tmp_path: Path, provider: TracerProvider
) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "feed.sock"))
        silent.listen(0)
        tracer, processor = provider.get_tracer("application"), processor_of(provider)
        connected = []
        for _ in range(5):
            processor._channel = processor._pen = None
            processor._due, processor._wait = 0, 10**9
            tracer.start_span("work").end()
            connected.append(processor._pen is not None)
    assert connected[0]
    assert not connected[-1]  # the queue is full by then


def test_file_in_place_of_the_socket_is_no_agent(tmp_path: Path, provider: TracerProvider) -> None:
    (tmp_path / "feed.sock").write_text("no socket")
    provider.get_tracer("application").start_span("work").end()
    assert processor_of(provider)._pen is None


# --------------------------------------------------------------------------------- it never fails


def test_exception_in_the_processor_turns_it_off_and_is_not_seen(
    feed: SideChannelServer, provider: TracerProvider
) -> None:
    class Endless:
        def generate_span_id(self) -> int:
            return 1 << 70  # no span id

        def generate_trace_id(self) -> int:
            return 1

        def is_trace_id_random(self) -> bool:
            return False

    provider.id_generator = Endless()  # type: ignore[assignment]
    tracer = provider.get_tracer("odd")
    for _ in range(3):
        with tracer.start_as_current_span("work"):
            pass
    assert processor_of(provider)._pen is None
    assert [(r.records, r.gone) for r in feed.drain()] == [([], True)]


def test_after_its_shutdown_the_process_is_gone_for_the_agent(
    feed: SideChannelServer, tracer: trace.Tracer, provider: TracerProvider
) -> None:
    span = tracer.start_span("work")
    provider.shutdown()
    span.end()
    tracer.start_span("later").end()
    (report,) = feed.drain()
    assert (len(report.records), report.gone) == (1, True)
    assert feed.drain() == []


def test_descriptors_that_were_closed_behind_its_back_are_not_touched(
    feed: SideChannelServer, tracer: trace.Tracer, provider: TracerProvider, tmp_path: Path
) -> None:
    tracer.start_span("work").end()
    channel = processor_of(provider)._channel
    assert channel is not None
    precious = tmp_path / "precious"
    precious.write_text("somebody else's")
    with precious.open() as theirs:
        ours = channel._held.number
        os.dup2(theirs.fileno(), ours)  # a program that turns into a daemon reuses what it closed
        try:
            assert not channel.is_open
            channel.close()
            assert os.read(ours, 8) == b"somebody"
        finally:
            os.close(ours)
