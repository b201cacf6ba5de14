"""State of a search, and the choice of its next level."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from wattspan.model import Decision, DecisionReason, Knob, ModelEnum, Nanoseconds
from wattspan.tuning.decisions.blocks import CapLatency, SampleBuffer, meter_error
from wattspan.tuning.decisions.budget import LevelUse, SlowdownAccount, allowance, lost_part
from wattspan.tuning.decisions.estimates import (
    MAX_REACH,
    POWER_CAP_PRIOR,
    Estimates,
    Pairing,
    ResponseCurve,
    ResponsePoint,
    fit_curve,
)
from wattspan.tuning.decisions.ranks import Lockstep, RankSlack
from wattspan.tuning.decisions.sequential_test import Cusum, LevelShift, MissAlarm, half_width
from wattspan.tuning.decisions.serving import ServingComparison
from wattspan.tuning.decisions.values import LevelLadder, Objective, TunerPolicy, WorkUnit

MAX_CANDIDATES = 3
"""Candidates that may fail before the search ends; they share the error probability.

A certified candidate costs no error: lower ones are tried only after it, in a fixed order."""

MIN_BASELINE_BLOCKS = 4
"""Blocks of the original setting that determine its noise."""


class TunerPhase(ModelEnum):
    LEARN = "learn"  # the original setting: its noise and power
    SCREEN = "screen"  # lower levels in steps
    PROVE = "prove"  # one candidate against the original
    HOLD = "hold"
    REST = "rest"  # the original setting, until a time
    ENDED = "ended"


class ProbePlan(NamedTuple):
    """A requested level, and its number of blocks."""

    level: int
    blocks: int


class SearchProgress(NamedTuple):
    """The course of a search, which the leader determines for every tenant."""

    ladder: LevelLadder
    plan: ProbePlan
    phase: TunerPhase = TunerPhase.LEARN
    previous_level: int = 0  # requested before the present one
    requested_at: int = 0
    probe_level: int = 0  # that is screened
    wanted_pairs: int = 0  # of it before the next decision
    candidate: int | None = None
    recertifying: bool = False  # the candidate was certified once
    failed_candidates: int = 0  # since the job last changed
    refinements: int = 0  # lower levels that were tried after a certification
    certified: int | None = None
    resume_level: int | None = None  # certified once, to be certified first
    retries: int = 0
    rest_until: int = 0
    releases: tuple[int, ...] = ()


class LevelEvidence(NamedTuple):
    """Results of comparisons beside the estimates; they are invalid after the job has changed."""

    pairing: Pairing = Pairing()
    cusum: Cusum = Cusum()
    level_shift: LevelShift = LevelShift()
    judged_pairs: int = 0  # pairs of the candidate at its last judgement
    refined_pairs: int = 0  # pairs of the certified level when a lower one was last considered
    slack: RankSlack = RankSlack()
    serving: Mapping[int, ServingComparison] = MappingProxyType({})  # of requests, by level
    unmatched: int = 0  # comparisons in a row with different loads
    miss_alarm: MissAlarm | None = None


class TunerState(NamedTuple):
    """Immutable state of one knob of one job."""

    policy: TunerPolicy
    search: SearchProgress
    samples: SampleBuffer
    decision: Decision
    begun: int
    evidence: LevelEvidence = LevelEvidence()
    estimates: Estimates = Estimates()
    account: SlowdownAccount = SlowdownAccount()
    latency: CapLatency = CapLatency()
    last_unit_end: int = 0
    lockstep: Lockstep | None = None  # of several ranks
    latencies: tuple[WorkUnit, ...] = ()  # of requests, until the latency limit is known
    latency_limit: int | None = None
    tenants: tuple[TunerState, ...] = ()  # of other jobs on the same devices
    committed: Nanoseconds | None = None
    random_state: int = 1

    def searching(self, **changes: Any) -> TunerState:
        """The state with other values in its ``search``."""
        return self._replace(search=self.search._replace(**changes))

    def knowing(self, **changes: Any) -> TunerState:
        """The state with other values in its ``evidence``."""
        return self._replace(evidence=self.evidence._replace(**changes))

    @property
    def ladder(self) -> LevelLadder:
        return self.search.ladder

    @property
    def phase(self) -> TunerPhase:
        return self.search.phase

    @property
    def level(self) -> int:
        """The requested level."""
        return self.search.plan.level

    @property
    def suspicious(self) -> bool:
        """True if the next comparison should be early."""
        return self.evidence.cusum.suspicious or self.evidence.level_shift.suspected

    @property
    def top(self) -> int:
        return self.ladder.top

    @property
    def budget(self) -> float:
        """The slowdown budget as a log ratio of the time per work.

        For the objective of time it is a slowdown that can hardly be measured.
        """
        budget = self.policy.max_slowdown
        if self.policy.objective is Objective.TIME:
            budget = min(budget, 0.005)
        return math.log1p(budget)

    @property
    def error(self) -> float:
        """The error probability of one candidate; it falls with each search without result.

        All searches in a row have at most that of the policy, because the sum of 1/n**2 is pi**2/6.
        """
        searches = (math.pi * (1 + self.search.retries)) ** 2 / 6
        return (1 - self.policy.confidence) / MAX_CANDIDATES / searches

    @property
    def chosen(self) -> int:
        """The candidate, or the top while there is none."""
        return self.top if self.search.candidate is None else self.search.candidate

    @property
    def exploring(self) -> bool:
        """True if it needs permission to explore."""
        learned = self.estimates.blocks >= MIN_BASELINE_BLOCKS
        searches = self.phase in (TunerPhase.SCREEN, TunerPhase.PROVE)
        return searches or (self.phase is TunerPhase.LEARN and learned)

    @property
    def held(self) -> int | None:
        """The level that is certified or held now."""
        judged = self.phase in (TunerPhase.PROVE, TunerPhase.HOLD)
        return self.search.candidate if judged else None


def random_choice(state: TunerState, sides: int) -> tuple[TunerState, int]:
    """A random number from 0 to ``sides`` - 1, and the next state (xorshift32)."""
    number = state.random_state
    number ^= (number << 13) & 0xFFFFFFFF
    number ^= number >> 17
    number ^= (number << 5) & 0xFFFFFFFF
    return state._replace(random_state=number), number % sides


# ------------------------------------------------------------------------------ next level

_MAX_JUMP = 0.12
"""Distance of the next level where the curve is known from its prior and the first levels."""

STEP = 0.06
"""Distance of the next screened level, relative to the level."""

_ONE_SIDED_QUANTILE = 2.33  # standard errors: 1 in 100
_PREDICTION_ERROR = 0.006
_MAX_SCREENING_PAIRS = 6
_SMALL_NOISE = 0.008  # standard deviation of a comparison of one block
_CAUTION = 0.4
"""Standard errors of a predicted slowdown that are added for the first candidate."""

_FIRST_AIM = 0.7
"""Expected slowdown of the first level, relative to the budget."""

_MAX_FIRST_DEPTH = 0.25  # of the first level below the origin
_FIRST_STEP = 0.12  # assumed slowdown of the first step down, before anything is known

_MIN_DRAWS = 8  # powers of the uncapped job from which its highest one is known

_BEFORE_CERTIFICATION = frozenset(
    {DecisionReason.NOT_BINDING, DecisionReason.INERT, DecisionReason.NO_ROOM}
)
"""Reasons that end a search before its first certification."""


def start_level(state: TunerState) -> int:
    """The first level to screen.

    For power caps of GPUs it is the one with the usual slowdown of a first candidate, by published
    curves. For other knobs it is just above the power that is rarely exceeded.
    """
    top, ladder = state.top, state.ladder
    if state.policy.knob is Knob.GPU_POWER:
        shape, level = fitted_curve(state), ladder.level((1 - STEP / 2) * origin(state))
        lowest = ladder.level((1 - _MAX_FIRST_DEPTH) * origin(state))
        while level > lowest and shape.time(level) < _FIRST_AIM * state.budget:
            level -= ladder.step
        return min(level, ladder.level((1 - STEP / 2) * top))
    draws = sorted(state.estimates.draws)
    if state.policy.knob is not Knob.GPU_CLOCK and draws:
        peak = draws[min(len(draws) * 95 // 100, len(draws) - 1)]
        if 1.03 * peak < (1 - STEP / 2) * top:
            return ladder.level(1.03 * peak)
    return ladder.level((1 - STEP) * top)


def origin(state: TunerState) -> float:
    """The highest level at which a cap may have an effect."""
    draws = state.estimates.draws
    if state.policy.knob is Knob.GPU_CLOCK or not draws:
        return float(state.top)
    return min(float(state.top), 1.15 * max(draws))


def cap_binds(state: TunerState) -> bool:
    """False if no permitted cap can have an effect, because the job certainly draws less.

    True while its power is hardly known, and for clocks, which always have an effect on work that
    they limit.
    """
    unknown = len(state.estimates.draws) < _MIN_DRAWS or state.policy.knob is Knob.GPU_CLOCK
    return unknown or origin(state) > state.ladder.bottom


def searches_without_result(state: TunerState) -> int:
    """Searches in a row that have spent error probability on candidates and certified none."""
    unspent = state.search.retries > 0 and state.decision.reason in _BEFORE_CERTIFICATION
    return state.search.retries - unspent


def fitted_curve(state: TunerState) -> ResponseCurve:
    """The curve through all compared levels that are the same for all devices."""
    points = []
    levels = state.estimates.levels
    least, meter = pair_deviation(state), meter_error(block_time(state)) if levels else 0.0
    for level, estimate in levels.items():
        if estimate.time.n and state.ladder.base(level) == level:
            time, power = estimate.time, estimate.power
            deviation = max(time.deviation, least)
            of_power = (max(power.deviation, deviation) ** 2 + 1.5 * meter**2) / max(power.n, 1)
            variances = deviation**2 / time.n, of_power
            points.append(ResponsePoint(level, time.mean, power.mean, *variances))
    prior = POWER_CAP_PRIOR if state.policy.knob is Knob.GPU_POWER else None
    return fit_curve(points, origin(state), prior)


def drift_dominates(state: TunerState) -> bool:
    """True if units differ so little that comparisons of more units gain little."""
    return state.estimates.deviation(0.6 / state.policy.block_units) <= _SMALL_NOISE


def comparison_blocks(state: TunerState) -> tuple[int, int]:
    """Blocks of a comparison: at the original setting, and on each side of it under the cap.

    A search alternates quickly: many short comparisons are better than few long ones, because
    drift is smaller between neighbours. The first certification should be early: twice as much
    work under the cap as at the original takes an eighth more units than equal parts, and saves
    meanwhile. While a certified level is improved, only the time at the original matters. Where
    settling takes longer than a block, more blocks cost little time.
    """
    short = block_time(state) < state.policy.settle_time
    if state.search.certified is None:
        return 1, 2 if short else 1
    if short:
        return 3, MAX_REACH
    return 1, 2 if drift_dominates(state) else 4


def free_blocks(state: TunerState) -> int:
    """Blocks at the original setting in the next comparison.

    A held setting is rarely compared, so that the comparison is longer where units differ.
    """
    free = comparison_blocks(state)[0]
    if state.phase is not TunerPhase.HOLD:
        return free
    deviation = state.estimates.deviation(0.6 / state.policy.block_units)
    return max(free, 1 if deviation <= _SMALL_NOISE else 2 if deviation <= 2 * _SMALL_NOISE else 4)


def reach(state: TunerState) -> int:
    """Capped blocks on each side of the next comparison."""
    if state.phase is TunerPhase.SCREEN:
        return 1
    if state.phase is TunerPhase.HOLD:
        return 2 if drift_dominates(state) else 6
    return comparison_blocks(state)[1]


def comparison_variance(state: TunerState) -> float:
    """Variance of a comparison during a search relative to one unit's."""
    free, side = comparison_blocks(state)
    return (1 / free + 0.5 / side) / state.policy.block_units


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


