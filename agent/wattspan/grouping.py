"""Energy by group: containers, pods, jobs, units, users; the dead stay counted in theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from wattspan.model import Group, GroupKind, GroupRow, HwType, Microjoules, PayerInfo
from wattspan.rates import Powers

NOBODY = Group(GroupKind.USER, "unknown")
"""The group of a payer that died before anybody could look who it was."""


@dataclass(slots=True)
class _Account:
    energy: dict[HwType, int] = field(default_factory=dict)
    charged: int = 0  # when last, on the monotonic clock


class Grouping:
    """At most ``limit`` accounts; beyond, the one that was charged longest ago is let go."""

    def __init__(self, limit: int, rows: Iterable[GroupRow] = (), now: int = 0) -> None:
        """``rows`` are accounts from an earlier life."""
        self._limit = limit
        self._accounts = {row.group: _Account(dict(row.energy), now) for row in rows}
        self._powers: Powers[Group] = Powers()

    def charge(self, info: PayerInfo | None, kind: HwType, energy: int, now: int) -> None:
        """Charge every group of a payer, or nobody's if it is not known."""
        for group in info.groups if info is not None and info.groups else (NOBODY,):
            account = self._accounts.get(group)
            if account is None:
                account = self._open(group)
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
            GroupRow(group, microjoules(account.energy), self._powers.of(group))
            for group, account in self._accounts.items()
        )

    def _open(self, group: Group) -> _Account:
        while len(self._accounts) >= self._limit:
            del self._accounts[min(self._accounts, key=lambda one: self._accounts[one].charged)]
        account = self._accounts[group] = _Account()
        return account


def microjoules(energy: Mapping[HwType, int]) -> dict[HwType, Microjoules]:
    """A copy that may be shown to others."""
    return {kind: Microjoules(amount) for kind, amount in energy.items()}
