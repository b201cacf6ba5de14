"""Accounts in bounded number: of processes, of groups, and the rule by which they are listed.

A host has thousands of processes and each time series has a cost, so at most ``top`` processes
have a row and all others share the account ``other``. Three rules keep exported counters
monotonic and steady:

- A process is charged to its row from its listing on and to ``other`` before. The first processes
  are listed by their first charges.
- The energy of a row that ends goes to the account ``retired``; in ``other`` it would look like a
  burst of power.
- A new row is safe from displacement for a while, except by a process that spends far more.

:class:`GroupAccounts` holds the energy of containers, pods, jobs, units and users; energy of
exited processes stays in their groups. Powers are means over at least a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from wattspan.model import (
    SECOND,
    Group,
    GroupKind,
    GroupRow,
    HwType,
    Microjoules,
    Milliwatts,
    Payer,
    Principal,
    ProcessRow,
    fills,
    mean_power,
)
from wattspan.sharing.fair_pool import FairPool, Overflow, SharePath, share_path

EXITED_ROW_LIFETIME = 60 * SECOND
"""A row stays for this time after the exit of its process, so that it is scraped once more."""

EXIT_GRACE = 10 * SECOND
"""Exited payers can be charged for this time: devices report usage late."""

MIN_LISTED_TIME = 60 * SECOND
"""An account of a running process or of a span name is safe from displacement for this time."""

_DISPLACEMENT_FACTOR = 2  # least ratio of the recent energies of newcomer and displaced
_IMMEDIATE_DISPLACEMENT_FACTOR = 16  # the same if the displaced one is still safe


K = TypeVar("K")


class Listing(NamedTuple):
    """A key with an account of its own, and its recent energy."""

    since: int
    score: float
    ended: bool = False


def displacements(
    listed: Mapping[K, Listing], waiting: Mapping[K, float], places: int, now: int
) -> Iterator[tuple[K, K | None]]:
    """Yield the waiting keys that get a place, each with the key that loses it, None if it is free.

    A listing is safe for ``MIN_LISTED_TIME``, except from a key that has spent more than an equal
    share: the largest consumer is listed at once, and a flood of small ones cannot make accounts
    flicker. ``waiting`` has the recent energy of keys; those that are listed are ignored.
    """
    newcomers = sorted(
        (key for key, score in waiting.items() if score > 0 and key not in listed),
        key=waiting.__getitem__,
        reverse=True,
    )
    settled, safe = deque[K](), deque[K]()
    for key in sorted(listed, key=lambda key: listed[key].score):
        if now - listed[key].since >= MIN_LISTED_TIME:
            settled.append(key)
        elif not listed[key].ended:
            safe.append(key)
    total = sum(one.score for one in listed.values()) + sum(waiting[key] for key in newcomers)
    free = places - len(listed)
    for newcomer in newcomers[:places]:
        score = waiting[newcomer]
        if free > 0:
            free -= 1
            yield newcomer, None
        elif settled and score >= _DISPLACEMENT_FACTOR * listed[settled[0]].score:
            yield newcomer, settled.popleft()
        elif (
            safe
            and score * places >= total
            and score >= _IMMEDIATE_DISPLACEMENT_FACTOR * listed[safe[0]].score
        ):
            yield newcomer, safe.popleft()
        else:
            return


@dataclass(slots=True)
class ListedPayer:
    """The energy of one listed payer since its listing."""

    since: int
    energy: dict[HwType, int] = field(default_factory=dict)
    exited: int | None = None
    bounded: set[HwType] = field(default_factory=set)
    shown: ProcessRow | None = None  # in the last snapshot; None after a change


class TopPayers:
    """Rows of at most ``top`` payers, and the accounts of all others.

    At all times, for each hardware type, the sum of all credits equals the rows plus ``other``
    plus ``retired``.
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
        self._exited: dict[Payer, int] = {}
        self.other = dict(other or {})
        self.retired = dict(retired or {})

    @property
    def rows(self) -> Mapping[Payer, ListedPayer]:
        return self._rows

    def restore(
        self,
        payer: Payer,
        energy: Mapping[HwType, int],
        now: int,
        bounded: Iterable[HwType] = (),
    ) -> None:
        """Restore the row of a checkpoint."""
        self._rows[payer] = ListedPayer(now, dict(energy), bounded=set(bounded))

    def bound(self, payer: Payer, kind: HwType) -> None:
        """Note that energy of ``kind`` is missing in the payer's row, if it has one."""
        if (row := self._rows.get(payer)) is not None:
            row.bounded.add(kind)
            row.shown = None

    def retire(self, energy: Mapping[HwType, int]) -> None:
        """Book the energy of a row that has ended."""
        for kind, amount in energy.items():
            self.retired[kind] = self.retired.get(kind, 0) + amount

    def credit(self, payer: Payer, kind: HwType, energy: int) -> None:
        """Charge ``energy`` to the payer's row, or to ``other`` without a row."""
        row = self._rows.get(payer)
        if row is None:
            account = self.other
        else:
            account, row.shown = row.energy, None
        account[kind] = account.get(kind, 0) + energy
        if payer not in self._exited:  # late GPU time of an exited payer makes no candidate
            self._score[payer] = self._score.get(payer, 0.0) + energy

    def list_first(self, charges: Iterable[Mapping[Payer, int]], now: int) -> None:
        """List payers by their first charges, which are then credited to their rows."""
        for payer, energy in chain.from_iterable(one.items() for one in charges):
            if payer not in self._exited:
                self._score[payer] = self._score.get(payer, 0.0) + energy
        self.rank(now)

    def exit(self, payer: Payer, now: int) -> None:
        """Record the exit of a payer; its row stays for ``EXITED_ROW_LIFETIME``."""
        self._score.pop(payer, None)
        self._exited[payer] = now
        row = self._rows.get(payer)
        if row is not None and row.exited is None:
            row.exited, row.shown = now, None

    def resume(self, payer: Payer) -> None:
        """Undo the exit of a payer that has come back."""
        self._exited.pop(payer, None)
        if (row := self._rows.get(payer)) is not None:
            row.exited = row.shown = None

    def rank(self, now: int) -> None:
        """Retire expired rows and list the payers with the most energy, as far as room permits.

        To be called every few seconds: scores decay by half with each call.
        """
        expired = [
            payer
            for payer, row in self._rows.items()
            if row.exited is not None and now - row.exited >= EXITED_ROW_LIFETIME
        ]
        for payer in expired:
            self.retire(self._rows.pop(payer).energy)
        self._exited = {
            p: exited for p, exited in self._exited.items() if now - exited < EXIT_GRACE
        }
        listed = {
            payer: Listing(row.since, self._score.get(payer, 0.0), row.exited is not None)
            for payer, row in self._rows.items()
        }
        for newcomer, displaced in displacements(listed, self._score, self._top, now):
            if displaced is not None:
                self.retire(self._rows.pop(displaced).energy)
            self._rows[newcomer] = ListedPayer(now)
        # A score below a microjoule has decayed to nothing: removal keeps memory bounded.
        self._score = {p: score / 2 for p, score in self._score.items() if score >= 1}


