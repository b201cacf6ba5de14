"""What a job has earned is told by counters, and a counter does not fall."""

from __future__ import annotations

from wattspan.model import SECOND
from wattspan.tuning import TunerReport
from wattspan.tuning.job import CumulativeSavings


def test_another_tuner_of_the_job_counts_on_from_the_one_before() -> None:
    earned = CumulativeSavings()
    earned.take(TunerReport(exploring=True, units=72, exploration=3 * SECOND, saved_low=900))
    earned.close()
    earned.take(TunerReport(exploring=False))
    assert (earned.units, earned.exploration, earned.surely) == (72, 3 * SECOND, 900)
    earned.take(TunerReport(exploring=True, units=5, exploration=SECOND, saved_low=100))
    assert (earned.units, earned.exploration, earned.surely) == (77, 4 * SECOND, 1000)


def test_a_report_that_says_less_than_the_one_before_takes_nothing_back() -> None:
    earned = CumulativeSavings()
    earned.take(TunerReport(exploring=True, units=72, saved_low=900))
    earned.take(TunerReport(exploring=True, units=70, saved_low=-50))
    assert (earned.units, earned.surely) == (72, 900)
