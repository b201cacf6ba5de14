"""One tuner over one whole job in simulated time, with its result.

The tuner sees the same data as in the agent: units in bursts as OTLP batches bring them, energy
that is known a little later, and caps read back half a second after they were asked for.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

from testbed.tuner.job import Job
from testbed.tuner.plants import Luck, Plant, luck
from testbed.tuner.truth import Total, Truth

from wattspan.model import SECOND, Decision, DecisionReason, Move, TuningFigures
from wattspan.tuning.decisions import phases
from wattspan.tuning.decisions.report import report
from wattspan.tuning.decisions.step import begin, step
from wattspan.tuning.decisions.values import (
    CertifiedLevels,
    KnobRange,
    Observation,
    TunerPolicy,
    WorkUnit,
)

BATCH = 5.0
"""Seconds between exports of OpenTelemetry's batch processor, as it is set by default."""

CORE = SimpleNamespace(
    begin=begin,
    step=step,
    report=report,
    plan_ends=getattr(phases, "plan_ends", lambda state: None),
    measures=getattr(phases, "measures_latency", lambda state: False),
)
"""The tuner of this project."""

_WINDOW = 600.0
_PATIENCE = 20.0  # longest time between two calls without a new unit, in seconds
_ALARMS = frozenset({DecisionReason.CHANGED, DecisionReason.OVER_BUDGET})


@dataclass(frozen=True)
class Terms:
    """The operator's settings, and the tuner's interval in seconds."""

    budget: float = 0.05
    confidence: float = 0.95
    turn: float = 0.5
    batch: float = BATCH
    policy: Mapping[str, Any] = field(default_factory=dict)  # other fields of Policy


