"""The state of a pipeline's session, and the requests for clocks and plans that change it."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import fmean, stdev
from typing import NamedTuple

from wattspan.model import DecisionReason, Move
from wattspan.tuning.decisions.budget import SlowdownAccount, allowance
from wattspan.tuning.decisions.sequential_test import Evidence, evidence
from wattspan.tuning.pipeline.costs import WARM_UP_ITERATIONS
from wattspan.tuning.pipeline.dag import BadPipelineError, PipelineDag
from wattspan.tuning.pipeline.frontier import PipelineModel
from wattspan.tuning.pipeline.iterations import (
    VERIFIED_ITERATIONS,
    PipelineIteration,
    StragglerWatch,
)
from wattspan.tuning.pipeline.online_profile import OnlineProfile
from wattspan.tuning.pipeline.plan import ClockPlan, RankClocks

DEVIATIONS = 2.0
"""Standard errors that are added to estimates where an error must not pass unnoticed."""

MODEL_ERROR = 0.0015
"""Standard deviation of the error of a predicted slowdown.

The first plans of 25 simulated pipelines had 0.0006, but single ones 0.002, and those of two runs
of the A40 profile 0.0015.
"""

RESUME_PART = 0.95
"""The part of the allowance below which lower clocks are held again after it was used up."""

_PART_BESIDE_EXPLORER = 0.5

_LEVELS = 24
"""Number of profiled clocks between the original clock and 0 MHz."""

_LEAST_NOISE = 0.001

_MAX_PAIRS = 200
"""Comparisons that are kept, the latest ones."""

ORIGINAL_RUN = 2
"""Iterations of a run at the original clocks."""

_PLAN_RUN = 8
_MAX_DOUBLINGS = 4


class PipelinePhase(Enum):
    """The stage of a session."""

    OBSERVE = "observe"
    PROFILE = "profile"
    HOLD = "hold"
    STRAGGLE = "straggle"
    DECLINED = "declined"


_ORIGINAL_SENTENCES = {
    DecisionReason.BASELINE: "The ranks have the original clocks until the slowdown budget permits"
    " to measure lower ones.",
    DecisionReason.SENTINEL: "The original clocks are measured, for the comparison with a plan.",
    DecisionReason.OVER_BUDGET: "The run has used up its slowdown budget: the ranks have the"
    " original clocks until it permits the plan again.",
}


@dataclass(frozen=True, slots=True)
class PipelinePolicy:
    """Requirements of the operator, and the clocks in MHz that every rank's device permits.

    ``blocking_watts`` is None if the power of waiting is fitted. ``pipelines`` is the number of
    data-parallel pipelines of the job, which share its budget. ``lag`` are the nanoseconds for
    which clocks may stay in force after an iteration that decides for others.
    """

    original: int
    floor: int
    step: int = 15
    max_slowdown: float = 0.05
    confidence: float = 0.95
    blocking_watts: float | None = None
    pipelines: int = 1
    lag: int = 0

    @property
    def clocks(self) -> tuple[int, ...]:
        """The original clock and those of probes, from the highest."""
        levels = (self.original * number / _LEVELS for number in range(_LEVELS - 1, 0, -1))
        rounded = dict.fromkeys(round(mhz / self.step) * self.step for mhz in levels)
        probed = (mhz for mhz in rounded if self.floor <= mhz < self.original)
        return (self.original, *probed)


class PlanTask(NamedTuple):
    """A search for the clocks of an iteration that is longer by ``slowdown`` at most.

    ``wait`` is the straggler's iteration relative to the original one; 0 without a straggler.
    ``error`` is the expected error of predicted slowdowns, which ``slowdown`` allows for.
    """

    model: PipelineModel
    slowdown: float
    wait: float = 0.0
    error: float = 0.0

    def slowdown_of(self, clocks: Sequence[int]) -> float:
        """The predicted slowdown of these clocks; BadPipelineError if one is not profiled."""
        search = RankClocks(self.model)
        return search.evaluated(clocks).seconds / search.fastest.seconds - 1

    def solved(self) -> ClockPlan | None:
        """The plan; None if there is none that saves energy. Takes up to seconds."""
        fastest = RankClocks(self.model).fastest.seconds
        search = RankClocks(self.model, self.wait * fastest)
        try:
            plan = search.best(fastest * (1 + self.slowdown))
        except BadPipelineError:
            return None
        return plan if plan.joules < search.fastest.joules else None


class JobLoss(NamedTuple):
    """Nanoseconds that all data-parallel pipelines of a job have lost, and their upper bound."""

    lost: float = 0.0
    bound: float = 0.0

    def plus(self, other: JobLoss) -> JobLoss:
        return JobLoss(self.lost + other.lost, self.bound + other.bound)


def plan_run(comparisons: int) -> int:
    """The iterations of the next run at a plan, after so many comparisons."""
    return _PLAN_RUN << min(comparisons, _MAX_DOUBLINGS)


class IterationRun(NamedTuple):
    """Consecutive iterations at the same clocks: sums of the logarithms of time and energy."""

    iterations: int = 0
    time: float = 0.0
    metered: int = 0
    energy: float = 0.0

    def add(self, seconds: float, watts: float | None) -> IterationRun:
        run = self._replace(iterations=self.iterations + 1, time=self.time + math.log(seconds))
        if watts is None or watts <= 0:
            return run
        energy = self.energy + math.log(watts * seconds)
        return run._replace(metered=self.metered + 1, energy=energy)

    def plus(self, other: IterationRun) -> IterationRun:
        return IterationRun(*map(operator.add, self, other))


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """The log ratios of one plan's time and energy per iteration to those of the original clocks.

    ``before`` and ``held`` are runs that wait for the run at the original clocks after them.
    """

    times: tuple[float, ...] = ()
    energies: tuple[float, ...] = ()
    before: IterationRun = field(default_factory=IterationRun)
    held: IterationRun = field(default_factory=IterationRun)

    def hold(self, run: IterationRun) -> PlanComparison:
        """Add a run at the plan."""
        return replace(self, held=run)

    def compare(self, after: IterationRun) -> PlanComparison:
        """Add a run at the original clocks, which completes a comparison if it is not the first."""
        before, held = self.before, self.held
        if not (before.iterations and held.iterations):
            return PlanComparison(self.times, self.energies, after)
        around = before.plus(after)
        times = (
            *self.times[1 - _MAX_PAIRS :],
            held.time / held.iterations - around.time / around.iterations,
        )
        energies = self.energies
        if held.metered and around.metered:
            saved = held.energy / held.metered - around.energy / around.metered
            energies = (*energies[1 - _MAX_PAIRS :], saved)
        return PlanComparison(times, energies, after)

    def drifted(self, after: IterationRun) -> float:
        """The log ratio of the times of both runs at the original clocks; 0 without the first."""
        if not self.before.iterations:
            return 0.0
        return after.time / after.iterations - self.before.time / self.before.iterations

    def slower(self, noise: float) -> Evidence:
        """The log ratio of the time, for iterations with this coefficient of variation."""
        return _evidence(self.times, noise)

    def energy(self, noise: float) -> Evidence:
        """The log ratio of the energy; of no comparisons, if no energy was measured."""
        return _evidence(self.energies, noise)


def _evidence(values: tuple[float, ...], noise: float) -> Evidence:
    return evidence(values, noise * math.sqrt(1 / _PLAN_RUN + 1 / (2 * ORIGINAL_RUN)))


class PipelineDecision(NamedTuple):
    """As ``Decision``, with the clock of each rank in MHz; none for the original clocks."""

    move: Move
    reason: DecisionReason
    sentence: str
    clocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PipelineState:
    """The state of a session.

    ``settings`` are all clocks that were requested; their numbers from 1 are the levels of
    ``account``, and level 0 has the original clocks. ``slower`` has the estimated log ratio of each
    level's time, ``baseline`` the logarithms of recent iteration times at the original clocks.
    ``level`` was requested last, ``previous`` before; ``run`` are the iterations since it is in
    force. ``plan`` is the level of the plan, 0 before there is one, and ``predicted`` its log
    ratio of time by the profile. ``task`` is a search that the caller makes and answers by
    ``use_plan``. ``straggler`` are the seconds of the other pipeline's iteration,
    ``straggler_plan`` is the level of the plan for it, 0 while lower clocks are measured for it.
    ``charged`` is the level that the latest iteration was charged to, ``job`` the loss of the whole
    job on this host, whose other pipelines may lose more, ``elsewhere`` what pipelines on other
    hosts have lost more. ``explorer`` is the other host that measures lower clocks for the job now,
    "" if there is none, and ``may_explore`` is False if this one must not. ``partner`` is the
    straggler on another host, and ``usual`` are the seconds of an iteration before there were
    clocks for it. Iterations that became longer with these have ``refuted`` partners so often;
    none is used before the iteration ``partners_from``.
    """

    policy: PipelinePolicy
    decision: PipelineDecision
    phase: PipelinePhase = PipelinePhase.OBSERVE
    seen: tuple[PipelineIteration, ...] = ()
    skipped: int = 0
    retries: int = 0
    dag: PipelineDag | None = None
    first: int = 0
    profile: OnlineProfile = field(default_factory=OnlineProfile)
    settings: tuple[tuple[int, ...], ...] = ()
    slower: Mapping[int, Evidence] = field(default_factory=dict)
    account: SlowdownAccount = field(default_factory=SlowdownAccount)
    level: int = 0
    previous: int = 0
    baseline: tuple[float, ...] = ()
    run: IterationRun = field(default_factory=IterationRun)
    task: PlanTask | None = None
    plan: int = 0
    predicted: float = 0.0
    comparison: PlanComparison = field(default_factory=PlanComparison)
    compared: int = 0
    watch: StragglerWatch = field(default_factory=StragglerWatch)
    straggler: float = 0.0
    straggler_plan: int = 0
    charged: int = 0
    job: JobLoss = field(default_factory=JobLoss)
    elsewhere: JobLoss = field(default_factory=JobLoss)
    explorer: str = ""
    may_explore: bool = True
    partner: str = ""
    usual: float = 0.0
    refuted: int = 0
    partners_from: int = 0

    @property
    def original(self) -> tuple[int, ...]:
        """The original clocks by rank; none before the ranks are known."""
        return (self.policy.original,) * (self.dag.rank_count if self.dag is not None else 0)

    def level_of(self, clocks: tuple[int, ...] | None) -> int | None:
        """The level with these clocks of an iteration; None if they changed or are no level's."""
        if clocks == self.original:
            return 0
        return self.settings.index(clocks) + 1 if clocks in self.settings else None

    def charged_level(self, clocks: tuple[int, ...] | None) -> int:
        """The level to which an iteration with these clocks is charged."""
        level = self.level_of(clocks)
        return level if level is not None else self.level or self.previous

    @property
    def original_seconds(self) -> float:
        """The iteration time at the original clocks, once it was observed."""
        return math.exp(fmean(self.baseline))

    @property
    def noise(self) -> float:
        """The coefficient of variation of the iteration time at the original clocks."""
        return max(stdev(self.baseline), _LEAST_NOISE) if len(self.baseline) > 1 else _LEAST_NOISE

    @property
    def lost(self) -> float:
        """Estimated nanoseconds that the run has lost."""
        return self.own_loss.lost + self.elsewhere.lost

    @property
    def lost_bound(self) -> float:
        """Nanoseconds that the run has lost, with the standard errors of all estimates."""
        return self.own_loss.bound + self.elsewhere.bound

    @property
    def own_loss(self) -> JobLoss:
        """The loss of the pipelines of this host.

        The standard errors add up: one plan's prediction is corrected by the error of another
        one's, so that the errors of plans are not independent.
        """
        lost = self.account.lost(lambda level: self.slower[level].mean)
        bound = self.account.bound(lambda level: self.slower[level].likely(DEVIATIONS))
        return JobLoss(max(lost, self.job.lost), max(bound, self.job.bound))

    @property
    def allowed(self) -> float:
        """Nanoseconds that the run may have lost by now."""
        return allowance(self.policy.max_slowdown, self.account.elapsed)

    @property
    def usable(self) -> float:
        """Nanoseconds that the run may have lost by now to hold a plan.

        Another host that explores needs the rest: it can never begin beside plans that use all.
        """
        return self.allowed * (_PART_BESIDE_EXPLORER if self.explorer else 1.0)

    @property
    def may_resume(self) -> bool:
        """True if the account permits lower clocks again."""
        return self.lost_bound <= RESUME_PART * self.usable

    @property
    def saving(self) -> float | None:
        """The part of the energy that the plan saves, as measured; None before."""
        energy = self.comparison.energy(self.noise)
        return 1 - math.exp(energy.mean) if energy.n else None


