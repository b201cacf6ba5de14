"""Paired comparisons of blocks, and the estimates of levels and noise that they give.

A run of blocks at one setting is compared with the runs before and after it (A B A), so that a
steady drift of the job cancels. For levels that were not tried, log time per work rises with depth
as a*x + b*x^2 with non-negative a and b, fitted to all pairs and corrected by nearby measurements
as far as these are more accurate than the fit. Log power falls in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from wattspan.tuning.decisions.blocks import Block
from wattspan.tuning.decisions.sequential_test import NO_EVIDENCE, Evidence

N = TypeVar("N", int, float)

MAX_REACH = 8
"""Blocks at each end of a run that are kept for comparisons."""


class Pair(NamedTuple):
    """Capped against uncapped blocks, as log ratios per work."""

    level: int
    at: int
    busy: float  # of the units' durations
    span: float  # of durations and gaps
    power: float | None
    weight: float  # its variance, relative to one unit's
    side_ratio: float = 0.0  # log ratio of time per work of the two outer runs


@dataclass(frozen=True, slots=True)
class BlockRun:
    """The first few and last few blocks of one period."""

    head: tuple[Block, ...]
    tail: tuple[Block, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Pairing:
    """The last three runs; ``compared`` if the middle one was compared."""

    before: BlockRun | None = None
    middle: BlockRun | None = None
    present: BlockRun | None = None
    compared: bool = False


MIN_DEVIATION = 0.001
"""Smallest assumed standard deviation of a pair's log ratio."""


@dataclass(frozen=True, slots=True)
class LevelEstimate:
    """The pairs of one level, and the evidence from them.

    ``time`` is the log ratio of the time per work, capped over uncapped: of the units' durations,
    or with their gaps where these certainly grow (``misleading`` durations). ``power`` is that of
    mean power.
    """

    pairs: tuple[Pair, ...] = ()
    time: Evidence = NO_EVIDENCE
    power: Evidence = NO_EVIDENCE
    misleading: bool = False

    @property
    def energy(self) -> float:
        """The log ratio of the energy per work."""
        return self.time.mean + self.power.mean


NO_ESTIMATE = LevelEstimate()


@dataclass(frozen=True, slots=True)
class Estimates:
    """Estimates of all tried levels, and the noise.

    ``variance`` is the relative variance of single units' time per work, over ``blocks`` blocks.
    ``draws`` are powers of the device with the highest one, uncapped.
    """

    levels: Mapping[int, LevelEstimate] = field(default_factory=dict)
    variance: float = 0.0
    blocks: int = 0
    energies: int = 0  # blocks whose energy is known
    power: float = 0.0  # mean, uncapped, in milliwatts of all devices
    draws: tuple[int, ...] = ()

    @property
    def noise(self) -> float:
        """The coefficient of variation of a unit's time per work."""
        return math.sqrt(self.variance)

    def at(self, level: int) -> LevelEstimate:
        return self.levels.get(level, NO_ESTIMATE)

    def deviation(self, weight: float) -> float:
        """Expected standard deviation of a pair's log ratio, from the noise of units alone."""
        return max(math.sqrt(self.variance * weight), MIN_DEVIATION)

    def spread(self, weight: float) -> float:
        """Expected standard deviation of a pair's log ratio, from previous pairs too."""
        expected = self.deviation(weight)
        times = [one.time for one in self.levels.values() if one.time.n > 3]
        total = sum(one.n for one in times)
        if total < 8:
            return expected
        return max(expected, math.sqrt(sum(one.n * one.deviation**2 for one in times) / total))


_CURVE_MODEL_ERROR = 0.004
"""Deviation of real curves from the parabola, in log time."""


class ResponsePoint(NamedTuple):
    """Measured log ratios of a level, and the variance of the mean of the time."""

    level: int
    time: float
    power: float
    variance: float
    power_variance: float = 0.0  # of the mean of the power; 0: as that of the time


class Prior(NamedTuple):
    """Means and covariances of a parabola's coefficients over many jobs."""

    linear: float
    square: float
    linear_variance: float
    square_variance: float
    covariance: float

    @property
    def precision(self) -> tuple[float, float, float]:
        """The inverse of the covariance matrix: its diagonal, and its other element."""
        one, two, both = self.linear_variance, self.square_variance, self.covariance
        determinant = one * two - both * both
        return two / determinant, one / determinant, -both / determinant


class CurvePrior(NamedTuple):
    """Usual responses to a cap, in the same terms as :class:`ResponseCurve`."""

    slowdown: Prior
    relief: Prior


POWER_CAP_PRIOR = CurvePrior(
    Prior(0.12, 0.54, 0.132, 1.61, -0.429), Prior(0.79, 0.41, 0.392, 3.69, -1.13)
)
"""The parabolas of 97 published curves of V100s and A40s (Zeus, NSDI '23; Perseus, SOSP '24).

``benchmarks.tuner.prior`` fits them, and measures their error for jobs that are left out.
"""


