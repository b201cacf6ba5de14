"""How slow and how thrifty levels are that were not tried, from those that were.

Log time rises with depth, the steeper the deeper: a*x + b*x^2 with neither below 0, fitted to
all pairs at once, and bent to what was measured nearby as far as that is surer than the fit.
Log power falls in the same way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_MODEL = 0.004
"""By how much real curves leave the parabola, in log time."""


class Point(NamedTuple):
    """What was measured at a level: log ratios, and the variance of the time's mean."""

    level: int
    time: float
    power: float
    variance: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Predictions for every level from ``origin`` down, where nothing is felt yet."""

    origin: float
    linear: float
    square: float
    levels: tuple[float, ...]  # ascending, the origin last
    bends: tuple[float, ...]
    power_linear: float = 0.0
    power_square: float = 0.0
    power_bends: tuple[float, ...] = ()

    def time(self, level: float) -> float:
        """The predicted log ratio of time per work."""
        x = max(self.origin - level, 0.0) / self.origin
        return max(self.linear * x + self.square * x * x + self._along(self.bends, level), 0.0)

    def power(self, level: float) -> float:
        """The predicted log ratio of mean power."""
        x = max(self.origin - level, 0.0) / self.origin
        fallen = self.power_linear * x + self.power_square * x * x
        return self._along(self.power_bends, level) - fallen

    def _along(self, values: tuple[float, ...], level: float) -> float:
        levels = self.levels
        if level >= self.origin:
            return 0.0
        right = bisect_left(levels, level)
        if right == 0:  # below all that was tried
            return values[0]
        low, high = levels[right - 1], levels[right]
        part = (level - low) / (high - low)
        return values[right - 1] + part * (values[right] - values[right - 1])


def fit(points: Sequence[Point], origin: float) -> Curve:
    """The curve through ``points``; those at the origin or above it say nothing."""
    used = sorted(point for point in points if point.level < origin)
    depths = [(origin - one.level) / origin for one in used]
    weights = [1 / one.variance for one in used]
    linear, square = _parabola(list(zip(depths, [one.time for one in used], weights, strict=True)))
    falls = [-one.power for one in used]
    power_linear, power_square = _parabola(list(zip(depths, falls, weights, strict=True)))
    bends, power_bends = [], []
    for x, one in zip(depths, used, strict=True):
        sure = _MODEL**2 / (_MODEL**2 + one.variance)
        bends.append(sure * (one.time - linear * x - square * x * x))
        power_bends.append(sure * (one.power + power_linear * x + power_square * x * x))
    return Curve(
        origin,
        linear,
        square,
        (*(float(one.level) for one in used), origin),
        (*bends, 0.0),
        power_linear,
        power_square,
        (*power_bends, 0.0),
    )


def _parabola(terms: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Weighted least squares with both coefficients at least 0."""
    if not terms:
        return 0.0, 0.0
    x2 = sum(w * x**2 for x, _, w in terms)
    x3 = sum(w * x**3 for x, _, w in terms)
    x4 = sum(w * x**4 for x, _, w in terms)
    xy = sum(w * x * y for x, y, w in terms)
    xxy = sum(w * x * x * y for x, y, w in terms)
    if len(terms) == 1:  # half and half: nothing tells them apart
        return max(xy / x2, 0.0) / 2, max(xxy / x4, 0.0) / 2
    apart = x2 * x4 - x3 * x3
    linear = (xy * x4 - xxy * x3) / apart
    square = (x2 * xxy - x3 * xy) / apart
    if linear < 0:
        return 0.0, max(xxy / x4, 0.0)
    if square < 0:
        return max(xy / x2, 0.0), 0.0
    return linear, square
