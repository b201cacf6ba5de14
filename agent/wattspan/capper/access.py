"""Who may speak: the kernel says who it is, the operator says who may.

What was refused, on record: enough to see who asks for what, and never so much as to fill it.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from wattspan.capper.audit import AuditAction, AuditEvent
from wattspan.model import SECOND
from wattspan.ports import CapsError, Clock
from wattspan.util.peer_credentials import PeerCredentials


def allowed_users(names: Iterable[str]) -> tuple[frozenset[int], tuple[str, ...]]:
    """The uids that may speak: root's, our own, and those of ``names``; and names of nobody."""
    uids, unknown = uids_of(names)
    return uids | {0, os.geteuid()}, unknown


def uids_of(names: Iterable[str]) -> tuple[frozenset[int], tuple[str, ...]]:
    """The uids of users, by name or number; and the names that no user has."""
    uids, unknown = set[int](), []
    for name in names:
        try:
            uids.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            if name.isdecimal():
                uids.add(int(name))
            else:
                unknown.append(name)
    return frozenset(uids), tuple(unknown)


ROWS_PER_PERIOD: Final = 10
"""Refusals of one user that have a row each, in one period; the rest has one row together."""
PERIOD: Final = 60 * SECOND


@dataclass(slots=True)
class _RefusalPeriod:
    since: int
    listed: int = 0
    more: int = 0


class RefusalLog:
    """Puts refusals on record, by whoever's connection they came."""

    def __init__(self, clock: Clock, record: Callable[[AuditEvent], None]) -> None:
        self._clock, self._record = clock, record
        self._told: dict[int, str] = {}
        self._periods: dict[int | None, _RefusalPeriod] = {}

    def refused(self, holder: int, peer: PeerCredentials, job: str, error: CapsError) -> None:
        """A tuner that asks the same again every second is on record once."""
        if self._told.get(holder) == str(error):
            return
        self._told[holder] = str(error)
        now = self._clock.now()
        self.turn()
        period = self._periods.setdefault(peer.uid, _RefusalPeriod(now.mono))
        if period.listed == ROWS_PER_PERIOD:
            period.more += 1
            return
        period.listed += 1
        self._record(
            AuditEvent(
                at=now.wall,
                deed=AuditAction.REFUSE,
                device=error.device,
                why=str(error),
                job=job,
                pid=peer.pid,
                uid=peer.uid,
            )
        )

    def granted(self, holder: int) -> None:
        """What ``holder`` asked for was carried out, or it has gone: a refusal is news again."""
        self._told.pop(holder, None)

    def turn(self) -> None:
        """Tell of the rest of every period that is over."""
        now = self._clock.monotonic()
        for uid, period in list(self._periods.items()):
            if now - period.since >= PERIOD:
                self._close(uid)

    def close(self) -> None:
        """Tell of the rest."""
        for uid in list(self._periods):
            self._close(uid)

    def _close(self, uid: int | None) -> None:
        more = self._periods.pop(uid).more
        if more:
            why = f"{more} more requests of this user were refused; they have no rows."
            self._record(
                AuditEvent(at=self._clock.now().wall, deed=AuditAction.REFUSE, why=why, uid=uid)
            )
