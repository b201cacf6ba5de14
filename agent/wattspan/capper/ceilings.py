"""The host's power budget: each ceiling has an owner, the least of all applies to the devices.

A ceiling that was set on the socket has a bounded time to live. It needs nobody to renew it within
that time, and stays over a restart of the capper. Only the configuration file takes a device below
the tuner's floor.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import msgspec

from wattspan.capper.audit import AuditAction, AuditEvent, AuditHook, ignore_event
from wattspan.capper.ceiling_file import CeilingFile, CeilingValue
from wattspan.capper.journal import JournalError
from wattspan.capper.protocol import CeilingRow, RefusalReason
from wattspan.config import CapsSettings
from wattspan.model import SECOND
from wattspan.ports import CapsError, Clock
from wattspan.util.peer_credentials import PeerCredentials, uids_of

VERSION: Final = 2
MAX_TTL: Final = 24 * 3600 * SECOND
MAX_OWNERS: Final = 16
"""Users who have a ceiling at a time, beside root."""
_MILLIWATTS_PER_WATT = 1_000


_Int = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
"""So that no sum of two can be too large to be written."""


class StoredCeiling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A ceiling as it outlives the capper; ``expires`` is monotonic time of the boot."""

    limit: _Int
    why: str = ""
    uid: _Int | None = None
    boot_id: str = ""
    expires: _Int | None = None
    expires_wall: _Int | None = None


class _CeilingsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int = VERSION
    requested: tuple[StoredCeiling, ...] = ()
    written: StoredCeiling | None = None