def begin_session(policy: PipelinePolicy, account: SlowdownAccount | None = None) -> PipelineState:
    """The state before the first iteration, with the closed ``account`` of the run so far."""
    wanted = WARM_UP_ITERATIONS + VERIFIED_ITERATIONS
    return PipelineState(
        policy,
        PipelineDecision(
            Move.DECLINE,
            DecisionReason.NO_SIGNAL,
            f"The tuner waits for {wanted} iterations of the pipeline at the original clocks.",
        ),
        account=account or SlowdownAccount(),
    )


def closed_session_account(state: PipelineState) -> SlowdownAccount:
    """The account of the run on this host with its present estimates as final figures."""
    return state.account.final(*state.own_loss)


def decline(state: PipelineState, reason: DecisionReason, sentence: str) -> PipelineState:
    """Restore the original clocks, and forget everything but the account of the run."""
    move = Move.RELEASE if state.level else Move.DECLINE
    return replace(
        begin_session(state.policy, closed_session_account(state)),
        decision=PipelineDecision(move, reason, sentence),
        phase=PipelinePhase.DECLINED,
        retries=state.retries + 1,
    )


def with_setting(
    state: PipelineState, clocks: tuple[int, ...], slower: float
) -> tuple[PipelineState, int]:
    """The level of these clocks; of new ones, with their predicted log ratio of time."""
    if clocks in state.settings:
        return state, state.settings.index(clocks) + 1
    settings = (*state.settings, clocks)
    known = {**state.slower, len(settings): Evidence(1, slower, MODEL_ERROR)}
    return replace(state, settings=settings, slower=known), len(settings)