@dataclass(frozen=True)
class Score:
    """A whole run, exploration included, against the same run without caps."""

    plant: str
    method: str
    seed: int
    slowdown: float
    saving: float
    worst: float  # the most that any ten minutes' work was slower
    oracle: float  # the best fixed setting's saving
    oracle_watts: float
    commit_units: int | None = None
    commit_seconds: float | None = None
    exploration: float = 0.0  # seconds lost before the first setting was held
    held_watts: float | None = None  # at the end
    held_slowdown: float | None = None  # of that setting, by the curve
    probes: int = 0
    releases: dict[str, int] = field(default_factory=dict)
    alarms: int = 0  # releases of a setting that was held and kept the budget, nothing changed
    declines: dict[str, int] = field(default_factory=dict)
    last: str = ""  # the last decision
    writes: int = 0
    told_slowdown: float | None = None
    told_bound: float | None = None
    told_low: float | None = None  # of the saving, as parts of the energy of the run without caps
    told_high: float | None = None
    hours: float = 0.0
    calls: int = 0

    def facts(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Watch:
    """Events of the run, by the tuner's decisions.

    ``let_go`` has the true slowdowns of settings that were held and given up in alarm.
    """

    commit: tuple[int, float] | None = None
    probes: int = 0
    compared: int = 0  # times that the original was gone back to, to compare
    holding: bool = False
    releases: Counter[str] = field(default_factory=Counter)
    declines: Counter[str] = field(default_factory=Counter)
    let_go: list[float] = field(default_factory=list)
    last: Decision | None = None
    calls: int = 0

    def see(self, decision: Decision, job: Job) -> None:
        """Take note of a decision, before it is carried out."""
        before, self.last = self.last, decision
        self.calls += 1
        if before is not None and before.same_as == decision.same_as:
            return
        if decision.move is Move.HOLD and decision.caps:
            self.commit = self.commit or (len(job.ends), job.time)
            self.holding = True
            return
        if decision.move is Move.PROBE:
            self.probes += 1
            self.compared += not decision.caps
            self.holding = self.holding and decision.reason is DecisionReason.SENTINEL
            return
        if decision.move is Move.RELEASE and self.holding and decision.reason in _ALARMS:
            self.let_go.append(job.slowdown())
        self.holding = False
        if before is None or (before.move, before.reason) != (decision.move, decision.reason):
            kept = self.releases if decision.move is Move.RELEASE else self.declines
            kept[decision.reason.value] += 1


class Bench:
    """One plant and seed: luck and truth are had once for all methods."""

    def __init__(self, plant: Plant, seed: int, terms: Terms) -> None:
        self.plant, self.seed, self.terms = plant, seed, terms
        self.luck: Luck = luck(plant, seed)
        self.truth = Truth(plant, self.luck)
        self.base: Total = self.truth.uncapped()

    def ours(self, core: Any = CORE) -> Score:
        """The project's tuner over the whole run."""
        job, watch, report = drive(self.plant, self.luck, self.seed, self.terms, core)
        score = self.score("wattspan", job, watch)
        spent = self.base.energy * 1e6
        return _told(score, report, spent)

    def score(self, method: str, job: Job, watch: Watch | None = None) -> Score:
        """Time and energy of a finished run."""
        watch = watch or Watch()
        base = self.base
        watts, best = self.truth.oracle(self.terms.budget)
        free = self.truth.at(self.plant.curve.original)
        commit = watch.commit
        return Score(
            self.plant.name,
            method,
            self.seed,
            job.time / base.time - 1,
            1 - job.spent / base.energy,
            self._worst(job),
            1 - best.energy / free.energy,
            watts,
            commit[0] if commit else None,
            commit[1] if commit else None,
            self._lost(job, commit[0] if commit else self.plant.units),
            job.cap,
            self.truth.at(job.cap).time / free.time - 1,
            watch.probes,
            dict(watch.releases),
            0 if self.plant.changes else sum(one <= self.terms.budget for one in watch.let_go),
            dict(watch.declines),
            f"{watch.last.move}: {watch.last.reason}" if watch.last else "",
            len(job.log),
            hours=job.time / 3600,
            calls=watch.calls,
        )

    def _lost(self, job: Job, units: int) -> float:
        if not units:
            return 0.0
        return job.ends[units - 1] - self.truth.base_ends[units - 1]

    def _worst(self, job: Job) -> float:
        """Over every stretch of work that lasts ten minutes without caps, a minute apart."""
        base, ends = self.truth.base_ends, job.ends
        worst, begin = 0.0, 0.0
        while begin + _WINDOW <= base[-1]:
            first, last = bisect_left(base, begin), bisect_left(base, begin + _WINDOW)
            if last > first:
                worst = max(worst, (ends[last] - ends[first]) / (base[last] - base[first]) - 1)
            begin += 60.0
        return worst


def drive(
    plant: Plant,
    fate: Luck,
    seed: int,
    terms: Terms,
    core: Any = CORE,
    *,
    remembered: CertifiedLevels | None = None,
    after: Callable[[Job, Watch], bool] = lambda job, watch: True,
) -> tuple[Job, Watch, TuningFigures]:
    """The tuner's core over a job, as the runtime drives it.

    The runtime looks every ``terms.turn``. Looks at which nothing new could be seen are left out:
    there is one for every batch of units, one when the energy of a batch is known while something
    is being tried, and one when a cap that was asked for can be read back. The energy is read
    every ``terms.turn`` too; readings at a held setting are left out between looks. ``after`` each
    look says whether to go on, and may do things to the job.
    """
    job, watch = Job(plant, fate, seed), Watch()
    random = Random(f"{plant.name}/{seed}/drive")
    devices = [f"gpu-{at}" for at in range(plant.curve.devices)]
    original = round(plant.curve.original * 1000)
    ranges = tuple(KnobRange(one, original, plant.floor_watts() * 1000) for one in devices)
    policy = TunerPolicy(
        max_slowdown=terms.budget, confidence=terms.confidence, seed=seed, **terms.policy
    )
    state = core.begin(policy, ranges, now=0, remembered=remembered)
    now, flush = 0.0, _turn_at(random.uniform(0.0, terms.batch), terms.turn)
    lag = _turn_at(plant.energy_lag, terms.turn)
    read_back = settled = math.inf  # when caps, and when energy, will be known
    looked = 0.0
    in_force: Mapping[str, int] = {}
    since = 0
    while not job.done:
        wanted = watch.last.caps if watch.last else {}
        if wanted != in_force:  # decided at the last look, written soon after
            job.advance(now + random.uniform(0.02, 0.3))
            job.set_cap(min(wanted.values(), default=original) / 1000)
            in_force, read_back = wanted, now + terms.turn
            since = int(read_back * 1e9)
        ends = core.plan_ends(state)
        due = math.inf if ends is None else _turn_at(ends / SECOND, terms.turn)
        if due <= now:  # the plan has ended, and the tuner waits for something else
            due = math.inf
        if core.measures(state):  # it uses every reading of the energy then
            due = min(due, now + terms.turn)
        before, now = now, min(flush, read_back, settled, due)
        if watch.last is None or watch.last.move is Move.PROBE:
            for turn in range(1, round((now - before) / terms.turn)):
                job.advance(before + turn * terms.turn)
                job.read()
        job.advance(now)
        job.read()
        units: tuple[WorkUnit, ...] = ()
        if now >= settled:
            settled = math.inf
        if now >= flush:
            flush += terms.batch
            units, job.units = tuple(job.units), []
            if not units and now < min(read_back, looked + _PATIENCE):
                continue
            if watch.last is None or watch.last.move is Move.PROBE:
                settled = now + lag
        if now >= read_back:
            read_back = math.inf
        looked = now
        state, decision = core.step(
            state,
            Observation(
                now=int(now * SECOND),
                units=units,
                energy=tuple(job.take(now)),
                in_force=in_force,
                since=since,
                draw={one: int(job.draw() * 1000) for one in devices},
            ),
        )
        watch.see(decision, job)
        if not after(job, watch):
            break
    return job, watch, core.report(state)


def _turn_at(time: float, turn: float) -> float:
    """The first turn at or after ``time``, in seconds."""
    return math.ceil(time / turn) * turn


def _told(score: Score, report: TuningFigures, spent: float) -> Score:
    """With the tuner's own report of the run."""
    facts = score.facts()
    facts["told_slowdown"], facts["told_bound"] = report.slowdown, report.slowdown_bound
    if report.saved_low is not None and report.saved_high is not None:
        facts["told_low"], facts["told_high"] = report.saved_low / spent, report.saved_high / spent
    return Score(**facts)
