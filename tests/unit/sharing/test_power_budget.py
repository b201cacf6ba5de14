"""The division of a power budget among devices."""

from __future__ import annotations

from wattspan.model import CapKey, Knob
from wattspan.sharing.power_budget import BudgetClaim, share_budget

A, B, C = (CapKey(Knob.GPU_POWER, f"gpu:{letter}") for letter in "abc")
PACKAGE = CapKey(Knob.CPU_POWER, "rapl:package-0")
H100 = BudgetClaim(200_000, 700_000)
CPU = BudgetClaim(100_000, 270_000)


def test_sufficient_limit_caps_no_device() -> None:
    assert share_budget({A: H100, B: H100}, 1_400_000) == {A: 700_000, B: 700_000}


def test_lowest_priority_is_limited_first() -> None:
    batch = H100._replace(priority=10)
    assert share_budget({A: H100, B: batch}, 1_000_000) == {A: 700_000, B: 300_000}


def test_equal_priorities_share_in_proportion_to_their_ranges() -> None:
    caps = share_budget({A: H100, PACKAGE: CPU}, 300_000 + 335_000)
    assert caps == {A: 200_000 + 250_000, PACKAGE: 100_000 + 85_000}


def test_unused_budget_goes_to_the_other_device() -> None:
    modest = H100._replace(want=250_000)
    assert share_budget({A: H100, B: modest}, 900_000) == {A: 650_000, B: 250_000}


def test_demand_above_the_share_is_limited_to_it() -> None:
    eager = H100._replace(want=600_000)
    assert share_budget({A: H100, B: eager}, 900_000) == {A: 450_000, B: 450_000}


def test_demand_within_the_limit_needs_no_cap() -> None:
    modest = H100._replace(want=250_000)
    assert share_budget({A: H100, B: modest}, 1_400_000)[B] == 700_000


def test_every_device_keeps_its_minimum_if_the_minimums_exceed_the_limit() -> None:
    assert share_budget({A: H100, B: H100}, 350_000) == {A: 200_000, B: 200_000}


def test_device_that_cannot_be_capped_counts_with_its_present_limit() -> None:
    stuck = H100._replace(minimum=650_000, maximum=650_000)
    assert share_budget({A: stuck, B: H100}, 1_000_000) == {A: 650_000, B: 350_000}


def test_shares_are_cut_to_whole_watts() -> None:
    caps = share_budget(dict.fromkeys((A, B, C), H100), 1_000_000)
    assert caps == dict.fromkeys((A, B, C), 333_000)


def test_host_without_devices_has_no_shares() -> None:
    assert share_budget({}, 1_000) == {}


def test_claimant_that_is_satisfied_by_the_last_milliwatt_gets_no_more() -> None:
    claims = {A: BudgetClaim(0, 2_000, want=1), B: BudgetClaim(0, 2_000)}
    assert share_budget(claims, 1) == {A: 0, B: 0}  # less than a watt is not used
