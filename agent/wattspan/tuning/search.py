"""Which level to look at next."""

from __future__ import annotations

import math

from wattspan.model import Knob
from wattspan.tuning.curve import Curve, Point, fit
from wattspan.tuning.sequence import half_width
from wattspan.tuning.spending import allowance, lost_part
from wattspan.tuning.state import State
from wattspan.tuning.values import Objective

STEP = 0.06
"""Of a level: how far down the next one is screened."""

_SURE = 2.33  # standard errors: 1 in 100
_MODEL = 0.006
_FIRST = 0.12  # what the first step down may cost at worst, before anything is known


def start_level(state: State) -> int:
    """The first level to be screened: just above what is drawn nearly always."""
    top = state.top
    draws = sorted(state.known.draws)
    if state.policy.knob is not Knob.GPU_CLOCK and draws:
        peak = draws[min(len(draws) * 95 // 100, len(draws) - 1)]
        if 1.03 * peak < (1 - STEP / 2) * top:
            return state.ladder.level(1.03 * peak)
    return state.ladder.level((1 - STEP) * top)


def origin(state: State) -> float:
    """Where a cap begins to be felt, at the highest."""
    draws = state.known.draws
    if state.policy.knob is Knob.GPU_CLOCK or not draws:
        return float(state.top)
    return min(float(state.top), 1.25 * max(draws))


def curve(state: State) -> Curve:
    """From all levels that were compared, and are the same for all devices."""
    points = []
    for level, seen in state.known.levels.items():
        if seen.time.n and state.ladder.base(level) == level:
            deviation = max(seen.time.deviation, pair_deviation(state))
            points.append(Point(level, seen.time.mean, seen.power.mean, deviation**2 / seen.time.n))
    return fit(points, origin(state))


def free_blocks(state: State) -> int:
    """For how many blocks the original is held in a comparison.

    Noise of single units is drowned by more of them; what drifts is not.
    """
    return 2 if state.known.deviation(1.2 / state.policy.block_units) > 0.008 else 1


def weight(state: State) -> float:
    """The variance of a comparison, in that of one unit: two or three blocks lie on each side."""
    return (1 / free_blocks(state) + 0.2) / state.policy.block_units


def pair_deviation(state: State) -> float:
    """What one pair's log ratio deviates."""
    return state.known.spread(weight(state))


def expected(state: State, level: int, shape: Curve | None = None) -> tuple[float, float]:
    """What the log ratio of time at ``level`` probably is, and its standard error."""
    shape = shape or curve(state)
    deviation = pair_deviation(state)
    others = sum(one.time.n for at, one in state.known.levels.items() if at != level)
    predicted = shape.time(level)
    error2 = 2 * deviation**2 / others + _MODEL**2 if others else _FIRST**2
    direct = state.known.at(level).time
    if direct.n:
        own = max(direct.deviation, deviation) ** 2 / direct.n
        weight = error2 / (error2 + own)
        return predicted + weight * (direct.mean - predicted), math.sqrt(weight * own)
    return predicted, math.sqrt(error2)


def worst(state: State, level: int, shape: Curve | None = None) -> float:
    """What it hardly exceeds."""
    if not state.known.levels:
        return _FIRST
    mean, error = expected(state, level, shape)
    return max(mean, 0.0) + _SURE * error


def affordable(state: State, level: int, lasts: float, share: float) -> bool:
    """Whether ``lasts`` more nanoseconds at ``level`` stay within ``share`` of the budget."""
    spending, budget = state.spending, share * state.policy.max_slowdown
    shape = curve(state)
    lost = spending.bound(lambda one: worst(state, one, shape))
    lost += lasts * lost_part(worst(state, level, shape))
    return lost <= allowance(budget, spending.elapsed + lasts)


def block_time(state: State) -> float:
    """About how long a block lasts, in nanoseconds."""
    unit = state.spending.elapsed / max(state.spending.units, 1)
    return max(unit * state.policy.block_units, state.policy.block_time)


def value(state: State, time: float, power: float) -> float:
    """What is made small, as the logarithm of a ratio to the original setting."""
    policy = state.policy
    if policy.objective is Objective.COST and policy.max_power > 0:
        energy, lasting = policy.eta * state.known.power, (1 - policy.eta) * policy.max_power
        return math.log(
            (energy * math.exp(time + power) + lasting * math.exp(time)) / (energy + lasting)
        )
    return time + power


def screening_pairs(state: State) -> int:
    """How many pairs tell enough of a level on the way down."""
    rough = (pair_deviation(state) / (0.3 * state.budget)) ** 2
    return min(max(math.ceil(rough), 1), 3)


def next_level(state: State) -> int | None:
    """The next one down, or None if what was seen suffices or there is none."""
    ladder, level = state.ladder, state.probe
    if level <= ladder.bottom:
        return None
    shape = curve(state)
    here = shape.time(level)
    if here >= 0.9 * state.budget:
        return None
    seen = state.known.at(level)
    upper = [one for at, one in state.known.levels.items() if at > level]
    if upper:
        best = min(value(state, one.time.mean, one.power.mean) for one in upper)
        worse = value(state, shape.time(level), seen.power.mean) - best
        if here > 0.4 * state.budget and worse > 0.01 + pair_deviation(state):
            return None
    step = STEP if here > 0.1 * state.budget or level == state.top else 1.5 * STEP
    down = ladder.level((1 - step) * level)
    while down < level and shape.time(down) > 1.7 * state.budget:
        down += ladder.step
    return down


def target(state: State, pairs: float) -> float:
    """The log ratio at which so many pairs would probably certify a level."""
    margin = half_width(max(int(pairs), 4), state.error) * pair_deviation(state)
    return state.budget - max(margin, 0.03 * state.budget)


def first_pairs(state: State) -> float:
    """How many pairs the first candidate is worth."""
    deviation, n = pair_deviation(state), 14.0
    while n < 24 and half_width(int(n), state.error) * deviation > 0.2 * state.budget:
        n *= 1.2
    return n


def candidate(state: State, aim: float, above: int = 0) -> int | None:
    """The best level that is predicted to be no slower than ``aim``, and higher than ``above``."""
    shape, ladder = curve(state), state.ladder
    best, least = None, -0.004  # less is no saving
    stride = max(ladder.rungs // 400, 1) * ladder.step
    # What lies further below all that was tried than one step is a guess, and may be a cliff.
    tried = min(state.known.levels, default=ladder.top)
    lowest = max(ladder.level((1 - STEP) * tried), above + ladder.step)
    for level in range(lowest, ladder.top, stride):
        time = shape.time(level)
        if time <= aim:
            worth = value(state, time, shape.power(level))
            if worth < least:
                best, least = level, worth
    return best
