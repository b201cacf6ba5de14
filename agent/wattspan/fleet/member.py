"""A host's part in its fleet: reports, its session, and the allotment in force.

A session is renewed by conditional writes of the host's report, not by a lease of the service: a
write that succeeds proves that nobody had ended the session when it was sent. From that moment on
the allotment is in force for ``contact``, by the host's own clock, and the capper ends it by
itself. The leader ends a session by deleting the report, at a longer time after the last write.

A session that was lost is never continued. The next one begins once the devices are at the
fallback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

import msgspec

from wattspan.capper.protocol import AllotmentRow
from wattspan.config import FleetSettings
from wattspan.fleet.allotment import Allotment, HostReport, held_power, next_demand, watts
from wattspan.fleet.coordination import (
    ABSENT,
    ConflictError,
    Coordination,
    CoordinationError,
    KeyWrite,
    OutcomeUnknownError,
    RevisionCondition,
    read_key,
)
from wattspan.fleet.records import MAX_LIFETIME, FleetKeys, Presence, decode, encode
from wattspan.model import SECOND
from wattspan.ports import CapsError, Clock, ConfigError
from wattspan.util.files import FileLock, LockHeldError, replace_file

_ENDED: Final = 0  # a time in the past


class AllottedCapper(Protocol):
    """The capper of this host, as a fleet needs it. CapsError if it does not respond."""

    def allotment(self) -> AllotmentRow:
        """The allotment in force, and the range of the host's limits."""

    def allot(self, limit: int, safe: int, until: int, why: str) -> AllotmentRow:
        """Put an allotment in force until a time since boot; the state afterwards."""


