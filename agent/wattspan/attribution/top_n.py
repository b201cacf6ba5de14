"""Which processes are shown by name.

A host has thousands of processes and a time series has a price, so at most ``top`` of them are
listed and the rest are ``other``. Three rules keep every exported counter honest. A process is
charged to its row from the moment it is listed and to ``other`` before, so nothing counts twice.
A row that ends is not poured into ``other``, which would look like a burst of power, but retired.
And a row, once given, is kept for a while, so that series do not flicker, unless somebody spends
far more.

Energy by group: containers, pods, jobs, units, users; the dead stay counted in theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from wattspan.attribution.energy import AveragePowers
from wattspan.model import SECOND, Group, GroupKind, GroupRow, HwType, Microjoules, Payer, PayerInfo

EXITED_ROW_LIFETIME = 60 * SECOND  # a dead process's row stays long enough to be scraped once more
EXIT_GRACE = 10 * SECOND  # the dead may be charged as long: GPU time is known late
MIN_LISTED_TIME = 60 * SECOND  # a living one's row is safe from displacement for as long
_DISPLACEMENT_FACTOR = 2  # a newcomer must have spent this many times as much as the row it takes
_IMMEDIATE_DISPLACEMENT_FACTOR = (
    16  # so many times as much, and its share of all, for a row that is still safe
)


@dataclass(slots=True)
class ListedPayer:
    """One listed payer's energy since it was listed."""

    since: int
    energy: dict[HwType, int] = field(default_factory=dict)
    died: int | None = None


class TopPayers:
    """Rows for at most ``top`` payers, and the accounts of everybody else.

    At all times, for each hardware type, all that was ever credited equals the rows plus
    ``other`` plus ``retired``.
    """

    def __init__(
        self,
        top: int,
        other: Mapping[HwType, int] | None = None,
        retired: Mapping[HwType, int] | None = None,
    ) -> None:
        self._top = top
        self._rows: dict[Payer, ListedPayer] = {}
        self._score: dict[Payer, float] = {}
        self._dead: dict[Payer, int] = {}
        self._other = dict(other or {})
        self._retired = dict(retired or {})

    @property
    def rows(self) -> Mapping[Payer, ListedPayer]:
        return self._rows

    @property
    def other(self) -> dict[HwType, Microjoules]:
        return {kind: Microjoules(energy) for kind, energy in self._other.items()}

    @property
    def retired(self) -> dict[HwType, Microjoules]:
        return {kind: Microjoules(energy) for kind, energy in self._retired.items()}

    def restore(self, payer: Payer, energy: Mapping[HwType, int], now: int) -> None:
        """Give back a row that an earlier life of the agent had listed."""
        self._rows[payer] = ListedPayer(now, dict(energy))

    def retire(self, energy: Mapping[HwType, int]) -> None:
        """Count what was spent under a row that no longer is."""
        for kind, amount in energy.items():
            self._retired[kind] = self._retired.get(kind, 0) + amount

    def credit(self, payer: Payer, kind: HwType, energy: int) -> None:
        """Charge ``energy`` to the payer's row, or to ``other`` if it has none."""
        row = self._rows.get(payer)
        account = self._other if row is None else row.energy
        account[kind] = account.get(kind, 0) + energy
        if payer not in self._dead:  # GPU time of the dead comes late, and makes no candidate
            self._score[payer] = self._score.get(payer, 0.0) + energy

    def leave(self, payer: Payer, now: int) -> None:
        """The payer is dead: its row, if any, lingers; it is no candidate any more."""
        self._score.pop(payer, None)
        self._dead[payer] = now
        row = self._rows.get(payer)
        if row is not None and row.died is None:
            row.died = now

    def rank(self, now: int) -> None:
        """Retire rows of the long dead; list the payers that spend most, as far as there is room.

        Call every few seconds: what was spent before fades by half at each call.
        """
        for payer in [p for p, row in self._rows.items() if _is_expired(row, now)]:
            self.retire(self._rows.pop(payer).energy)
        self._dead = {p: died for p, died in self._dead.items() if now - died < EXIT_GRACE}
        waiting = sorted(
            (payer for payer, score in self._score.items() if score and payer not in self._rows),
            key=lambda payer: self._score[payer],
            reverse=True,
        )
        for payer in waiting[: self._top]:
            if len(self._rows) >= self._top and not self._make_room(payer, now):
                break
            self._rows[payer] = ListedPayer(now)
        # What has faded below a microjoule has spent nothing of late: forget it, stay bounded.
        self._score = {p: score / 2 for p, score in self._score.items() if score >= 1}

    def _make_room(self, newcomer: Payer, now: int) -> bool:
        """Displace the least row that had its time, if the newcomer is clearly above it.

        One that had not is displaced by who is far above it and has spent more than an equal
        share: whoever draws most is seen at once, and so few are that many that no flood of
        small ones can make rows come and go.
        """
        score = self._score[newcomer]
        settled, safe = [], []
        for payer, row in self._rows.items():
            if now - row.since >= MIN_LISTED_TIME:
                settled.append(payer)
            elif row.died is None:
                safe.append(payer)
        dominant = score * self._top >= sum(self._score.values())
        for rows, times in (
            (settled, _DISPLACEMENT_FACTOR),
            (safe if dominant else [], _IMMEDIATE_DISPLACEMENT_FACTOR),
        ):
            if not rows:
                continue
            least = min(rows, key=lambda payer: self._score.get(payer, 0.0))
            if score >= times * self._score.get(least, 0.0):
                self.retire(self._rows.pop(least).energy)
                return True
        return False