class _ParabolaFit(NamedTuple):
    """A parabola of the depth, and its corrections at each of the curve's levels.

    ``covariance`` is that of the coefficients: both variances, and the mixed one.
    """

    linear: float
    square: float
    bends: tuple[float, ...]
    covariance: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class ResponseCurve:
    """Predictions for every level below ``origin``, at which caps have no effect yet.

    ``slowdown`` is the rise of the log time per work, ``relief`` the fall of the log power.
    """

    origin: float
    levels: tuple[float, ...]  # ascending, the origin last
    slowdown: _ParabolaFit
    relief: _ParabolaFit

    def time(self, level: float) -> float:
        """The predicted log ratio of time per work, at least 0."""
        return next(self.predictions((level,)))[1]

    def time_error(self, level: float) -> float:
        """The standard error of :meth:`time` where nothing was measured; 0 without a prior."""
        x = max((self.origin - level) / self.origin, 0.0)
        one, two, both = self.slowdown.covariance
        return math.sqrt(max(one * x**2 + two * x**4 + 2 * both * x**3, 0.0))

    def power(self, level: float) -> float:
        """The predicted log ratio of mean power."""
        return next(self.predictions((level,)))[2]

    def predictions(self, levels: Iterable[N]) -> Iterator[tuple[N, float, float]]:
        """Each of ascending ``levels`` with its time and power.

        A search of the best level asks for hundreds, so that one pass computes them all.
        """
        origin, known, right = self.origin, self.levels, 0
        slower, slower2, slower_bends, _ = self.slowdown
        less, less2, less_bends, _ = self.relief
        for level in levels:
            if level >= origin:
                yield level, 0.0, 0.0
                continue
            while known[right] < level:
                right += 1
            if right == 0:  # below every level that was tried
                slower_bend, less_bend = slower_bends[0], less_bends[0]
            else:
                low, high = right - 1, right
                part = (level - known[low]) / (known[high] - known[low])
                slower_bend = slower_bends[low] + part * (slower_bends[high] - slower_bends[low])
                less_bend = less_bends[low] + part * (less_bends[high] - less_bends[low])
            x = (origin - level) / origin
            time = slower * x + slower2 * x * x + slower_bend
            power = -(less * x + less2 * x * x + less_bend)
            yield level, (0.0 if time < 0 else time), power


def fit_curve(
    points: Sequence[ResponsePoint], origin: float, prior: CurvePrior | None = None
) -> ResponseCurve:
    """The curve through ``points``; those at or above the origin are ignored."""
    used = sorted(point for point in points if point.level < origin)
    depths = [(origin - one.level) / origin for one in used]
    variances = [one.variance for one in used]
    return ResponseCurve(
        origin,
        (*(float(one.level) for one in used), origin),
        _fit(depths, [one.time for one in used], variances, prior and prior.slowdown),
        _fit(
            depths,
            [-one.power for one in used],
            [one.power_variance or one.variance for one in used],
            prior and prior.relief,
        ),
    )


def _fit(
    depths: Sequence[float],
    values: Sequence[float],
    variances: Sequence[float],
    prior: Prior | None,
) -> _ParabolaFit:
    terms = list(zip(depths, values, variances, strict=True))
    model_error = 0.0 if prior is None else _CURVE_MODEL_ERROR**2
    weighted = [(x, value, 1 / (variance + model_error)) for x, value, variance in terms]
    linear, square, covariance = _coefficients(weighted, prior)
    bends = [
        _CURVE_MODEL_ERROR**2
        / (_CURVE_MODEL_ERROR**2 + variance)
        * (value - linear * x - square * x * x)
        for x, value, variance in terms
    ]
    return _ParabolaFit(linear, square, (*bends, 0.0), covariance)


def _coefficients(
    terms: Sequence[tuple[float, float, float]], prior: Prior | None
) -> tuple[float, float, tuple[float, float, float]]:
    """Coefficients by least squares of weighted terms, at least 0, and their covariance.

    With a prior they are those of a Bayesian linear regression; without one the covariance is 0.
    """
    one = two = both = first = second = 0.0
    if prior is not None:
        one, two, both = prior.precision
        first = one * prior.linear + both * prior.square
        second = both * prior.linear + two * prior.square
    for x, value, weight in terms:
        one += weight * x**2
        two += weight * x**4
        both += weight * x**3
        first += weight * x * value
        second += weight * x**2 * value
    covariance = 0.0, 0.0, 0.0
    if prior is None and len(terms) < 2:  # half and half: one point cannot determine both
        if not terms:
            return 0.0, 0.0, covariance
        return max(first / one, 0.0) / 2, max(second / two, 0.0) / 2, covariance
    determinant = one * two - both * both
    if prior is not None:
        covariance = two / determinant, one / determinant, -both / determinant
    linear = (first * two - second * both) / determinant
    square = (one * second - both * first) / determinant
    if linear < 0:
        return 0.0, max(second / two, 0.0), covariance
    if square < 0:
        return max(first / one, 0.0), 0.0, covariance
    return linear, square, covariance
