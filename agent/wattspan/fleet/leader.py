"""The leader of a fleet: it ends silent sessions, plans allotments and delivers them.

Every write is conditional: on the leadership, and on the records from which it follows. A leader
that was replaced therefore changes nothing, whenever it notices that.
"""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple

from wattspan.fleet.allotment import AllotmentBook, note_absence
from wattspan.fleet.allotment_planner import AllotmentPlan
from wattspan.fleet.coordination import (
    MAX_CHANGES,
    Coordination,
    KeyWrite,
    RevisionCondition,
)
from wattspan.fleet.records import MAX_LIFETIME, FleetKeys, FleetState, encode, read_state
from wattspan.model import SECOND
from wattspan.ports import Clock

_MILLIWATTS_PER_WATT: Final = 1_000
_ABSENCE_STEP: Final = 60
"""Seconds after which the absence of hosts is noted in the book."""


class _LastWrite(NamedTuple):
    """The newest known write of a report, and the monotonic time at which it was first seen."""

    revision: int
    seen: int


class FleetLeader:
    """Decides for all hosts while this host leads. For one thread."""

    def __init__(
        self, keys: FleetKeys, coordination: Coordination, clock: Clock, least_change_watts: int
    ) -> None:
        self._keys, self._coordination, self._clock = keys, coordination, clock
        self._least_change = least_change_watts * _MILLIWATTS_PER_WATT
        self._last: dict[str, _LastWrite] = {}
        self._fence: RevisionCondition | None = None
        self._absent_since: dict[str, int] = {}
        self.ended = 0
        """Hosts whose registration has ended because they were absent for too long."""
        self.plan: AllotmentPlan | None = None
        """The newest plan; None before the first."""
        self.next_end: float = inf
        """The earliest monotonic time at which a session ends unless its report is renewed."""

    def step(self, fence: RevisionCondition) -> None:
        """Decide once, as leader by ``fence``. CoordinationError, RecordError.

        ConflictError if a record has changed meanwhile: the next step sees it.
        """
        if fence != self._fence:  # silence is counted anew: this host has not watched until now
            self._fence, self._last, self._absent_since = fence, {}, {}
        state = read_state(self._keys, self._coordination.read(self._keys.prefix))
        silent = self._observe(state)
        for name in silent:
            self._end_session(name, state, fence)
        known = self._with_absence(state)
        self.ended = len(known.ended)
        plan = self.plan = state.plan(silent, known, self._least_change)
        book = known if plan.book is None else plan.book
        copies = [
            KeyWrite(self._keys.allotment(name), encode(entry.allotment))
            for name, entry in book.hosts.items()
            if state.allotments.get(name) != entry.allotment
        ]
        copies += [
            KeyWrite(self._keys.allotment(name), None)
            for name in state.allotments
            if name not in book.hosts
        ]
        if book is not state.book:
            self._coordination.commit(
                (KeyWrite(self._keys.book, encode(book)),),
                (fence, state.condition(self._keys.book)),
            )
        # An old copy does no harm, so the delivery need not be one with the decision.
        for first in range(0, len(copies), MAX_CHANGES):
            self._coordination.commit(copies[first : first + MAX_CHANGES], (fence,))

    # --------------------------------------------------------------------------- inner workings

    def _observe(self, state: FleetState) -> tuple[str, ...]:
        """Note the writes of all reports; the hosts whose report has been silent for too long."""
        now = self._clock.monotonic()
        last: dict[str, _LastWrite] = {}
        silent = []
        self.next_end = inf
        lifetimes = dict.fromkeys(state.invalid, MAX_LIFETIME)
        lifetimes |= {name: presence.lifetime for name, presence in state.reports.items()}
        for name, lifetime in lifetimes.items():
            revision = state.written[self._keys.report(name)].revision
            before = self._last.get(name)
            if before is None or before.revision != revision:
                before = _LastWrite(revision, now)
            last[name] = before
            end = before.seen + lifetime
            if now > end:
                silent.append(name)
            else:
                self.next_end = min(self.next_end, end + 1)
        self._last = last
        return tuple(silent)

    def _with_absence(self, state: FleetState) -> AllotmentBook:
        """The book with the time for which this leader has seen hosts without a session."""
        now = self._clock.monotonic()
        reported = state.reports.keys() | state.invalid.keys()
        absent = [name for name in state.book.hosts if name not in reported]
        since = {name: self._absent_since.get(name, now) for name in absent}
        seconds = {name: (now - first) // SECOND for name, first in since.items()}
        due = {name: more for name, more in seconds.items() if more >= _ABSENCE_STEP}
        self._absent_since = since | {name: since[name] + due[name] * SECOND for name in due}
        return note_absence(state.book, due)

    def _end_session(self, name: str, state: FleetState, fence: RevisionCondition) -> None:
        """Delete a silent report as it was read; ConflictError if it was renewed meanwhile."""
        key = self._keys.report(name)
        self._coordination.commit((KeyWrite(key, None),), (fence, state.condition(key)))
