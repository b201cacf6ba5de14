"""The power of a CPU over its load, and the idle power to which it extrapolates.

Power is ``idle + slope * (load + c * (load - load**r))``. Fan, Weber and Barroso ("Power
provisioning for a warehouse-sized computer", ISCA 2007) fitted c = 1 and r = 1.4 to several hundred
servers; c = 0 is a straight line, and c < 0 a processor whose clock rises with load. The slope at
the present load alone does not identify the intercept of a curve, so c has a normal prior for each
exponent r, and the results for the exponents are averaged by their likelihoods (Hoeting et al.,
"Bayesian model averaging", Statistical Science 14, 1999). With little variation of load the
credible interval is therefore wide, however many samples there are.
"""

from __future__ import annotations

import math
from typing import NamedTuple

TOLERANCE = 0.12
"""An extrapolated idle power is known if the half-width of its 95 % credible interval is at most
this part of the mean active power."""

HALF_LIFE = 300.0  # seconds, of the weight of a sample

MAX_IDLE_SHARE = 0.9
"""Upper bound of idle power as a part of the power at full load: an assumption, before there is any
evidence. It makes the energy that utilisation justifies small, but not zero."""

_MIN_RELATIVE_LOAD = 0.7  # lower bound of active power at a load, over load × that at full load


def largest_idle(load: float, power: float) -> float:
    """The largest idle power of a device with ``power`` at ``load``; see `MAX_IDLE_SHARE`."""
    ratio = (1 - MAX_IDLE_SHARE) / MAX_IDLE_SHARE
    return power / (1 + ratio * _MIN_RELATIVE_LOAD * load)


class Extrapolation(NamedTuple):
    """The credible idle power in milliwatts, and the power curve at low load."""

    idle: float
    deviation: float  # standard deviation of ``idle``
    active: float  # mean power above ``idle``
    slope: float  # milliwatts from idle to full load, along the tangent at zero load

    @property
    def half_width(self) -> float:
        """Half of the 95 % credible interval."""
        return 1.96 * self.deviation

    @property
    def narrow(self) -> bool:
        """True if the idle power is known."""
        return self.half_width <= TOLERANCE * self.active


class _Prior(NamedTuple):
    """The prior of the curvature for one exponent.

    Both priors include a straight line, the servers of Fan et al., and clocks that rise with load.
    """

    exponent: float
    mean: float
    deviation: float

    def bend(self, load: float) -> float:
        return load - math.pow(load, self.exponent)


_PRIORS = (_Prior(1.4, 0.25, 0.6), _Prior(2.0, 0.1, 0.35))
_WIDTH = len(_PRIORS) + 2  # columns: load, a bend for each exponent, power
_PARAMETERS = 3
_ITERATIONS = 4
_HUBER = 3.0
_NEW_LOAD = 3.0  # standard deviations of the observed loads; a load beyond is new to the curve
_NOISE = 0.001  # least deviation of the power of one second: counters are updated every millisecond
_RESIDUAL_SAMPLES = 20
_SHIFT_SECONDS = 30.0
_MAX_CORRELATION = 0.98
_MIN_SAMPLES = 3.0
_TINY = 1e-9  # avoids divisions by zero


