"""Predictions for levels that were not tried, and the choice of the next level.

Log time per work rises with depth as a*x + b*x^2 with non-negative a and b, fitted to all pairs
and corrected by nearby measurements as far as these are more accurate than the fit. Log power
falls in the same way.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wattspan.model import Knob
from wattspan.tuning.decisions.budget import allowance, lost_part
from wattspan.tuning.decisions.sequential_test import half_width
from wattspan.tuning.decisions.state import TunerState
from wattspan.tuning.decisions.values import Objective

_CURVE_MODEL_ERROR = 0.004
"""Deviation of real curves from the parabola, in log time."""


class ResponsePoint(NamedTuple):
    """Measured log ratios of a level, and the variance of the mean of the time."""

    level: int
    time: float
    power: float
    variance: float


@dataclass(frozen=True, slots=True)
class ResponseCurve:
    """Predictions for every level below ``origin``, at which caps have no effect yet."""

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
        if right == 0:  # below every level that was tried
            return values[0]
        low, high = levels[right - 1], levels[right]
        part = (level - low) / (high - low)
        return values[right - 1] + part * (values[right] - values[right - 1])


def fit_curve(points: Sequence[ResponsePoint], origin: float) -> ResponseCurve:
    """The curve through ``points``; those at or above the origin are ignored."""
    used = sorted(point for point in points if point.level < origin)
    depths = [(origin - one.level) / origin for one in used]
    weights = [1 / one.variance for one in used]
    linear, square = _parabola(list(zip(depths, [one.time for one in used], weights, strict=True)))
    falls = [-one.power for one in used]
    power_linear, power_square = _parabola(list(zip(depths, falls, weights, strict=True)))
    bends, power_bends = [], []
    for x, one in zip(depths, used, strict=True):
        weight = _CURVE_MODEL_ERROR**2 / (_CURVE_MODEL_ERROR**2 + one.variance)
        bends.append(weight * (one.time - linear * x - square * x * x))
        power_bends.append(weight * (one.power + power_linear * x + power_square * x * x))
    return ResponseCurve(
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
    if len(terms) == 1:  # half and half: one point cannot determine both
        return max(xy / x2, 0.0) / 2, max(xxy / x4, 0.0) / 2
    determinant = x2 * x4 - x3 * x3
    linear = (xy * x4 - xxy * x3) / determinant
    square = (x2 * xxy - x3 * xy) / determinant
    if linear < 0:
        return 0.0, max(xxy / x4, 0.0)
    if square < 0:
        return max(xy / x2, 0.0), 0.0
    return linear, square


STEP = 0.06
"""Distance of the next screened level, relative to the level."""

_ONE_SIDED_QUANTILE = 2.33  # standard errors: 1 in 100
_PREDICTION_ERROR = 0.006
_FIRST_STEP = 0.12  # assumed slowdown of the first step down, before anything is known


def start_level(state: TunerState) -> int:
    """The first level to screen: just above the power that is rarely exceeded."""
    top = state.top
    draws = sorted(state.estimates.draws)
    if state.policy.knob is not Knob.GPU_CLOCK and draws:
        peak = draws[min(len(draws) * 95 // 100, len(draws) - 1)]
        if 1.03 * peak < (1 - STEP / 2) * top:
            return state.ladder.level(1.03 * peak)
    return state.ladder.level((1 - STEP) * top)


def origin(state: TunerState) -> float:
    """The highest level at which a cap may have an effect."""
    draws = state.estimates.draws
    if state.policy.knob is Knob.GPU_CLOCK or not draws:
        return float(state.top)
    return min(float(state.top), 1.25 * max(draws))


def fitted_curve(state: TunerState) -> ResponseCurve:
    """The curve through all compared levels that are the same for all devices."""
    points = []
    for level, estimate in state.estimates.levels.items():
        if estimate.time.n and state.ladder.base(level) == level:
            deviation = max(estimate.time.deviation, pair_deviation(state))
            points.append(
                ResponsePoint(
                    level, estimate.time.mean, estimate.power.mean, deviation**2 / estimate.time.n
                )
            )
    return fit_curve(points, origin(state))


def free_blocks(state: TunerState) -> int:
    """Blocks at the original setting in a comparison.

    More blocks reduce the noise of single units, but not the effect of drift.
    """
    return 2 if state.estimates.deviation(1.2 / state.policy.block_units) > 0.008 else 1


def comparison_variance(state: TunerState) -> float:
    """Variance of a comparison relative to one unit's: two or three blocks lie on each side."""
    return (1 / free_blocks(state) + 0.2) / state.policy.block_units


def pair_deviation(state: TunerState) -> float:
    """Expected standard deviation of one pair's log ratio."""
    return state.estimates.spread(comparison_variance(state))


def expected_slowdown(
    state: TunerState, level: int, shape: ResponseCurve | None = None
) -> tuple[float, float]:
    """Estimated log ratio of time at ``level``, and its standard error."""
    shape = shape or fitted_curve(state)
    deviation = pair_deviation(state)
    others = sum(one.time.n for at, one in state.estimates.levels.items() if at != level)
    predicted = shape.time(level)
    error2 = 2 * deviation**2 / others + _PREDICTION_ERROR**2 if others else _FIRST_STEP**2
    direct = state.estimates.at(level).time
    if direct.n:
        own = max(direct.deviation, deviation) ** 2 / direct.n
        weight = error2 / (error2 + own)
        return predicted + weight * (direct.mean - predicted), math.sqrt(weight * own)
    return predicted, math.sqrt(error2)