UNKNOWN_USER = Group(GroupKind.USER, "unknown")
"""The group of payers without a known user: processes that ended before discovery."""

STALE_AFTER = 600 * SECOND
"""An account without charges for this time may be removed for another."""

OTHER = "other"
"""The name of the account, one for each kind, of all groups without an account."""


_USED_EVERY = SECOND  # the precision of the time of the last charge
_UNKNOWN = share_path(None)  # all groups whose owner is not known have the share of one


@dataclass(slots=True)
class _GroupAccount:
    energy: dict[HwType, int] = field(default_factory=dict)
    owner: SharePath = _UNKNOWN
    used: int = -_USED_EVERY  # monotonic time of a charge
    bounded: set[HwType] = field(default_factory=set)
    shown: GroupRow | None = None  # in the last snapshot; None after a change


def _with_user(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """The groups of a payer, with ``UNKNOWN_USER`` if they name no user.

    The energy of all users is therefore the energy of all consumers.
    """
    if any(group.kind is GroupKind.USER for group in groups):
        return groups
    return (*groups, UNKNOWN_USER)


class GroupAccounts:
    """At most ``limit`` accounts, and one of each kind that all further groups share.

    For want of room, stale accounts are removed, then that of a principal with more accounts than
    the one of the new group; they begin at zero if their group returns. They are not added to
    another account, where they would look like a burst of power and count twice. A new group of a
    principal that has its share is charged to ``other`` of its kind: no energy is lost from any
    sum. A user is an owner of its own, so that no group displaces its account.
    """

    def __init__(self, limit: int, rows: Iterable[GroupRow] = (), now: int = 0) -> None:
        """``rows`` are from a checkpoint."""
        self._places: FairPool[Group] = FairPool(limit, Overflow.REFUSE, STALE_AFTER)
        self._accounts: dict[Group, _GroupAccount] = {}
        self._powers: AveragePowers[Group] = AveragePowers()
        self.unnamed = 0  # charges to `other` for want of room
        for row in rows:
            if self._admit(row.group, _owner(row.group, None), now):
                own = _GroupAccount(dict(row.energy), bounded=set(row.bounded))
                self._accounts[row.group] = own

    def charge(
        self,
        groups: tuple[Group, ...],
        kind: HwType,
        energy: int,
        now: int,
        principal: Principal | None = None,
    ) -> None:
        """Charge all groups of payers, which belong to the first ``principal`` that is known."""
        # New ones last: an old one is in use, and makes no room for them.
        for group in sorted(_with_user(groups), key=self._accounts.__contains__, reverse=True):
            account = self._accounts.get(group)
            if account is None or now - account.used >= _USED_EVERY:
                account = self._use(group, _owner(group, principal), now)
            account.energy[kind] = account.energy.get(kind, 0) + energy
            account.shown = None

    def bound(self, groups: tuple[Group, ...], kind: HwType) -> None:
        """Note that energy of ``kind`` is missing in the accounts that ``groups`` have or share."""
        for group in _with_user(groups):
            account = self._accounts.get(group) or self._accounts.get(Group(group.kind, OTHER))
            if account is not None:
                account.bounded.add(kind)
                account.shown = None

    def update_powers(self, kind: HwType, settled: int) -> None:
        """Update the powers of ``kind``, whose charges are complete up to ``settled``."""
        self._powers.update(
            kind, settled, {g: one.energy.get(kind, 0) for g, one in self._accounts.items()}
        )

    def rows(self) -> tuple[GroupRow, ...]:
        """All accounts; an unchanged one as the same object as before."""
        return tuple([self._row(group, account) for group, account in self._accounts.items()])

    def _row(self, group: Group, account: _GroupAccount) -> GroupRow:
        row, power = account.shown, self._powers.of(group)
        if row is None or row.power is not power:
            energy = frozen_energies(account.energy)
            row = account.shown = GroupRow(group, energy, power, frozenset(account.bounded))
        return row

    def _use(self, group: Group, owner: SharePath, now: int) -> _GroupAccount:
        """The account of a group, perhaps a new one, or the shared one of its kind."""
        account = self._accounts.get(group)
        if account is not None and account.owner == _UNKNOWN != owner:
            self._places.remove(group)
            account.owner = owner
        if not self._admit(group, owner, now):
            self.unnamed += 1
            group = Group(group.kind, OTHER)
        account = self._accounts.setdefault(group, _GroupAccount(owner=owner))
        account.used = now
        return account

    def _admit(self, group: Group, owner: SharePath, now: int) -> bool:
        if group.name == OTHER:
            return True
        admission = self._places.admit(group, owner, now)
        for displaced in admission.displaced:
            del self._accounts[displaced]
            self._powers.forget(displaced)
        return admission.admitted


def _owner(group: Group, principal: Principal | None) -> SharePath:
    """The owner of a group's account.

    Root's processes, such as setuid programs, prove no owner of a group that a user has named.
    """
    if group.kind is GroupKind.USER:
        return (group,)
    claimed = "/" in group.name and principal is not None and principal.is_host_root
    return _UNKNOWN if claimed else share_path(principal)


def frozen_energies(energy: Mapping[HwType, int]) -> dict[HwType, Microjoules]:
    """A copy for a snapshot."""
    return {kind: Microjoules(amount) for kind, amount in energy.items()}


POWER_WINDOW = SECOND
"""Powers are means over at least this."""


@dataclass(slots=True)
class AveragePower:
    """The mean power of one counter over the last full window."""

    energy: int = 0
    duration: int = 0
    power: Milliwatts | None = None

    def add(self, energy: int, duration: int) -> None:
        """Add the ``energy`` of the next ``duration`` nanoseconds, in microjoules."""
        self.energy += energy
        self.duration += duration
        if fills(POWER_WINDOW, self.duration, duration):
            self.power = mean_power(self.energy, self.duration)
            self.energy = self.duration = 0

    def reset(self) -> None:
        """After a gap the power is unknown until another window is full."""
        self.energy, self.duration, self.power = 0, 0, None


_NO_POWERS: Mapping[HwType, Milliwatts] = {}


class AveragePowers(Generic[K]):
    """The mean powers of many accounts, one hardware type at a time.

    Each type has its own watermark, because GPU energy is settled later than CPU energy; a mean
    over another period would oscillate.
    """

    def __init__(self) -> None:
        self._marks: dict[HwType, tuple[int, dict[K, int]]] = {}  # time and energies
        self._powers: dict[K, Mapping[HwType, Milliwatts]] = {}

    def of(self, account: K) -> Mapping[HwType, Milliwatts]:
        """The account's known powers: another object after each change."""
        return self._powers.get(account, _NO_POWERS)

    def forget(self, account: K) -> None:
        """Begin at zero with an account that has been removed."""
        self._powers.pop(account, None)
        for _, before in self._marks.values():
            before.pop(account, None)

    def update(self, kind: HwType, settled: int, energies: Mapping[K, int]) -> None:
        """Update from all accounts' energies of ``kind``, settled up to ``settled``.

        Without effect until a window has passed since the last update.
        """
        since, before = self._marks.get(kind, (settled, {}))
        elapsed = settled - since
        # A period of a second that one tick measures may be a little shorter.
        if kind in self._marks and 0 <= elapsed < POWER_WINDOW - POWER_WINDOW // 10:
            return
        if elapsed > 0:
            for account, energy in energies.items():
                power = mean_power(energy - before.get(account, 0), elapsed)
                known = self._powers.get(account, _NO_POWERS)
                if known.get(kind) != power:
                    self._powers[account] = {**known, kind: power}
            for account in self._powers.keys() - energies.keys():
                del self._powers[account]
        self._marks[kind] = settled, dict(energies)
