"""Accounts of groups."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattspan.attribution.top_n import OTHER, STALE_AFTER, UNKNOWN_USER, GroupAccounts
from wattspan.model import SECOND, Group, GroupKind, HwType, Principal

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


def test_missing_energy_bounds_the_accounts_that_are_charged() -> None:
    groups = GroupAccounts(1)  # of the four, one has an account of its own
    charges = (UNIT, USER), (Group(GroupKind.UNIT, "test"),)
    groups.bound(charges[0], HwType.CPU)
    assert groups.rows() == ()
    for one in charges:
        groups.charge(one, HwType.CPU, 7, now=1)
    for one in charges:
        groups.bound(one, HwType.CPU)
    assert len(groups.rows()) == 3
    assert all(row.bounded == {HwType.CPU} for row in groups.rows())


# -------------------------------------------------------------------------------- fair shares

LIMIT = 40
EVA, BOB, ROOT = Principal(1000), Principal(1001), Principal(0)
LABELS = {EVA: "eva", BOB: "bob", ROOT: "root"}


def charge(accounts: GroupAccounts, owner: Principal, name: str, now: int) -> None:
    groups = Group(GroupKind.UNIT, name), Group(GroupKind.USER, LABELS[owner])
    accounts.charge(groups, HwType.CPU, 7, now, owner)


def names(accounts: GroupAccounts) -> set[str]:
    return {row.group.name for row in accounts.rows()}


def flood(accounts: GroupAccounts, now: int, number: int = 3 * LIMIT) -> None:
    """Root's processes are setuid programs in scopes that their user has named."""
    for at in range(number):
        charge(accounts, BOB, f"bob/{at}.scope", now)
        charge(accounts, ROOT, f"bob/root-{at}.scope", now)
        accounts.charge((Group(GroupKind.UNIT, f"bob/unseen-{at}.scope"),), HwType.CPU, 7, now)


def test_rows_beyond_a_lower_limit_are_not_restored() -> None:
    accounts = GroupAccounts(8)
    for name in ("cron.service", "ssh.service"):
        charge(accounts, ROOT, name, SECOND)
    assert len(accounts.rows()) == 3
    assert len(GroupAccounts(2, accounts.rows(), 2 * SECOND).rows()) == 2


@pytest.mark.parametrize("restarted", [False, True])
def test_groups_of_one_owner_displace_none_of_another_owner(*, restarted: bool) -> None:
    accounts = GroupAccounts(LIMIT)
    for name in ("cron.service", "ssh.service"):
        charge(accounts, ROOT, name, SECOND)
    flood(accounts, SECOND)
    if restarted:
        accounts = GroupAccounts(LIMIT, accounts.rows(), 2 * SECOND)
        for name in ("cron.service", "ssh.service"):
            charge(accounts, ROOT, name, 2 * SECOND)
    for at in range(10):
        charge(accounts, EVA, f"eva/{at}.service", 3 * SECOND)
    flood(accounts, 4 * SECOND)
    shown = names(accounts)
    assert {f"eva/{at}.service" for at in range(10)} < shown
    assert {"cron.service", "ssh.service", "eva", "bob", "root", OTHER} < shown
    assert len(shown - {OTHER}) == LIMIT
    assert accounts.unnamed > 0


def test_group_that_returns_begins_at_zero_and_has_a_power() -> None:
    accounts = GroupAccounts(5)
    for at in range(1, 4):
        for number in range(4):
            charge(accounts, BOB, f"bob/{number}", at * SECOND)
        accounts.update_powers(HwType.CPU, at * SECOND)
    charge(accounts, EVA, "eva/x", 4 * SECOND)
    assert names(accounts) == {"bob/2", "bob/3", "bob", "eva/x", "eva"}
    charge(accounts, BOB, "bob/0", STALE_AFTER + 4 * SECOND)
    charge(accounts, BOB, "bob/3", STALE_AFTER + 4 * SECOND)
    accounts.update_powers(HwType.CPU, STALE_AFTER + 5 * SECOND)
    rows = {row.group.name: row for row in accounts.rows()}
    assert rows["bob/3"].energy == {HwType.CPU: 7}
    assert all(power >= 0 for row in rows.values() for power in row.power.values())


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(LABELS)), st.integers(0, 9), st.integers(0, STALE_AFTER // 2)
        ),
        max_size=60,
    )
)
def test_charges_are_conserved_while_accounts_are_displaced(
    charges: list[tuple[Principal, int, int]],
) -> None:
    accounts, now, charged, removed = GroupAccounts(6), 0, 0, 0
    before: dict[Group, int] = {}
    for owner, number, wait in charges:
        now += wait
        charge(accounts, owner, f"{LABELS[owner]}/{number}", now)
        charged += 14
        after = {row.group: row.energy[HwType.CPU] for row in accounts.rows()}
        removed += sum(energy for group, energy in before.items() if group not in after)
        assert all(after[group] >= energy for group, energy in before.items() if group in after)
        assert sum(after.values()) == charged - removed
        assert len([group for group in after if group.name != OTHER]) <= 6
        before = after