class PowerCurve:
    """The regression of power over load, with an unknown curvature.

    Samples are weighted by duration; the weights decay by `HALF_LIFE`. A residual beyond three
    times the mean absolute residual has proportionally less weight (Huber, "Robust estimation of a
    location parameter", 1964), because counters may be updated late. Correlated residuals widen the
    interval: the variance of the level by their lag-one correlation, that of the slope by its
    product with the correlation of the load (Bartlett, "Some aspects of the time-correlation
    problem", 1935). An error of the observed load, such as CPU time that the kernel accounts later,
    attenuates the slope by at most the coefficient of determination (the bounds of Frisch,
    "Statistical confluence analysis", 1934): the slope is taken to be uniformly distributed
    between its bounds. A lasting deviation from the curve means that the device has changed: the
    regression then restarts. A deviation at loads that are new to the curve means only that it was
    not known there: after a rest it is steep or flat by accident, and must not be forgotten.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._weight = self._count = 0.0
        self._mean = [0.0] * _WIDTH
        self._moments = [[0.0] * _WIDTH for _ in range(_WIDTH)]  # upper triangle, around the mean
        self._fourth = 0.0  # sum of the squares of the summands of the first moment
        self._residual = self._shift = 0.0  # means of absolute and of signed residuals
        self._residuals, self._loads = _Autocorrelation(), _Autocorrelation()
        self._fits: tuple[_CurveFit, ...] = ()

    @property
    def observed(self) -> bool:
        """True after the first sample."""
        return self._weight > 0

    @property
    def upper_bound(self) -> float:
        """The largest idle power that the mean power at the mean load permits."""
        return largest_idle(self._mean[0], self._mean[-1])

    def add(self, load: float, power: float, seconds: float) -> None:
        """Add a sample: the mean ``power`` in milliwatts at ``load`` (0–1) over ``seconds``."""
        decay = 0.5 ** (seconds / HALF_LIFE)
        weight = seconds * self._trust(load, power, seconds, decay)
        row = (load, *(prior.bend(load) for prior in _PRIORS), power)
        whole = self._weight * decay + weight
        part = weight / whole
        change = [value - mean for value, mean in zip(row, self._mean, strict=True)]
        for i, moments in enumerate(self._moments):
            scaled = weight * (1 - part) * change[i]
            for j in range(i, _WIDTH):
                moments[j] = moments[j] * decay + scaled * change[j]
            self._mean[i] += part * change[i]
        self._fourth = self._fourth * decay * decay + (weight * (1 - part) * change[0] ** 2) ** 2
        self._loads.add(change[0], decay)
        self._weight, self._count = whole, self._count * decay + 1

    def _trust(self, load: float, power: float, seconds: float, decay: float) -> float:
        """The robust weight of a sample; its residual enters the statistics of residuals."""
        if not self._fits:
            return 1.0
        best = max(self._fits, key=lambda fit: fit.likelihood)
        residual = power - best.power(load)
        scale = max(self._residual, _NOISE * self._mean[-1])
        limited = min(max(residual, -_HUBER * scale), _HUBER * scale)
        if (load - self._mean[0]) ** 2 > _NEW_LOAD**2 * self._moments[0][0] / self._weight:
            return limited / residual if residual else 1.0
        self._shift += (limited - self._shift) * min(1.0, seconds / _SHIFT_SECONDS)
        if abs(self._shift) > TOLERANCE * (self._mean[-1] - best.intercept):
            self._reset()
            return 1.0
        self._residual += (abs(residual) - self._residual) / _RESIDUAL_SAMPLES
        self._residuals.add(residual, decay)
        return limited / residual if residual else 1.0

    def extrapolate(self) -> Extrapolation | None:
        """The idle power; None without a rise of power with load over several samples."""
        spread = self._moments[0][0]
        if spread <= 0 or self._count <= _PARAMETERS + 1:
            return None
        # The number of samples that the slope depends on, as in Kish's effective sample size.
        if spread * spread < _MIN_SAMPLES * self._fourth:
            return None
        found = (self._fit(index) for index in range(len(_PRIORS)))
        self._fits = tuple(fit for fit in found if fit is not None)
        if not self._fits:
            return None
        best = max(fit.likelihood for fit in self._fits)
        weights = [math.exp(fit.likelihood - best) for fit in self._fits]
        each = [(w / sum(weights), fit) for w, fit in zip(weights, self._fits, strict=True)]
        idle = sum(w * fit.idle for w, fit in each)
        variance = sum(w * (fit.variance + (fit.idle - idle) ** 2) for w, fit in each)
        slope = sum(w * fit.slope * (1 + fit.curvature) for w, fit in each)
        return Extrapolation(idle, math.sqrt(variance), self._mean[-1] - idle, max(0.0, slope))

    def _fit(self, index: int) -> _CurveFit | None:
        """The posterior for one exponent; None if power does not rise with load."""
        prior, bend, last = _PRIORS[index], index + 1, _WIDTH - 1
        first, second = self._moments[0], self._moments[bend]
        sums = _CurveMoments(
            first[0],
            first[bend],
            first[last],
            second[bend],
            second[last],
            self._moments[last][last],
        )
        correlation = self._residuals.value
        inflation = _inflation(correlation * self._loads.value)
        freedom = self._count - _PARAMETERS
        least = freedom * (_NOISE * self._mean[last]) ** 2
        line = _CurveSolution(sums.up / sums.uu, 0.0, 0.0, 0.0, 1.0)
        if line.slope <= 0:
            return None
        for _ in range(_ITERATIONS):  # the prior of the curvature is scaled by the slope
            variance = max(sums.squares(line), least) / freedom * inflation
            line = sums.solve(prior, line.slope, variance)
        load, bent, curvature = self._mean[0], self._mean[bend], line.turn / line.slope
        leverage = load * load * line.known - 2 * load * bent * sums.uv + bent * bent * sums.uu
        small_sample = (1 + _PARAMETERS / freedom) ** 2
        squares = sums.squares(line)
        active = line.slope * load + line.turn * bent
        # The residual may be due to errors of power or of load: see the bounds of Frisch.
        attenuation = squares / max(sums.pp - squares, _TINY)
        return _CurveFit(
            prior,
            self._mean[last] - active,
            self._mean[last] - active * (1 + attenuation / 2),
            line.variance
            * (_inflation(correlation) / inflation / self._weight + leverage / line.determinant)
            * small_sample
            + (active * attenuation) ** 2 / 12,
            line.slope,
            curvature,
            -0.5 * self._count / inflation * math.log(max(squares, least))
            - 0.5 * ((curvature - prior.mean) / prior.deviation) ** 2,
        )


def _inflation(correlation: float) -> float:
    """The factor of the variance of a mean of samples with this lag-one correlation."""
    return (1 + correlation) / (1 - correlation)


class _Autocorrelation:
    """The lag-one correlation of a series around 0, from `0` to `_MAX_CORRELATION`."""

    def __init__(self) -> None:
        self._product = self._square = self._last = 0.0

    def add(self, value: float, decay: float) -> None:
        self._product = self._product * decay + value * self._last
        self._square = self._square * decay + value * value
        self._last = value

    @property
    def value(self) -> float:
        found = self._product / self._square if self._square else 0.0
        return min(_MAX_CORRELATION, max(0.0, found))


class _CurveSolution(NamedTuple):
    """A solution of the normal equations: power is ``slope`` × load + ``turn`` × bend + idle."""

    slope: float
    turn: float
    variance: float  # of the power of one second
    known: float  # moment of the bend, with the information of the prior
    determinant: float


class _CurveMoments(NamedTuple):
    """Central moments of load (u), bend (v) and power (p)."""

    uu: float
    uv: float
    up: float
    vv: float
    vp: float
    pp: float

    def squares(self, line: _CurveSolution) -> float:
        """The sum of the squares of the residuals."""
        slope, turn = line.slope, line.turn
        explained = 2 * (slope * self.up + turn * self.vp) - 2 * slope * turn * self.uv
        return self.pp - explained + slope * slope * self.uu + turn * turn * self.vv

    def solve(self, prior: _Prior, slope: float, variance: float) -> _CurveSolution:
        """The posterior mean with a prior of ``turn`` around ``prior.mean`` × ``slope``."""
        information = variance / (prior.deviation * slope) ** 2
        known = self.vv + information
        aimed = self.vp + information * prior.mean * slope
        # At least the second by the Cauchy-Schwarz inequality, but for rounding.
        determinant = max(self.uu * known - self.uv * self.uv, self.uu * information)
        return _CurveSolution(
            max(_TINY, (self.up * known - self.uv * aimed) / determinant),
            (self.uu * aimed - self.uv * self.up) / determinant,
            variance,
            known,
            determinant,
        )


class _CurveFit(NamedTuple):
    prior: _Prior
    intercept: float  # without correction: for predictions at an observed load
    idle: float
    variance: float  # of ``idle``
    slope: float
    curvature: float
    likelihood: float  # logarithm, up to a constant

    def power(self, load: float) -> float:
        return self.intercept + self.slope * (load + self.curvature * self.prior.bend(load))