def unit_time(state: TunerState) -> float:
    """Mean duration of a unit in nanoseconds."""
    return state.account.elapsed / max(state.account.units, 1)


def block_time(state: TunerState) -> float:
    """Approximate duration of a block in nanoseconds."""
    return max(unit_time(state) * state.policy.block_units, state.policy.block_time)


def objective_value(state: TunerState, time: float, power: float) -> float:
    """Quantity to minimise, as the log of its ratio to the original setting."""
    return objective(state)(time, power)


def objective(state: TunerState) -> Callable[[float, float], float]:
    """As :func:`objective_value`, for many pairs of log ratios of time and power."""
    policy = state.policy
    if policy.objective is not Objective.COST or policy.max_power <= 0:
        return operator.add
    energy, time_power = policy.eta * state.estimates.power, (1 - policy.eta) * policy.max_power

    def cost(time: float, power: float) -> float:
        return math.log(
            (energy * math.exp(time + power) + time_power * math.exp(time)) / (energy + time_power)
        )

    return cost


def screening_pairs(state: TunerState) -> int:
    """Pairs of a level that suffice for screening."""
    rough = (pair_deviation(state) / (0.3 * state.budget)) ** 2
    return min(max(math.ceil(rough), 1), _MAX_SCREENING_PAIRS)


