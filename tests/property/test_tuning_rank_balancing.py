"""Invariants of per-rank settings."""

from __future__ import annotations

from types import MappingProxyType

from hypothesis import given
from hypothesis import strategies as st
from testbed.tuning_plant import with_fields

from wattspan.model import SECOND, DecisionReason, Move
from wattspan.tuning.decisions.estimates import Estimates, LevelEstimate
from wattspan.tuning.decisions.rank_balancing import (
    lower_waiting_ranks,
)
from wattspan.tuning.decisions.ranks import MIN_SLACK, STEPS, RankSlack, RankWaits, SynchronousStep
from wattspan.tuning.decisions.search import (
    ProbePlan,
    TunerPhase,
    TunerState,
)
from wattspan.tuning.decisions.sequential_test import Evidence
from wattspan.tuning.decisions.step import begin, step
from wattspan.tuning.decisions.values import KnobRange, Observation, TunerPolicy

W = 1_000
TOP, BASE = 700 * W, 600 * W

ranks = st.lists(st.tuples(st.floats(0.05, 0.95), st.integers(200, 699)), min_size=2, max_size=8)
slopes = st.floats(0.0, 2.0)


def holding(given_ranks: list[tuple[float, int]], slope: float) -> TunerState:
    """One cap for all is certified; each rank has computed so long, and has its own floor."""
    ranges = [
        KnobRange(f"GPU-{at}", TOP, floor * W, rank=at) for at, (_, floor) in enumerate(given_ranks)
    ]
    waiting = RankWaits()
    own = {at: round(part * SECOND) for at, (part, _) in enumerate(given_ranks)}
    for at in range(STEPS):
        waiting = waiting.add(SynchronousStep(at * SECOND, (at + 1) * SECOND, 1.0, own))

    def seen(level: int) -> LevelEstimate:
        slower = slope * (1 - level / TOP)
        return LevelEstimate((), Evidence(16, slower, 0.002), Evidence(16, -0.1, 0.002))

    known = Estimates(levels=MappingProxyType({BASE: seen(BASE), 500 * W: seen(500 * W)}))
    return with_fields(
        begin(TunerPolicy(slack=True), ranges, now=0),
        phase=TunerPhase.HOLD,
        candidate=BASE,
        certified=BASE,
        estimates=known,
        slack=RankSlack(waiting, BASE),
    )


@given(given_ranks=ranks, slope=slopes)
def test_only_waiting_ranks_are_lowered_within_their_range(
    given_ranks: list[tuple[float, int]], slope: float
) -> None:
    before = holding(given_ranks, slope)
    after = lower_waiting_ranks(before)
    if after is None:
        return
    assert after.evidence.slack.lowered is not None
    alike, caps = (
        before.search.ladder.caps(BASE),
        after.search.ladder.caps(after.evidence.slack.lowered),
    )
    longest = max(part for part, _ in given_ranks)
    assert caps.keys() == alike.keys()
    assert caps != alike
    for one, (part, _) in zip(before.search.ladder.ranges, given_ranks, strict=True):
        if one.device in caps:
            assert one.floor <= caps[one.device] <= alike[one.device] <= one.original
            waits = longest - part > MIN_SLACK - 1e-9  # a sum of steps has their rounding errors
            assert caps[one.device] == alike[one.device] or waits


@given(given_ranks=ranks, slope=slopes, reason=st.sampled_from(DecisionReason))
def test_reason_from_outside_releases_every_rank(
    given_ranks: list[tuple[float, int]], slope: float, reason: DecisionReason
) -> None:
    held = lower_waiting_ranks(holding(given_ranks, slope))
    if held is None:
        return
    level = held.evidence.slack.lowered
    assert level is not None
    held = with_fields(held, candidate=level, certified=level, plan=ProbePlan(level, 24))
    seen = Observation(
        now=SECOND, in_force=held.search.ladder.caps(level), vetoes=frozenset({reason})
    )
    _, decision = step(held, seen)
    assert (decision.move, decision.reason) == (Move.RELEASE, reason)
    assert not decision.caps
