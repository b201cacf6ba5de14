"""JSON form of tuning state and decisions: served, stored in the decision log and exported.

Power is in watts and clocks in megahertz, as ``unit`` names; energies are in joules, durations in
seconds, slowdowns and savings in ratios. Unknown values are null.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from wattspan.model import (
    CapperFigures,
    CapRow,
    Decision,
    Knob,
    RecordedDecision,
    TuningAccounts,
    TuningRow,
)

JsonObject = dict[str, Any]

_MILLI = 1e3


class _Scaled(NamedTuple):
    """An attribute with another unit in JSON: its key there, and its units per one of it.

    ``path`` are the keys to its object, or list of objects, in a row; ``scale`` is None for a
    setting of the knob.
    """

    path: tuple[str, ...]
    name: str
    key: str
    scale: float | None


_ENERGIES = ("saved", "saved_low", "saved_high", "saved_surely", "unit_energy")
_DURATIONS = ("exploration", "lost", "allowance", "committed", "unit_time")
_PIPELINE_TIMES = ("unit_time", "original_time", "straggler_time")
_SCALED = (
    *(_Scaled((), name, f"{name}_joules", 1e6) for name in _ENERGIES),
    *(_Scaled((), name, f"{name}_seconds", 1e9) for name in _DURATIONS),
    *(_Scaled(("pipelines",), name, f"{name}_seconds", 1e9) for name in _PIPELINE_TIMES),
    _Scaled(("pipelines", "ranks"), "saved", "saved_joules", 1e6),
    _Scaled(("partners",), "age", "age_seconds", 1e9),
    _Scaled(("tried",), "setting", "setting", None),
    _Scaled(("load", "bins"), "setting", "setting", None),
)

_STATE_SETTINGS = ("minimum", "default", "maximum", "requested", "enforced")
_CAP_SETTINGS = ("original", "wanted", "ceiling")


def unit(knob: Knob) -> str:
    """The unit of a knob's settings in JSON."""
    return "MHz" if knob is Knob.GPU_CLOCK else "W"


def setting_number(knob: Knob, value: int) -> float:
    """A setting in the unit of JSON."""
    return value / _setting_scale(knob)


def _setting_scale(knob: Knob) -> float:
    return 1.0 if knob is Knob.GPU_CLOCK else _MILLI


# ------------------------------------------------------------------------------------ accounts


class TuningDocument(Struct, frozen=True):
    """The state of tuning and of all caps; unknown fields of a newer agent are ignored."""

    mode: str
    capper: CapperFigures
    ceiling_watts: float | None
    jobs: list[JsonObject]  # each of `row_to_json`
    caps: list[JsonObject]


def tuning_document(accounts: TuningAccounts) -> TuningDocument:
    return TuningDocument(
        accounts.mode,
        accounts.capper,
        _divided(accounts.ceiling, _MILLI),
        list(map(row_to_json, accounts.rows)),
        list(map(_cap_to_json, accounts.caps)),
    )


def tuning_accounts(document: TuningDocument) -> TuningAccounts:
    """Inverse of :func:`tuning_document`. LookupError, TypeError or ValueError: invalid facts."""
    return TuningAccounts(
        mode=document.mode,
        rows=tuple(map(_row_from_json, document.jobs)),
        caps=tuple(map(_cap_from_json, document.caps)),
        capper=document.capper,
        ceiling=_multiplied(document.ceiling_watts, _MILLI),
    )


def row_to_json(row: TuningRow) -> JsonObject:
    knob, facts = row.knob, _to_builtins(row)
    del facts["since"]
    for path, name, key, scale in _SCALED:
        for one in _objects(facts, path):
            one[key] = _divided(one.pop(name), scale or _setting_scale(knob))
    return facts | {
        "unit": unit(knob),
        "since_unix_ns": row.since.wall,
        "since_mono_ns": row.since.mono,
        "decision": _decision_to_json(knob, row.decision),
        "original": _settings_to_json(knob, row.original),
        "decisions": [
            {"move": move.value, "reason": reason.value, "count": count}
            for (move, reason), count in row.decisions.items()
        ],
    }


