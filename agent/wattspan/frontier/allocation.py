"""The settings that deserve further trials, for a known slowdown or time budget.

For a slowdown budget, a setting is measured further only as long as that can change the
recommendation: it may keep the budget, and its energy may be lower than that of the present
recommendation. Successive elimination (Even-Dar et al. 2006), with an indifference zone: settings
of nearly equal energy are not told apart.

For a time budget, the trial with the most expected gain is next. The trials are those of the random
order: each setting at most once in each of ``study.repeat`` blocks, with the baseline first in a
block. A block ends once another trial of a setting that it has already promises more than the
settings that it lacks.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from math import floor, log, log1p, sqrt
from random import Random

from wattspan.frontier.estimates import CONFIDENCE, BlockModel, SettingEstimates
from wattspan.frontier.recommendation import DEFAULT_TOLERANCE
from wattspan.frontier.statistics import LogPoint, SettingFigures, best, gains, quantile
from wattspan.frontier.trials import Setting, Study, places

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


def undecided(
    estimates: SettingEstimates, max_slowdown: float, out: Container[int] = ()
) -> list[int]:
    """The numbers of the settings to repeat, besides the baseline; none of those ``out``.

    No claim is made from the errors that it assumes.
    """
    measured = estimates.measured
    if 0 not in measured:
        return []
    time, energy = estimates.time, estimates.energy
    excess = {number: time.contrast(number, 0)[0] - log1p(max_slowdown) for number in measured}
    errors = {number: _error(time, number, 0) for number in measured}
    # The best one is that which would be recommended with the assumed noise.
    deviations = quantile(CONFIDENCE, _PRIOR_FREEDOM + max(0, time.freedom))
    keeping = [
        number
        for number in measured
        if number
        and excess[number] <= min(0.0, log1p(DEFAULT_TOLERANCE) - deviations * errors[number])
    ]
    best = min([0, *keeping], key=lambda number: energy.value(number).value)
    found = [
        number
        for number in measured
        if number not in (0, best)
        and number not in out
        and excess[number] <= _OVER * errors[number]
        and energy.contrast(number, best)[0]
        < log(1 - INDIFFERENCE) + _WORSE * _error(energy, number, best)
    ]
    doubtful = found or excess[best] > -_OVER * errors[best]
    if best != 0 and (doubtful or time.freedom < MIN_FREEDOM):
        found.append(best)
    return sorted(found)


def trial_variance(model: BlockModel) -> float:
    """The variance of one trial's logarithm: the estimate, with the assumed one for few trials."""
    freedom = max(0, model.freedom)
    known = freedom * model.variance if freedom else 0.0
    return (_PRIOR_FREEDOM * _PRIOR_NOISE**2 + known) / (_PRIOR_FREEDOM + freedom)


def _error(model: BlockModel, one: int, other: int) -> float:
    return sqrt(trial_variance(model) * model.contrast(one, other)[1])


# ------------------------------------------------------------------------------------- time budget


LEAST_BLOCK = 3
"""Settings besides the baseline that a block has before it may end."""


def spent_seconds(study: Study) -> float:
    """The wall time of all trials so far."""
    return sum(trial.elapsed_seconds for trial in study.trials)


def affordable_trials(study: Study, budget: float) -> int:
    """The trials for which the rest of ``budget`` seconds suffices, by their mean time so far."""
    past = [trial.elapsed_seconds for trial in study.trials if trial.elapsed_seconds > 0]
    least = study.warm_up_seconds + study.window_seconds
    expected = max(least, sum(past) / len(past) if past else 0.0)
    return max(0, floor((budget - spent_seconds(study)) / expected))


class GainOrder:
    """Chooses among the trials that are to do, each a setting's number and a block."""

    def __init__(
        self,
        study: Study,
        done: Container[tuple[Setting, int]],
        out: Container[Setting],
        reference: LogPoint,
    ) -> None:
        """``out`` are settings without further trials; beyond ``reference`` nothing is gained."""
        self._study = study
        self._to_do = {
            number: [
                block
                for block in range(study.repeat)
                if (setting, block) not in done and (number == 0 or setting not in out)
            ]
            for number, setting in enumerate(study.settings)
        }
        self._newest = max((trial.block for trial in study.trials), default=0)
        self._reference = reference

    @property
    def to_do(self) -> int:
        """The number of trials to do."""
        return sum(map(len, self._to_do.values()))

    def next(self, random: Random) -> tuple[int, int] | None:
        """A setting's number and its block; None if nothing is to do."""
        blocks, newest = self._to_do, self._newest
        candidates = [number for number in blocks if number and blocks[number]]
        if newest in blocks[0]:
            return 0, newest
        if not candidates:
            return (0, blocks[0][0]) if blocks[0] else None
        lacking = [number for number in candidates if newest in blocks[number]]
        begins = newest + 1 in blocks[0]  # a further block is possible
        if begins:
            if not lacking:
                return 0, newest + 1
            if self._others() < LEAST_BLOCK:
                candidates = lacking
        chosen = self._best(candidates, random)
        if chosen in lacking:
            return chosen, newest
        return (0, newest + 1) if begins else (chosen, blocks[chosen][-1])

    def _others(self) -> int:
        """The settings in the newest block, without the baseline."""
        found = {one.setting for one in self._study.trials if one.block == self._newest}
        return len(found - {self._study.baseline})

    def _best(self, candidates: Sequence[int], random: Random) -> int:
        study = self._study
        estimates = SettingEstimates(study.settings, study.usable())
        counts = dict.fromkeys(estimates.measured, 0)
        for trial in estimates.trials:
            counts[estimates.numbers[trial.setting]] += 1
        found = dict.fromkeys(candidates, 0.0)
        if 0 in counts:
            time, energy = estimates.time, estimates.energy
            results = {
                number: SettingFigures(
                    LogPoint(time.contrast(number, 0)[0], energy.contrast(number, 0)[0]), trials
                )
                for number, trials in counts.items()
            }
            noise = LogPoint(trial_variance(time), trial_variance(energy))
            found = gains(candidates, places(study.settings), results, noise, self._reference)
        return best(found, counts, random)
