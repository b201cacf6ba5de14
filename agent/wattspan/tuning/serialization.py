"""Tuning as plain facts for JSON, and back: what is served, kept in the history and exported.

Power is told in watts and clocks in megahertz, as ``unit`` says; energies in joules, durations
in seconds, slowdowns and savings as parts of 1. What is not known is null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from wattspan.model import (
    CapKey,
    CapRow,
    Decision,
    DecisionReason,
    Instant,
    Knob,
    KnobState,
    Microjoules,
    Move,
    Nanoseconds,
    RecordedDecision,
    SettingResult,
    TuningAccounts,
    TuningRow,
    TuningState,
)

JsonObject = dict[str, Any]


def unit(knob: Knob) -> str:
    """The unit in which settings of ``knob`` are told."""
    return "MHz" if knob is Knob.GPU_CLOCK else "W"


# ------------------------------------------------------------------------------------ accounts


def accounts_to_json(accounts: TuningAccounts) -> JsonObject:
    """Everything that is known of tuning."""
    return {
        "mode": accounts.mode,
        "capper": {
            "answers": accounts.capper,
            "trouble": accounts.capper_trouble,
            "writes": accounts.writes,
            "restores": accounts.restores,
        },
        "ceiling_watts": _from_milli(accounts.ceiling),
        "jobs": [row_to_json(row) for row in accounts.rows],
        "caps": [_cap_to_json(row) for row in accounts.caps],
    }


def accounts_from_json(facts: Mapping[str, Any]) -> TuningAccounts:
    """What :func:`accounts_facts` told. LookupError, TypeError or ValueError: it is something else.

    What a newer agent tells beside it is passed over.
    """
    capper = facts["capper"]
    return TuningAccounts(
        mode=str(facts["mode"]),
        rows=tuple(map(_row_from_json, facts["jobs"])),
        caps=tuple(map(_cap_from_json, facts["caps"])),
        capper=capper["answers"],
        capper_trouble=capper["trouble"],
        writes=capper["writes"],
        restores=capper["restores"],
        ceiling=_to_milli(facts["ceiling_watts"]),
    )


def row_to_json(row: TuningRow) -> JsonObject:
    """One job's tuning of one knob."""
    knob = row.knob
    return {
        "job": _text(row.job),
        "service": _text(row.service),
        "span": _text(row.span),
        "knob": knob.value,
        "unit": unit(knob),
        "state": row.state.value,
        "since_unix_ns": row.since.wall,
        "since_mono_ns": row.since.mono,
        "applied": row.applied,
        "decision": _decision_to_json(knob, row.decision),
        "devices": list(row.devices),
        "original": _settings_to_json(knob, row.original),
        "budget": row.budget,
        "confidence": row.confidence,
        "slowdown": _finite(row.slowdown),
        "slowdown_bound": _finite(row.slowdown_bound),
        "held_slowdown": _finite(row.held_slowdown),
        "held_bound": _finite(row.held_bound),
        "saving": _finite(row.saving),
        "saved_joules": _from_micro(row.saved),
        "saved_low_joules": _from_micro(row.saved_low),
        "saved_high_joules": _from_micro(row.saved_high),
        "saved_surely_joules": _from_micro(row.saved_surely),
        "exploration_seconds": _from_nano(row.exploration),
        "lost_seconds": _from_nano(row.lost),
        "allowance_seconds": _from_nano(row.allowance),
        "committed_seconds": _from_nano(row.committed),
        "pairs": row.pairs,
        "units": row.units,
        "tried": [_tested_to_json(knob, tried) for tried in row.tried],
        "decisions": [
            {"move": move.value, "reason": reason.value, "count": count}
            for (move, reason), count in row.decisions.items()
        ],
    }