class FleetMember:
    """One host. For one thread."""

    def __init__(
        self,
        name: str,
        settings: FleetSettings,
        coordination: Coordination,
        capper: AllottedCapper,
        clock: Clock,
        *,
        power: Callable[[], int | None],
        powers: Callable[[], Mapping[str, int]] = dict,
        new_session: Callable[[], str],
        former_session: str = "",
        note_session: Callable[[str], None] = lambda session: None,
        ramp: int = 0,
        largest_step: float = 1.0,
    ) -> None:
        """``power`` is the present power of the host in milliwatts, None if it is unknown.

        ``powers`` are those of its devices by id, as far as they are known.

        ``former_session`` is that of this host's agent that has ended without notice and acts no
        more, "" if none is known; ``note_session`` is called with each new one before it begins.
        The capper changes the host's limits by at most ``ramp`` milliwatts per second, 0 for any,
        and lowers one by ``largest_step`` of its default in a second.
        """
        self._ramp, self._largest_step = ramp, largest_step
        self.name, self._settings = name, settings
        self._coordination, self._capper, self._clock = coordination, capper, clock
        self._power, self._powers, self._new_session = power, powers, new_session
        self._keys = FleetKeys(settings.prefix)
        self._holding = Allotment.initial(0, 0)
        self._session, self._until = "", _ENDED
        self._note_session = note_session
        self._own_sessions = {former_session} - {""}
        self._revision = ABSENT
        self._beat = self._acknowledged = 0
        self._leaves = False
        self.awaits_devices = False
        """True while devices are above a limit that the fleet has to know to be in force."""
        self.state: AllotmentRow | None = None
        """The capper's newest state."""
        self.demand: int | None = None
        """The power for which the host asks; None for that of all its devices."""
        self.waiting = ""
        """The reason if the host has no allotment, in one sentence; "" if it has one."""

    @property
    def session(self) -> str:
        """The present session, "" without one."""
        return self._session

    @property
    def sequence(self) -> int:
        """The sequence of the allotment in force; 0 without one."""
        return self._holding.sequence

    def beat(self) -> bool:
        """Renew the session, or begin one, and put the newest allotment in force.

        True if the next beat has news and should follow at once. CoordinationError, CapsError and
        RecordError leave everything as it is: the allotment ends in time.
        """
        self.awaits_devices = False
        state = self.state = self._capper.allotment()
        if self._session and self._now() >= self._until:
            self._lose("The host has lost contact to the fleet and joins again.")
        if not self._session and not self._begin(state):
            return False
        sent = self._now()
        self._publish(state, self._lifetime(state))
        self._until = sent + self._settings.contact
        return self._adopt(self._newest())

    def has_lowered(self) -> bool:
        """True if the devices have come within the limit for which the last beat had to wait.

        Asks the capper only; CapsError.
        """
        return self.awaits_devices and _is_lowered(self._capper.allotment())

    def leave(self) -> bool:
        """End the session for an orderly stop, so that the fleet need not wait for its end.

        False while the devices are above the fallback, or etcd does not answer: call again. The
        fleet ends such a session by itself, earlier than that of a host that has lost contact.
        """
        if not self._session:
            return True
        key = self._keys.report(self.name)
        with suppress(CoordinationError):
            try:
                state = self._capper.allot(0, 0, _ENDED, "the agent stops")
                if _is_lowered(state):
                    condition = RevisionCondition(key, self._revision)
                    self._coordination.commit((KeyWrite(key, None),), (condition,))
                    self._session = ""
                elif not self._leaves:
                    self._publish(state, self._lifetime(state) - self._settings.contact)
                    self._leaves = True
            except (CapsError, ConfigError, ConflictError):  # nothing can be done, or need be
                self._session = ""
        return not self._session

    # --------------------------------------------------------------------------- inner workings

    def _now(self) -> int:
        return self._clock.now().since_boot

    def _lose(self, why: str) -> None:
        self._session, self._acknowledged = "", 0
        self._until = _ENDED
        self._holding = self._holding.lost()
        self.waiting = why

    def _begin(self, state: AllotmentRow) -> bool:
        """Begin a session once no earlier allotment is in force; False if that takes longer."""
        if state.until is not None:
            state = self._capper.allot(0, 0, _ENDED, "a new session with the fleet begins")
        self.state = state
        if not _is_lowered(state):
            self.awaits_devices = True
            self.waiting = (
                "The host's devices are not yet limited to"
                f" {watts(max(state.limit, state.floor))}, with which the host may join the fleet."
            )
            return False
        entry = read_key(self._coordination, self._keys.report(self.name))
        if entry is not None and decode(entry, Presence).report.session not in self._own_sessions:
            self.waiting = (
                "A session of this host's name has not ended: the agent began it before a crash,"
                " or it belongs to another host with the same [fleet] name."
            )
            return False
        self._revision = entry.revision if entry else ABSENT
        self._session = self._new_session()
        self._own_sessions.add(self._session)
        self._note_session(self._session)
        self._acknowledged = 0
        self._holding = Allotment.initial(state.limit, state.safe).begin(self._session)
        self.waiting = "The host has joined the fleet and waits for its allotment."
        return True

    def _publish(self, state: AllotmentRow, lifetime: int) -> None:
        """Write the report under the condition that the session goes on."""
        self._beat += 1
        settings = self._settings
        held = max(self._holding.limit, state.floor)
        original = max(state.floor, state.original)
        limit = state.enforced or held
        tuned = held_power(state.held, self._powers())
        self.demand = next_demand(self.demand, self._power(), limit, state.floor, original, tuned)
        presence = Presence(
            report=HostReport(
                session=self._session,
                place=settings.place,
                floor=state.floor,
                ceiling=original,
                limit=max(held, state.enforced or held),
                demand=self.demand,
                priority=settings.priority,
                acknowledged=self._acknowledged,
            ),
            beat=self._beat,
            lifetime=lifetime,
        )
        key, value = self._keys.report(self.name), encode(presence)
        try:
            self._revision = self._coordination.commit(
                (KeyWrite(key, value),), (RevisionCondition(key, self._revision),)
            )
        except OutcomeUnknownError:
            entry = read_key(self._coordination, key)
            if entry is None or entry.value != value:
                raise  # not made so far; if it is made later, the next beat conflicts
            self._revision = entry.revision
        except ConflictError:
            self._lose("The fleet has ended this host's session, or another host uses its name.")
            raise
        self._own_sessions = {self._session}

    def _lifetime(self, state: AllotmentRow) -> int:
        """The time from a beat without a successor until the fallback is certainly in force."""
        settings = self._settings
        span = max(0, state.original - state.floor)
        ramp = SECOND * span // self._ramp if self._ramp else 0
        steps = SECOND * math.ceil(1 / self._largest_step)
        lifetime = settings.contact + settings.fallback + ramp + steps
        if lifetime > MAX_LIFETIME:
            raise ConfigError(
                "[caps] ramp_watts_per_second and largest_step are too slow for a fleet: a fallback"
                f" by {watts(span)} would take {(ramp + steps) // SECOND} s. Together with [fleet]"
                f" contact and fallback, {MAX_LIFETIME // SECOND} s are permitted."
            )
        return lifetime

    def _newest(self) -> Allotment | None:
        entry = read_key(self._coordination, self._keys.allotment(self.name))
        return None if entry is None else decode(entry, Allotment)

    def _adopt(self, newest: Allotment | None) -> bool:
        if newest is not None:
            self._holding = self._holding.adopt(newest)
        holding = self._holding
        if not holding.sequence:
            return newest is None and self._lower_to_floor()
        why = f"allotment {holding.sequence} of the fleet"
        state = self._capper.allot(holding.limit, holding.safe, self._until, why)
        self.state, self.waiting = state, ""
        if state.until != self._until:
            return False  # its time has passed meanwhile
        self.awaits_devices = not _is_lowered(state)
        if self.awaits_devices:
            return False
        news = self._acknowledged != holding.sequence
        self._acknowledged = holding.sequence
        return news

    def _lower_to_floor(self) -> bool:
        """Give up the fallback of an earlier time, since no budget counts it; True for news."""
        if self.state is None or self.state.limit <= self.state.floor:
            return False
        why = "the fleet does not count this host yet"
        self.state = self._capper.allot(0, 0, self._until, why)
        self._holding = Allotment.initial(0, 0, self._session)
        self.awaits_devices = not _is_lowered(self.state)
        return not self.awaits_devices


