"""How slow and how thrifty levels are that were not tried, from those that were.

Log time rises with depth, the steeper the deeper: a*x + b*x^2 with neither below 0, fitted to
all pairs at once, and bent to what was measured nearby as far as that is surer than the fit.
Log power falls in the same way.

Which level to look at next.
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
"""By how much real curves leave the parabola, in log time."""


class ResponsePoint(NamedTuple):
    """What was measured at a level: log ratios, and the variance of the time's mean."""

    level: int
    time: float
    power: float
    variance: float


@dataclass(frozen=True, slots=True)
class ResponseCurve:
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


def fit_curve(points: Sequence[ResponsePoint], origin: float) -> ResponseCurve:
    """The curve through ``points``; those at the origin or above it say nothing."""
    used = sorted(point for point in points if point.level < origin)
    depths = [(origin - one.level) / origin for one in used]
    weights = [1 / one.variance for one in used]
    linear, square = _parabola(list(zip(depths, [one.time for one in used], weights, strict=True)))
    falls = [-one.power for one in used]
    power_linear, power_square = _parabola(list(zip(depths, falls, weights, strict=True)))
    bends, power_bends = [], []
    for x, one in zip(depths, used, strict=True):
        sure = _CURVE_MODEL_ERROR**2 / (_CURVE_MODEL_ERROR**2 + one.variance)
        bends.append(sure * (one.time - linear * x - square * x * x))
        power_bends.append(sure * (one.power + power_linear * x + power_square * x * x))
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


STEP = 0.06
"""Of a level: how far down the next one is screened."""

_ONE_SIDED_QUANTILE = 2.33  # standard errors: 1 in 100
_PREDICTION_ERROR = 0.006
_FIRST_STEP = 0.12  # what the first step down may cost at worst, before anything is known


def start_level(state: TunerState) -> int:
    """The first level to be screened: just above what is drawn nearly always."""
    top = state.top
    draws = sorted(state.estimates.draws)
    if state.policy.knob is not Knob.GPU_CLOCK and draws:
        peak = draws[min(len(draws) * 95 // 100, len(draws) - 1)]
        if 1.03 * peak < (1 - STEP / 2) * top:
            return state.ladder.level(1.03 * peak)
    return state.ladder.level((1 - STEP) * top)


def origin(state: TunerState) -> float:
    """Where a cap begins to be felt, at the highest."""
    draws = state.estimates.draws
    if state.policy.knob is Knob.GPU_CLOCK or not draws:
        return float(state.top)
    return min(float(state.top), 1.25 * max(draws))


def fitted_curve(state: TunerState) -> ResponseCurve:
    """From all levels that were compared, and are the same for all devices."""
    points = []
    for level, seen in state.estimates.levels.items():
        if seen.time.n and state.ladder.base(level) == level:
            deviation = max(seen.time.deviation, pair_deviation(state))
            points.append(
                ResponsePoint(level, seen.time.mean, seen.power.mean, deviation**2 / seen.time.n)
            )
    return fit_curve(points, origin(state))


def free_blocks(state: TunerState) -> int:
    """For how many blocks the original is held in a comparison.

    Noise of single units is drowned by more of them; what drifts is not.
    """
    return 2 if state.estimates.deviation(1.2 / state.policy.block_units) > 0.008 else 1


def comparison_variance(state: TunerState) -> float:
    """The variance of a comparison, in that of one unit: two or three blocks lie on each side."""
    return (1 / free_blocks(state) + 0.2) / state.policy.block_units


def pair_deviation(state: TunerState) -> float:
    """What one pair's log ratio deviates."""
    return state.estimates.spread(comparison_variance(state))


def expected_slowdown(
    state: TunerState, level: int, shape: ResponseCurve | None = None
) -> tuple[float, float]:
    """What the log ratio of time at ``level`` probably is, and its standard error."""
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
    """What it hardly exceeds."""
    if not state.estimates.levels:
        return _FIRST_STEP
    mean, error = expected_slowdown(state, level, shape)
    return max(mean, 0.0) + _ONE_SIDED_QUANTILE * error


def affordable(state: TunerState, level: int, lasts: float, share: float) -> bool:
    """Whether ``lasts`` more nanoseconds at ``level`` stay within ``share`` of the budget."""
    account, budget = state.account, share * state.policy.max_slowdown
    shape = fitted_curve(state)
    lost = account.bound(lambda one: slowdown_bound(state, one, shape))
    lost += lasts * lost_part(slowdown_bound(state, level, shape))
    return lost <= allowance(budget, account.elapsed + lasts)


def block_time(state: TunerState) -> float:
    """About how long a block lasts, in nanoseconds."""
    unit = state.account.elapsed / max(state.account.units, 1)
    return max(unit * state.policy.block_units, state.policy.block_time)


def objective_value(state: TunerState, time: float, power: float) -> float:
    """What is made small, as the logarithm of a ratio to the original setting."""
    policy = state.policy
    if policy.objective is Objective.COST and policy.max_power > 0:
        energy, lasting = policy.eta * state.estimates.power, (1 - policy.eta) * policy.max_power
        return math.log(
            (energy * math.exp(time + power) + lasting * math.exp(time)) / (energy + lasting)
        )
    return time + power


def screening_pairs(state: TunerState) -> int:
    """How many pairs tell enough of a level on the way down."""
    rough = (pair_deviation(state) / (0.3 * state.budget)) ** 2
    return min(max(math.ceil(rough), 1), 3)


def next_level(state: TunerState) -> int | None:
    """The next one down, or None if what was seen suffices or there is none."""
    ladder, level = state.ladder, state.probe_level
    if level <= ladder.bottom:
        return None
    shape = fitted_curve(state)
    here = shape.time(level)
    if here >= 0.9 * state.budget:
        return None
    seen = state.estimates.at(level)
    upper = [one for at, one in state.estimates.levels.items() if at > level]
    if upper:
        best = min(objective_value(state, one.time.mean, one.power.mean) for one in upper)
        worse = objective_value(state, shape.time(level), seen.power.mean) - best
        if here > 0.4 * state.budget and worse > 0.01 + pair_deviation(state):
            return None
    step = STEP if here > 0.1 * state.budget or level == state.top else 1.5 * STEP
    down = ladder.level((1 - step) * level)
    while down < level and shape.time(down) > 1.7 * state.budget:
        down += ladder.step
    return down


def certifiable_slowdown(state: TunerState, pairs: float) -> float:
    """The log ratio at which so many pairs would probably certify a level."""
    margin = half_width(max(int(pairs), 4), state.error) * pair_deviation(state)
    return state.budget - max(margin, 0.03 * state.budget)


def first_pairs(state: TunerState) -> float:
    """How many pairs the first candidate is worth."""
    deviation, n = pair_deviation(state), 14.0
    while n < 24 and half_width(int(n), state.error) * deviation > 0.2 * state.budget:
        n *= 1.2
    return n


def candidate(state: TunerState, aim: float, above: int = 0) -> int | None:
    """The best level that is predicted to be no slower than ``aim``, and higher than ``above``."""
    shape, ladder = fitted_curve(state), state.ladder
    best, least = None, -0.004  # less is no saving
    stride = max(ladder.rungs // 400, 1) * ladder.step
    # What lies further below all that was tried than one step is a guess, and may be a cliff.
    tried = min(state.estimates.levels, default=ladder.top)
    lowest = max(ladder.level((1 - STEP) * tried), above + ladder.step)
    for level in range(lowest, ladder.top, stride):
        time = shape.time(level)
        if time <= aim:
            worth = objective_value(state, time, shape.power(level))
            if worth < least:
                best, least = level, worth
    return best
