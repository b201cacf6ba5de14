"""JSON form of tuning state and decisions: served, stored in the decision log and exported.

Power is in watts and clocks in megahertz, as ``unit`` names; energies are in joules, durations in
seconds, slowdowns and savings in ratios. Unknown values are null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from wattspan.model import (
    CapKey,
    CapRow,
    Decision,
    DecisionReason,
    Instant,
    Knob,
    KnobState,
    Move,
    RecordedDecision,
    SettingResult,
    TuningAccounts,
    TuningRow,
    TuningState,
)

JsonObject = dict[str, Any]

_MILLI, _MICRO, _NANO = 1e3, 1e6, 1e9

# Attributes with the same name in JSON.
_ROW_NAMES = ("job", "service", "span")
_ROW_VALUES = ("budget", "confidence", "applied", "pairs", "units")
_ROW_RATIOS = ("slowdown", "slowdown_bound", "held_slowdown", "held_bound", "saving")
_STATE_SETTINGS = ("minimum", "default", "maximum", "requested", "enforced")
_CAP_SETTINGS = ("original", "wanted", "ceiling")
_CAP_VALUES = ("holder", "why", "foreign", "usable", "trouble")
_TRIED_RATIOS = ("slowdown", "bound", "saving")
# Attributes with a unit appended in JSON.
_ROW_ENERGIES = ("saved", "saved_low", "saved_high", "saved_surely")
_ROW_DURATIONS = ("exploration", "lost", "allowance", "committed")


def unit(knob: Knob) -> str:
    """The unit of a knob's settings in JSON."""
    return "MHz" if knob is Knob.GPU_CLOCK else "W"


def setting_number(knob: Knob, value: int) -> float:
    """A setting in the unit of JSON."""
    return float(value) if knob is Knob.GPU_CLOCK else value / _MILLI


# ------------------------------------------------------------------------------------ accounts


def accounts_to_json(accounts: TuningAccounts) -> JsonObject:
    return {
        "mode": accounts.mode,
        "capper": {
            "answers": accounts.capper,
            "trouble": accounts.capper_trouble,
            "writes": accounts.writes,
            "restores": accounts.restores,
        },
        "ceiling_watts": _divided(accounts.ceiling, _MILLI),
        "jobs": [row_to_json(row) for row in accounts.rows],
        "caps": [_cap_to_json(row) for row in accounts.caps],
    }


