"""Decisions in one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping

from wattspan.model import Decision, DecisionReason, Knob, Move
from wattspan.tuning.decisions.estimates import LevelEstimate
from wattspan.tuning.decisions.search import block_time
from wattspan.tuning.decisions.state import TunerState


def format_setting(state: TunerState, level: int) -> str:
    """A level as operators write it."""
    if state.policy.knob is Knob.GPU_CLOCK:
        return f"{level} MHz"
    if level in state.ladder.lowered:
        base, settings = state.ladder.lowered[level]
        return f"{base / 1000:.0f} W, {min(settings.values()) / 1000:.0f} W where ranks wait"
    return f"{level / 1000:.0f} W"


def format_percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def format_slowdown(ratio: float) -> str:
    """A log ratio of time in words."""
    part = math.expm1(ratio)
    return f"{format_percent(part)} slower" if part >= 0 else f"{format_percent(-part)} faster"


def format_saving(ratio: float) -> str:
    """A log ratio of energy in words."""
    part = -math.expm1(ratio)
    return (
        f"{format_percent(part)} less energy"
        if part >= 0
        else f"{format_percent(-part)} more energy"
    )


def hold_decision(state: TunerState, level: int, seen: LevelEstimate) -> Decision:
    """A certified level is held."""
    bound = seen.time.upper(state.error)
    sentence = (
        f"Hold {format_setting(state, level)}: {format_slowdown(seen.time.mean)} "
        f"({100 * state.policy.confidence:.0f} % bound {format_percent(math.expm1(bound))}) of a "
        f"{_plain(state.policy.max_slowdown)} budget, {format_saving(seen.energy)}, "
        f"{seen.time.n} pairs."
    )
    return Decision(
        Move.HOLD,
        DecisionReason.CERTIFIED,
        sentence,
        state.ladder.caps(level),
        level_figures(state, level, seen),
    )


def level_figures(state: TunerState, level: int, seen: LevelEstimate) -> Mapping[str, float]:
    """The figures of a level by name."""
    figures = {
        "setting": float(level),
        "budget": state.policy.max_slowdown,
        "pairs": float(seen.time.n),
    }
    if seen.time.n:
        figures["slowdown"] = math.expm1(seen.time.mean)
        figures["saving"] = -math.expm1(seen.energy)
        bound = seen.time.upper(state.error)
        if bound < 5:
            figures["bound"] = math.expm1(bound)
    return figures


def probe_decision(state: TunerState, reason: DecisionReason, level: int) -> Decision:
    """A level is looked at."""
    seen = state.estimates.at(level)
    name = format_setting(state, level)
    so_far = (
        f"{format_slowdown(seen.time.mean)} so far, {seen.time.n} pairs"
        if seen.time.n
        else "no pair yet"
    )
    sentence = {
        DecisionReason.BASELINE: f"Learn the original setting: {_noise(state)}.",
        DecisionReason.SCREENING: f"Screen {name}: {so_far}.",
        DecisionReason.CERTIFYING: f"Certify {name}: {so_far}.",
        DecisionReason.RECERTIFYING: f"Prove {name} anew, which was certified before: {so_far}.",
        DecisionReason.SENTINEL: f"Compare {name} with the original setting: {so_far}.",
    }[reason]
    return Decision(
        Move.PROBE,
        reason,
        sentence,
        state.ladder.caps(state.plan.level),
        level_figures(state, level, seen),
    )


def _noise(state: TunerState) -> str:
    """How much units of work differ by themselves; of nothing that was seen there is no figure."""
    blocks = state.estimates.blocks
    if not blocks:
        return "its noise is not known yet"
    stretches = "1 stretch" if blocks == 1 else f"{blocks} stretches"
    return f"{stretches}, {format_percent(state.estimates.noise)} noise"


_REASONS = {
    DecisionReason.OVER_BUDGET: "it is probably slower than the budget allows",
    DecisionReason.BUDGET_SPENT: "the whole run's allowance is used up",
    DecisionReason.CHANGED: "the job is not what it was",
    DecisionReason.PAUSED: "no unit of work has ended for long",
    DecisionReason.ENDED: "the job has ended",
    DecisionReason.TAIL: "too many requests are slower than the latency that must hold",
    DecisionReason.NO_SIGNAL: "no unit of work was seen yet",
    DecisionReason.BAD_WORK: "the attribute that counts the work is missing, zero or negative",
    DecisionReason.LYING_SIGNAL: "units are as long as ever, and fewer",
    DecisionReason.TOO_SHORT: "the job ended before it could pay",
    DecisionReason.TOO_NOISY: "to be certain would cost more than is saved",
    DecisionReason.NOT_MONOTONE: "a lower setting was surely faster than a higher one",
    DecisionReason.INERT: "no allowed setting changes time or power",
    DecisionReason.NO_SAVING: "no setting within the budget saves energy",
    DecisionReason.NO_ROOM: "budget and range leave nothing to try",
    DecisionReason.WAITING: "another job of this host explores",
    DecisionReason.BACKING_OFF: "it was released too often of late",
    DecisionReason.FOREIGN_WRITER: "somebody else sets the device's limits",
    DecisionReason.THROTTLED: "the device slows down for reasons of its own",
    DecisionReason.SHARED: "another tenant of the device has no signal or does not agree",
    DecisionReason.MIG: "the device is split into instances",
    DecisionReason.PROFILE: "a power profile of the vendor's is in force",
    DecisionReason.NO_PERMISSION: "limits may not be written here",
    DecisionReason.NO_CAPPER: "whoever may write limits does not answer",
    DecisionReason.LOST_DEVICE: "a device is lost",
}


def release_decision(state: TunerState, reason: DecisionReason, level: int) -> Decision:
    """The original comes back, now."""
    why = _REASONS.get(reason, reason.value.replace("_", " "))
    seen = state.estimates.at(level)
    sentence = f"Release {format_setting(state, level)}: {why}."
    return Decision(Move.RELEASE, reason, sentence, {}, level_figures(state, level, seen))


def decline_decision(reason: DecisionReason, more: str = "") -> Decision:
    """The original stays."""
    why = _REASONS.get(reason, reason.value.replace("_", " "))
    sentence = f"Leave the original setting: {why}{more}."
    return Decision(Move.DECLINE, reason, sentence)


def advice_decision(state: TunerState, level: int, pairs: float) -> Decision:
    """What would be done, were it allowed."""
    blocks = block_time(state) * 5 * pairs / 60e9
    sentence = (
        f"Advice: try {format_setting(state, level)} first; the job's noise is "
        f"{format_percent(state.estimates.noise)}, so certifying a setting would take about "
        f"{blocks:.0f} minutes."
    )
    return Decision(Move.DECLINE, DecisionReason.ADVICE, sentence, {}, {"setting": float(level)})


def _plain(part: float) -> str:
    return f"{100 * part:g} %"
