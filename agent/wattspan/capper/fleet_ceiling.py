"""The ceiling that the fleet allots to this host, and its fallback without contact to the fleet.

An allotment has a time to live. When it passes, because the agent has ended or has lost contact,
the ceiling falls to the lower one of the limit and the safe allotment, and only a new allotment
raises it again. Both values are on disk before a raise: a restarted capper begins with that
fallback. RETREAT after the end of the last allotment it falls to the devices' floors, which is all
that the fleet counts for an absent host later. A host that was restarted, or has no record, begins
with these floors: it cannot tell for how long it was off.

Times to live are counted by the clock since boot, which includes a suspend of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import msgspec

from wattspan.capper.audit import AuditAction, AuditEvent
from wattspan.capper.journal import JournalError
from wattspan.capper.protocol import RefusalReason
from wattspan.model import SECOND
from wattspan.ports import CapsError, Clock
from wattspan.util.files import replace_file, synchronize_directory
from wattspan.util.unix_sockets import PeerCredentials

MAX_LIFETIME: Final = 600 * SECOND
"""Longest time to live of an allotment."""
RETREAT: Final = 7200 * SECOND
"""Time from the end of the last allotment until the ceiling falls to the devices' floors."""
_NOTED: Final = RETREAT // 8
"""Longest time that an allotment is renewed before the record on disk shows it."""
_NOBODY = PeerCredentials()
_Power = Annotated[int, msgspec.Meta(ge=0, le=10**12)]


class _StoredAllotment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``seen`` is a time in force, in seconds since the boot ``boot_id``."""

    limit: _Power
    safe: _Power
    boot_id: Annotated[str, msgspec.Meta(max_length=100)] = ""
    seen: Annotated[int, msgspec.Meta(ge=0, lt=2**53)] = 0


class FleetCeiling:
    """The allotment in force, in milliwatts. Belongs to one thread."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        *,
        enabled: bool,
        boot_id: str = "",
        record: Callable[[AuditEvent], None] = lambda event: None,
    ) -> None:
        """``path`` is the file of the last allotment; ``enabled``: this host is in a fleet."""
        self.enabled = enabled
        self.trouble = ""
        """The fault of the stored allotment in one sentence; "" if it has none."""
        self._path, self._clock, self._record = path, clock, record
        self._boot_id = boot_id
        self._stored = self._load()
        self._limit = self._safe = min(self._stored.limit, self._stored.safe)
        self._until: int | None = None
        self._ended = self._stored.seen * SECOND  # at this time or later
        now = clock.now().since_boot
        if self._stored.boot_id != boot_id or not now - RETREAT < self._ended <= now:
            self._limit = self._safe = 0

    @property
    def limit(self) -> int | None:
        """The ceiling in force; None outside a fleet."""
        return self._limit if self.enabled else None

    @property
    def safe(self) -> int:
        """The limit to which the ceiling falls at most once the allotment's time has passed."""
        return self._safe

    @property
    def until(self) -> int | None:
        """The end of the allotment by the clock since boot; None if it has ended."""
        return self._until

    @property
    def expires(self) -> int | None:
        """The end of the allotment by the monotonic clock."""
        return None if self._until is None else self._until - self._clock.now().asleep

    def allot(self, limit: int, safe: int, until: int, why: str, peer: PeerCredentials) -> None:
        """Replace the allotment; one whose time has passed only ends the present one.

        CapsError if it is invalid, JournalError if it cannot be stored: then only its lower
        values apply.
        """
        if not self.enabled:
            raise CapsError(
                "This host is in no fleet: set [fleet] endpoints in the capper's configuration.",
                RefusalReason.NOT_ALLOWED,
            )
        now = self._clock.now().since_boot
        if min(limit, safe) < 0 or until > now + MAX_LIFETIME:
            raise CapsError(
                "An allotment needs a limit and a safe allotment of at least 0, and ends within"
                f" {MAX_LIFETIME // SECOND} s.",
                RefusalReason.MALFORMED,
            )
        if until <= now:
            self._lapse(peer, why)
            return
        before = self._limit
        try:
            self._store(limit, safe, now)
        except OSError as error:
            self._limit, self._safe = min(self._limit, limit), min(self._safe, safe)
            raise JournalError(
                f"Cannot store the allotment in {self._path}: {error.strerror}. Make room there,"
                " or make it writable."
            ) from None
        self._limit, self._safe, self._until = limit, safe, until
        if limit != before:
            self._note(AuditAction.CEILING, peer, before, limit, why)

    def end(self) -> None:
        """End the allotment now, before an orderly end of the capper."""
        self._lapse(_NOBODY, "the capper ends")

    def poll(self) -> None:
        """End an allotment whose time has passed."""
        if self._until is not None and self._clock.now().since_boot >= self._until:
            self._lapse(_NOBODY, "its time is up, without contact to the fleet")
        now = self._clock.now().since_boot
        if self._until is None and self._limit and now >= self._ended + RETREAT:
            before, self._limit, self._safe = self._limit, 0, 0
            why = f"{RETREAT // SECOND} s without contact to the fleet: to the devices' floors"
            self._note(AuditAction.LAPSE, _NOBODY, before, 0, why)

    # --------------------------------------------------------------------------- inner workings

    def _lapse(self, peer: PeerCredentials, why: str) -> None:
        if self._until is not None:
            self._ended = min(self._until, self._clock.now().since_boot)
        before, self._until = self._limit, None
        self._limit = self._safe = min(self._limit, self._safe)
        if self._limit != before:
            self._note(AuditAction.LAPSE, peer, before, self._limit, why)

    def _note(
        self, action: AuditAction, peer: PeerCredentials, old: int, new: int, why: str
    ) -> None:
        self._record(
            AuditEvent(
                at=self._clock.now().wall,
                deed=action,
                old=old,
                new=new,
                why=why,
                job="fleet",
                **peer._asdict(),
            )
        )

    def _load(self) -> _StoredAllotment:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_StoredAllotment)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            self.trouble = (
                f"The allotment stored in {self._path} is invalid: {error}. The devices' floors"
                " apply until the fleet allots anew."
            )
        return _StoredAllotment(0, 0)

    def _store(self, limit: int, safe: int, now: int) -> None:
        stored = self._stored
        is_renewal = (limit, safe) == (stored.limit, stored.safe)
        is_noted = stored.boot_id == self._boot_id and now - stored.seen * SECOND < _NOTED
        if is_renewal and is_noted:
            return
        allotment = _StoredAllotment(limit, safe, self._boot_id, now // SECOND)
        content = msgspec.json.encode(allotment) + b"\n"
        try:
            replace_file(self._path, content, self._path.with_suffix(".new"))
            synchronize_directory(self._path.parent)
        except OSError:
            if is_renewal:
                return  # a restarted capper retreats earlier
            raise
        self._stored, self.trouble = allotment, ""
