"""Ranks that wait for others get lower caps, once one cap for all of them is certified.

What they compute slower they wait less, so the job's step stays as long as it was. Whether it
does is not taken for granted: such settings are certified as any other, against the original
setting with the whole budget, and besides they may make a step hardly longer than the one cap
for all does, and must save more. As soon as ranks wait otherwise, all have one cap again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from wattspan.tuning.decisions import search
from wattspan.tuning.decisions.ranks import (
    SLACK_CHANGE_STEPS,
    STEPS,
    RankSlack,
    RankWaits,
    SynchronousStep,
    propose_rank_settings,
    remaining_slack,
    slack_changed,
)
from wattspan.tuning.decisions.state import MAX_CANDIDATES, TunerState

LONGER = 0.01
"""By how much a step may become longer than under one cap for all."""

TRIES = 2
"""How often it is tried until the job changes."""

DEEPEST = 0.8
"""No cap is lower than this part of that for all: so far below, the curve is a guess."""

WINDOW = 5 * SLACK_CHANGE_STEPS
"""Steps over which it is judged whether ranks still wait as they did."""

_LEAST = 0.002  # of the energy: less is no saving
_SETTLED = 3  # more pairs of the one cap for all, before anything lower is tried


def observe_steps(state: TunerState, steps: Sequence[SynchronousStep]) -> TunerState:
    """The state with who waited in these steps, if the level that is held was in force."""
    level, last = state.held, state.samples.periods[-1]
    if not (steps and state.policy.slack) or level is None or last.level != level:
        return state
    seen = state.slack
    fresh = seen.level != level or (level == seen.lowered and seen.waiting.steps >= WINDOW)
    waiting = RankWaits() if fresh else seen.waiting
    for one in steps:
        if one.start >= last.since + state.policy.settle_time:
            waiting = waiting.add(one)
    return state._replace(slack=seen._replace(waiting=waiting, level=level))


def lower_waiting_ranks(state: TunerState) -> TunerState | None:
    """The state with a level at which ranks that wait have less; None where none does.

    The level is ``slack.lowered``.
    """
    base, seen = state.certified, state.slack
    if base is None or base != seen.level or state.ladder.base(base) != base:
        return None
    estimates = state.estimates.at(base).time
    if seen.waiting.steps < STEPS or estimates.n < state.refined_pairs + _SETTLED:
        return None
    if seen.tries >= TRIES or state.failed_candidates >= MAX_CANDIDATES or state.cusum.suspicious:
        return None
    shape = search.fitted_curve(state)

    def longer(setting: int) -> float:
        return math.exp(shape.time(setting))

    floor = round(DEEPEST * base)
    ranges = [replace(one, floor=max(one.floor, floor)) for one in state.ladder.ranges]
    levels = state.ladder.caps(base)
    settings = propose_rank_settings(levels, ranges, seen.waiting, longer)
    if settings == levels:
        return None
    try:
        ladder, level = state.ladder.with_lowered(base, settings)
    except LookupError:
        return None
    critical = seen.waiting.critical
    slack = RankSlack(
        lowered=level,
        critical=critical if critical is not None else 0,
        left=remaining_slack(levels, settings, ranges, seen.waiting, longer),
        tries=seen.tries + 1,
    )
    return state._replace(ladder=ladder, slack=slack)


def step_time_certified(state: TunerState, level: int) -> bool:
    """Whether a step is surely hardly longer than under one cap for all; of that it always is."""
    base = state.ladder.base(level)
    if base == level:
        return True
    error = state.error / 2
    time, before = state.estimates.at(level).time, state.estimates.at(base).time
    return time.upper(error) - before.lower(error) <= math.log1p(LONGER)


def saves_energy(state: TunerState, level: int) -> bool:
    """Whether more is saved than under one cap for all; of that it is not asked."""
    base = state.ladder.base(level)
    if base == level:
        return True
    now, before = state.estimates.at(level), state.estimates.at(base)
    parts = [one for seen in (now, before) for one in (seen.time, seen.power)]
    doubt = math.hypot(*(one.deviation / math.sqrt(max(one.n, 1)) for one in parts))
    return before.energy - now.energy > _LEAST + doubt


def slack_outdated(state: TunerState) -> bool:
    """Whether ranks wait otherwise than when some were given less."""
    seen = state.slack
    if seen.lowered is None or not seen.lowered == seen.level == state.held:
        return False
    if seen.waiting.steps < WINDOW:
        return False
    return slack_changed(seen.waiting, seen.critical, seen.left)
