"""The next trial of a study that has a time budget: the one with the most expected gain.

The trials are those of the random order: each setting at most once in each of ``study.repeat``
blocks, with the baseline first in a block. A block ends once another trial of a setting that it
has already promises more than the settings that it lacks.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from math import floor
from random import Random

from wattspan.frontier.allocation import trial_variance
from wattspan.frontier.estimates import SettingEstimates
from wattspan.frontier.hypervolume import LogPoint
from wattspan.frontier.selection import SettingFigures, TrialVariance, best, gains
from wattspan.frontier.settings import Setting, places
from wattspan.frontier.trials import Study

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
            noise = TrialVariance(trial_variance(time), trial_variance(energy))
            found = gains(candidates, places(study.settings), results, noise, self._reference)
        return best(found, counts, random)
