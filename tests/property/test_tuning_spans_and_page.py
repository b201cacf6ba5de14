"""Requests of a tracked server whose spans come and go beside the page of its engine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from testbed.latency_pages import LatencyPages

from wattspan.config import TunedJobSettings
from wattspan.model import MILLISECOND, SECOND, Consumer
from wattspan.model.settings import Duration
from wattspan.spans.values import RequestLatency, Span, SpanColumns, SpanEnd, SpanStart
from wattspan.tuning.decisions.engine_load import EnginePageRead
from wattspan.tuning.job_work import JobWork
from wattspan.tuning.work_units import ReceivedSpans

SERVER = Consumer(1, 1)
JOB = TunedJobSettings(
    service="llm",
    span="chat",
    engine="vllm",
    kind="requests",
    control="track",
    slo={"ttft_p99": Duration(SECOND)},
    ttft="a",
)
RATE, TOKENS = 4, 10  # requests a second, generated tokens of each
QUARTER = SECOND // RATE
AGREEMENT = 20  # requests by which spans and the page are compared

phases = st.lists(
    st.tuples(
        st.integers(1, 60),  # seconds
        st.booleans(),  # spans arrive
        st.integers(0, 3),  # seconds by which they arrive later
    ),
    min_size=1,
    max_size=5,
)


class _Server:
    """A server with a request after the other, all shown by its page."""

    def __init__(self) -> None:
        self.work, self.pages = JobWork("chat", JOB, 0), LatencyPages()
        self.work.add(self._received([]), 0)
        self.happened = self.counted = self.completed = 0
        self.tokens = 0.0
        self._late: list[tuple[int, Span]] = []
        self._page: EnginePageRead | None = None

    def _received(self, spans: list[Span]) -> ReceivedSpans:
        return ReceivedSpans(SERVER, "llm", SpanColumns.of(spans))

    def second(self, now: int, *, spans: bool, late: int) -> None:
        """The requests of the second until ``now``; spans arrive ``late`` seconds later."""
        for end in range(now - SECOND + QUARTER, now + 1, QUARTER):
            self.happened += 1
            start, ident = end - QUARTER, self.happened.to_bytes(8, "big")
            self.pages.first.add(0.2)
            if spans:
                records = SpanStart(ident, b"", start, 1, 0), SpanEnd(ident, end, 1, 0)
                self.work.in_flight.add(SERVER, records, now)
                latency = RequestLatency(200 * MILLISECOND, None)
                span = Span(b"t" * 16, ident, b"", "llm", "chat", start, end, latency=latency)
                self._late.append((now + late * SECOND, span._replace(tokens_out=TOKENS)))
        arrived = [span for due, span in self._late if due <= now]
        self._late = [(due, span) for due, span in self._late if due > now]
        if arrived:
            self.work.add(self._received(arrived), now)

    def read_page(self, now: int, interval: int) -> None:
        counts = {"finished": self.happened, "generated": TOKENS * self.happened}
        self._page = self.pages.read(now, interval, (SERVER,), running=1, **counts)

    def read_requests(self, now: int) -> None:
        """Count what the job reads, with the newest page."""
        if self._page is not None:
            self.work.add_page(self._page, now)
        self._page = None
        found = self.work.read_requests(now)
        self.counted += sum(one.number for one in found.requests)
        if found.sample is not None:
            self.completed += found.sample.completions
            self.tokens += found.sample.output_tokens


@given(parts=phases, interval=st.integers(1, 6), period=st.integers(1, 3))
def test_no_request_counts_by_spans_and_by_the_page(
    parts: list[tuple[int, bool, int]], interval: int, period: int
) -> None:
    server, now = _Server(), 0
    server.read_page(0, interval * SECOND)
    for seconds, spans, late in parts:
        for _ in range(seconds):
            now += SECOND
            server.second(now, spans=spans, late=late)
            if now // SECOND % interval == 0:
                server.read_page(now, interval * SECOND)
            if now // SECOND % period == 0:
                server.read_requests(now)
            assert server.counted <= server.happened
            assert server.completed <= server.happened
            assert server.tokens <= TOKENS * server.happened
    # At each change: an interval of the page, those before the change is known, and late spans.
    unread = 3 * (interval + period) + max(late for *_, late in parts)
    lost = len(parts) * (RATE * unread + AGREEMENT)
    assert server.counted >= server.happened - lost
