"""The static power of a GPU board: its power while it is blocked on communication.

Dynamic energy is the energy of a computation beyond it (Kareus: ``E_dynamic = E - P_static * t``).
The power of a window is a mixture, ``P = P_block * w + P_work * (1 - w)``, where ``w`` is the share
of its time in waiting spans. Windows with different shares identify both powers by linear
regression. The regression begins with the median of pairwise slopes (Theil 1950, Sen 1968) and
goes on with Tukey's biweight, so that windows of other activities have no weight. Residuals of
consecutive windows are correlated; the half-width of the result is widened by their lag-one
correlation (Bartlett, "Some aspects of the time-correlation problem", 1935).

A result is refused without enough spread of ``w``, because the line is then an extrapolation.
Static power depends on the clock, so each board has a regression for each bin of its SM clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import combinations, pairwise
from math import sqrt
from operator import itemgetter
from statistics import median
from typing import NamedTuple

from wattspan.model import Milliwatts, ModelEnum

MIN_WINDOWS = 15
"""Windows before the first result: a minute."""

MIN_SPREAD = 0.2
"""The least distance of the 5th and the 95th percentile of waiting shares."""

TOLERANCE = 0.04
"""A result is known if the half-width of its 95 % interval is at most this part of it:
an error of 5 % is then less likely than 2 %."""

MAX_WINDOWS = 150
MAX_CLOCK_BINS = 16
CLOCK_BIN_HZ = 100_000_000
REFIT_EVERY = 5
REFIT_PART = 8
"""A regression is computed again after so many new windows, and a part of those that it has."""

_NEAR_BINS = 1  # of clocks; a fit applies to neighbouring bins too
_BIWEIGHT = 4.685  # 95 % efficiency for Gaussian residuals
_ITERATIONS = 10
_TO_SIGMA = 1.4826  # of a median absolute deviation
_LEAST_SIGMA = 0.001  # relative to the power: the resolution of counters over a second
_LEAST_POWER = 0.05  # of the median power: the line may be negative before it has converged
_PAIRED = 80  # windows of which pairwise slopes are taken
_MAX_CORRELATION = 0.9
_TWO_SIDED = 2.0  # standard errors
_UNKNOWN_CLOCK = -1
_WAITING = itemgetter(0)


class WaitingWindow(NamedTuple):
    """A period of at least a second: the share of waiting time in it, and the mean power in mW."""

    waiting: float
    power: float
    celsius: int | None = None

    @classmethod
    def of(
        cls,
        waiting: float,
        outside: float,
        power: float,
        idle: Milliwatts | None,
        celsius: int | None = None,
    ) -> WaitingWindow:
        """Without the share of time ``outside`` of all spans, in which the board draws ``idle``.

        The host prepares a step meanwhile. An error of that power changes the power of work only.
        """
        if idle is None:
            return cls(waiting, power, celsius)
        inside = 1 - outside
        return cls(waiting / inside, (power - idle * outside) / inside, celsius)


class StaticPowerRefusal(ModelEnum):
    """The reason why no static power was fitted."""

    FEW_WINDOWS = "few_windows"  # fewer than MIN_WINDOWS
    NO_SPREAD = "no_spread"  # the share of waiting time hardly varies
    UNCERTAIN = "uncertain"  # the interval of the result is wider than TOLERANCE
    NOT_LOWER = "not_lower"  # waiting draws as much power as working


class StaticPowerFit(NamedTuple):
    """A fitted static power and its half-width of 95 %, in milliwatts; ``working`` is P_work.

    The result holds for the range of temperatures; leakage rises with it.
    """

    power: Milliwatts
    half_width: Milliwatts
    working: Milliwatts
    windows: int
    celsius: tuple[int, int] | None = None


def fit_static_power(windows: Sequence[WaitingWindow]) -> StaticPowerFit | StaticPowerRefusal:
    """The power at a waiting share of one, of windows in order of time."""
    if len(windows) < MIN_WINDOWS:
        return StaticPowerRefusal.FEW_WINDOWS
    shares = sorted(window.waiting for window in windows)
    edge = len(shares) // 20
    spread = shares[-1 - edge] - shares[edge]
    if spread < MIN_SPREAD:
        return StaticPowerRefusal.NO_SPREAD
    line = _first_line(windows, spread)
    weighted: list[tuple[float, float]] = []
    for _ in range(_ITERATIONS):
        weighted = line.weighted(windows)
        better = _WaitingLine.of(windows, [weight for weight, _ in weighted])
        if better is None:  # the spread was that of windows without weight
            return StaticPowerRefusal.NO_SPREAD
        line = better
    power = line.base + line.slope
    half_width = line.half_width(weighted)
    if not half_width <= TOLERANCE * power:
        return StaticPowerRefusal.UNCERTAIN
    if line.slope >= -half_width:
        return StaticPowerRefusal.NOT_LOWER
    known = [window.celsius for window in windows if window.celsius is not None]
    return StaticPowerFit(
        Milliwatts(round(power)),
        Milliwatts(round(half_width)),
        Milliwatts(round(line.base)),
        len(windows),
        (min(known), max(known)) if known else None,
    )


class _WaitingLine(NamedTuple):
    """Power over the share of waiting time; ``moment`` is the weighted one around ``mean``."""

    base: float
    slope: float
    weight: float = 0.0
    mean: float = 0.0
    moment: float = 0.0

    @classmethod
    def of(cls, windows: Sequence[WaitingWindow], weights: Sequence[float]) -> _WaitingLine | None:
        """The weighted regression; None without enough spread of windows with weight."""
        weight = sum(weights)
        pairs = list(zip(weights, windows, strict=True))
        mean = sum(w * one.waiting for w, one in pairs) / weight
        level = sum(w * one.power for w, one in pairs) / weight
        moment = sum(w * (one.waiting - mean) ** 2 for w, one in pairs)
        if moment < weight * (MIN_SPREAD / 4) ** 2:
            return None
        slope = sum(w * (one.waiting - mean) * (one.power - level) for w, one in pairs) / moment
        return cls(level - slope * mean, slope, weight, mean, moment)

    def weighted(self, windows: Sequence[WaitingWindow]) -> list[tuple[float, float]]:
        """The weight and the residual of each window.

        Deviations are proportional to the power. Tukey's biweight gives no weight to windows of
        other activities.
        """
        least = _LEAST_POWER * median(window.power for window in windows)
        expected = [max(least, self.base + self.slope * window.waiting) for window in windows]
        deviations = [
            (window.power - self.base - self.slope * window.waiting) / power
            for window, power in zip(windows, expected, strict=True)
        ]
        sigma = max(_LEAST_SIGMA, _TO_SIGMA * median(map(abs, deviations)))
        return [
            (_trust(deviation / (_BIWEIGHT * sigma)) / (power * power), deviation * power)
            for deviation, power in zip(deviations, expected, strict=True)
        ]

    def half_width(self, weighted: Sequence[tuple[float, float]]) -> float:
        """Half width of the 95 % interval of the power at a share of one."""
        largest = max(weight for weight, _ in weighted)
        effective = sum(weight for weight, _ in weighted) / largest
        squares = sum(weight * residual * residual for weight, residual in weighted)
        variance = squares / self.weight / max(1.0, effective - 2)
        variance = max(variance, (_LEAST_SIGMA * self.base) ** 2 / effective)
        leverage = 1 + (1 - self.mean) ** 2 * self.weight / self.moment
        return _TWO_SIDED * sqrt(variance * leverage * _inflation(weighted))


def _first_line(windows: Sequence[WaitingWindow], spread: float) -> _WaitingLine:
    """The line by the median of pairwise slopes, of windows with all shares."""
    some = sorted(windows, key=_WAITING)[:: len(windows) // _PAIRED + 1]
    slopes = [
        (other.power - one.power) / (other.waiting - one.waiting)
        for one, other in combinations(some, 2)
        if abs(other.waiting - one.waiting) >= spread / 4
    ]
    slope = median(slopes)
    return _WaitingLine(median(window.power - slope * window.waiting for window in windows), slope)


def _trust(deviation: float) -> float:
    """Tukey's biweight; ``deviation`` is 1 where the weight becomes 0."""
    return (1 - deviation * deviation) ** 2 if abs(deviation) < 1 else 0.0


