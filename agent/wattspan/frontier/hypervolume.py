"""The hypervolume of settings in time and energy, and its expected gain by one more trial.

The hypervolume is the area between the settings that no other one beats and a reference point
(Zitzler and Thiele, 1999). Both axes are logarithms relative to the baseline, so that a gain does
not depend on units, and a tenth of time counts as much as a tenth of energy. The expectation over
independent normal distributions is that of Emmerich, Deutz and Klinkenberg, "Hypervolume-based
expected improvement", 2011, by strips: the probability of dominating a point is integrated over the
area that nothing dominates yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import erfc, exp, inf, pi, sqrt
from typing import NamedTuple


class LogPoint(NamedTuple):
    """Logarithms of time and energy per unit of work, relative to the baseline's."""

    time: float
    energy: float


class NormalPoint(NamedTuple):
    """A point that is not known yet: the mean and the standard deviations of its logarithms."""

    mean: LogPoint
    time_error: float
    energy_error: float


def hypervolume(points: Iterable[LogPoint], reference: LogPoint) -> float:
    """The area that ``points`` dominate up to ``reference``; nothing beyond it counts."""
    return sum(
        (right - left) * (reference.energy - height)
        for left, right, height in _strips(points, reference)
        if height < reference.energy
    )


def expected_gain(point: NormalPoint, others: Iterable[LogPoint], reference: LogPoint) -> float:
    """The expected growth of the hypervolume of ``others`` by ``point``."""
    mean, time_error, energy_error = point
    return sum(
        (_expected_excess(right, mean.time, time_error)
         - _expected_excess(left, mean.time, time_error))
        * _expected_excess(height, mean.energy, energy_error)
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