def _row_from_json(facts: Mapping[str, Any]) -> TuningRow:
    knob = Knob(facts["knob"])
    values: JsonObject = msgspec.to_builtins(facts)  # a copy
    for path, name, key, scale in _SCALED:
        for one in _objects(values, path):
            # Earlier agents have not sent all attributes of nested objects.
            value = one.pop(key, None) if path else one.pop(key)
            one[name] = _multiplied(value, scale or _setting_scale(knob))
    values |= {
        "since": (facts["since_mono_ns"], facts["since_unix_ns"]),
        "decision": _decision_from_json(knob, facts["decision"]),
        "original": _settings_from_json(knob, facts["original"]),
        "decisions": {(one["move"], one["reason"]): one["count"] for one in facts["decisions"]},
    }
    return msgspec.convert(values, TuningRow)


def _objects(facts: JsonObject, path: Iterable[str]) -> list[JsonObject]:
    """The objects at a path, in all lists on the way; none where it is null or missing."""
    found = [facts]
    for key in path:
        values = [one.get(key) or () for one in found]
        found = [one for value in values for one in ([value] if isinstance(value, dict) else value)]
    return found


def _cap_to_json(row: CapRow) -> JsonObject:
    facts = _to_builtins(row)
    facts |= facts.pop("state")
    for name in ("key", "since", "expires", "lost", "presence"):
        del facts[name]
    knob, device = row.state.key
    for name in (*_STATE_SETTINGS, *_CAP_SETTINGS):
        facts[name] = None if facts[name] is None else setting_number(knob, facts[name])
    return facts | {
        "knob": knob.value,
        "unit": unit(knob),
        "device": device,
        "since_unix_ns": row.since.wall if row.since else None,
        "since_mono_ns": row.since.mono if row.since else None,
        "expires_mono_ns": row.expires,
    }


def _cap_from_json(facts: Mapping[str, Any]) -> CapRow:
    knob, since = Knob(facts["knob"]), facts["since_mono_ns"]
    settings = {
        name: _setting_from_json(knob, facts[name]) for name in (*_STATE_SETTINGS, *_CAP_SETTINGS)
    }
    converted = {
        "key": (knob.value, facts["device"]),
        "since": None if since is None else (since, facts["since_unix_ns"]),
        "expires": facts["expires_mono_ns"],
    }
    values = {**facts, **settings, **converted}
    return msgspec.convert(values | {"state": values}, CapRow)


# ----------------------------------------------------------------------------------- decisions


def recorded_decision_to_json(recorded: RecordedDecision) -> JsonObject:
    return {
        "at_unix_ns": recorded.at.wall,
        "at_mono_ns": recorded.at.mono,
        "job": _encodable(recorded.job),
        "knob": recorded.knob.value,
        "unit": unit(recorded.knob),
        "applied": recorded.applied,
        **_decision_to_json(recorded.knob, recorded.decision),
    }


def recorded_decision_from_json(facts: Mapping[str, Any]) -> RecordedDecision:
    """Inverse of :func:`recorded_decision_to_json`; errors as in :func:`tuning_accounts`."""
    knob, at = facts["knob"], (facts["at_mono_ns"], facts["at_unix_ns"])
    values = at, facts["job"], knob, _decision_from_json(Knob(knob), facts), facts["applied"]
    return msgspec.convert(values, RecordedDecision)


def _decision_to_json(knob: Knob, decision: Decision) -> JsonObject:
    return _to_builtins(decision) | {"caps": _settings_to_json(knob, decision.caps)}


def _decision_from_json(knob: Knob, facts: Mapping[str, Any]) -> JsonObject:
    """The attributes of a decision."""
    return {
        **facts,
        "caps": _settings_from_json(knob, facts["caps"]),
        "shown": {name: figure for name, figure in facts["shown"].items() if figure is not None},
    }


# -------------------------------------------------------------------------------------- values


def _to_builtins(value: object) -> JsonObject:
    facts: JsonObject = _encodable(msgspec.to_builtins(value))
    return facts


def _encodable(value: Any) -> Any:
    """A value that JSON can encode: applications choose names, with lone surrogates."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _encodable(one) for key, one in value.items()}
        case list() | tuple():
            return [_encodable(one) for one in value]
    return value


def _setting_from_json(knob: Knob, value: float | None) -> int | None:
    return _multiplied(value, _setting_scale(knob))


def _settings_to_json(knob: Knob, values: Mapping[str, int]) -> dict[str, float]:
    return {device: setting_number(knob, value) for device, value in values.items()}


def _settings_from_json(knob: Knob, values: Mapping[str, float]) -> dict[str, int | None]:
    return {device: _setting_from_json(knob, value) for device, value in values.items()}


def _divided(value: int | None, scale: float) -> float | None:
    return None if value is None else value / scale


def _multiplied(value: float | None, scale: float) -> int | None:
    return None if value is None else round(value * scale)
