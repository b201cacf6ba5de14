"""Deadlines are absolute; missed ones are counted and not replayed."""

from wattspan.model import SECOND
from wattspan.service.poller import MAX_SLEEP, Ticker
from wattspan.testing import ManualClock


def test_ticks_come_at_multiples_of_the_interval_however_long_the_work_took() -> None:
    clock = ManualClock(mono=0)
    ticker = Ticker(clock, SECOND)
    for work in (0.1, 0.7, 0.3):
        clock.advance(work)
        ticker.wait()
    assert clock.monotonic() == 3 * SECOND
    assert (ticker.ticks, ticker.missed) == (3, 0)


def test_missed_ticks_are_counted_and_not_made_up_for() -> None:
    clock = ManualClock(mono=0)
    ticker = Ticker(clock, SECOND)
    clock.advance(3.4)
    ticker.wait()
    assert clock.monotonic() == round(3.4 * SECOND)
    assert ticker.missed == 2
    ticker.wait()
    assert clock.monotonic() == 4 * SECOND
    assert (ticker.ticks, ticker.missed) == (2, 2)


def test_long_wait_ends_soon_after_somebody_wants_it_to() -> None:
    clock = ManualClock(mono=0)
    ticker = Ticker(clock, 60 * SECOND)
    ticker.wait(lambda: clock.monotonic() >= SECOND)
    assert SECOND <= clock.monotonic() <= SECOND + MAX_SLEEP