class _CeilingsFileVersion1(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Version 1, which named no version: one ceiling for all users, with or without an end."""

    requested: StoredCeiling | None = None
    written: StoredCeiling | None = None


class PowerCeilings:
    """Every ceiling in force: configured, from the file, and those set on the socket by user."""

    def __init__(
        self,
        settings: CapsSettings,
        path: Path,
        boot_id: str,
        clock: Clock,
        *,
        record: AuditHook = ignore_event,
    ) -> None:
        """``path`` is where the ceilings of users are kept."""
        self._settings, self._path = settings, path
        self._boot_id, self._clock, self._record = boot_id, clock, record
        self._owners = _ceiling_users(settings)
        self._load_trouble = ""
        stored = self._load()
        self._requested = {one.uid: one for one in stored.requested if one.uid is not None}
        self._file: CeilingFile | None = None
        self._kept_of_file: CeilingValue | None = None
        if settings.budget_file:
            self._kept_of_file = _stored_value(stored.written)
            self._file = self._open(settings.budget_file)
        self._drop_strangers()

    @property
    def trouble(self) -> str:
        """Faults of the kept ceilings and of the file; "" without any."""
        file = "" if self._file is None else self._file.trouble
        return " ".join(filter(None, (self._load_trouble, file)))

    def reconfigure(self, settings: CapsSettings) -> None:
        """Keep to other settings from now on; the ceilings of permitted users stay."""
        self._owners = _ceiling_users(settings)
        if settings.budget_file != self._settings.budget_file:
            self._file = None
            if settings.budget_file:  # the last ceiling holds until the new file says otherwise
                self._file = self._open(settings.budget_file)
            else:
                self._kept_of_file = None
        elif self._file is not None:
            self._file.owners = self._owners
        self._settings = settings
        self._drop_strangers()

    def request(self, limit: int | None, why: str, ttl: int | None, peer: PeerCredentials) -> None:
        """Set the ceiling of ``peer``'s user, or lift it. CapsError, JournalError."""
        if peer.uid is None or peer.uid not in self._owners:
            raise CapsError(
                f"User {peer.uid} may not set or lift a ceiling: name it in [caps] ceiling_users.",
                RefusalReason.NOT_ALLOWED,
            )
        before = self._requested.get(peer.uid)
        old = None if before is None else before.limit
        others = {uid: one for uid, one in self._requested.items() if uid != peer.uid}
        if limit is None:
            self._replace(others)
            self._note(AuditAction.LIFT, why, peer, old=old)
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
        stored = self._stored(limit, why, peer.uid, self._clock.monotonic() + ttl)
        self._replace({**others, peer.uid: stored})
        self._note(AuditAction.CEILING, why, peer, old=old, new=limit, ttl=ttl)

    def lift_all(self, peer: PeerCredentials) -> None:
        """Lift every user's ceiling, as ``peer`` may. JournalError if they stay on disk."""
        self._drop(self._requested, f"user {peer.uid} asked for everything to be restored", peer)
        if self._requested:
            self._requested = {}
            self._save()

    def poll(self) -> None:
        """Read the file, and end ceilings whose time is up."""
        if self._file is not None:
            self._take_file(self._file.poll())
        now = self._clock.monotonic()
        ended = {uid: c for uid, c in self._requested.items() if (c.expires or 0) <= now}
        if ended:
            self._forget(ended)
            for uid, ceiling in ended.items():
                self._note(
                    AuditAction.LAPSE,
                    "its time is up",
                    PeerCredentials(None, uid),
                    old=ceiling.limit,
                )

    @property
    def configured(self) -> int | None:
        """The ceiling of the configuration over all devices that can be capped, in milliwatts."""
        if not self._settings.budget_watts:
            return None
        return max(0, self._settings.budget_watts * _MILLIWATTS_PER_WATT - self._reserve)

    @property
    def requested(self) -> int | None:
        """The lowest ceiling of the file and of users, in milliwatts."""
        limits = [one.limit for one in self._requested.values()]
        if self._kept_of_file is not None:
            limits.append(self._kept_of_file.limit - self._reserve)
        return max(0, min(limits)) if limits else None

    @property
    def limit(self) -> int | None:
        """The lowest ceiling of all, in milliwatts."""
        both = (self.configured, self.requested)
        return min((limit for limit in both if limit is not None), default=None)

    @property
    def rows(self) -> tuple[CeilingRow, ...]:
        """Every ceiling in force, for whoever asks."""
        rows = []
        if self.configured is not None:
            rows.append(CeilingRow(source="configuration", limit=self.configured))
        file = self._kept_of_file
        if file is not None:
            limit = max(0, file.limit - self._reserve)
            row = CeilingRow(
                source="file", limit=limit, uid=file.uid, why=file.why, expires=file.expires
            )
            rows.append(row)
        rows += (
            CeilingRow(source="socket", limit=c.limit, uid=uid, why=c.why, expires=c.expires)
            for uid, c in sorted(self._requested.items())
        )
        return tuple(rows)

    # --------------------------------------------------------------------------- inner workings

    @property
    def _reserve(self) -> int:
        return self._settings.reserve_watts * _MILLIWATTS_PER_WATT

    def _open(self, path: str) -> CeilingFile:
        return CeilingFile(Path(path), self._clock, self._kept_of_file, owners=self._owners)

    def _take_file(self, now: CeilingValue | None) -> None:
        before = self._kept_of_file
        if now == before:
            return
        self._kept_of_file = now
        with contextlib.suppress(JournalError):  # it applies all the same, while we live
            self._save()
        peer = PeerCredentials(None, (now or before or CeilingValue(0)).uid)
        old = None if before is None else before.limit
        if now is not None:
            self._note(
                AuditAction.CEILING, now.why, peer, old=old, new=now.limit, job="budget_file"
            )
            return
        expires = None if before is None else before.expires
        is_over = expires is not None and expires <= self._clock.monotonic()
        self._note(
            AuditAction.LAPSE if is_over else AuditAction.LIFT, "", peer, old=old, job="budget_file"
        )

    def _drop_strangers(self) -> None:
        """Lift the ceilings of users who may not set one any more."""
        strangers = {u: c for u, c in self._requested.items() if u not in self._owners}
        if strangers:
            self._drop(strangers, "[caps] ceiling_users does not name its owner", PeerCredentials())
            self._forget(strangers)

    def _drop(self, ceilings: Mapping[int, StoredCeiling], why: str, peer: PeerCredentials) -> None:
        for uid, ceiling in ceilings.items():
            self._note(AuditAction.LIFT, why, PeerCredentials(peer.pid, uid), old=ceiling.limit)

    def _forget(self, gone: Mapping[int, StoredCeiling]) -> None:
        self._requested = {u: c for u, c in self._requested.items() if u not in gone}
        with contextlib.suppress(JournalError):  # it is dropped again when it is read again
            self._save()

    def _replace(self, requested: dict[int, StoredCeiling]) -> None:
        """Keep other ceilings of users, once they are on disk. JournalError."""
        before, self._requested = self._requested, requested
        try:
            self._save()
        except JournalError:
            self._requested = before
            raise

    def _note(
        self,
        deed: AuditAction,
        why: str,
        peer: PeerCredentials,
        *,
        old: int | None = None,
        new: int | None = None,
        ttl: int | None = None,
        job: str = "",
    ) -> None:
        self._record(
            AuditEvent(
                at=self._clock.now().wall,
                deed=deed,
                old=old,
                new=new,
                ttl=ttl,
                why=why,
                job=job,
                pid=peer.pid,
                uid=peer.uid,
            )
        )

    def _stored(self, limit: int, why: str, uid: int | None, expires: int | None) -> StoredCeiling:
        now = self._clock.now()
        wall = None if expires is None else now.wall + expires - now.mono
        return StoredCeiling(
            limit=limit,
            why=why,
            uid=uid,
            boot_id=self._boot_id,
            expires=expires,
            expires_wall=wall,
        )

    def _load(self) -> _CeilingsFile:
        try:
            told = _decode_ceilings(self._path.read_bytes())
        except FileNotFoundError:
            return _CeilingsFile()
        except (OSError, ValueError, RecursionError) as error:
            self._load_trouble = (
                f"The ceilings kept in {self._path} cannot be understood, and none of them"
                f" applies: {error}. Set them again."
            )
            return _CeilingsFile()
        requested = tuple(self._bounded(self._here(one)) for one in told.requested)
        written = None if told.written is None else self._here(told.written)
        return _CeilingsFile(requested=requested, written=written)

    def _here(self, stored: StoredCeiling) -> StoredCeiling:
        """With the time of this boot: the monotonic clock began anew since, the wall went on."""
        if stored.boot_id == self._boot_id or stored.expires_wall is None:
            return stored
        now = self._clock.now()
        expires = now.mono + stored.expires_wall - now.wall
        return msgspec.structs.replace(stored, boot_id=self._boot_id, expires=expires)

    def _bounded(self, stored: StoredCeiling) -> StoredCeiling:
        """With an end that is not later than that of a ceiling which is set now."""
        latest = self._clock.monotonic() + MAX_TTL
        expires = latest if stored.expires is None else min(stored.expires, latest)
        return self._stored(stored.limit, stored.why, stored.uid, expires)

    def _save(self) -> None:
        kept = self._kept_of_file
        written = None
        if kept is not None:
            written = self._stored(kept.limit, kept.why, kept.uid, kept.expires)
        file = _CeilingsFile(requested=tuple(self._requested.values()), written=written)
        draft = self._path.with_suffix(".new")
        try:
            with draft.open("wb") as out:
                out.write(msgspec.json.encode(file) + b"\n")
                out.flush()
                os.fsync(out.fileno())
            draft.replace(self._path)
        except OSError as error:
            raise JournalError(
                f"Cannot keep the ceiling in {self._path}: {error.strerror}. Make room there, or"
                " make it writable."
            ) from None


def _ceiling_users(settings: CapsSettings) -> frozenset[int]:
    """The users who may set a ceiling."""
    return uids_of(settings.ceiling_users)[0] | {0}


def _stored_value(stored: StoredCeiling | None) -> CeilingValue | None:
    if stored is None:
        return None
    return CeilingValue(stored.limit, stored.why, stored.expires, stored.uid)


def _decode_ceilings(content: bytes) -> _CeilingsFile:
    """The kept ceilings of this version or the first; ValueError."""
    told = msgspec.json.decode(content)
    if isinstance(told, dict) and "version" not in told:
        first = msgspec.convert(told, _CeilingsFileVersion1)
        requested = () if first.requested is None else (first.requested,)
        return _CeilingsFile(requested=requested, written=first.written)
    file = msgspec.convert(told, _CeilingsFile)
    if file.version != VERSION:
        raise ValueError(f"version {file.version} is not {VERSION}")
    return file