def slowdown_bound(state: TunerState, level: int, shape: ResponseCurve | None = None) -> float:
    """Upper bound of the log ratio of time at ``level``, for a probability of 1 %."""
    if not state.estimates.levels:
        return _FIRST_STEP
    mean, error = expected_slowdown(state, level, shape)
    return max(mean, 0.0) + _ONE_SIDED_QUANTILE * error


def affordable(state: TunerState, level: int, duration: float, share: float) -> bool:
    """True if ``duration`` more nanoseconds at ``level`` stay within ``share`` of the budget."""
    account, budget = state.account, share * state.policy.max_slowdown
    shape = fitted_curve(state)
    lost = account.bound(lambda one: slowdown_bound(state, one, shape))
    lost += duration * lost_part(slowdown_bound(state, level, shape))
    return lost <= allowance(budget, account.elapsed + duration)


def block_time(state: TunerState) -> float:
    """Approximate duration of a block in nanoseconds."""
    unit = state.account.elapsed / max(state.account.units, 1)
    return max(unit * state.policy.block_units, state.policy.block_time)


def objective_value(state: TunerState, time: float, power: float) -> float:
    """Quantity to minimise, as the log of its ratio to the original setting."""
    policy = state.policy
    if policy.objective is Objective.COST and policy.max_power > 0:
        energy, time_power = policy.eta * state.estimates.power, (1 - policy.eta) * policy.max_power
        return math.log(
            (energy * math.exp(time + power) + time_power * math.exp(time)) / (energy + time_power)
        )
    return time + power


def screening_pairs(state: TunerState) -> int:
    """Pairs of a level that suffice for screening."""
    rough = (pair_deviation(state) / (0.3 * state.budget)) ** 2
    return min(max(math.ceil(rough), 1), 3)


def next_level(state: TunerState) -> int | None:
    """The next lower level to screen; None if screening has ended."""
    ladder, level = state.ladder, state.probe_level
    if level <= ladder.bottom:
        return None
    shape = fitted_curve(state)
    slowdown = shape.time(level)
    if slowdown >= 0.9 * state.budget:
        return None
    estimate = state.estimates.at(level)
    upper = [one for at, one in state.estimates.levels.items() if at > level]
    if upper:
        best = min(objective_value(state, one.time.mean, one.power.mean) for one in upper)
        worse = objective_value(state, shape.time(level), estimate.power.mean) - best
        if slowdown > 0.4 * state.budget and worse > 0.01 + pair_deviation(state):
            return None
    step = STEP if slowdown > 0.1 * state.budget or level == state.top else 1.5 * STEP
    down = ladder.level((1 - step) * level)
    while down < level and shape.time(down) > 1.7 * state.budget:
        down += ladder.step
    return down


def certifiable_slowdown(state: TunerState, pairs: float) -> float:
    """The log ratio of time up to which ``pairs`` would probably certify a level."""
    margin = half_width(max(int(pairs), 4), state.error) * pair_deviation(state)
    return state.budget - max(margin, 0.03 * state.budget)


def first_pairs(state: TunerState) -> float:
    """Expected number of pairs for the certification of the first candidate."""
    deviation, n = pair_deviation(state), 14.0
    while n < 24 and half_width(int(n), state.error) * deviation > 0.2 * state.budget:
        n *= 1.2
    return n


def candidate(state: TunerState, target: float, above: int = 0) -> int | None:
    """The best level with a predicted log ratio of at most ``target``, higher than ``above``."""
    shape, ladder = fitted_curve(state), state.ladder
    best, least = None, -0.004  # the smallest saving worth a search
    stride = max(ladder.rungs // 400, 1) * ladder.step
    # Further than one step below the tried levels, the curve may be much steeper.
    tried = min(state.estimates.levels, default=ladder.top)
    lowest = max(ladder.level((1 - STEP) * tried), above + ladder.step)
    for level in range(lowest, ladder.top, stride):
        time = shape.time(level)
        if time <= target:
            worth = objective_value(state, time, shape.power(level))
            if worth < least:
                best, least = level, worth
    return best


def saved_energy(state: TunerState) -> tuple[float, float, float]:
    """Microjoules saved since the job last changed: lower bound, estimate, upper bound."""

    def energy(sign: float, level: int) -> float:
        estimate = state.estimates.at(level)
        if not estimate.time.n or not estimate.power.n:
            return 0.0
        error = 2.0 * math.hypot(
            estimate.time.deviation / math.sqrt(estimate.time.n),
            estimate.power.deviation / math.sqrt(estimate.power.n),
        )
        return estimate.energy + sign * (error if estimate.time.n > 1 else 2 * error)

    low = state.account.saved(lambda level: energy(1.0, level), 0.0)
    likely = state.account.saved(lambda level: energy(0.0, level), 0.5)
    high = state.account.saved(lambda level: energy(-1.0, level), 1.0)
    return min(low, likely), likely, max(likely, high)