def next_level(state: TunerState) -> int | None:
    """The next lower level to screen; None if screening has ended."""
    ladder, level = state.ladder, state.search.probe_level
    if level <= ladder.bottom:
        return None
    power_cap = state.policy.knob is Knob.GPU_POWER
    last, most = (0.65, 0.8) if power_cap else (0.9, 1.7)
    shape = fitted_curve(state)
    slowdown = shape.time(level)
    if slowdown >= last * state.budget:
        return None
    estimate = state.estimates.at(level)
    upper = [one for at, one in state.estimates.levels.items() if at > level]
    if upper:
        best = min(objective_value(state, one.time.mean, one.power.mean) for one in upper)
        worse = objective_value(state, slowdown, estimate.power.mean) - best
        if slowdown > 0.4 * state.budget and worse > 0.01 + pair_deviation(state):
            return None
    step = STEP if slowdown > 0.1 * state.budget or level == state.top else 1.5 * STEP
    down = ladder.level((1 - (_MAX_JUMP if power_cap else step)) * level)
    while down < level and shape.time(down) > most * state.budget:
        down += ladder.step
    return down if down < level else None


def certifiable_slowdown(state: TunerState, pairs: float) -> float:
    """The log ratio of time up to which ``pairs`` would probably certify a level."""
    margin = half_width(max(int(pairs), 4), state.error) * pair_deviation(state)
    return state.budget - max(margin, 0.05 * state.budget)


