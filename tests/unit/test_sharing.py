"""A host's power budget over devices: who gives way, and to whom."""

from __future__ import annotations

from wattspan.capper.limits import (
    BudgetDevice,
    BudgetShares,
    WeightedClaim,
    divide_by_weight,
    share_budget,
)

H100 = BudgetDevice("gpu:a", 200_000, 700_000)
TWIN = BudgetDevice("gpu:b", 200_000, 700_000)
CPU = BudgetDevice("rapl:package-0", 100_000, 270_000)


def test_a_limit_that_does_for_all_caps_nobody() -> None:
    assert share_budget([H100, TWIN], 1_400_000) == BudgetShares(
        {"gpu:a": 700_000, "gpu:b": 700_000}
    )


def test_the_lowest_priority_gives_way_first() -> None:
    batch = TWIN._replace(priority=10)
    assert share_budget([H100, batch], 1_000_000).caps == {"gpu:a": 700_000, "gpu:b": 300_000}


def test_equals_are_cut_by_the_same_part_of_their_range() -> None:
    caps = share_budget([H100, CPU], 300_000 + 335_000).caps
    assert caps == {"gpu:a": 200_000 + 250_000, "rapl:package-0": 100_000 + 85_000}


def test_what_one_does_not_want_goes_to_the_other() -> None:
    modest = TWIN._replace(want=250_000)
    assert share_budget([H100, modest], 900_000).caps == {"gpu:a": 650_000, "gpu:b": 250_000}


def test_a_wish_beyond_its_part_is_cut_to_it() -> None:
    eager = TWIN._replace(want=600_000)
    assert share_budget([H100, eager], 900_000).caps == {"gpu:a": 450_000, "gpu:b": 450_000}


def test_a_wish_is_no_cap_where_there_is_plenty() -> None:
    modest = TWIN._replace(want=250_000)
    assert share_budget([H100, modest], 1_400_000).caps["gpu:b"] == 700_000


def test_the_reserve_is_kept_for_what_cannot_be_capped() -> None:
    assert share_budget([H100, TWIN], 1_000_000, reserve=200_000).total == 800_000


def test_minimums_that_do_not_fit_are_said_by_how_much() -> None:
    assert share_budget([H100, TWIN], 350_000) == BudgetShares(
        {"gpu:a": 200_000, "gpu:b": 200_000}, 50_000
    )


def test_a_device_that_cannot_be_capped_is_counted_with_what_it_has() -> None:
    stuck = H100._replace(minimum=650_000, maximum=650_000)
    assert share_budget([stuck, TWIN], 1_000_000).caps == {"gpu:a": 650_000, "gpu:b": 350_000}


def test_shares_are_cut_to_whole_watts() -> None:
    third = H100._replace(device="gpu:c")
    assert share_budget([H100, TWIN, third], 1_000_000).caps == dict.fromkeys(
        ("gpu:a", "gpu:b", "gpu:c"), 333_000
    )


def test_no_device_needs_no_share() -> None:
    assert share_budget([], 1_000) == BudgetShares({})


def test_odd_milliwatts_are_given_out_too() -> None:
    assert sorted(divide_by_weight(10, dict.fromkeys("abc", WeightedClaim(100, 1))).values()) == [
        3,
        3,
        4,
    ]
