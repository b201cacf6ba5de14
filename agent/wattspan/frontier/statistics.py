"""Statistics of a study: Student's t and the F distribution, steadiness, and gains of trials."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import dist, erfc, exp, inf, lgamma, log, log1p, pi, sqrt
from random import Random
from typing import NamedTuple

from wattspan.util.linear_systems import solved

_TOLERANCE = 1e-12


def upper_tail(t: float, freedom: float) -> float:
    """P(T > t) with ``freedom`` degrees of freedom.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.1.
    """
    half = 0.5 * _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)
    return half if t >= 0 else 1.0 - half


@lru_cache(maxsize=1024)
def quantile(probability: float, freedom: float) -> float:
    """The t with P(T <= t) = ``probability``, which is above 0 and below 1, by bisection."""
    if probability < 0.5:
        return -quantile(1.0 - probability, freedom)
    low, high = 0.0, 1.0
    while upper_tail(high, freedom) > 1.0 - probability:
        low, high = high, 2.0 * high
    while high - low > _TOLERANCE * max(1.0, high):
        middle = (low + high) / 2
        if upper_tail(middle, freedom) > 1.0 - probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def f_upper_tail(f: float, freedom: float, other: float) -> float:
    """P(F > f) with ``freedom`` of the numerator and ``other`` degrees of the denominator.

    Abramowitz and Stegun, 26.6.2.
    """
    return _incomplete_beta(other / (other + freedom * f), other / 2, freedom / 2)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (26.5.8)."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges slowly there
        return 1.0 - _incomplete_beta(1.0 - x, b, a)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)) / a
    return front / _continued_fraction(x, a, b)


def _continued_fraction(x: float, a: float, b: float) -> float:
    """1 + d1/(1 + d2/(1 + ...)), by the modified method of Lentz."""
    value = c = 1.0
    d, term = 0.0, 0
    while abs(c * d - 1.0) >= _TOLERANCE:
        term += 1
        m = term // 2
        if term % 2:
            factor = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            factor = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1.0 / (1.0 + factor * d)
        c = 1.0 + factor / c
        value *= c * d
    return value


# -------------------------------------------------------------------------------------- steadiness


SIGNIFICANCE = 0.001
"""Probability that a steady window is called unsteady: studies have up to hundreds of them."""

LEAST_CHANGE = 0.01
"""Relative change of the time per unit that does not matter."""

_BATCHES = 8
"""Batches of a half at most."""


def change_of_speed(completions: Sequence[tuple[int, float]], start: int, end: int) -> str:
    """A sentence if the time per unit of work changed in the second half of a window, else "".

    Consecutive units of work are averaged in batches, which makes their errors nearly independent
    (the method of batch means; Law, Simulation Modeling and Analysis, chapter 9). The variance of a
    batch comes from differences of neighbours (von Neumann 1941), so that a trend does not count as
    noise.

    ``completions`` are monotonic times in ascending order and the work that was completed at each.
    The window begins and ends with one. Fewer than two completions in a half tell nothing: "".
    """
    middle = (start + end) / 2
    first: list[tuple[int, float]] = []
    second: list[tuple[int, float]] = []
    inside = [one for one in completions if start <= one[0] <= end]
    for (before, _), (at, work) in pairwise(inside):
        (first if at <= middle else second).append((at - before, work))
    one, two = _batches(first), _batches(second)
    if min(len(one), len(two)) < 2:
        return ""
    change = sum(two) / len(two) - sum(one) / len(one)
    if abs(change) <= LEAST_CHANGE:
        return ""
    squares = sum((b - a) ** 2 for half in (one, two) for a, b in pairwise(half))
    variance = squares / 2 / (len(one) + len(two) - 2)
    error = sqrt(variance * (1 / len(one) + 1 / len(two)))
    t = abs(change) / error if error else inf
    if 2 * upper_tail(t, _freedom(len(one)) + _freedom(len(two))) > SIGNIFICANCE:
        return ""
    return f"A unit of work took {exp(change) - 1:+.1%} in the second half of the window."


def _batches(gaps: Sequence[tuple[int, float]]) -> list[float]:
    """Logarithms of the time per unit of work, in batches of consecutive units."""
    count = min(_BATCHES, len(gaps))
    bounds = [n * len(gaps) // count for n in range(count + 1)] if count else []
    return [
        log(sum(gap for gap, _ in gaps[low:high]) / sum(work for _, work in gaps[low:high]))
        for low, high in pairwise(bounds)
    ]


def _freedom(count: int) -> float:
    """Degrees of freedom of a variance from the differences of ``count`` neighbours."""
    differences = count - 1
    return 2 * differences**2 / (3 * differences - 1)


# -------------------------------------------------------------------------- gains of further trials
# The setting whose next trial promises the most: the expected growth of the hypervolume. For a
# measured setting that is the growth by knowing its figures better, as in the knowledge gradient
# (Frazier, Powell and Dayanik, 2009): the mean after the trial is normal around the present mean.
# The growth is never negative.
#
# The hypervolume is the area between the settings that no other one beats and a reference point
# (Zitzler and Thiele, 1999). Both axes are logarithms relative to the baseline, so that a gain does
# not depend on units, and a tenth of time counts as much as a tenth of energy. The expectation over
# independent normal distributions is that of Emmerich, Deutz and Klinkenberg, "Hypervolume-based
# expected improvement", 2011, by strips: the probability of dominating a point is integrated over
# the area that nothing dominates yet.
#
# Settings without a trial are predicted by a Gaussian process over their places on the knobs, with
# a Matérn kernel of order 3/2, which permits bends (Rasmussen and Williams, "Gaussian Processes
# for Machine Learning", 2006, sections 2.2 and 4.2). No figure of a study comes from it.


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
