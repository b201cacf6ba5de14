"""The settings that deserve further trials, for a known slowdown budget.

A setting is measured further only as long as that can change the recommendation: it may keep the
budget, and its energy may be lower than that of the present recommendation. Successive elimination
(Even-Dar et al. 2006), with an indifference zone: settings of nearly equal energy are
not told apart.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from math import log, log1p, sqrt

from wattspan.frontier.estimates import CONFIDENCE, BlockModel, SettingEstimates
from wattspan.frontier.recommendation import DEFAULT_TOLERANCE
from wattspan.frontier.student_t import quantile

INDIFFERENCE = 0.02
"""Relative energy that is not worth further trials."""

MIN_FREEDOM = 2
"""Degrees of freedom from which the noise counts as known: the recommendation needs it."""

_PRIOR_NOISE, _PRIOR_FREEDOM = 0.02, 2
"""Relative noise of a trial that is assumed at first, as if known from so many trials."""

_OVER = 2.0
"""Standard errors beyond the limit from which a setting is not measured further."""

_WORSE = 1.0
"""Standard errors of energy, beyond the zone, from which a setting is not measured further."""


@dataclass(frozen=True)
class TrialAllocation:
    """Chooses settings for the next block. No claim is made from its errors."""

    estimates: SettingEstimates
    max_slowdown: float

    def undecided(self, out: Container[int] = ()) -> list[int]:
        """The numbers of the settings to repeat, besides the baseline; none of those ``out``."""
        measured = self.estimates.measured
        if 0 not in measured:
            return []
        energy = self.estimates.energy
        best = self._best()
        found = [
            number
            for number in measured
            if number not in (0, best)
            and number not in out
            and self._excess(number) <= _OVER * self._time_error(number)
            and energy.contrast(number, best)[0]
            < log(1 - INDIFFERENCE) + _WORSE * _error(energy, number, best)
        ]
        doubtful = found or self._excess(best) > -_OVER * self._time_error(best)
        if best != 0 and (doubtful or self.estimates.time.freedom < MIN_FREEDOM):
            found.append(best)
        return sorted(found)

    # --------------------------------------------------------------------------- inner workings

    @cached_property
    def _limit(self) -> float:
        return log1p(self.max_slowdown)

    def _best(self) -> int:
        """The setting that would be recommended with the assumed noise."""
        time, energy = self.estimates.time, self.estimates.energy
        others = [number for number in self.estimates.measured if number]
        errors = quantile(CONFIDENCE, _PRIOR_FREEDOM + max(0, time.freedom))
        keeping = [
            number
            for number in others
            if self._excess(number)
            <= min(0.0, log1p(DEFAULT_TOLERANCE) - errors * self._time_error(number))
        ]
        return min([0, *keeping], key=lambda number: energy.value(number).value)

    def _excess(self, number: int) -> float:
        """How far the time is beyond the budget, as a logarithm."""
        return self.estimates.time.contrast(number, 0)[0] - self._limit

    def _time_error(self, number: int) -> float:
        return _error(self.estimates.time, number, 0)


def trial_variance(model: BlockModel) -> float:
    """The variance of one trial's logarithm: the estimate, with the assumed one for few trials."""
    freedom = max(0, model.freedom)
    known = freedom * model.variance if freedom else 0.0
    return (_PRIOR_FREEDOM * _PRIOR_NOISE**2 + known) / (_PRIOR_FREEDOM + freedom)


def _error(model: BlockModel, one: int, other: int) -> float:
    return sqrt(trial_variance(model) * model.contrast(one, other)[1])
