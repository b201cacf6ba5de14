"""Cumulative savings of a job never fall."""

from __future__ import annotations

from wattspan.model import SECOND, TuningFigures
from wattspan.tuning.job import CumulativeSavings


def test_savings_continue_with_the_next_tuner_of_the_job() -> None:
    savings = CumulativeSavings()
    savings.update(TuningFigures(units=72, exploration=3 * SECOND, saved_low=900))
    savings.close()
    savings.update(TuningFigures())
    assert (savings.units, savings.exploration, savings.saved) == (72, 3 * SECOND, 900)
    savings.update(TuningFigures(units=5, exploration=SECOND, saved_low=100))
    assert (savings.units, savings.exploration, savings.saved) == (77, 4 * SECOND, 1000)


def test_savings_do_not_fall_with_a_lower_report() -> None:
    savings = CumulativeSavings()
    savings.update(TuningFigures(units=72, saved_low=900))
    savings.update(TuningFigures(units=70, saved_low=-50))
    assert (savings.units, savings.saved) == (72, 900)
