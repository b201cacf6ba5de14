"""The setting whose next trial promises the most: the expected growth of the hypervolume.

For a measured setting that is the growth by knowing its figures better, as in the knowledge
gradient (Frazier, Powell and Dayanik, 2009): the mean after the trial is normal around the present
mean. The growth is never negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from random import Random
from typing import NamedTuple

from wattspan.frontier.hypervolume import LogPoint, NormalPoint, expected_gain
from wattspan.frontier.surrogate import Place, PlacedFigure, Prediction, predictions

LEAST_GAIN = 1e-6
"""A smaller area counts as none: one part in a thousand of time by one of energy."""


class SettingFigures(NamedTuple):
    """The measured figures of a setting, and its number of trials, 1 at least."""

    figures: LogPoint
    trials: int


class TrialVariance(NamedTuple):
    """The variances of the logarithms of one trial's time and energy, above 0."""

    time: float
    energy: float


def gains(
    candidates: Sequence[int],
    places: Sequence[Place],
    results: Mapping[int, SettingFigures],
    noise: TrialVariance,
    reference: LogPoint,
) -> dict[int, float]:
    """The expected growth of the hypervolume by one trial of each candidate.

    ``places`` has every setting, ``results`` the measured ones, at least one of them.
    """
    wanted = [places[number] for number in candidates]
    time, energy = (
        predictions(
            [
                PlacedFigure(places[number], one.figures[axis], noise[axis] / one.trials)
                for number, one in results.items()
            ],
            wanted,
        )
        for axis in (0, 1)
    )
    found: dict[int, float] = {}
    for number, in_time, in_energy in zip(candidates, time, energy, strict=True):
        others = [one.figures for other, one in results.items() if other != number]
        mean = LogPoint(in_time.mean, in_energy.mean)
        after = NormalPoint(mean, _change(in_time, noise.time), _change(in_energy, noise.energy))
        found[number] = expected_gain(after, others, reference)
        if number in results:
            found[number] -= expected_gain(NormalPoint(mean, 0.0, 0.0), others, reference)
    return found


def best(found: Mapping[int, float], trials: Mapping[int, int], random: Random) -> int:
    """The candidate with the most gain; without any gain one with the fewest ``trials``, by chance.

    ``found`` has one candidate at least.
    """
    most = max(found.values())
    if most > LEAST_GAIN:
        return min(number for number, gain in found.items() if gain == most)
    fewest = min(trials.get(number, 0) for number in found)
    return random.choice(sorted(n for n in found if trials.get(n, 0) == fewest))


def _change(present: Prediction, noise: float) -> float:
    """The standard deviation of the mean after one more trial."""
    return present.variance / sqrt(present.variance + noise)
