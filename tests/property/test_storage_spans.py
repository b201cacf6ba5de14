"""For any spans and any checkpoint times: the history sums to the recorded totals."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from testbed.joined_spans import CPU, GPU, joined
from testbed.known_totals import Books

from wattspan.config import StoreSettings as Settings
from wattspan.model.settings import Duration
from wattspan.spans.aggregator import SpanAggregator
from wattspan.spans.values import SpanEnergy
from wattspan.storage.breakdown import break_down
from wattspan.storage.database import HOUR
from wattspan.storage.deltas import SPAN, SpanUsage, UsageRole, total_usage
from wattspan.storage.query import NoHistory, extract_history
from wattspan.storage.store import Store

EVER = 2**40

spans = st.builds(
    joined,
    st.sampled_from(["a", "b", "c", "d", "other", "", "\ud800"]),
    st.dictionaries(st.sampled_from([CPU, GPU]), st.integers(0, 10**9), max_size=2),
    service=st.sampled_from(["s", "other"]),
    end=st.integers(1, 100),
    tokens=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
)
steps = st.tuples(
    st.lists(spans, max_size=6),
    st.integers(0, 10**6),
    st.sampled_from([1, 30, 60, HOUR, 5 * HOUR]),
    st.sampled_from(["write", "write", "write", "wait", "restart", "crash"]),
)


class Told:
    """The recorded totals, and those in the last checkpoint."""

    def __init__(self) -> None:
        self.now = self.written = SpanUsage()
        self.outside = self.outside_written = 0

    def add(self, batch: list[SpanEnergy], outside: int) -> None:
        for one in batch:
            span = one.span
            self.now += SpanUsage(
                dict(one.exclusive), 1, span.end - span.start, span.tokens_in, span.tokens_out
            )
        self.outside += outside

    def write(self) -> None:
        self.written, self.outside_written = self.now, self.outside

    def crash(self) -> None:
        self.now, self.outside = self.written, self.outside_written


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(steps, min_size=1, max_size=12), st.integers(1, 3))
def test_span_history_sums_to_the_totals(
    story: list[tuple[list[SpanEnergy], int, int, str]], bound: int
) -> None:
    bounds = Settings(spans=bound, minutes=Duration.parse("1h"), hours=Duration.parse("1d"))
    host, told = Books(), Told()
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory), bounds, host.clock)
        totals = SpanAggregator(100)
        for batch, outside, seconds, then in story:
            opening = host.spend({1: 1}, seconds=seconds)
            totals.add(batch, host.clock.now())
            totals.outside("s", CPU, outside)
            told.add(batch, outside)
            if then in ("write", "restart"):
                shown = totals.accounts()
                assert store.write(replace(opening, spans=shown.rows, outside=shown.outside))
                told.write()
            if then in ("restart", "crash"):
                store.close()
                told.crash()
                store = Store(Path(directory), bounds, host.clock)
                books = store.last_checkpoint()
                totals = (
                    SpanAggregator(100, books.spans, books.outside)
                    if books
                    else SpanAggregator(100)
                )
        check(store, told)
        store.close()


def check(store: Store, told: Told) -> None:
    found = extract_history(store.path, 0, EVER, [SPAN])
    if isinstance(found, NoHistory):
        assert not told.written
        return
    inside = total_usage(
        use for name, use in found.spans.items() if name.role is not UsageRole.OUTSIDE
    )
    assert nothing_but(inside) == nothing_but(told.written)
    outside = total_usage(
        use for name, use in found.spans.items() if name.role is UsageRole.OUTSIDE
    )
    assert sum(outside.energy.values()) == told.outside_written
    for limit in (0, 1):
        report = break_down(found, [SPAN], limit=limit)
        for section in report.sections:
            lines = (*section.lines, *report.unattributed)
            assert sum(line.total for line in lines) == report.total.total


def nothing_but(use: SpanUsage) -> SpanUsage:
    return replace(use, energy={kind: energy for kind, energy in use.energy.items() if energy})
