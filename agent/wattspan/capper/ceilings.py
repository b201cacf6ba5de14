"""The ceilings of the host's power: each has an owner, and the lowest applies to the devices.

The configuration has one, a fleet may allot one (`fleet_ceiling`), users set theirs on the socket,
and another program (a scheduler, a power manager, a person) may write one to a file. A ceiling of a
user has a bounded time to live, within which nothing renews it, and stays over a restart of the
capper.

The file is TOML: ``watts = 1200``, optionally ``ttl = "1h"`` from the last write of the file, and
``why = "grid event"``; ``watts = 0`` lifts it. Its owner must be root, the capper's own user or a
user whom the configuration names, and no other user may be able to write it. A writer that fails
leaves its ceiling in force: a file that vanishes or is invalid changes nothing until the last
ceiling's time to live ends.
"""

from __future__ import annotations

import contextlib
import os
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec.structs import replace

from wattspan.capper.audit import AuditAction, AuditEvent
from wattspan.capper.fleet_ceiling import FleetCeiling
from wattspan.capper.journal import JournalError
from wattspan.capper.protocol import CeilingRow, RefusalReason
from wattspan.config import CapsSettings
from wattspan.model import SECOND
from wattspan.model.settings import Duration, Table, about, convert
from wattspan.ports import CapsError, Clock
from wattspan.util.files import read_regular, replace_file
from wattspan.util.text import printable
from wattspan.util.unix_sockets import PeerCredentials, uids_of

VERSION: Final = 2
MAX_TTL: Final = 24 * 3600 * SECOND
MAX_OWNERS: Final = 16
"""Users with a ceiling at a time, beside root."""
MAX_FILE_BYTES: Final = 4096
_MAX_WATTS: Final = 1_000_000
_MAX_REASON_LENGTH: Final = 200
_MILLIWATTS_PER_WATT: Final = 1_000
_CONFIGURED: Final = ("configuration", "fleet")
"""Sources of ceilings that the operator has agreed to: they go below the tuner's floor."""


_Int = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
"""The sum of two can still be encoded."""


class CeilingValue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ceiling of ``limit`` milliwatts until the monotonic time ``expires``.

    ``uid`` is its owner's, None if it is not known any more. ``boot_id`` and ``expires_wall`` are
    set on disk only: the boot of the monotonic time, and the same end by the wall clock.
    """

    limit: _Int
    why: str = ""
    expires: _Int | None = None
    uid: _Int | None = None
    boot_id: str = ""
    expires_wall: _Int | None = None

    def is_over(self, now: int) -> bool:
        return self.expires is not None and self.expires <= now


class _CeilingsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int = VERSION
    requested: tuple[CeilingValue, ...] = ()
    written: CeilingValue | None = None


class _CeilingsFileVersion1(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Version 1, which named no version: one ceiling for all users, with or without an end."""

    requested: CeilingValue | None = None
    written: CeilingValue | None = None