def request(
    state: PipelineState, level: int, move: Move, reason: DecisionReason, sentence: str
) -> PipelineState:
    """Request the clocks of a level."""
    clocks = state.settings[level - 1] if level else ()
    state = replace(state, decision=PipelineDecision(move, reason, sentence, clocks))
    if level == state.level:
        return state
    return replace(state, level=level, previous=state.level, run=IterationRun())


def request_original(state: PipelineState, reason: DecisionReason) -> PipelineState:
    """Request the original clocks."""
    move = Move.RELEASE if reason is DecisionReason.OVER_BUDGET else Move.PROBE
    return request(state, 0, move, reason, _ORIGINAL_SENTENCES[reason])


def request_plan(
    state: PipelineState, dag: PipelineDag, slowdown: float, wait: float = 0.0
) -> PipelineState:
    """Ask for the search of a plan; decline without energies."""
    policy = state.policy
    planned = state.settings[state.plan - 1] if state.plan else ()
    model = state.profile.model(dag, policy.step, policy.blocking_watts, planned)
    if model is not None:
        return replace(state, task=PlanTask(model, max(slowdown, 0.0), wait))
    return decline(
        state,
        DecisionReason.NO_DEVICE,
        "The energy of the pipeline's ranks is not known. Each rank needs a GPU of its own with an"
        " energy counter.",
    )


def with_measured_run(state: PipelineState) -> PipelineState:
    """The present level's slowdown as the present run has measured it."""
    run = state.run
    slower = run.time / run.iterations - fmean(state.baseline)
    known = {**state.slower, state.level: Evidence(run.iterations, slower, state.noise)}
    return replace(state, slower=known)
