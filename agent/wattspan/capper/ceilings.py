"""The ceilings of the host's power: each has an owner, and the lowest applies to the devices.

The configuration has one, a fleet may allot one, users set theirs on the socket, and another
program (a scheduler, a power manager, a person) may write one to a file. A ceiling of a user has a
bounded time to live, within which nothing renews it, and stays over a restart of the capper.
"""

from __future__ import annotations

import contextlib
import os
import tomllib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec.structs import replace

from wattspan.capper.audit import AuditAction, AuditEvent
from wattspan.capper.journal import JournalError
from wattspan.capper.protocol import CeilingRow, RefusalReason
from wattspan.config import CapsSettings
from wattspan.model import SECOND
from wattspan.model.settings import Duration, Table, about, convert
from wattspan.ports import CapsError, Clock
from wattspan.util.files import read_regular, replace_file, synchronize_directory
from wattspan.util.text import printable
from wattspan.util.unix_sockets import PeerCredentials, uids_of

VERSION: Final = 2
"""Of the stored ceilings. Version 1 named none, and had one ceiling for all users."""
MAX_TTL: Final = 24 * 3600 * SECOND
MAX_OWNERS: Final = 16
"""Users with a ceiling at a time, beside root."""
_CONFIGURED: Final = ("configuration", "fleet")
"""Sources of ceilings that the operator has agreed to: they go below the tuner's floor."""
_REQUESTED: Final = ("file", "socket")
_FILE: Final = -1
"""In place of the user: the file's ceiling, whoever owns the file."""
MAX_FILE_BYTES: Final = 4096
MAX_LIFETIME: Final = 600 * SECOND
"""Longest time to live of an allotment."""
RETREAT: Final = 7200 * SECOND
"""Time from the end of the last allotment until the ceiling falls to the devices' floors."""
_NOTED: Final = RETREAT // 8
"""Longest time that an allotment is renewed before the record on disk shows it."""
_MAX_WATTS: Final = 1_000_000
_MAX_REASON_LENGTH: Final = 200
_MILLIWATTS_PER_WATT: Final = 1_000
_NOBODY: Final = PeerCredentials()
_Power = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
_Int = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
"""The sum of two can still be encoded."""


