"""Accounts of groups."""

from __future__ import annotations

from wattspan.attribution.top_n import UNKNOWN_USER, GroupAccounts
from wattspan.model import Group, GroupKind, HwType

UNIT, USER = Group(GroupKind.UNIT, "build"), Group(GroupKind.USER, "eva")


def charged(groups: tuple[Group, ...]) -> dict[Group, int]:
    grouping = GroupAccounts(10)
    grouping.charge(groups, HwType.CPU, 7, now=1)
    return {row.group: row.energy[HwType.CPU] for row in grouping.rows()}


def test_payer_is_charged_in_all_its_groups() -> None:
    assert charged((UNIT, USER)) == {UNIT: 7, USER: 7}


def test_energy_of_users_is_the_energy_of_all_payers() -> None:
    assert charged((UNIT,)) == {UNIT: 7, UNKNOWN_USER: 7}
    assert charged(()) == {UNKNOWN_USER: 7}
