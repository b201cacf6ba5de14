"""All that a tuner remembers from one observation to the next."""

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
"""Settings that may fail to be certified, before the search ends; they share the error.

One that is certified costs no error: lower ones are tried only after it, in a fixed order."""


class TunerPhase(ModelEnum):
    """What the tuner is about."""

    LEARN = "learn"  # the original setting: noise and draw
    SCREEN = "screen"  # down in steps
    PROVE = "prove"  # one candidate against the original
    HOLD = "hold"
    REST = "rest"  # uncapped, until a time
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """A level, and for how many blocks."""

    level: int
    blocks: int


class TunerState(NamedTuple):
    """Immutable; one knob of one job."""

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
    previous_level: int = 0
    requested_at: int = 0
    last_unit_end: int = 0  # when the last unit ended
    probe_level: int = 0  # the level that is screened
    wanted_pairs: int = 0  # pairs of it that are wanted before the next decision
    candidate: int | None = None
    judged_pairs: int = 0  # pairs of the candidate when it was last judged
    failed_candidates: int = 0  # candidates that failed since the job last changed
    recertifying: bool = False  # the candidate was good once
    deepened: int = 0  # lower levels that were tried after one was certified
    certified: int | None = None
    refined_pairs: int = 0  # pairs of the certified level when a lower one was last considered
    resume_level: int | None = None  # a level that was good once, to be proved first
    lockstep: Lockstep | None = None  # of several ranks
    slack: RankSlack = RankSlack()  # and who of them waits
    serving: Mapping[int, ServingComparison] = MappingProxyType({})  # of requests, by level
    latencies: tuple[WorkUnit, ...] = ()  # of requests, until the latency that must hold is known
    limit: int | None = None  # that latency
    unmatched: int = 0  # comparisons in a row whose two sides had not the same load
    miss_alarm: MissAlarm | None = None
    rest_until: int = 0
    releases: tuple[int, ...] = ()
    retries: int = 0
    committed: int | None = None
    random_state: int = 1  # state of the order's randomness

    @property
    def top(self) -> int:
        return self.ladder.top

    @property
    def budget(self) -> float:
        """What the logarithm of the time per work may rise by."""
        return math.log1p(slowdown_allowed(self.policy))

    @property
    def error(self) -> float:
        """Of one candidate; the less, the more searches came to nothing before."""
        return (1 - self.policy.confidence) / MAX_CANDIDATES / (1 + self.retries) ** 2

    @property
    def chosen(self) -> int:
        """The candidate, or the top while there is none."""
        return self.top if self.candidate is None else self.candidate

    @property
    def held(self) -> int | None:
        """The level that is proved or held now."""
        return self.candidate if self.phase in (TunerPhase.PROVE, TunerPhase.HOLD) else None


def slowdown_allowed(policy: TunerPolicy) -> float:
    """The budget; for the objective of time, what can hardly be told from no slowdown."""
    if policy.objective is Objective.TIME:
        return min(policy.max_slowdown, 0.005)
    return policy.max_slowdown


def initial_state(
    policy: TunerPolicy, ladder: LevelLadder, now: int, remembered: CertifiedLevels | None
) -> TunerState:
    """A tuner that has seen nothing yet."""
    resume_level = None
    if remembered is not None and remembered.knob is policy.knob:
        resume_level = ladder.level(remembered.level)
    return TunerState(
        policy=policy,
        ladder=ladder,
        phase=TunerPhase.LEARN,
        plan=ProbePlan(ladder.top, 1),
        samples=empty_buffer(ladder.top, now),
        decision=Decision(Move.DECLINE, DecisionReason.NO_SIGNAL, "No unit of work was seen yet."),
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
    """A number from 0 to ``sides`` - 1, and the state after drawing it (xorshift32)."""
    random_state = state.random_state
    random_state ^= (random_state << 13) & 0xFFFFFFFF
    random_state ^= random_state >> 17
    random_state ^= (random_state << 5) & 0xFFFFFFFF
    return state._replace(random_state=random_state), random_state % sides