def _is_expired(row: ListedPayer, now: int) -> bool:
    return row.died is not None and now - row.died >= EXITED_ROW_LIFETIME


UNKNOWN_USER = Group(GroupKind.USER, "unknown")
"""The group of a payer that died before anybody could look who it was."""


STALE_AFTER = 600 * SECOND
"""A group that nobody was charged in for as long may make room for another."""

OTHER = "other"
"""The name of what groups without an account share, one for each kind."""


@dataclass(slots=True)
class _GroupAccount:
    energy: dict[HwType, int] = field(default_factory=dict)
    charged: int = 0  # when last, on the monotonic clock


class GroupAccounts:
    """At most ``limit`` accounts, and one more for each kind, which all further groups share.

    When there is no room, a stale account is let go, and begins at zero should it ever return;
    it is not poured into another, which would look like a burst of power. With none stale, a new
    group is charged to its kind's ``other``: nothing is lost from any sum.
    """

    def __init__(self, limit: int, rows: Iterable[GroupRow] = (), now: int = 0) -> None:
        """``rows`` are accounts from an earlier life."""
        self._limit = limit
        self._accounts = {row.group: _GroupAccount(dict(row.energy), now) for row in rows}
        self._powers: AveragePowers[Group] = AveragePowers()
        self.unnamed = 0  # charges that went to an `other` for want of room

    def charge(self, info: PayerInfo | None, kind: HwType, energy: int, now: int) -> None:
        """Charge every group of a payer; its user is nobody as long as none is known.

        So all consumers are among the users, whoever dies before anybody could look who it was.
        """
        groups = info.groups if info is not None else ()
        if all(group.kind is not GroupKind.USER for group in groups):
            groups = (*groups, UNKNOWN_USER)
        for group in groups:
            account = self._accounts.get(group) or self._open(group, now)
            account.energy[kind] = account.energy.get(kind, 0) + energy
            account.charged = now

    def settle(self, kind: HwType, settled: int) -> None:
        """All of ``kind`` is charged up to ``settled``: bring the powers up to date."""
        self._powers.update(
            kind, settled, {g: one.energy.get(kind, 0) for g, one in self._accounts.items()}
        )

    def rows(self) -> tuple[GroupRow, ...]:
        """Every account as it stands."""
        return tuple(
            GroupRow(group, frozen_energies(account.energy), self._powers.of(group))
            for group, account in self._accounts.items()
        )

    def _open(self, group: Group, now: int) -> _GroupAccount:
        if len(self._accounts) >= self._limit and group.name != OTHER and not self._let_go(now):
            self.unnamed += 1
            return self._accounts.setdefault(Group(group.kind, OTHER), _GroupAccount())
        return self._accounts.setdefault(group, _GroupAccount())

    def _let_go(self, now: int) -> bool:
        """Let go of all stale accounts, if any."""
        stale = [g for g, one in self._accounts.items() if now - one.charged >= STALE_AFTER]
        for group in stale:
            del self._accounts[group]
        return bool(stale)


def frozen_energies(energy: Mapping[HwType, int]) -> dict[HwType, Microjoules]:
    """A copy that may be shown to others."""
    return {kind: Microjoules(amount) for kind, amount in energy.items()}
