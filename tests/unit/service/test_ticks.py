"""Deadlines are absolute; missed ones are counted and not replayed; the interval may change."""

from collections.abc import Callable

from wattspan.model import MILLISECOND, SECOND, TickCounts
from wattspan.service.ticks import MAX_SLEEP, RECENT, RecentTicks, Ticker
from wattspan.testing import ManualClock


def constantly(interval: int) -> Callable[[int], int]:
    return lambda now: interval


def test_ticks_are_multiples_of_the_interval_for_any_work_time() -> None:
    clock = ManualClock(mono=0)
    ticker = Ticker(clock, constantly(SECOND))
    for work in (0.1, 0.7, 0.3):
        clock.advance(work)
        ticker.wait()
    assert clock.monotonic() == 3 * SECOND
    assert (ticker.ticks, ticker.missed) == (3, 0)


def test_missed_ticks_are_counted_and_not_repeated() -> None:
    clock = ManualClock(mono=0)
    ticker = Ticker(clock, constantly(SECOND))
    clock.advance(3.4)
    ticker.wait()
    assert clock.monotonic() == round(3.4 * SECOND)
    assert ticker.missed == 2
    ticker.wait()
    assert clock.monotonic() == 4 * SECOND
    assert (ticker.ticks, ticker.missed) == (2, 2)


def test_stop_interrupts_a_long_wait() -> None:
    clock = ManualClock(mono=0)
    ticker = Ticker(clock, constantly(60 * SECOND))
    ticker.wait(lambda: clock.monotonic() >= SECOND)
    assert SECOND <= clock.monotonic() <= SECOND + MAX_SLEEP


class Waking:
    """Sleeps that end early at given times, at which the interval becomes shorter."""

    def __init__(self, clock: ManualClock, *wakes: tuple[int, int]) -> None:
        self.clock, self.wakes, self.interval = clock, [*wakes], SECOND

    def sleep_until(self, mono: int) -> None:
        if self.wakes and self.wakes[0][0] < mono:
            at, self.interval = self.wakes.pop(0)
            mono = at
        self.clock.sleep_until(mono)


def test_shorter_interval_counts_at_once_and_a_longer_one_from_the_next_tick() -> None:
    clock, times = ManualClock(mono=0), list[int]()
    waking = Waking(clock, (1_050 * MILLISECOND, SECOND // 10), (2_700 * MILLISECOND, SECOND // 10))
    ticker = Ticker(clock, lambda now: waking.interval, waking.sleep_until)
    for rest in (0, 0, 0, 0, 1, 0, 0):
        ticker.wait()
        times.append(clock.monotonic() // MILLISECOND)
        waking.interval = SECOND if rest else waking.interval
    # Woken 50 ms after a tick, it waits for the rest of 100 ms; 400 ms after one, it ticks at once.
    assert times == [1000, 1100, 1200, 1300, 1400, 2400, 2700]
    assert ticker.missed == 0


def test_consumer_that_comes_during_a_slow_poll_at_rest_makes_no_missed_ticks() -> None:
    clock = ManualClock(mono=0)
    waking = Waking(clock)
    ticker = Ticker(clock, lambda now: waking.interval)
    ticker.wait()
    clock.advance(0.9)  # a poll
    waking.interval = SECOND // 10
    for expected in (1900, 2000, 2100):
        ticker.wait()
        assert (clock.monotonic() // MILLISECOND, ticker.missed) == (expected, 0)
    waking.interval = SECOND
    ticker.wait()
    clock.advance(3.4)
    waking.interval = SECOND // 10
    ticker.wait()
    assert (clock.monotonic() // MILLISECOND, ticker.missed) == (6500, 2)


def test_counts_are_those_of_the_last_minute() -> None:
    recent = RecentTicks()
    assert recent.counts(SECOND) == TickCounts(0, 0, 0)
    recent.add(1 * SECOND, 2, 300 * MILLISECOND)
    recent.add(1 * SECOND + 1, 0, 5 * MILLISECOND)
    recent.add(40 * SECOND, 1, 200 * MILLISECOND)
    assert recent.counts(41 * SECOND) == TickCounts(6, 3, 300 * MILLISECOND)
    assert recent.counts(RECENT + 2 * SECOND) == TickCounts(2, 1, 200 * MILLISECOND)
    assert recent.counts(RECENT + 41 * SECOND) == TickCounts(0, 0, 0)