def _row_from_json(facts: Mapping[str, Any]) -> TuningRow:
    knob = Knob(facts["knob"])
    return TuningRow(
        job=facts["job"],
        service=facts["service"],
        span=facts["span"],
        knob=knob,
        state=TuningState(facts["state"]),
        decision=_decision_from_json(knob, facts["decision"]),
        since=Instant(facts["since_mono_ns"], facts["since_unix_ns"]),
        budget=facts["budget"],
        confidence=facts["confidence"],
        devices=tuple(facts["devices"]),
        applied=facts["applied"],
        slowdown=facts["slowdown"],
        slowdown_bound=facts["slowdown_bound"],
        held_slowdown=facts["held_slowdown"],
        held_bound=facts["held_bound"],
        saving=facts["saving"],
        saved=_to_micro(facts["saved_joules"]),
        saved_low=_to_micro(facts["saved_low_joules"]),
        saved_high=_to_micro(facts["saved_high_joules"]),
        saved_surely=_to_micro(facts["saved_surely_joules"]) or Microjoules(0),
        exploration=_to_nano(facts["exploration_seconds"]) or Nanoseconds(0),
        lost=_to_nano(facts["lost_seconds"]),
        allowance=_to_nano(facts["allowance_seconds"]),
        committed=_to_nano(facts["committed_seconds"]),
        pairs=facts["pairs"],
        units=facts["units"],
        tried=tuple(_tested_from_json(knob, tried) for tried in facts["tried"]),
        decisions={
            (Move(one["move"]), DecisionReason(one["reason"])): one["count"]
            for one in facts["decisions"]
        },
        original=_settings_from_json(knob, facts["original"]),
    )


def _tested_to_json(knob: Knob, tried: SettingResult) -> JsonObject:
    return {
        "setting": _setting_to_json(knob, tried.setting),
        "slowdown": _finite(tried.slowdown),
        "bound": _finite(tried.bound),
        "saving": _finite(tried.saving),
        "pairs": tried.pairs,
        "certified": tried.certified,
    }


def _tested_from_json(knob: Knob, facts: Mapping[str, Any]) -> SettingResult:
    return SettingResult(
        _setting_from_json(knob, facts["setting"]),
        facts["slowdown"],
        facts["bound"],
        facts["saving"],
        facts["pairs"],
        facts["certified"],
    )


def _cap_to_json(row: CapRow) -> JsonObject:
    state = row.state
    knob = state.key.knob
    return {
        "knob": knob.value,
        "unit": unit(knob),
        "device": state.key.device,
        "name": state.name,
        "aliases": list(state.aliases),
        **{name: _setting_to_json(knob, getattr(state, name)) for name in _STATE},
        **{name: _setting_to_json(knob, getattr(row, name)) for name in _ROW},
        "holder": row.holder,
        "why": row.why,
        "since_unix_ns": row.since.wall if row.since else None,
        "since_mono_ns": row.since.mono if row.since else None,
        "expires_mono_ns": row.expires,
        "foreign": row.foreign,
        "usable": row.usable,
        "trouble": row.trouble,
    }


_STATE = ("minimum", "default", "maximum", "requested", "enforced")
_ROW = ("original", "wanted", "ceiling")


def _cap_from_json(facts: Mapping[str, Any]) -> CapRow:
    knob, since = Knob(facts["knob"]), facts["since_mono_ns"]
    return CapRow(
        state=KnobState(
            CapKey(knob, facts["device"]),
            facts["name"],
            **{name: _setting_from_json(knob, facts[name]) for name in _STATE},
            aliases=tuple(facts["aliases"]),
        ),
        **{name: _setting_from_json(knob, facts[name]) for name in _ROW},
        holder=facts["holder"],
        why=facts["why"],
        since=None if since is None else Instant(since, facts["since_unix_ns"]),
        expires=facts["expires_mono_ns"],
        foreign=facts["foreign"],
        usable=facts["usable"],
        trouble=facts["trouble"],
    )


# ----------------------------------------------------------------------------------- decisions


def recorded_decision_to_json(decided: RecordedDecision) -> JsonObject:
    """One decision of the history."""
    return {
        "at_unix_ns": decided.at.wall,
        "at_mono_ns": decided.at.mono,
        "job": _text(decided.job),
        "knob": decided.knob.value,
        "unit": unit(decided.knob),
        "applied": decided.applied,
        **_decision_to_json(decided.knob, decided.decision),
    }