class PowerCeilings:
    """All ceilings in force: of the configuration, of the file, and of users by uid."""

    def __init__(
        self,
        settings: CapsSettings,
        path: Path,
        boot_id: str,
        clock: Clock,
        *,
        record: Callable[[AuditEvent], None] = lambda event: None,
        fleet: FleetCeiling | None = None,
    ) -> None:
        """``path`` is where the ceilings are stored; ``fleet`` is the allotment of a fleet."""
        self._fleet = fleet
        self._settings, self._path = settings, path
        self._boot_id, self._clock, self._record = boot_id, clock, record
        self._load_trouble = ""
        self._by_user: dict[int, CeilingValue] = {}
        self._of_file: CeilingValue | None = None
        self._load()
        self._file: CeilingFile | None = None
        self._open_file()
        self._drop_strangers()

    @property
    def trouble(self) -> str:
        """The faults of the stored ceilings and of the file; "" if there are none."""
        file = "" if self._file is None else self._file.trouble
        fleet = "" if self._fleet is None else self._fleet.trouble
        return " ".join(filter(None, (self._load_trouble, file, fleet)))

    def reconfigure(self, settings: CapsSettings) -> None:
        """Apply other settings from now on; the ceilings of permitted users stay."""
        changed = settings.budget_file != self._settings.budget_file
        self._settings = settings
        if changed:  # the last ceiling holds until the new file says otherwise
            self._open_file()
        elif self._file is not None:
            self._file.owners = self._permitted
        self._drop_strangers()

    def request(self, limit: int | None, why: str, ttl: int | None, peer: PeerCredentials) -> None:
        """Set the ceiling of ``peer``'s user, or lift it. CapsError, JournalError."""
        if peer.uid is None or peer.uid not in self._permitted:
            raise CapsError(
                f"User {peer.uid} may not set or lift a ceiling: name it in [caps] ceiling_users.",
                RefusalReason.NOT_ALLOWED,
            )
        before = self._by_user.get(peer.uid)
        others = {uid: one for uid, one in self._by_user.items() if uid != peer.uid}
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
        if peer.uid != 0 and len(others.keys() - {0}) >= MAX_OWNERS:
            raise CapsError(
                f"{MAX_OWNERS} users have a ceiling already; let one of them lift its own.",
                RefusalReason.NOT_ALLOWED,
            )
        new = CeilingValue(limit, why, self._clock.monotonic() + ttl, peer.uid)
        self._replace({**others, peer.uid: new})
        self._note(AuditAction.CEILING, peer, before, new, why=why, ttl=ttl)

    def lift_all(self, peer: PeerCredentials) -> None:
        """Lift every user's ceiling, as ``peer`` may. JournalError if they stay on disk."""
        lifted, self._by_user = self._by_user, {}
        why = f"user {peer.uid} asked for everything to be restored"
        for uid, ceiling in lifted.items():
            self._note(AuditAction.LIFT, PeerCredentials(peer.pid, uid), ceiling, why=why)
        if lifted:
            self._save()

    def poll(self) -> None:
        """Read the file, and end ceilings with an expired time to live."""
        if self._fleet is not None:
            self._fleet.poll()
        if self._file is not None:
            self._take_file(self._file.poll())
        now = self._clock.monotonic()
        ended = [uid for uid, ceiling in self._by_user.items() if ceiling.is_over(now)]
        self._end(ended, AuditAction.LAPSE, "its time is up")

    @property
    def rows(self) -> tuple[CeilingRow, ...]:
        """Every ceiling in force, as it is reported to clients."""
        rows = []
        if configured := self._settings.budget_watts:
            limit = self._less_reserve(configured * _MILLIWATTS_PER_WATT)
            rows.append(CeilingRow(source="configuration", limit=limit))
        if self._fleet is not None and (allotted := self._fleet.limit) is not None:
            limit, expires = self._less_reserve(allotted), self._fleet.expires
            rows.append(CeilingRow(source="fleet", limit=limit, expires=expires))
        if self._of_file is not None:
            rows.append(_row("file", self._of_file, self._less_reserve(self._of_file.limit)))
        users = (ceiling for _, ceiling in sorted(self._by_user.items()))
        return (*rows, *(_row("socket", ceiling, max(0, ceiling.limit)) for ceiling in users))

    @property
    def configured(self) -> int | None:
        """The ceiling of the configuration, or the fleet's if it is lower, in milliwatts."""
        return min((row.limit for row in self.rows if row.source in _CONFIGURED), default=None)

    @property
    def requested(self) -> int | None:
        """The lowest ceiling of the file and of users, in milliwatts."""
        rows = (row for row in self.rows if row.source not in _CONFIGURED)
        return min((row.limit for row in rows), default=None)

    @property
    def limit(self) -> int | None:
        """The lowest ceiling of all, in milliwatts."""
        return min((row.limit for row in self.rows), default=None)

    # --------------------------------------------------------------------------- inner workings

    @property
    def _permitted(self) -> frozenset[int]:
        """The users who may set a ceiling."""
        return uids_of(self._settings.ceiling_users)[0] | {0}

    def _less_reserve(self, limit: int) -> int:
        return max(0, limit - self._settings.reserve_watts * _MILLIWATTS_PER_WATT)

    def _open_file(self) -> None:
        path = self._settings.budget_file
        if path:
            self._file = CeilingFile(Path(path), self._clock, self._of_file, owners=self._permitted)
        else:
            self._file = self._of_file = None

    def _take_file(self, now: CeilingValue | None) -> None:
        before = self._of_file
        if now == before:
            return
        self._of_file = now
        with contextlib.suppress(JournalError):  # it applies all the same while this process lives
            self._save()
        peer = PeerCredentials(None, (now or before or CeilingValue(0)).uid)
        action = AuditAction.CEILING
        if now is None:
            is_over = before is not None and before.is_over(self._clock.monotonic())
            action = AuditAction.LAPSE if is_over else AuditAction.LIFT
        self._note(action, peer, before, now, why=now.why if now else "", job="budget_file")

    def _drop_strangers(self) -> None:
        """Lift the ceilings of users who may not set one any more."""
        strangers = self._by_user.keys() - self._permitted
        self._end(strangers, AuditAction.LIFT, "[caps] ceiling_users does not name its owner")

    def _end(self, uids: Iterable[int], action: AuditAction, why: str) -> None:
        ended = {uid: self._by_user.pop(uid) for uid in uids}
        if ended:
            with contextlib.suppress(JournalError):  # it ends again when it is read again
                self._save()
        for uid, ceiling in ended.items():
            self._note(action, PeerCredentials(None, uid), ceiling, why=why)

    def _replace(self, by_user: dict[int, CeilingValue]) -> None:
        """Change the ceilings of users, once they are on disk. JournalError."""
        before, self._by_user = self._by_user, by_user
        try:
            self._save()
        except JournalError:
            self._by_user = before
            raise

    def _note(
        self,
        action: AuditAction,
        peer: PeerCredentials,
        old: CeilingValue | None,
        new: CeilingValue | None = None,
        *,
        why: str,
        ttl: int | None = None,
        job: str = "",
    ) -> None:
        self._record(
            AuditEvent(
                at=self._clock.now().wall,
                deed=action,
                old=None if old is None else old.limit,
                new=None if new is None else new.limit,
                ttl=ttl,
                why=why,
                job=job,
                **peer._asdict(),
            )
        )

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
        for stored in file.requested:
            if stored.uid is not None:
                value = self._value(stored)
                expires = latest if value.expires is None else min(value.expires, latest)
                self._by_user[stored.uid] = replace(value, expires=expires)
        if self._settings.budget_file and file.written is not None:
            self._of_file = self._value(file.written)

    def _value(self, stored: CeilingValue) -> CeilingValue:
        """In the time of this boot: its monotonic clock restarted, the wall clock did not."""
        now, expires = self._clock.now(), stored.expires
        if stored.boot_id != self._boot_id and stored.expires_wall is not None:
            expires = now.mono + stored.expires_wall - now.wall
        return replace(stored, expires=expires, boot_id="", expires_wall=None)

    def _stored(self, value: CeilingValue) -> CeilingValue:
        now, expires = self._clock.now(), value.expires
        wall = None if expires is None else now.wall + expires - now.mono
        return replace(value, boot_id=self._boot_id, expires_wall=wall)

    def _save(self) -> None:
        file = _CeilingsFile(
            requested=tuple(map(self._stored, self._by_user.values())),
            written=None if self._of_file is None else self._stored(self._of_file),
        )
        content = msgspec.json.encode(file) + b"\n"
        try:
            replace_file(self._path, content, self._path.with_suffix(".new"))
        except OSError as error:
            raise JournalError(
                f"Cannot store the ceiling in {self._path}: {error.strerror}. Make room there, or"
                " make it writable."
            ) from None


