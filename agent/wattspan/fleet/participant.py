"""The thread of a host in a fleet: beats, the candidacy, and the steps of a leader.

A leader ends silent sessions, plans allotments and delivers them. Every write is conditional: on
the leadership, and on the records from which it follows. A leader that was replaced therefore
changes nothing, whenever it notices that.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Final, NamedTuple

from wattspan.config import FleetSettings
from wattspan.fleet.allotment import AllotmentBook, note_absence
from wattspan.fleet.allotment_planner import AllotmentPlan
from wattspan.fleet.coordination import (
    MAX_CHANGES,
    Changes,
    ConflictError,
    Coordination,
    CoordinationError,
    Election,
    KeyChange,
    KeyWrite,
    LeaseEndedError,
    RevisionCondition,
)
from wattspan.fleet.member import FleetMember
from wattspan.fleet.records import MAX_LIFETIME, FleetKeys, FleetState, encode, read_state
from wattspan.model import MILLISECOND, SECOND, Failure, SourceHealth, Trouble
from wattspan.model.snapshot import FleetAccounts
from wattspan.ports import Clock, WattspanError
from wattspan.util.throttle import RateLimitedLog, RetryBackoff

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
        for name in silent:  # the report as it was read; it may be renewed meanwhile
            key = self._keys.report(name)
            self._coordination.commit((KeyWrite(key, None),), (fence, state.condition(key)))
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


# ------------------------------------------------------------------------------------- participant


LEADER_LEASE_SECONDS: Final = 10
"""Time from the end of a leader until another one may be elected, at most."""
BEATS_PER_CONTACT: Final = 4
LEAST_PAUSE: Final = 200 * MILLISECOND
"""Least time between two rounds, so that changes of many hosts are decided together."""
LEAVE_TIME: Final = 4 * SECOND
"""Longest wait for the fallback at an orderly end; a fall of all limits by quarters takes 3 s."""
_LONGEST_WAIT: Final = 500 * MILLISECOND
"""Longest wait for changes at once, so that the thread ends soon."""
_MAX_PENDING: Final = 1000
"""Changes that are read between two rounds; the rest of a flood is skipped."""
FIRST_DELAY: Final = 250 * MILLISECOND
MAX_JOIN_TIME: Final = 60 * SECOND
"""Longer than a former session of the host and a slow ramp of its limits usually last."""


class FleetParticipant:
    """One host in its fleet. ``round`` is one pass; ``start`` repeats it in a thread."""

    def __init__(
        self,
        settings: FleetSettings,
        coordination: Coordination,
        member: FleetMember,
        clock: Clock,
        log: Callable[[str], None],
    ) -> None:
        self._settings, self._coordination, self._member = settings, coordination, member
        self._clock = clock
        self._log = RateLimitedLog(clock.monotonic, log)
        self._keys = FleetKeys(settings.prefix)
        self._election = Election(coordination, self._keys.leader, member.name)
        self._leader = FleetLeader(self._keys, coordination, clock, settings.least_change_watts)
        self._interval = settings.contact // BEATS_PER_CONTACT
        self._backoff = RetryBackoff(FIRST_DELAY, self._interval, random.random)
        self._lease = 0
        self._beat_due = 0
        self._has_news = False
        self._trouble = ""
        self._changes: Changes | None = None
        self._watched = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wattspan-fleet", daemon=True)
        self._rounds = self._failed = 0
        self._joined_at = clock.monotonic()  # when it was last in a session
        self.status = FleetAccounts()
        """The newest state. Safe from any thread."""

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = LEAVE_TIME / SECOND + 1) -> None:
        """Leave the fleet and end the thread; a call that hangs does not delay the end."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def round(self) -> None:
        """Renew, lead if elected, and publish the status. Never raises a WattspanError."""
        news, self._has_news = self._has_news, False
        try:
            if self._clock.monotonic() >= self._beat_due or self._member.has_lowered():
                news = True
                self._rounds += 1
                self._beat_due = self._clock.monotonic() + self._interval
                if self._member.beat():
                    self._beat_due = 0  # its news are published by the next round
                self._campaign()
                self._trouble = ""
                self._backoff.reset()
            if news or self._clock.monotonic() >= self._next_end:
                self._lead()
        except ConflictError:
            self._beat_due = 0  # another participant was faster: read again
        except WattspanError as error:
            self._failed += 1
            self._trouble = str(error)
            self._beat_due = self._backoff.failed(self._clock.monotonic())
            self._log.write(f"The fleet: {error}", type(error).__name__)
        self.status = self._status()

    def health(self) -> tuple[SourceHealth, ...]:
        """The contact to the fleet. Safe from any thread.

        A host that waits for longer than a start takes reports the reason: another host may have
        its name.
        """
        status, verb = self.status, "reach"
        cause = status.trouble
        if not cause and self._clock.monotonic() - self._joined_at > MAX_JOIN_TIME:
            cause, verb = status.waiting, "join"
        failure = Failure("fleet", "the fleet", Trouble.RETRY, cause.rstrip("."), verb=verb)
        failures = (failure,) if cause else ()
        return (SourceHealth("fleet", not cause, self._rounds, self._failed, failures),)

    def observe(self, seconds: float) -> bool:
        """True if something changes within ``seconds`` that the next round has to decide."""
        try:
            changes = self._pending(seconds)
        except CoordinationError:
            self._unwatch()
            self._stopped.wait(seconds)
            return False
        own = self._keys.allotment(self._member.name)
        if any(change.key == own for change in changes):
            self._beat_due = 0
        self._has_news = self._has_news or bool(changes)
        return bool(changes)

    def leave(self) -> bool:
        """Give up the leadership and the session, for the thread that calls ``round``.

        False while the devices are above the fallback: repeat it for ``LEAVE_TIME`` at most.
        """
        self._election.resign()
        return self._member.leave()

    def close(self) -> None:
        """End the connections, after ``leave``."""
        with suppress(CoordinationError):
            if self._lease:
                self._coordination.revoke(self._lease)
        self._unwatch()
        self._coordination.close()

    # --------------------------------------------------------------------------- inner workings

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.round()
                self._wait()
            except Exception as error:  # noqa: BLE001 - the host would never return to its fleet
                self._log.failure("The host's part in the fleet", error)
                self._unwatch()
                self._stopped.wait(self._interval / SECOND)
        deadline, pause = self._clock.monotonic() + LEAVE_TIME, threading.Event()
        while not self.leave() and self._clock.monotonic() < deadline:
            pause.wait(LEAST_PAUSE / SECOND)
        self.close()

    def _campaign(self) -> None:
        if not self._settings.lead:
            return
        try:
            if not self._lease:
                self._lease = self._coordination.grant(LEADER_LEASE_SECONDS)
            self._coordination.renew(self._lease)
            self._election.campaign(self._lease)
        except LeaseEndedError:
            self._lease = 0  # the next beat asks for another

    def _lead(self) -> None:
        fence = self._election.fence
        if fence is not None:
            try:
                self._leader.step(fence)
            except ConflictError:
                self._beat_due = 0  # it leads no more, or a record was changed: look again

    def _wait(self) -> None:
        """Return at the next beat, or earlier with changes to see."""
        earliest = self._clock.monotonic() + LEAST_PAUSE
        due = max(earliest, min(self._beat_due, self._next_end))
        if self._member.awaits_devices:
            due = earliest
        while not self._stopped.is_set():
            left = min(due - self._clock.monotonic(), _LONGEST_WAIT)
            if left <= 0:
                return
            if self.observe(left / SECOND):
                self._stopped.wait(LEAST_PAUSE / SECOND)
                return

    @property
    def _next_end(self) -> float:
        """The time at which the next session ends, for a leader."""
        return inf if self._election.fence is None else self._leader.next_end

    def _watch(self) -> Changes:
        """The changes of all records for a leader, of the own allotment for others."""
        leads = self._election.fence is not None
        prefix = self._keys.prefix if leads else self._keys.allotment(self._member.name)
        if self._changes is None or prefix != self._watched:
            self._unwatch()
            revision = self._coordination.read(self._keys.leader).revision
            self._changes, self._watched = self._coordination.watch(prefix, revision), prefix
        return self._changes

    def _pending(self, seconds: float) -> list[KeyChange]:
        """All changes that have arrived, awaited for ``seconds``.

        One round decides for all of them: rounds for each would lag behind a flood of writes.
        """
        found = list(self._watch().wait(seconds))
        more = bool(found)
        while more and len(found) < _MAX_PENDING:
            more = bool(changes := self._watch().wait(0.0))
            found += changes
        if more:  # skip the rest: the next beat and round read the present state
            self._unwatch()
            self._watch()
            self._beat_due = 0
        return found

    def _unwatch(self) -> None:
        if self._changes is not None:
            self._changes.close()
            self._changes = None

    def _status(self) -> FleetAccounts:
        member, state = self._member, self._member.state
        leads, plan = self._election.fence is not None, self._leader.plan
        if member.session:
            self._joined_at = self._clock.monotonic()
        return FleetAccounts(
            allotment=None if state is None else state.limit,
            safe=None if state is None else state.safe,
            demand=member.demand,
            in_contact=bool(member.session) and not self._trouble,
            leads=leads,
            leader=self._election.leader,
            trouble=self._trouble,
            waiting=member.waiting,
            places=tuple(one for _, one in sorted(plan.nodes.items())) if leads and plan else (),
            ended=self._leader.ended if leads else 0,
        )