def first_pairs(state: TunerState) -> float:
    """Expected number of pairs for the certification of the first candidate."""
    deviation, n = pair_deviation(state), 14.0
    while n < 60 and half_width(int(n), state.error) * deviation > 0.28 * state.budget:
        n *= 1.2
    return n


def candidate(
    state: TunerState, target: float, above: int = 0, shape: ResponseCurve | None = None
) -> int | None:
    """The best level with a predicted log ratio of at most ``target``, higher than ``above``."""
    shape, ladder, value = shape or fitted_curve(state), state.ladder, objective(state)
    caution = _CAUTION if state.search.certified is None else 0.0
    best, least = None, -0.004  # the smallest saving worth a search
    stride = max(ladder.rungs // 400, 1) * ladder.step
    # Further than one step below the tried levels, the curve may be much steeper.
    tried = min(state.estimates.levels, default=ladder.top)
    lowest = max(ladder.level((1 - STEP) * tried), above + ladder.step)
    for level, time, power in shape.predictions(range(lowest, ladder.top, stride)):
        if time + (caution and caution * shape.time_error(level)) <= target:
            worth = value(time, power)
            if worth < least:
                best, least = level, worth
    return best


def closed_account(state: TunerState) -> SlowdownAccount:
    """The slowdown account with its present estimates as final figures."""
    shape = fitted_curve(state)
    return state.account.close(
        lambda level: expected_slowdown(state, level, shape)[0],
        lambda level: slowdown_bound(state, level, shape),
        saved_energy(state),
    )


def saved_energy(state: TunerState) -> tuple[float, float, float]:
    """Microjoules saved since the job last changed: lower bound, estimate, upper bound.

    The lower bound contains only energy between comparisons. Half of the saving is assumed while a
    setting settles, all of it in the upper bound.
    """
    low = likely = high = 0.0
    shape = fitted_curve(state)
    for level, use in state.account.levels.items():
        if use.metered:
            energy, error = _compared_energy(state, level, use, shape)
            settling = max(use.time - use.metered, 0) / use.metered
            low += use.compared.energy * math.expm1(-energy - error)
            likely += use.energy * (1 + settling / 2) * math.expm1(-energy)
            high += use.energy * (1 + settling) * math.expm1(-energy + error)
    return min(low, likely), likely, max(likely, high)


def _compared_energy(
    state: TunerState, level: int, use: LevelUse, shape: ResponseCurve
) -> tuple[float, float]:
    """The log ratio of the energy per work at ``level``, and its error: two standard errors.

    The effect on power is that of the comparisons around the energy. For the time, whose noise is
    larger, it is in the middle between that and the mean of all comparisons. A level without
    comparison has the energy of the curve.
    """
    estimate, compared = state.estimates.at(level), use.compared
    time, power = estimate.time, estimate.power
    if not power.n or not compared.energy:
        slower, error = expected_slowdown(state, level, shape)
        return slower + shape.power(level), 3.0 * error
    error = 2.0 * math.hypot(
        time.deviation / math.sqrt(time.n), power.deviation / math.sqrt(compared.comparisons)
    )
    error = (error if time.n > 1 else 2 * error) + abs(compared.time - time.mean) / 2
    return (compared.time + time.mean) / 2 + compared.power, error
