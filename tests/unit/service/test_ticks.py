"""Deadlines are absolute; missed ones are counted and not replayed."""

from wattspan.model import MILLISECOND, SECOND, TickCounts
from wattspan.service.ticks import MAX_SLEEP, RECENT, RecentTicks, Ticker
from wattspan.testing import ManualClock


def test_ticks_are_multiples_of_the_interval_for_any_work_time() -> None:
    clock = ManualClock(mono=0)
    ticker = Ticker(clock, SECOND)
    for work in (0.1, 0.7, 0.3):
        clock.advance(work)
        ticker.wait()
    assert clock.monotonic() == 3 * SECOND
    assert (ticker.ticks, ticker.missed) == (3, 0)


def test_missed_ticks_are_counted_and_not_repeated() -> None:
    clock = ManualClock(mono=0)
    ticker = Ticker(clock, SECOND)
    clock.advance(3.4)
    ticker.wait()
    assert clock.monotonic() == round(3.4 * SECOND)
    assert ticker.missed == 2
    ticker.wait()
    assert clock.monotonic() == 4 * SECOND
    assert (ticker.ticks, ticker.missed) == (2, 2)


def test_stop_interrupts_a_long_wait() -> None:
    clock = ManualClock(mono=0)
    ticker = Ticker(clock, 60 * SECOND)
    ticker.wait(lambda: clock.monotonic() >= SECOND)
    assert SECOND <= clock.monotonic() <= SECOND + MAX_SLEEP


def test_counts_are_those_of_the_last_minute() -> None:
    recent = RecentTicks()
    assert recent.counts(SECOND) == TickCounts(0, 0, 0)
    recent.add(1 * SECOND, 2, 300 * MILLISECOND)
    recent.add(1 * SECOND + 1, 0, 5 * MILLISECOND)
    recent.add(40 * SECOND, 1, 200 * MILLISECOND)
    assert recent.counts(41 * SECOND) == TickCounts(6, 3, 300 * MILLISECOND)
    assert recent.counts(RECENT + 2 * SECOND) == TickCounts(2, 1, 200 * MILLISECOND)
    assert recent.counts(RECENT + 41 * SECOND) == TickCounts(0, 0, 0)
