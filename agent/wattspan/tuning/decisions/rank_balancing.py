"""Balancing of ranks: lower caps for ranks with slack, once a common cap is certified.

Slower computation uses the slack, so that steps do not become longer. Such settings are certified
like others, against the original setting with the whole budget. In addition, steps must hardly be
longer than under the common cap, and the saving must be larger. When slack changes, all ranks get
the common cap again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

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
from wattspan.tuning.decisions.search import MAX_CANDIDATES, TunerState, fitted_curve

MAX_STEP_SLOWDOWN = 0.01
"""Permitted slowdown of a step relative to the common cap."""

BALANCING_TRIES = 2
"""Attempts until the job changes."""

BALANCING_DEPTH = 0.8
"""Lowest cap relative to the common cap: further below, the curve is inaccurate."""

SLACK_WINDOW = 5 * SLACK_CHANGE_STEPS
"""Steps over which a change of slack is judged."""

_MIN_FURTHER_SAVING = 0.002  # log ratio: smallest further saving
_SETTLED_PAIRS = 3  # further pairs of the common cap before balancing


def observe_steps(state: TunerState, steps: Sequence[SynchronousStep]) -> TunerState:
    """Add the waiting in these steps, if the held level was in force."""
    level, last = state.held, state.samples.periods[-1]
    if not (steps and state.policy.slack) or level is None or last.level != level:
        return state
    slack = state.evidence.slack
    fresh = slack.level != level or (level == slack.lowered and slack.waiting.steps >= SLACK_WINDOW)
    waiting = RankWaits() if fresh else slack.waiting
    for one in steps:
        if one.start >= last.since + state.policy.settle_time:
            waiting = waiting.add(one)
    return state.knowing(slack=slack._replace(waiting=waiting, level=level))


def lower_waiting_ranks(state: TunerState) -> TunerState | None:
    """The state with a lowered level for ranks with slack, ``slack.lowered``; None without."""
    base, slack = state.search.certified, state.evidence.slack
    if base is None or base != slack.level or state.ladder.base(base) != base:
        return None
    if slack.tries >= BALANCING_TRIES:
        return None
    estimates = state.estimates.at(base).time
    if slack.waiting.steps < STEPS or estimates.n < state.evidence.refined_pairs + _SETTLED_PAIRS:
        return None
    if state.evidence.cusum.suspicious or state.search.failed_candidates >= MAX_CANDIDATES:
        return None
    shape = fitted_curve(state)

    def step_time(setting: int) -> float:
        return math.exp(shape.time(setting))

    floor = round(BALANCING_DEPTH * base)
    ranges = [replace(one, floor=max(one.floor, floor)) for one in state.ladder.ranges]
    levels = state.ladder.caps(base)
    settings = propose_rank_settings(levels, ranges, slack.waiting, step_time)
    if settings == levels:
        return None
    try:
        ladder, level = state.ladder.with_lowered(base, settings)
    except LookupError:
        return None
    critical = slack.waiting.critical
    balanced = RankSlack(
        lowered=level,
        critical=critical if critical is not None else 0,
        remaining=remaining_slack(levels, settings, ranges, slack.waiting, step_time),
        tries=slack.tries + 1,
    )
    return state.searching(ladder=ladder).knowing(slack=balanced)


def step_time_certified(state: TunerState, level: int) -> bool:
    """True if a step is certainly hardly longer than under the common cap."""
    base = state.ladder.base(level)
    if base == level:
        return True
    error = state.error / 2
    time, before = state.estimates.at(level).time, state.estimates.at(base).time
    return time.upper(error) - before.lower(error) <= math.log1p(MAX_STEP_SLOWDOWN)


def saves_energy(state: TunerState, level: int) -> bool:
    """True if a lowered level saves more than the common cap; True for other levels."""
    base = state.ladder.base(level)
    if base == level:
        return True
    now, before = state.estimates.at(level), state.estimates.at(base)
    parts = [now.time, now.power, before.time, before.power]
    error = math.hypot(*(one.deviation / math.sqrt(max(one.n, 1)) for one in parts))
    return before.energy - now.energy > _MIN_FURTHER_SAVING + error


def slack_outdated(state: TunerState) -> bool:
    """True if slack has changed since caps were lowered."""
    slack = state.evidence.slack
    if slack.lowered is None or not slack.lowered == slack.level == state.held:
        return False
    if slack.waiting.steps < SLACK_WINDOW:
        return False
    return slack_changed(slack.waiting, slack.critical, slack.remaining)