def _row(source: str, ceiling: CeilingValue, limit: int) -> CeilingRow:
    return CeilingRow(
        source=source, limit=limit, uid=ceiling.uid, why=ceiling.why, expires=ceiling.expires
    )


def _decode_ceilings(content: bytes) -> _CeilingsFile:
    """The stored ceilings of this version or the first; ValueError."""
    decoded = msgspec.json.decode(content)
    if isinstance(decoded, dict) and "version" not in decoded:
        first = msgspec.convert(decoded, _CeilingsFileVersion1)
        requested = () if first.requested is None else (first.requested,)
        return _CeilingsFile(requested=requested, written=first.written)
    file = msgspec.convert(decoded, _CeilingsFile)
    if file.version != VERSION:
        raise ValueError(f"version {file.version} is not {VERSION}")
    return file


class _CeilingTable(Table, frozen=True):
    """The content of a ceiling file."""

    watts: Annotated[float, about("Ceiling; 0 lifts it.", least=0, most=_MAX_WATTS)]
    ttl: Annotated[Duration | None, about("Time from the last write of the file.")] = None
    why: Annotated[str, about("Reason.")] = ""


class CeilingFile:
    """The newest ceiling of one file. Belongs to one thread.

    ``trouble`` is the fault of the file in one sentence; "" if it has none.
    """

    def __init__(
        self,
        path: Path,
        clock: Clock,
        last: CeilingValue | None = None,
        *,
        owners: frozenset[int] = frozenset(),
    ) -> None:
        """``last`` is in force until the file says otherwise, as before a restart.

        ``owners`` are the users who may own the file beside root and the capper's own.
        """
        self.owners = owners
        self.trouble = ""
        self._path, self._clock, self._last = path, clock, last
        self._version: tuple[int, ...] | None = None  # of the file when it was last read

    def poll(self) -> CeilingValue | None:
        """Read the file; the ceiling in force now, or None."""
        try:
            self._read()
            self.trouble = ""
        except (OSError, ValueError, RecursionError) as error:
            cause = str(error).rstrip(".").replace("\n", " ")
            if isinstance(error, OSError):
                cause = (error.strerror or "").lower()
            last = self._in_force
            present = (
                "No ceiling of it is in force"
                if last is None
                else f"Its last ceiling of {last.limit / _MILLIWATTS_PER_WATT:g} W stays in force"
            )
            self.trouble = (
                f"Cannot take a ceiling from {self._path}: {cause}. {present}; correct the file."
            )
        return self._in_force

    @property
    def _in_force(self) -> CeilingValue | None:
        is_over = self._last is None or self._last.is_over(self._clock.monotonic())
        return None if is_over else self._last

    def _read(self) -> None:
        content, status = read_regular(self._path, MAX_FILE_BYTES)
        if status.st_uid not in self.owners | {0, os.geteuid()}:
            raise ValueError(
                f"user {status.st_uid} owns it, whom [caps] ceiling_users does not name"
            )
        if status.st_mode & 0o022:
            raise ValueError("its group or everybody may write it (chmod go-w)")
        version = (status.st_ino, status.st_size, status.st_mtime_ns)
        if version == self._version:
            return
        if not content.endswith(b"\n"):  # "watts = 12" may be on its way to be 1200
            raise ValueError("its last line does not end, so it may be half written")
        table = tomllib.loads(content.decode())
        if "watts" not in table:
            raise ValueError("it has no key 'watts'")
        fresh = convert(table, _CeilingTable, "")
        now = self._clock.now()
        # A file from the future counts as written now.
        age = max(0, now.wall - status.st_mtime_ns)
        self._last = None
        if limit := round(fresh.watts * _MILLIWATTS_PER_WATT):
            expires = None if fresh.ttl is None else now.mono + fresh.ttl - age
            why = printable(fresh.why, " ")[:_MAX_REASON_LENGTH]
            self._last = CeilingValue(limit, why, expires, status.st_uid)
        self._version = version
