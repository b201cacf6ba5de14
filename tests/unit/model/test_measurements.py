"""Moments on the clocks of a host."""

from wattspan.model import Instant


def test_earlier_moment_has_the_same_time_in_suspend() -> None:
    assert Instant(mono=9, wall=7, asleep=5).before(4) == Instant(mono=5, wall=3, asleep=5)