def _inflation(weighted: Sequence[tuple[float, float]]) -> float:
    """The factor of the variance by the lag-one correlation of the residuals."""
    values = [weight * residual for weight, residual in weighted]
    squares = sum(each * each for each in values)
    product = sum(one * other for one, other in pairwise(values))
    found = min(_MAX_CORRELATION, max(0.0, product / squares)) if squares else 0.0
    return (1 + found) / (1 - found)


class BoardStaticPower:
    """The windows of one board by bins of its SM clock, and their regressions."""

    def __init__(self) -> None:
        self._bins: OrderedDict[int, _ClockBin] = OrderedDict()

    def add(self, clock_hz: int | None, window: WaitingWindow) -> None:
        """Add a window at the mean SM clock ``clock_hz``; None if that is unknown."""
        number = _bin_of(clock_hz)
        if number not in self._bins and len(self._bins) >= MAX_CLOCK_BINS:
            self._bins.popitem(last=False)
        found = self._bins.setdefault(number, _ClockBin())
        self._bins.move_to_end(number)
        found.add(window)

    def fit(self, clock_hz: int | None) -> StaticPowerFit | StaticPowerRefusal:
        """The static power at a clock, by windows of its bin or of a neighbouring one."""
        number, refusal = _bin_of(clock_hz), StaticPowerRefusal.FEW_WINDOWS
        near = sorted(
            (one for one in self._bins if abs(one - number) <= _NEAR_BINS),
            key=lambda one: abs(one - number),
        )
        for place, one in enumerate(near):
            fitted = self._bins[one].fit()
            if isinstance(fitted, StaticPowerFit):
                return fitted
            if not place:
                refusal = fitted
        return refusal


class _ClockBin:
    def __init__(self) -> None:
        self._windows: deque[WaitingWindow] = deque(maxlen=MAX_WINDOWS)
        self._new = MAX_WINDOWS
        self._fit: StaticPowerFit | StaticPowerRefusal = StaticPowerRefusal.FEW_WINDOWS

    def add(self, window: WaitingWindow) -> None:
        self._windows.append(window)
        self._new += 1

    def fit(self) -> StaticPowerFit | StaticPowerRefusal:
        if self._new >= REFIT_EVERY + len(self._windows) // REFIT_PART:
            self._new = 0
            self._fit = fit_static_power(self._windows)
        return self._fit


def _bin_of(clock_hz: int | None) -> int:
    return _UNKNOWN_CLOCK if clock_hz is None else clock_hz // CLOCK_BIN_HZ