def recorded_decision_from_json(facts: Mapping[str, Any]) -> RecordedDecision:
    """What :func:`decided_facts` told; its errors are those of :func:`accounts_of`."""
    knob = Knob(facts["knob"])
    return RecordedDecision(
        Instant(int(facts["at_mono_ns"]), int(facts["at_unix_ns"])),
        str(facts["job"]),
        knob,
        _decision_from_json(knob, facts),
        bool(facts["applied"]),
    )


def _decision_to_json(knob: Knob, decision: Decision) -> JsonObject:
    return {
        "move": decision.move.value,
        "reason": decision.reason.value,
        "sentence": _text(decision.sentence),
        "caps": _settings_to_json(knob, decision.caps),
        "shown": {name: _finite(figure) for name, figure in decision.shown.items()},
    }


def _decision_from_json(knob: Knob, facts: Mapping[str, Any]) -> Decision:
    return Decision(
        Move(facts["move"]),
        DecisionReason(facts["reason"]),
        str(facts["sentence"]),
        _settings_from_json(knob, facts["caps"]),
        {name: figure for name, figure in facts["shown"].items() if figure is not None},
    )


class DecisionEvent(NamedTuple):
    """A decision as OpenTelemetry takes it: an event of a span, or a log record with this body."""

    name: str
    wall: int  # Unix nanoseconds
    body: str
    attributes: Mapping[str, str | bool | float | list[str] | list[float]]


DECISION_EVENT_NAME = "wattspan.autotune.decision"


def decision_event(decided: RecordedDecision) -> DecisionEvent:
    """``decided`` as an event; its figures are ``wattspan.autotune.shown.*``."""
    decision, knob = decided.decision, decided.knob
    caps = sorted(decision.caps.items())
    attributes: dict[str, str | bool | float | list[str] | list[float]] = {
        "job": decided.job,
        "knob": knob.value,
        "unit": unit(knob),
        "move": decision.move.value,
        "reason": decision.reason.value,
        "applied": decided.applied,
        "devices": [device for device, _ in caps],
        "settings": [_number(knob, value) for _, value in caps],
    }
    attributes |= {
        f"shown.{name}": float(figure)
        for name, figure in decision.shown.items()
        if math.isfinite(figure)
    }
    named = {f"wattspan.autotune.{name}": value for name, value in attributes.items()}
    return DecisionEvent(DECISION_EVENT_NAME, decided.at.wall, decision.sentence, named)


# --------------------------------------------------------------------------------------- units


def _text(text: str) -> str:
    """As JSON takes it: names come from applications, and may hold what is no Unicode."""
    return text.encode("utf-8", "replace").decode()


def _number(knob: Knob, value: int) -> float:
    return float(value) if knob is Knob.GPU_CLOCK else value / 1e3


def _setting_to_json(knob: Knob, value: int | None) -> float | None:
    return None if value is None else _number(knob, value)


def _setting_from_json(knob: Knob, value: float | None) -> Any:  # None, or an int
    return None if value is None else round(value if knob is Knob.GPU_CLOCK else value * 1e3)


def _settings_to_json(knob: Knob, values: Mapping[str, int]) -> dict[str, float]:
    return {device: _number(knob, value) for device, value in values.items()}


def _settings_from_json(knob: Knob, values: Mapping[str, float]) -> dict[str, int]:
    return {device: _setting_from_json(knob, value) for device, value in values.items()}


def _finite(figure: float | None) -> float | None:
    return figure if figure is not None and math.isfinite(figure) else None


def _from_milli(value: int | None) -> float | None:
    return None if value is None else value / 1e3


def _to_milli(value: float | None) -> int | None:
    return None if value is None else round(value * 1e3)


def _from_micro(value: int | None) -> float | None:
    return None if value is None else value / 1e6


def _to_micro(value: float | None) -> Microjoules | None:
    return None if value is None else Microjoules(round(value * 1e6))


def _from_nano(value: int | None) -> float | None:
    return None if value is None else value / 1e9


def _to_nano(value: float | None) -> Nanoseconds | None:
    return None if value is None else Nanoseconds(round(value * 1e9))