class _StoredCeiling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `CeilingRow` on disk, with the boot of ``expires``, and the same end by the wall clock."""

    limit: _Int
    why: str = ""
    expires: _Int | None = None
    uid: _Int | None = None
    boot_id: str = ""
    expires_wall: _Int | None = None


class _CeilingsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int = 1
    requested: tuple[_StoredCeiling, ...] | _StoredCeiling | None = ()
    written: _StoredCeiling | None = None


class PowerCeilings:
    """All ceilings in force: of the configuration, the fleet, the file, and users by uid."""

    def __init__(
        self,
        settings: CapsSettings,
        path: Path,
        boot_id: str,
        clock: Clock,
        *,
        record: Callable[[AuditEvent], None] = lambda event: None,
        in_fleet: bool = False,
    ) -> None:
        """``path`` is where the ceilings are stored; the allotment of a fleet is beside it."""
        allotment = path.with_name("allotment.json")
        self.fleet = FleetCeiling(
            allotment, clock, enabled=in_fleet, boot_id=boot_id, record=record
        )
        self.settings, self._path = settings, path
        self._file_owners = self._permitted  # not looked up at each poll: a name service may hang
        self._boot_id, self._clock, self._record = boot_id, clock, record
        self._load_trouble = ""
        self._stored: dict[int, CeilingRow] = {}
        """The ceilings of users by uid, and the file's."""
        self._load()
        self._file: CeilingFile | None = None
        self._open_file()
        self._drop_strangers()

    @property
    def trouble(self) -> str:
        """The faults of the stored ceilings and of the file; "" if there are none."""
        file = "" if self._file is None else self._file.trouble
        return " ".join(filter(None, (self._load_trouble, file, self.fleet.trouble)))

    def reconfigure(self, settings: CapsSettings) -> None:
        """Apply other settings from now on; the ceilings of permitted users stay."""
        changed = settings.budget_file != self.settings.budget_file
        self.settings = settings
        self._file_owners = self._permitted
        if changed:  # the last ceiling holds until the new file says otherwise
            self._open_file()
        self._drop_strangers()

    def request(self, limit: int | None, why: str, ttl: int | None, peer: PeerCredentials) -> None:
        """Set the ceiling of ``peer``'s user, or lift it. CapsError, JournalError."""
        uid = peer.uid
        if uid is None or uid not in self._permitted:
            raise CapsError(
                f"User {uid} may not set or lift a ceiling: name it in [caps] ceiling_users.",
                RefusalReason.NOT_ALLOWED,
            )
        before, others = self._stored.get(uid), dict(self._stored)
        others.pop(uid, None)
        if limit is None:
            self._replace(others)
            self._note(AuditAction.LIFT, peer, before, why=why)
            return
        if limit <= 0 or ttl is None or not 0 < ttl <= MAX_TTL:
            raise CapsError(
                "A ceiling needs a limit of more than 0, and a ttl of more than 0 and at most"
                f" {MAX_TTL // SECOND // 3600} hours; a limit of null lifts it.",
                RefusalReason.MALFORMED,
            )
        if uid != 0 and len(others.keys() - {0, _FILE}) >= MAX_OWNERS:
            raise CapsError(
                f"{MAX_OWNERS} users have a ceiling already; let one of them lift its own.",
                RefusalReason.NOT_ALLOWED,
            )
        expires = self._clock.monotonic() + ttl
        new = CeilingRow(source="socket", limit=limit, uid=uid, why=why, expires=expires)
        self._replace({**others, uid: new})
        self._note(AuditAction.CEILING, peer, before, new, why=why, ttl=ttl)

    def lift_all(self, peer: PeerCredentials) -> None:
        """Lift every user's ceiling, as ``peer`` may. JournalError if they stay on disk."""
        why = f"user {peer.uid} asked for everything to be restored"
        self._end(self._of_users, AuditAction.LIFT, why, peer.pid)

    def poll(self) -> None:
        """Read the file, and end ceilings with an expired time to live."""
        self.fleet.poll()
        if self._file is not None:
            self._update_from_file(self._file.poll(self._stored.get(_FILE), self._file_owners))
        now = self._clock.monotonic()
        ended = [uid for uid in self._of_users if _is_over(self._stored[uid], now)]
        with contextlib.suppress(JournalError):  # it ends again when it is read again
            self._end(ended, AuditAction.LAPSE, "its time is up")

    @property
    def rows(self) -> tuple[CeilingRow, ...]:
        """Every ceiling in force, as it is reported to clients: without the reserve."""
        rows = []
        if configured := self.settings.budget_watts:
            limit = configured * _MILLIWATTS_PER_WATT
            rows.append(CeilingRow(source="configuration", limit=limit))
        if (allotted := self.fleet.limit) is not None:
            rows.append(CeilingRow(source="fleet", limit=allotted, expires=self.fleet.expires))
        rows += (ceiling for _, ceiling in sorted(self._stored.items()))
        reserve = self.settings.reserve_watts * _MILLIWATTS_PER_WATT
        return tuple(
            replace(row, limit=max(0, row.limit - (0 if row.source == "socket" else reserve)))
            for row in rows
        )

    @property
    def configured(self) -> int | None:
        """The ceiling of the configuration, or the fleet's if it is lower, in milliwatts."""
        return self._lowest(_CONFIGURED)

    @property
    def requested(self) -> int | None:
        """The lowest ceiling of the file and of users, in milliwatts."""
        return self._lowest(_REQUESTED)

    @property
    def limit(self) -> int | None:
        """The lowest ceiling of all, in milliwatts."""
        return self._lowest((*_CONFIGURED, *_REQUESTED))

    # --------------------------------------------------------------------------- inner workings

    def _lowest(self, sources: Iterable[str]) -> int | None:
        return min((row.limit for row in self.rows if row.source in sources), default=None)

    @property
    def _permitted(self) -> frozenset[int]:
        """The users who may set a ceiling."""
        return uids_of(self.settings.ceiling_users)[0] | {0}

    @property
    def _of_users(self) -> frozenset[int]:
        return frozenset(self._stored.keys() - {_FILE})

    def _open_file(self) -> None:
        path = self.settings.budget_file
        self._file = CeilingFile(Path(path), self._clock) if path else None
        if not path:
            self._stored.pop(_FILE, None)

    def _update_from_file(self, now: CeilingRow | None) -> None:
        before = self._stored.pop(_FILE, None)
        if now is not None:
            self._stored[_FILE] = now
        if now == before:
            return
        with contextlib.suppress(JournalError):  # it applies all the same while this process lives
            self._save()
        owner = now or before
        peer = PeerCredentials(None, None if owner is None else owner.uid)
        action = AuditAction.CEILING
        if now is None:
            over = before is not None and _is_over(before, self._clock.monotonic())
            action = AuditAction.LAPSE if over else AuditAction.LIFT
        self._note(action, peer, before, now, why=now.why if now else "", job="budget_file")

    def _drop_strangers(self) -> None:
        """Lift the ceilings of users who may not set one any more."""
        why = "[caps] ceiling_users does not name its owner"
        with contextlib.suppress(JournalError):  # they end again when they are read again
            self._end(self._of_users - self._permitted, AuditAction.LIFT, why)

    def _end(
        self, uids: Collection[int], action: AuditAction, why: str, pid: int | None = None
    ) -> None:
        """End ceilings of users, whether that can be stored or not. JournalError."""
        for uid in uids:
            self._note(action, PeerCredentials(pid, uid), self._stored.pop(uid), why=why)
        if uids:
            self._save()

    def _note(
        self,
        action: AuditAction,
        peer: PeerCredentials,
        old: CeilingRow | None,
        new: CeilingRow | None = None,
        *,
        why: str,
        ttl: int | None = None,
        job: str = "",
    ) -> None:
        before, after = (None if one is None else one.limit for one in (old, new))
        at, peer_ids = self._clock.now().wall, peer._asdict()
        self._record(
            AuditEvent(
                at=at, deed=action, old=before, new=after, ttl=ttl, why=why, job=job, **peer_ids
            )
        )

    def _replace(self, stored: dict[int, CeilingRow]) -> None:
        """Change the ceilings of users, once they are on disk. JournalError."""
        before, self._stored = self._stored, stored
        try:
            self._save()
        except JournalError:
            self._stored = before
            raise

    # ---------------------------------------------------------------------------------- on disk

    def _load(self) -> None:
        try:
            file = _decode_ceilings(self._path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            self._load_trouble = (
                f"The ceilings stored in {self._path} are invalid, and none of them applies:"
                f" {error}. Set them again."
            )
            return
        latest = self._clock.monotonic() + MAX_TTL
        requested = file.requested if isinstance(file.requested, tuple) else (file.requested,)
        for stored in requested:
            if stored is not None and stored.uid is not None:
                row = self._row("socket", stored)
                expires = latest if row.expires is None else min(row.expires, latest)
                self._stored[stored.uid] = replace(row, expires=expires)
        if self.settings.budget_file and file.written is not None:
            self._stored[_FILE] = self._row("file", file.written)

    def _row(self, source: str, stored: _StoredCeiling) -> CeilingRow:
        """In the time of this boot: its monotonic clock restarted, the wall clock did not."""
        now, expires = self._clock.now(), stored.expires
        if stored.boot_id != self._boot_id and stored.expires_wall is not None:
            expires = now.mono + stored.expires_wall - now.wall
        return CeilingRow(
            source=source, limit=stored.limit, uid=stored.uid, why=stored.why, expires=expires
        )

    def _save(self) -> None:
        now = self._clock.now()
        stored = {
            uid: _StoredCeiling(
                row.limit,
                row.why,
                row.expires,
                row.uid,
                self._boot_id,
                None if row.expires is None else now.wall + row.expires - now.mono,
            )
            for uid, row in self._stored.items()
        }
        written = stored.pop(_FILE, None)
        file = _CeilingsFile(version=VERSION, requested=tuple(stored.values()), written=written)
        try:
            content = msgspec.json.encode(file) + b"\n"
            replace_file(self._path, content, self._path.with_suffix(".new"))
        except OSError as error:
            raise _not_stored("ceiling", self._path, error) from None


def _decode_ceilings(content: bytes) -> _CeilingsFile:
    """The stored ceilings of this version or the first; ValueError."""
    file = msgspec.json.decode(content, type=_CeilingsFile)
    if file.version not in (1, VERSION):
        raise ValueError(f"version {file.version} is not {VERSION}")
    return file


def _not_stored(what: str, path: Path, error: OSError) -> JournalError:
    return JournalError(
        f"Cannot store the {what} in {path}: {error.strerror}. Make room there, or make it"
        " writable."
    )


def _is_over(ceiling: CeilingRow, now: int) -> bool:
    return ceiling.expires is not None and ceiling.expires <= now


class _CeilingTable(Table, frozen=True):
    """The content of a ceiling file."""

    watts: Annotated[float, about("Ceiling; 0 lifts it.", least=0, most=_MAX_WATTS)]
    ttl: Annotated[Duration | None, about("Time from the last write of the file.")] = None
    why: Annotated[str, about("Reason.")] = ""


class CeilingFile:
    """Reads the ceiling of one file. Belongs to one thread.

    The file is TOML: ``watts = 1200``, optionally ``ttl = "1h"`` from the last write of the file,
    and ``why = "grid event"``; ``watts = 0`` lifts it. Its owner must be root, the capper's own
    user or a user whom the configuration names, and no other user may be able to write it. A
    writer that fails leaves its ceiling in force: a file that vanishes or is invalid changes
    nothing until the last ceiling's time to live ends.

    ``trouble`` is the fault of the file in one sentence; "" if it has none.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self.trouble = ""
        self._path, self._clock = path, clock
        self._version: tuple[int, ...] | None = None  # of the file when it was last read

    def poll(
        self, last: CeilingRow | None, owners: frozenset[int] = frozenset()
    ) -> CeilingRow | None:
        """Read the file; the ceiling in force now, or None.

        ``last`` is in force until the file says otherwise, as before a restart. ``owners`` are the
        users who may own the file beside root and the capper's own.
        """
        now = self._clock.monotonic()
        try:
            last = self._read(last, owners)
            self.trouble = ""
        except (OSError, ValueError, RecursionError) as error:
            cause = str(error).rstrip(".").replace("\n", " ")
            if isinstance(error, OSError):
                cause = (error.strerror or "").lower()
            present = "No ceiling of it is in force"
            if last is not None and not _is_over(last, now):
                watts = last.limit / _MILLIWATTS_PER_WATT
                present = f"Its last ceiling of {watts:g} W stays in force"
            self.trouble = (
                f"Cannot take a ceiling from {self._path}: {cause}. {present}; correct the file."
            )
        return None if last is None or _is_over(last, now) else last

    def _read(self, last: CeilingRow | None, owners: frozenset[int]) -> CeilingRow | None:
        """The ceiling of the file, or the ``last`` one if it has not changed."""
        content, status = read_regular(self._path, MAX_FILE_BYTES)
        if status.st_uid not in owners | {0, os.geteuid()}:
            raise ValueError(
                f"user {status.st_uid} owns it, whom [caps] ceiling_users does not name"
            )
        if status.st_mode & 0o022:
            raise ValueError("its group or everybody may write it (chmod go-w)")
        version = (status.st_ino, status.st_size, status.st_mtime_ns)
        if version == self._version:
            return last
        if not content.endswith(b"\n"):  # "watts = 12" may be on its way to be 1200
            raise ValueError("its last line does not end, so it may be half written")
        table = tomllib.loads(content.decode())
        if "watts" not in table:
            raise ValueError("it has no key 'watts'")
        fresh = convert(table, _CeilingTable, "")
        now = self._clock.now()
        # A file from the future counts as written now.
        age = max(0, now.wall - status.st_mtime_ns)
        expires = None if fresh.ttl is None else now.mono + fresh.ttl - age
        why = printable(fresh.why, " ")[:_MAX_REASON_LENGTH]
        self._version = version
        limit = round(fresh.watts * _MILLIWATTS_PER_WATT)
        row = CeilingRow(source="file", limit=limit, uid=status.st_uid, why=why, expires=expires)
        return row if limit else None


class _StoredAllotment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``seen`` is a time in force, in seconds since the boot ``boot_id``."""

    limit: _Power
    safe: _Power
    boot_id: Annotated[str, msgspec.Meta(max_length=100)] = ""
    seen: Annotated[int, msgspec.Meta(ge=0, lt=2**53)] = 0


class FleetCeiling:
    """The allotment of a fleet in force, in milliwatts. Belongs to one thread.

    An allotment has a time to live. When it passes, because the agent has ended or has lost
    contact, the ceiling falls to the lower one of the limit and the safe allotment, and only a new
    allotment raises it again. Both values are on disk before a raise: a restarted capper begins
    with that fallback. RETREAT after the end of the last allotment it falls to the devices' floors,
    which is all that the fleet counts for an absent host later. A host that was restarted, or has
    no record, begins with these floors: it cannot tell for how long it was off. Times to live are
    counted by the clock since boot, which includes a suspend of the host.
    """

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
        self._limit = self.safe = min(self._stored.limit, self._stored.safe)
        """``safe``: the limit to which the ceiling falls at most after the allotment's time."""
        self.until: int | None = None
        """The end of the allotment by the clock since boot; None if it has ended."""
        self._ended = self._stored.seen * SECOND  # at this time or later
        now = clock.now().since_boot
        if self._stored.boot_id != boot_id or not now - RETREAT < self._ended <= now:
            self._limit = self.safe = 0

    @property
    def limit(self) -> int | None:
        """The ceiling in force; None outside a fleet."""
        return self._limit if self.enabled else None

    @property
    def expires(self) -> int | None:
        """The end of the allotment by the monotonic clock."""
        return None if self.until is None else self.until - self._clock.now().asleep

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
            self.lapse(why, peer)
            return
        before = self._limit
        try:
            self._store(limit, safe, now)
        except OSError as error:
            self._limit, self.safe = min(self._limit, limit), min(self.safe, safe)
            raise _not_stored("allotment", self._path, error) from None
        self._limit, self.safe, self.until = limit, safe, until
        if limit != before:
            self._note(AuditAction.CEILING, peer, before, why)

    def poll(self) -> None:
        """End an allotment whose time has passed."""
        now = self._clock.now().since_boot
        if self.until is not None and now >= self.until:
            self.lapse("its time is up, without contact to the fleet")
        if self.until is None and self._limit and now >= self._ended + RETREAT:
            before, self._limit, self.safe = self._limit, 0, 0
            why = f"{RETREAT // SECOND} s without contact to the fleet: to the devices' floors"
            self._note(AuditAction.LAPSE, _NOBODY, before, why)

    def lapse(self, why: str, peer: PeerCredentials = _NOBODY) -> None:
        """End the allotment now."""
        if self.until is not None:
            self._ended = min(self.until, self._clock.now().since_boot)
        before, self.until = self._limit, None
        self._limit = self.safe = min(self._limit, self.safe)
        if self._limit != before:
            self._note(AuditAction.LAPSE, peer, before, why)

    # --------------------------------------------------------------------------- inner workings

    def _note(self, action: AuditAction, peer: PeerCredentials, before: int, why: str) -> None:
        at, new, peer_ids = self._clock.now().wall, self._limit, peer._asdict()
        self._record(
            AuditEvent(at=at, deed=action, old=before, new=new, why=why, job="fleet", **peer_ids)
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
