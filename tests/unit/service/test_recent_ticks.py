"""The ticks of the last minute."""

from __future__ import annotations

from wattspan.model import MILLISECOND, SECOND, TickCounts
from wattspan.service.recent_ticks import PERIOD, RecentTicks


def test_counts_are_those_of_the_last_minute() -> None:
    recent = RecentTicks()
    assert recent.counts(SECOND) == TickCounts(0, 0, 0)
    recent.add(1 * SECOND, 2, 300 * MILLISECOND)
    recent.add(1 * SECOND + 1, 0, 5 * MILLISECOND)
    recent.add(40 * SECOND, 1, 200 * MILLISECOND)
    assert recent.counts(41 * SECOND) == TickCounts(6, 3, 300 * MILLISECOND)
    assert recent.counts(PERIOD + 2 * SECOND) == TickCounts(2, 1, 200 * MILLISECOND)
    assert recent.counts(PERIOD + 41 * SECOND) == TickCounts(0, 0, 0)
