"""Log records of the tuner's decisions and the capper's writes, for the user's collector.

Decisions come from the tuner. The capper's actions come from its audit log, because its state lacks
refused requests, earlier values and changes between two reads.
"""

from __future__ import annotations

import math
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from wattspan.capper.audit import AuditAction, AuditEvent
from wattspan.model import SECOND, DecisionReason, Knob, RecordedDecision
from wattspan.otlp.logs import LogRecord
from wattspan.ports import Clock
from wattspan.tuning.serialization import setting_number, unit
from wattspan.util.protobuf import AttributeValue
from wattspan.util.throttle import RateLimitedLog

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

_WARNING_ACTIONS = frozenset(
    {AuditAction.REFUSE, AuditAction.FOREIGN, AuditAction.FAIL, AuditAction.RESET}
)
_CEILING_ACTIONS = frozenset({AuditAction.CEILING, AuditAction.LIFT, AuditAction.LAPSE})
"""Actions without a device; their settings are in milliwatts, as those of power knobs."""

RecordSink = Callable[[LogRecord], None]


def store_and_send(
    store: Callable[[RecordedDecision], object], send: RecordSink, decided: RecordedDecision
) -> None:
    """Store a decision and send it to the collector."""
    store(decided)
    send(decision_record(decided))


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


_UNSENT = ("at", "original", "check")
"""Fields of an event without an attribute."""


def audit_record(event: AuditEvent) -> LogRecord:
    """An action of the capper; settings are in the unit of the attribute ``unit``."""
    knob = Knob.GPU_POWER if event.deed in _CEILING_ACTIONS else event.knob
    attributes: dict[str, AttributeValue] = {
        name: value
        for name, value in msgspec.to_builtins(event).items()  # without defaults
        if name not in _UNSENT and (knob is not None or name not in ("old", "new"))
    }
    if event.ttl is not None:
        attributes["ttl"] = event.ttl / SECOND
    if knob is not None:
        settings = {"old": event.old, "new": event.new}
        attributes |= {n: setting_number(knob, v) for n, v in settings.items() if v is not None}
        attributes["unit"] = unit(knob)
    return LogRecord(
        f"{CAPS_PREFIX}{event.deed.value}",
        event.at,
        _audit_sentence(event, knob),
        {f"{CAPS_PREFIX}{name}": value for name, value in attributes.items()},
        event.deed in _WARNING_ACTIONS,
    )


_SENTENCES = {
    AuditAction.WRITE: "The capper set {target} to {new}, from {old}{job}",
    AuditAction.RESTORE: "The capper restored {target} to {new}, from {old}{job}",
    AuditAction.FOREIGN: "Another program set {target} to {new}; the capper leaves it unchanged",
    AuditAction.RESET: "The cap of {old} on {target} is gone",
    AuditAction.SNAPSHOT: "The cap on {target} is {new}; the original limit is {old}",
    AuditAction.CEILING: "A ceiling of {new} was set",
    AuditAction.LIFT: "The ceiling of {old} was removed",
    AuditAction.LAPSE: "The ceiling of {old} expired",
    AuditAction.START: "The capper started",
    AuditAction.END: "The capper ended",
}


def _audit_sentence(event: AuditEvent, knob: Knob | None) -> str:
    if event.why and event.deed in (AuditAction.REFUSE, AuditAction.FAIL, AuditAction.VOID):
        return event.why
    text = _SENTENCES.get(event.deed, "The capper recorded: {deed}").format(
        deed=event.deed,
        target=f"{knob} of {event.name or event.device}",
        old=_setting_text(knob, event.old),
        new=_setting_text(knob, event.new),
        job=f", for {event.job}" if event.job else "",
    )
    return f"{text}: {event.why.rstrip('.')}." if event.why else f"{text}."


def _setting_text(knob: Knob | None, value: int | None) -> str:
    if knob is None or value is None:
        return "unlocked" if knob is Knob.GPU_CLOCK else "unknown"
    return f"{setting_number(knob, value):g} {unit(knob)}"


READ_INTERVAL = SECOND
MAX_READ_BYTES = 256 * 1024
"""Bytes of one read; a longer line is skipped."""


class AuditTail:
    """Passes on every event that the capper writes after ``begin``, once and in order.

    After a rotation the old file is read to its end before the new one. The tail waits for a
    missing log, and logs an unreadable one once while it retries.
    """

    def __init__(
        self,
        path: Path,
        handle: Callable[[AuditEvent], None],
        clock: Clock,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._path, self._handle, self._log = path, handle, log
        self._failures = RateLimitedLog(clock.monotonic, log)
        self._file = -1
        self._position = 0  # after the last whole line
        self._unreadable = False

    def begin(self) -> None:
        """Skip the present content of the log."""
        if self._open():
            self._position = os.fstat(self._file).st_size

    def turn(self) -> None:
        """Pass on the events since the last turn."""
        if self._file < 0 and not self._open():
            return
        self._read()
        if self._replaced():
            self._read()  # rows written between the last read and the rotation
            self.close()
            if self._open():
                self._read()

    def run(self, stop: threading.Event) -> None:
        """Turn until ``stop`` is set, and once more after it."""
        ended = False
        while not ended:
            ended = stop.wait(READ_INTERVAL / SECOND)
            try:
                self.turn()
            except Exception as error:  # noqa: BLE001 - the rest of the agent continues
                self._failures.failure("Following the capper's audit log", error)
                self.close()
        self.close()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _open(self) -> bool:
        self._position = 0
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        except OSError as error:
            return self._refuse((error.strerror or str(error)).lower())
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            return self._refuse("it is not a file")
        self._file, self._unreadable = file, False
        return True

    def _refuse(self, cause: str) -> bool:
        if not self._unreadable:
            self._log(
                f"Cannot follow the capper's audit log {self._path}: {cause}. Its events are not "
                "sent on; make it readable for the user of the agent."
            )
        self._unreadable = True
        return False

    def _replaced(self) -> bool:
        """True if the path leads to another file now."""
        try:
            there = self._path.lstat()
        except OSError:
            return False  # a rotation is under way
        return not os.path.samestat(there, os.fstat(self._file))

    def _read(self) -> None:
        if os.fstat(self._file).st_size < self._position:
            self._position = 0  # the file was truncated
        while chunk := os.pread(self._file, MAX_READ_BYTES, self._position):
            end = chunk.rfind(b"\n") + 1
            if not end and len(chunk) < MAX_READ_BYTES:
                return  # an incomplete line
            self._position += end or len(chunk)
            for line in chunk[:end].split(b"\n"):
                try:
                    event = msgspec.json.decode(line, type=AuditEvent)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    continue  # torn, or of a later version
                self._handle(event)
