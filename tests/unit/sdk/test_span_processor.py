"""Announcements of a span processor, from the agent's side."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from testbed.announcing import ends, listening, processor_of, starts, telling
from testbed.fixtures import entered_in

from wattspan.ingest.side_channel import SideChannelServer
from wattspan.model import Principal
from wattspan.sdk.span_processor import SpanProcessor

feed = entered_in(listening)


provider = entered_in(telling)


@pytest.fixture
def tracer(feed: SideChannelServer, provider: TracerProvider) -> trace.Tracer:
    return provider.get_tracer("application")


def identity(span: trace.Span) -> bytes:
    return span.get_span_context().span_id.to_bytes(8)


def test_span_is_announced_at_start_and_end(feed: SideChannelServer, tracer: trace.Tracer) -> None:
    before = time.monotonic_ns()
    span = tracer.start_span("work")
    (started,) = feed.drain()
    span.end()
    (ended,) = feed.drain()
    assert (started.pid, started.principal) == (os.getpid(), Principal(os.getuid()))
    assert [s.id for s in starts([started])] == [identity(span)]
    assert [e.id for e in ends([ended])] == [identity(span)]
    (start,), (end,) = starts([started]), ends([ended])
    assert before < start.at < end.at < time.monotonic_ns()
    assert start.thread == end.thread == threading.get_native_id()
    assert not ends([started])
    assert not starts([ended])


def test_announcement_matches_the_span_times(feed: SideChannelServer, tracer: trace.Tracer) -> None:
    offset = time.time_ns() - time.monotonic_ns()
    span = tracer.start_span("work")
    span.end()
    reports = feed.drain()
    (start,), (end,) = starts(reports), ends(reports)
    assert abs(start.at + offset - span.start_time) < 10**9  # type: ignore[attr-defined]
    assert abs(end.at + offset - span.end_time) < 10**9  # type: ignore[attr-defined]


def test_local_parent_is_announced(feed: SideChannelServer, tracer: trace.Tracer) -> None:
    with tracer.start_as_current_span("outer") as outer, tracer.start_as_current_span("inner"):
        pass
    assert [s.parent for s in starts(feed.drain())] == [b"", identity(outer)]


def test_remote_parent_is_not_announced(feed: SideChannelServer, tracer: trace.Tracer) -> None:
    remote = SpanContext(7, 9, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    tracer.start_span("work", trace.set_span_in_context(NonRecordingSpan(remote))).end()
    assert [s.parent for s in starts(feed.drain())] == [b""]


def test_span_ending_on_another_thread_is_marked(
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


def test_end_is_announced_before_the_export(feed: SideChannelServer, tmp_path: Path) -> None:
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


def test_unsampled_span_is_not_announced(feed: SideChannelServer, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WATTSPAN_RUN_DIR", str(tmp_path))
        provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
        provider.add_span_processor(SpanProcessor())
        provider.get_tracer("application").start_span("work").end()
        provider.shutdown()
    assert feed.drain() == []


# ------------------------------------------------------------------------------ thread CPU time


def test_single_thread_has_no_cpu_time_read(feed: SideChannelServer, tracer: trace.Tracer) -> None:
    tracer.start_span("work").end()
    reports = feed.drain()
    assert [s.cpu for s in starts(reports)] + [e.cpu for e in ends(reports)] == [0, 0]


def test_each_of_several_threads_reports_its_cpu_time(
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


def test_cached_cpu_time_error_is_small(feed: SideChannelServer, tracer: trace.Tracer) -> None:
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


def test_span_attributes_are_unchanged_without_an_agent(provider: TracerProvider) -> None:
    span = provider.get_tracer("application").start_span("work")
    assert span.attributes == {}  # type: ignore[attr-defined]
    span.end()


def test_span_attributes_are_unchanged_with_an_agent(tracer: trace.Tracer) -> None:
    span = tracer.start_span("work")
    assert span.attributes == {}  # type: ignore[attr-defined]
    span.end()


def test_later_agent_is_found(tmp_path: Path, provider: TracerProvider) -> None:
    tracer = provider.get_tracer("application")
    tracer.start_span("unheard").end()
    with listening(tmp_path) as feed:
        processor_of(provider)._due = 0  # the next search is due
        span = tracer.start_span("heard")
        assert [s.id for s in starts(feed.drain())] == [identity(span)]
        span.end()


def test_agent_search_is_rate_limited(tmp_path: Path, provider: TracerProvider) -> None:
    tracer = provider.get_tracer("application")
    processor_of(provider)._wait = 10**12
    tracer.start_span("unheard").end()
    with listening(tmp_path) as feed:
        for _ in range(100):
            tracer.start_span("unheard").end()
        assert feed.drain() == []


def test_restarted_agent_receives_the_next_span(tmp_path: Path, provider: TracerProvider) -> None:
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


def test_missing_agent_is_retried_with_backoff(tmp_path: Path, provider: TracerProvider) -> None:
    tracer, processor = provider.get_tracer("application"), processor_of(provider)
    waits = []
    for _ in range(6):
        processor._due = 0
        before = time.monotonic_ns()
        tracer.start_span("unheard").end()
        waits.append((processor._due - before) // 10**9)
    assert waits == [1, 2, 4, 8, 10, 10]


def test_full_agent_is_treated_as_missing(tmp_path: Path, provider: TracerProvider) -> None:
    tracer, processor = provider.get_tracer("application"), processor_of(provider)
    with listening(tmp_path, max_processes=0, max_windows=0) as feed:
        tracer.start_span("unheard").end()
        feed.drain()
        processor._due = 0
        tracer.start_span("unheard").end()
        assert feed.drain() == []
        assert feed.counts.crowded_out == 1


def test_unresponsive_socket_does_not_block(tmp_path: Path, provider: TracerProvider) -> None:
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


def test_file_in_place_of_the_socket_is_ignored(tmp_path: Path, provider: TracerProvider) -> None:
    (tmp_path / "feed.sock").write_text("no socket")
    provider.get_tracer("application").start_span("work").end()
    assert processor_of(provider)._pen is None


# --------------------------------------------------------------------------------- it never fails


def test_exception_disables_the_processor_silently(
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


def test_shutdown_closes_the_agent_connection(
    feed: SideChannelServer, tracer: trace.Tracer, provider: TracerProvider
) -> None:
    span = tracer.start_span("work")
    provider.shutdown()
    span.end()
    tracer.start_span("later").end()
    (report,) = feed.drain()
    assert (len(report.records), report.gone) == (1, True)
    assert feed.drain() == []


def test_externally_closed_descriptors_are_not_reused(
    feed: SideChannelServer, tracer: trace.Tracer, provider: TracerProvider, tmp_path: Path
) -> None:
    tracer.start_span("work").end()
    channel = processor_of(provider)._channel
    assert channel is not None
    precious = tmp_path / "precious"
    precious.write_text("somebody else's")
    with precious.open() as theirs:
        ours = channel._held.number
        os.dup2(theirs.fileno(), ours)  # a daemonising program reuses closed descriptor numbers
        try:
            assert not channel.is_open
            channel.close()
            assert os.read(ours, 8) == b"somebody"
        finally:
            os.close(ours)
