"""What was decided and what was written, as events for the user's collector.

Decisions come from the tuner, by the book that it is handed. What the capper did comes from the
capper's audit log, not from its state: the log has what a state cannot show, such as who was
refused, what stood before, and what came and went between two looks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from wattspan.capper.audit import AuditAction, AuditEvent
from wattspan.model import SECOND, DecisionReason, Knob, RecordedDecision
from wattspan.otlp.log_records import AttributeValue, LogRecord
from wattspan.tuning import serialization

PREFIX = "wattspan.caps."

WARNINGS = frozenset(
    {
        DecisionReason.OVER_BUDGET,
        DecisionReason.BUDGET_SPENT,
        DecisionReason.TAIL,
        DecisionReason.LYING_SIGNAL,
        DecisionReason.BAD_WORK,
        DecisionReason.FOREIGN_WRITER,
        DecisionReason.NO_PERMISSION,
        DecisionReason.NO_CAPPER,
        DecisionReason.LOST_DEVICE,
    }
)
"""Reasons that somebody should look into: a budget that was about to break, or what is broken."""

_WARNING_ACTIONS = frozenset({AuditAction.REFUSE, AuditAction.FOREIGN, AuditAction.FAIL})
_CEILING_ACTIONS = frozenset({AuditAction.CEILING, AuditAction.LIFT, AuditAction.LAPSE})
"""Deeds that have no device; their settings are in milliwatts, as those of power knobs."""

RecordSink = Callable[[LogRecord], None]


class DecisionSink(Protocol):
    def add(self, decided: RecordedDecision) -> object: ...


class ForwardedDecisions:
    """A book of decisions; whatever it is given is told as well, its small steps too."""

    def __init__(self, book: DecisionSink, tell: RecordSink) -> None:
        self._book, self._tell = book, tell

    def add(self, decided: RecordedDecision) -> None:
        self._book.add(decided)
        self._tell(decision_record(decided))


def decision_record(decided: RecordedDecision) -> LogRecord:
    """A decision of the tuner."""
    event = serialization.decision_event(decided)
    warns = decided.decision.reason in WARNINGS
    return LogRecord(event.name, event.wall, event.body, event.attributes, warns)


def audit_record(event: AuditEvent) -> LogRecord:
    """What the capper did; settings are in the unit that is told beside them."""
    attributes: dict[str, AttributeValue] = {"deed": event.deed.value}
    knob = Knob.GPU_POWER if event.deed in _CEILING_ACTIONS else event.knob
    if event.knob is not None:
        attributes["knob"] = event.knob.value
    if event.ttl is not None:
        attributes["ttl"] = event.ttl / SECOND
    if knob is not None:
        attributes["unit"] = serialization.unit(knob)
        settings = {"old": event.old, "new": event.new}
        attributes |= {
            name: _number(knob, value) for name, value in settings.items() if value is not None
        }
    words = {"device": event.device, "name": event.name, "job": event.job, "why": event.why}
    attributes |= {name: word for name, word in words.items() if word}
    numbers = {"pid": event.pid, "uid": event.uid}
    attributes |= {name: number for name, number in numbers.items() if number is not None}
    return LogRecord(
        f"{PREFIX}{event.deed.value}",
        event.at,
        audit_sentence(event),
        {f"{PREFIX}{name}": value for name, value in attributes.items()},
        event.deed in _WARNING_ACTIONS,
    )


def audit_sentence(event: AuditEvent) -> str:
    """What happened, for people."""
    where = f"{event.knob} of {event.name or event.device}"
    whose = f", for {event.job}" if event.job else ""
    old, new = _format_value(event.knob, event.old), _format_value(event.knob, event.new)
    match event.deed:
        case AuditAction.WRITE:
            said = f"Set {where} to {new}, from {old}{whose}"
        case AuditAction.RESTORE:
            said = f"Gave back {where}: {new}, from {old}{whose}"
        case AuditAction.FOREIGN:
            said = f"Somebody else has set {where}, to {new}: it is left alone"
        case AuditAction.REFUSE | AuditAction.FAIL | AuditAction.VOID if event.why:
            return event.why
        case AuditAction.SNAPSHOT:
            said = f"In force: {where} at {new}; the original is {old}"
        case AuditAction.CEILING | AuditAction.LIFT | AuditAction.LAPSE:
            limit = event.new if event.deed is AuditAction.CEILING else event.old
            done = {
                AuditAction.CEILING: "was set",
                AuditAction.LIFT: "was lifted",
                AuditAction.LAPSE: "has ended",
            }
            said = f"A ceiling of {_format_value(Knob.GPU_POWER, limit)} {done[event.deed]}"
        case AuditAction.START:
            said = "The capper began"
        case AuditAction.END:
            said = "The capper ended"
        case _:
            said = f"The capper noted: {event.deed}"
    return f"{said}: {event.why.rstrip('.')}." if event.why else f"{said}."


def _format_value(knob: Knob | None, value: int | None) -> str:
    if knob is None or value is None:
        return "unlocked" if knob is Knob.GPU_CLOCK else "unknown"
    return f"{_number(knob, value):g} {serialization.unit(knob)}"


def _number(knob: Knob, value: int) -> float:
    return float(value) if knob is Knob.GPU_CLOCK else value / 1e3
