"""The setting whose next trial promises the most: the expected growth of the hypervolume.

For a measured setting that is the growth by knowing its figures better, as in the knowledge
gradient (Frazier, Powell and Dayanik, 2009): the mean after the trial is normal around the present
mean. The growth is never negative.

The hypervolume is the area between the settings that no other one beats and a reference point
(Zitzler and Thiele, 1999). Both axes are logarithms relative to the baseline, so that a gain does
not depend on units, and a tenth of time counts as much as a tenth of energy. The expectation over
independent normal distributions is that of Emmerich, Deutz and Klinkenberg, "Hypervolume-based
expected improvement", 2011, by strips: the probability of dominating a point is integrated over the
area that nothing dominates yet.

Settings without a trial are predicted by a Gaussian process over their places on the knobs, with a
Matérn kernel of order 3/2, which permits bends (Rasmussen and Williams, "Gaussian Processes for
Machine Learning", 2006, sections 2.2 and 4.2). No figure of a study comes from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import dist, erfc, exp, inf, pi, sqrt
from random import Random
from typing import NamedTuple

from wattspan.util.linear_systems import solved


class LogPoint(NamedTuple):
    """Logarithms of time and energy per unit of work, relative to the baseline's.

    Or a figure of each: a standard deviation, or a variance.
    """

    time: float
    energy: float


_CERTAIN = LogPoint(0.0, 0.0)


def expected_gain(
    mean: LogPoint, others: Iterable[LogPoint], reference: LogPoint, error: LogPoint = _CERTAIN
) -> float:
    """The expected growth of the hypervolume of ``others`` by a point of this mean and error."""
    return sum(
        (_expected_excess(right, mean.time, error.time)
         - _expected_excess(left, mean.time, error.time))
        * _expected_excess(height, mean.energy, error.energy)
        for left, right, height in _strips(others, reference)
    )  # fmt: skip


def _strips(
    points: Iterable[LogPoint], reference: LogPoint
) -> Iterator[tuple[float, float, float]]:
    """Ranges of time, each with the energy above which a point is dominated."""
    left, height = -inf, reference.energy
    for time, energy in sorted(points):
        if time >= reference.time:
            break
        if energy < height:
            yield left, time, height
            left, height = time, energy
    yield left, reference.time, height


_LEAST_ERROR = 1e-12
"""A smaller standard deviation changes nothing, and the quotient by it might be infinite."""


def _expected_excess(bound: float, mean: float, error: float) -> float:
    """The expectation of max(0, bound - X) for a normal X."""
    if bound == -inf:
        return 0.0
    if error < _LEAST_ERROR:
        return max(0.0, bound - mean)
    z = (bound - mean) / error
    below = erfc(-z / sqrt(2)) / 2
    return max(0.0, error * (z * below + exp(-z * z / 2) / sqrt(2 * pi)))


# ------------------------------------------------------------------------------------- predictions


Place = tuple[float, ...]
"""The position of a setting on each knob, from 0 to 1."""

REACH = 0.25
"""Length scale of the kernel: figures at half of a knob's range are hardly related."""

PRIOR_SPREAD = 0.2
"""Standard deviation of a logarithm around the baseline that is assumed at first."""

_PRIOR_WEIGHT = 2.0
"""The assumed spread counts as so many settings."""


class PlacedFigure(NamedTuple):
    """The logarithm of a figure relative to the baseline's, and its variance, above 0."""

    place: Place
    value: float
    variance: float


class Prediction(NamedTuple):
    """The mean of a logarithm relative to the baseline's, and its variance."""

    mean: float
    variance: float


def predictions(observations: Sequence[PlacedFigure], places: Sequence[Place]) -> list[Prediction]:
    """The prediction for each of ``places``, which may have observations too.

    The spread of the process is learned from the observations.
    """
    values = [one.value for one in observations]
    (weights,) = _solutions(observations, PRIOR_SPREAD**2, [values])
    prior = PRIOR_SPREAD**2 * _PRIOR_WEIGHT
    explained = sum(map(float.__mul__, values, weights))
    spread = (prior + explained) / (_PRIOR_WEIGHT + len(values))
    crosses = [[_kernel(one.place, place) for one in observations] for place in places]
    weights, *columns = _solutions(observations, spread, [values, *crosses])
    return [
        Prediction(
            sum(map(float.__mul__, cross, weights)),
            spread * max(0.0, 1.0 - sum(map(float.__mul__, cross, column))),
        )
        for cross, column in zip(crosses, columns, strict=True)
    ]


def _solutions(
    observations: Sequence[PlacedFigure], spread: float, rights: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Solutions of the correlation matrix with the noise, for the ``rights``."""
    matrix = [
        [
            _kernel(one.place, other.place) + (one.variance / spread if one is other else 0.0)
            for other in observations
        ]
        for one in observations
    ]
    return solved(matrix, rights)


def _kernel(one: Place, other: Place) -> float:
    scaled = sqrt(3) * dist(one, other) / REACH
    return (1 + scaled) * exp(-scaled)


# --------------------------------------------------------------------------------------- selection


LEAST_GAIN = 1e-6
"""A smaller area counts as none: one part in a thousand of time by one of energy."""


class SettingFigures(NamedTuple):
    """The measured figures of a setting, and its number of trials, 1 at least."""

    figures: LogPoint
    trials: int


def gains(
    candidates: Sequence[int],
    places: Sequence[Place],
    results: Mapping[int, SettingFigures],
    noise: LogPoint,
    reference: LogPoint,
) -> dict[int, float]:
    """The expected growth of the hypervolume by one trial of each candidate.

    ``places`` has every setting, ``results`` the measured ones, at least one of them. ``noise`` are
    the variances of one trial, above 0.
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
        change = LogPoint(_change(in_time, noise.time), _change(in_energy, noise.energy))
        found[number] = expected_gain(mean, others, reference, change)
        if number in results:
            found[number] -= expected_gain(mean, others, reference)
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