def accounts_from_json(facts: Mapping[str, Any]) -> TuningAccounts:
    """Inverse of :func:`accounts_to_json`; unknown keys are ignored.

    LookupError, TypeError or ValueError: invalid facts.
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
        ceiling=_multiplied(facts["ceiling_watts"], _MILLI),
    )


def row_to_json(row: TuningRow) -> JsonObject:
    knob = row.knob
    return {
        **{name: _text(getattr(row, name)) for name in _ROW_NAMES},
        "knob": knob.value,
        "unit": unit(knob),
        "state": row.state.value,
        "since_unix_ns": row.since.wall,
        "since_mono_ns": row.since.mono,
        "decision": _decision_to_json(knob, row.decision),
        "devices": list(row.devices),
        "original": _settings_to_json(knob, row.original),
        **_values(row, _ROW_VALUES),
        **_ratios(row, _ROW_RATIOS),
        **{f"{name}_joules": _divided(getattr(row, name), _MICRO) for name in _ROW_ENERGIES},
        **{f"{name}_seconds": _divided(getattr(row, name), _NANO) for name in _ROW_DURATIONS},
        "tried": [
            {
                "setting": setting_number(knob, tried.setting),
                **_ratios(tried, _TRIED_RATIOS),
                "pairs": tried.pairs,
                "certified": tried.certified,
            }
            for tried in row.tried
        ],
        "decisions": [
            {"move": move.value, "reason": reason.value, "count": count}
            for (move, reason), count in row.decisions.items()
        ],
    }


def _row_from_json(facts: Mapping[str, Any]) -> TuningRow:
    knob = Knob(facts["knob"])
    return TuningRow(
        knob=knob,
        state=TuningState(facts["state"]),
        decision=_decision_from_json(knob, facts["decision"]),
        since=Instant(facts["since_mono_ns"], facts["since_unix_ns"]),
        devices=tuple(facts["devices"]),
        tried=tuple(
            SettingResult(
                setting=_setting_from_json(knob, tried["setting"]),
                **{name: tried[name] for name in (*_TRIED_RATIOS, "pairs", "certified")},
            )
            for tried in facts["tried"]
        ),
        decisions={
            (Move(one["move"]), DecisionReason(one["reason"])): one["count"]
            for one in facts["decisions"]
        },
        original=_settings_from_json(knob, facts["original"]),
        **{name: facts[name] for name in (*_ROW_NAMES, *_ROW_VALUES, *_ROW_RATIOS)},
        **{name: _multiplied(facts[f"{name}_joules"], _MICRO) for name in _ROW_ENERGIES},
        **{name: _multiplied(facts[f"{name}_seconds"], _NANO) for name in _ROW_DURATIONS},
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
        **{name: _setting_to_json(knob, getattr(state, name)) for name in _STATE_SETTINGS},
        **{name: _setting_to_json(knob, getattr(row, name)) for name in _CAP_SETTINGS},
        **_values(row, _CAP_VALUES),
        "since_unix_ns": row.since.wall if row.since else None,
        "since_mono_ns": row.since.mono if row.since else None,
        "expires_mono_ns": row.expires,
    }


def _cap_from_json(facts: Mapping[str, Any]) -> CapRow:
    knob, since = Knob(facts["knob"]), facts["since_mono_ns"]
    return CapRow(
        state=KnobState(
            CapKey(knob, facts["device"]),
            facts["name"],
            **{name: _setting_from_json(knob, facts[name]) for name in _STATE_SETTINGS},
            aliases=tuple(facts["aliases"]),
        ),
        since=None if since is None else Instant(since, facts["since_unix_ns"]),
        expires=facts["expires_mono_ns"],
        **{name: _setting_from_json(knob, facts[name]) for name in _CAP_SETTINGS},
        **{name: facts[name] for name in _CAP_VALUES},
    )


# ----------------------------------------------------------------------------------- decisions


def recorded_decision_to_json(recorded: RecordedDecision) -> JsonObject:
    return {
        "at_unix_ns": recorded.at.wall,
        "at_mono_ns": recorded.at.mono,
        "job": _text(recorded.job),
        "knob": recorded.knob.value,
        "unit": unit(recorded.knob),
        "applied": recorded.applied,
        **_decision_to_json(recorded.knob, recorded.decision),
    }


def recorded_decision_from_json(facts: Mapping[str, Any]) -> RecordedDecision:
    """Inverse of :func:`recorded_decision_to_json`; errors as in :func:`accounts_from_json`."""
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


# -------------------------------------------------------------------------------------- values


def _values(row: object, names: tuple[str, ...]) -> JsonObject:
    return {name: getattr(row, name) for name in names}


def _ratios(row: object, names: tuple[str, ...]) -> JsonObject:
    return {name: _finite(getattr(row, name)) for name in names}


def _text(text: str) -> str:
    """Valid Unicode: applications choose names, and JSON cannot encode lone surrogates."""
    return text.encode("utf-8", "replace").decode()


def _setting_to_json(knob: Knob, value: int | None) -> float | None:
    return None if value is None else setting_number(knob, value)


def _setting_from_json(knob: Knob, value: float | None) -> Any:  # None, or an int
    return None if value is None else round(value if knob is Knob.GPU_CLOCK else value * _MILLI)


def _settings_to_json(knob: Knob, values: Mapping[str, int]) -> dict[str, float]:
    return {device: setting_number(knob, value) for device, value in values.items()}


def _settings_from_json(knob: Knob, values: Mapping[str, float]) -> dict[str, int]:
    return {device: _setting_from_json(knob, value) for device, value in values.items()}


def _finite(figure: float | None) -> float | None:
    return figure if figure is not None and math.isfinite(figure) else None


def _divided(value: int | None, scale: float) -> float | None:
    return None if value is None else value / scale


def _multiplied(value: float | None, scale: float) -> Any:  # None, or an int
    return None if value is None else round(value * scale)
