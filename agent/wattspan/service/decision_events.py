"""Log records of the tuner's decisions and the capper's writes, for the user's collector.

Decisions come from the tuner. The capper's actions come from its audit log and not from its state,
which lacks refused requests, earlier values and changes between two reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from wattspan.capper.audit import AuditAction, AuditEvent
from wattspan.model import SECOND, DecisionReason, Knob, RecordedDecision
from wattspan.otlp.logs import AttributeValue, LogRecord
from wattspan.tuning.serialization import setting_number, unit

DECISION_PREFIX = "wattspan.autotune."
CAPS_PREFIX = "wattspan.caps."

WARNINGS = frozenset(
    {
        DecisionReason.OVER_BUDGET,
        DecisionReason.TAIL,
        DecisionReason.BAD_WORK,
        DecisionReason.FOREIGN_WRITER,
        DecisionReason.NO_PERMISSION,
        DecisionReason.NO_CAPPER,
        DecisionReason.LOST_DEVICE,
    }
)
"""Reasons that an operator should examine: exceeded budgets, and faults."""

_WARNING_ACTIONS = frozenset({AuditAction.REFUSE, AuditAction.FOREIGN, AuditAction.FAIL})
_CEILING_ACTIONS = frozenset({AuditAction.CEILING, AuditAction.LIFT, AuditAction.LAPSE})
"""Actions without a device; their settings are in milliwatts, as those of power knobs."""

RecordSink = Callable[[LogRecord], None]


class DecisionSink(Protocol):
    def add(self, decided: RecordedDecision) -> object: ...


class ForwardedDecisions:
    """Adds each decision to a store and sends it to the collector."""

    def __init__(self, store: DecisionSink, send: RecordSink) -> None:
        self._store, self._send = store, send

    def add(self, decided: RecordedDecision) -> None:
        self._store.add(decided)
        self._send(decision_record(decided))


def decision_record(decided: RecordedDecision) -> LogRecord:
    """A decision of the tuner; its figures are ``wattspan.autotune.shown.*``."""
    decision, knob = decided.decision, decided.knob
    caps = sorted(decision.caps.items())
    attributes: dict[str, AttributeValue] = {
        "job": decided.job,
        "knob": knob.value,
        "unit": unit(knob),
        "move": decision.move.value,
        "reason": decision.reason.value,
        "applied": decided.applied,
        "devices": [device for device, _ in caps],
        "settings": [setting_number(knob, value) for _, value in caps],
    }
    attributes |= {
        f"shown.{name}": float(figure)
        for name, figure in decision.shown.items()
        if math.isfinite(figure)
    }
    return LogRecord(
        f"{DECISION_PREFIX}decision",
        decided.at.wall,
        decision.sentence,
        {f"{DECISION_PREFIX}{name}": value for name, value in attributes.items()},
        decision.reason in WARNINGS,
    )


def audit_record(event: AuditEvent) -> LogRecord:
    """An action of the capper; settings are in the unit of the attribute ``unit``."""
    knob = Knob.GPU_POWER if event.deed in _CEILING_ACTIONS else event.knob
    numbers: dict[str, AttributeValue | None] = {
        "ttl": None if event.ttl is None else event.ttl / SECOND,
        "pid": event.pid,
        "uid": event.uid,
    }
    if knob is not None:
        numbers |= {
            name: None if value is None else setting_number(knob, value)
            for name, value in (("old", event.old), ("new", event.new))
        }
    texts = {
        "deed": event.deed.value,
        "knob": event.knob.value if event.knob is not None else "",
        "unit": unit(knob) if knob is not None else "",
        "device": event.device,
        "name": event.name,
        "job": event.job,
        "why": event.why,
    }
    attributes = {name: text for name, text in texts.items() if text} | {
        name: number for name, number in numbers.items() if number is not None
    }
    return LogRecord(
        f"{CAPS_PREFIX}{event.deed.value}",
        event.at,
        _audit_sentence(event),
        {f"{CAPS_PREFIX}{name}": value for name, value in attributes.items()},
        event.deed in _WARNING_ACTIONS,
    )


def _audit_sentence(event: AuditEvent) -> str:
    knob = event.knob
    target = f"{knob} of {event.name or event.device}"
    job = f", for {event.job}" if event.job else ""
    old, new = _setting_text(knob, event.old), _setting_text(knob, event.new)
    match event.deed:
        case AuditAction.REFUSE | AuditAction.FAIL | AuditAction.VOID if event.why:
            return event.why
        case AuditAction.WRITE:
            text = f"The capper set {target} to {new}, from {old}{job}"
        case AuditAction.RESTORE:
            text = f"The capper restored {target} to {new}, from {old}{job}"
        case AuditAction.FOREIGN:
            text = f"Another program set {target} to {new}; the capper leaves it unchanged"
        case AuditAction.SNAPSHOT:
            text = f"The cap on {target} is {new}; the original limit is {old}"
        case AuditAction.CEILING:
            text = f"A ceiling of {_setting_text(Knob.GPU_POWER, event.new)} was set"
        case AuditAction.LIFT:
            text = f"The ceiling of {_setting_text(Knob.GPU_POWER, event.old)} was removed"
        case AuditAction.LAPSE:
            text = f"The ceiling of {_setting_text(Knob.GPU_POWER, event.old)} expired"
        case AuditAction.START:
            text = "The capper started"
        case AuditAction.END:
            text = "The capper ended"
        case _:
            text = f"The capper recorded: {event.deed}"
    return f"{text}: {event.why.rstrip('.')}." if event.why else f"{text}."


def _setting_text(knob: Knob | None, value: int | None) -> str:
    if knob is None or value is None:
        return "unlocked" if knob is Knob.GPU_CLOCK else "unknown"
    return f"{setting_number(knob, value):g} {unit(knob)}"
