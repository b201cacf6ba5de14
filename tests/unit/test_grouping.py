"""Which groups are charged, when little is known of who is."""

from __future__ import annotations

from wattspan.attribution.top_n import UNKNOWN_USER, GroupAccounts
from wattspan.model import Consumer, Group, GroupKind, HwType, PayerInfo

UNIT, USER = Group(GroupKind.UNIT, "build"), Group(GroupKind.USER, "eva")


def charged(groups: tuple[Group, ...] | None) -> dict[Group, int]:
    grouping = GroupAccounts(10)
    info = None if groups is None else PayerInfo(Consumer(9, 5), "make", groups)
    grouping.charge(info, HwType.CPU, 7, now=1)
    return {row.group: row.energy[HwType.CPU] for row in grouping.rows()}


def test_a_payer_is_charged_in_all_its_groups() -> None:
    assert charged((UNIT, USER)) == {UNIT: 7, USER: 7}


def test_all_energy_is_among_the_users_whoever_it_was() -> None:
    assert charged((UNIT,)) == {UNIT: 7, UNKNOWN_USER: 7}
    assert charged(()) == charged(None) == {UNKNOWN_USER: 7}
