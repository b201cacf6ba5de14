"""A job to tune, in a few lines: a curve, noise, and a device that obeys.

The tests check the tuner's actions; the benchmark measures their quality.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from wattspan.model import SECOND, Decision, DecisionReason
from wattspan.tuning.decisions.search import TunerState
from wattspan.tuning.decisions.step import begin, step
from wattspan.tuning.decisions.tenants import everyone
from wattspan.tuning.decisions.values import (
    EnergyPoint,
    KnobRange,
    Observation,
    TunerPolicy,
    WorkUnit,
)

TOP = 400_000
FLOOR = 240_000
GPU = "GPU-1"
RANGES = (KnobRange(GPU, TOP, FLOOR),)


def gentle(level: float) -> tuple[float, float]:
    """Time and power against the original: 10 % slower and 30 % less power at 280 W."""
    depth = max(TOP - level, 0.0) / TOP
    return 1 + 0.1 * (depth / 0.3) ** 1.5, 1 - depth


@dataclass
class Plant:
    """Steps of ``step`` seconds, one after the other. ``fate`` may change anything at a turn."""

    curve: Callable[[float], tuple[float, float]] = gentle
    step: float = 0.5
    cv: float = 0.01
    seed: int = 0
    turn: float = 1.0
    draw: int = 390_000
    metered: bool = True
    drawn: bool = True
    obeys: bool = True
    vetoes: frozenset[DecisionReason] = frozenset()
    may: bool = True
    silent: bool = False
    gap: Callable[[float], float] = lambda level: 0.0  # seconds after a step before it is visible
    ranks: int = 1
    work: Callable[[int], float] = lambda at: 1.0
    now: float = 0.0
    began: float = 0.0
    left: float = 0.0
    joules: float = 0.0
    level: int = TOP
    since: float = 0.0
    count: int = 0
    random: Random = field(default_factory=Random)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.left = self._next()

    def _next(self) -> float:
        return self.step * self.work(self.count) * max(self.random.gauss(1, self.cv), 0.2)

    def observe(self, decision: Decision | None) -> Observation:
        """One tick under the decided settings."""
        asked = min(decision.caps.values(), default=TOP) if decision else TOP
        if self.obeys and asked != self.level:
            self.level, self.since = asked, self.now
        units: list[WorkUnit] = []
        end = self.now + self.turn
        time, power = self.curve(self.level)
        while not self.silent and self.now < end:
            lasts = self.left * time
            if self.now + lasts > end:
                self.left -= (end - self.now) / time
                self.joules += (end - self.now) * power * self.draw / 1000
                self.now = end
                break
            self.now += lasts
            self.joules += lasts * power * self.draw / 1000
            start, done = int(self.began * 1e9), int(self.now * 1e9)
            work = self.work(self.count)
            units.extend(WorkUnit(start, done, work, rank) for rank in range(self.ranks))
            self.now += self.gap(self.level)
            self.began = self.now
            self.count += 1
            self.left = self._next()
        if self.silent:
            self.now = self.began = end
        now = int(self.now * SECOND)
        return Observation(
            now=now,
            units=tuple(units),
            energy=(EnergyPoint(now, int(self.joules * 1e6)),) if self.metered else (),
            in_force={GPU: self.level} if self.level != TOP else {},
            since=int(self.since * SECOND),
            draw={GPU: min(self.draw, self.level)} if self.drawn else {},
            vetoes=self.vetoes,
            may_explore=self.may,
        )


QUICK = TunerPolicy(block_units=10, block_time=2 * SECOND, settle_units=2, settle_time=SECOND)


@dataclass
class Run:
    """A tuner at a plant, with all it decided."""

    plant: Plant
    policy: TunerPolicy = QUICK
    ranges: tuple[KnobRange, ...] = RANGES
    state: TunerState | None = None
    decisions: list[Decision] = field(default_factory=list)

    def on(self, turns: int) -> Decision:
        """So many turns on."""
        state = self.state or begin(self.policy, self.ranges, now=0)
        for _ in range(turns):
            seen = self.plant.observe(self.decisions[-1] if self.decisions else None)
            state, decision = step(state, seen)
            if not self.decisions or decision is not self.decisions[-1]:
                self.decisions.append(decision)
        self.state = state
        return self.decisions[-1]

    def until(self, wanted: Callable[[Decision], bool], turns: int = 20_000) -> Decision:
        """On until something is decided; AssertionError if it never is."""
        for _ in range(turns):
            if wanted(self.on(1)):
                return self.decisions[-1]
        raise AssertionError(f"never, but: {self.decisions[-1].sentence}")

    @property
    def reasons(self) -> list[DecisionReason]:
        """All decisions without repetitions."""
        found: list[DecisionReason] = []
        for one in self.decisions:
            if not found or found[-1] is not one.reason:
                found.append(one.reason)
        return found


@dataclass
class SharedRun:
    """A tuner at a device with several tenants, each with its own policy; the first leads."""

    plants: list[Plant]
    policies: list[TunerPolicy]
    state: TunerState | None = None
    decision: Decision | None = None
    reasons: list[DecisionReason] = field(default_factory=list)

    def on(self, turns: int) -> Decision:
        if self.state is None:
            first, *others = self.policies
            self.state = begin(
                first, RANGES, now=0, tenants=[begin(one, RANGES, now=0) for one in others]
            )
        for _ in range(turns):
            seen = [plant.observe(self.decision) for plant in self.plants]
            shared = replace(seen[0], tenants=tuple(one.units for one in seen[1:]))
            self.state, self.decision = step(self.state, shared)
            if self.reasons[-1:] != [self.decision.reason]:
                self.reasons.append(self.decision.reason)
        assert self.decision is not None
        return self.decision

    def until(self, wanted: Callable[[Decision], bool], turns: int = 6_000) -> Decision:
        for _ in range(turns):
            if wanted(self.on(1)):
                assert self.decision is not None
                return self.decision
        raise AssertionError(f"never, but: {self.reasons} {self.decision}")

    @property
    def states(self) -> tuple[TunerState, ...]:
        assert self.state is not None
        return everyone(self.state)


def with_fields(state: TunerState, **changes: Any) -> TunerState:
    """The state with other values of these fields, of its own or of its parts."""
    for part in ("search", "evidence"):
        present = getattr(state, part)
        own = {name: changes.pop(name) for name in present._fields if name in changes}
        state = state._replace(**{part: present._replace(**own)})
    return state._replace(**changes)