def _is_lowered(state: AllotmentRow) -> bool:
    """True if all devices together are within the limit, or at their floors."""
    return state.enforced is not None and state.enforced <= max(state.limit, state.floor)


# --------------------------------------------------------------------------------- session on disk


class _StoredSession(msgspec.Struct, frozen=True):
    boot_id: str
    session: str


class SessionRecord:
    """The newest session of this host on disk, for the agent that follows a crash of this one.

    A lock is held until the end of the process. The agent that gets it knows that the process that
    wrote the record sends nothing any more, to the capper or to the fleet, and ends that session.
    A record of another boot is of no use: a copy of this host's disk may run elsewhere. ``former``
    is the session of the process that ended before, "" if none is known.
    """

    def __init__(self, folder: Path, boot_id: str) -> None:
        """The record in ``folder``; it stays empty if another agent holds the lock."""
        self._path, self._boot_id = folder / "fleet-session.json", boot_id
        self._lock: FileLock | None = None
        with suppress(OSError, LockHeldError):
            self._lock = FileLock(folder / "fleet.lock")
        self.former = self._load() if self._lock is not None and boot_id else ""

    def note(self, session: str) -> None:
        """Record a session before it begins. A full disk costs the next agent time, and no more."""
        if self._lock is not None:
            content = msgspec.json.encode(_StoredSession(self._boot_id, session))
            with suppress(OSError):
                replace_file(self._path, content, self._path.with_suffix(".new"))

    def close(self) -> None:
        """Release the lock, once this process acts for the host no more. Idempotent."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _load(self) -> str:
        try:
            stored = msgspec.json.decode(self._path.read_bytes(), type=_StoredSession)
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
            return ""
        return stored.session if stored.boot_id == self._boot_id else ""
