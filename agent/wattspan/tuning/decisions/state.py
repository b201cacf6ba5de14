"""State of a tuner between two observations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from wattspan.model import Decision, DecisionReason, ModelEnum, Move
from wattspan.tuning.decisions.blocks import SampleBuffer, empty_buffer
from wattspan.tuning.decisions.budget import SlowdownAccount
from wattspan.tuning.decisions.drift import Cusum, LevelShift
from wattspan.tuning.decisions.estimates import Estimates, Pairing
from wattspan.tuning.decisions.ranks import Lockstep, RankSlack
from wattspan.tuning.decisions.sequential_test import MissAlarm
from wattspan.tuning.decisions.serving import ServingComparison
from wattspan.tuning.decisions.values import (
    CertifiedLevels,
    LevelLadder,
    Objective,
    TunerPolicy,
    WorkUnit,
)

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


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """A requested level, and its number of blocks."""

    level: int
    blocks: int


class TunerState(NamedTuple):
    """Immutable state of one knob of one job."""

    policy: TunerPolicy
    ladder: LevelLadder
    phase: TunerPhase
    plan: ProbePlan
    samples: SampleBuffer
    decision: Decision
    begun: int
    pairing: Pairing = Pairing()
    estimates: Estimates = Estimates()
    account: SlowdownAccount = SlowdownAccount()
    cusum: Cusum = Cusum()
    level_shift: LevelShift = LevelShift()
    previous_level: int = 0  # requested before the present one
    requested_at: int = 0
    last_unit_end: int = 0
    probe_level: int = 0  # that is screened
    wanted_pairs: int = 0  # of it before the next decision
    candidate: int | None = None
    judged_pairs: int = 0  # pairs of the candidate at its last judgement
    failed_candidates: int = 0  # since the job last changed
    recertifying: bool = False  # the candidate was certified once
    refinements: int = 0  # lower levels that were tried after a certification
    certified: int | None = None
    refined_pairs: int = 0  # pairs of the certified level when a lower one was last considered
    resume_level: int | None = None  # certified once, to be certified first
    lockstep: Lockstep | None = None  # of several ranks
    slack: RankSlack = RankSlack()
    serving: Mapping[int, ServingComparison] = MappingProxyType({})  # of requests, by level
    latencies: tuple[WorkUnit, ...] = ()  # of requests, until the latency limit is known
    latency_limit: int | None = None
    unmatched: int = 0  # comparisons in a row with different loads
    miss_alarm: MissAlarm | None = None
    rest_until: int = 0
    releases: tuple[int, ...] = ()
    retries: int = 0
    committed: int | None = None
    random_state: int = 1

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
        """The error probability of one candidate; it falls with each search without result."""
        return (1 - self.policy.confidence) / MAX_CANDIDATES / (1 + self.retries) ** 2

    @property
    def chosen(self) -> int:
        """The candidate, or the top while there is none."""
        return self.top if self.candidate is None else self.candidate

    @property
    def held(self) -> int | None:
        """The level that is certified or held now."""
        return self.candidate if self.phase in (TunerPhase.PROVE, TunerPhase.HOLD) else None


def initial_state(
    policy: TunerPolicy, ladder: LevelLadder, now: int, remembered: CertifiedLevels | None
) -> TunerState:
    resume_level = None
    if remembered is not None and remembered.knob is policy.knob:
        resume_level = ladder.level(remembered.level)
    return TunerState(
        policy=policy,
        ladder=ladder,
        phase=TunerPhase.LEARN,
        plan=ProbePlan(ladder.top, 1),
        samples=empty_buffer(ladder.top, now),
        decision=Decision(
            Move.DECLINE, DecisionReason.NO_SIGNAL, "No unit of work was received yet."
        ),
        begun=now,
        previous_level=ladder.top,
        requested_at=now,
        last_unit_end=now,
        resume_level=resume_level
        if resume_level is not None and resume_level < ladder.top
        else None,
        random_state=(policy.seed * 2654435761 + 40503) % 2**32 or 1,
    )


def random_choice(state: TunerState, sides: int) -> tuple[TunerState, int]:
    """A random number from 0 to ``sides`` - 1, and the next state (xorshift32)."""
    number = state.random_state
    number ^= (number << 13) & 0xFFFFFFFF
    number ^= number >> 17
    number ^= (number << 5) & 0xFFFFFFFF
    return state._replace(random_state=number), number % sides
