"""Allotments of a fleet: budgets, joins, shrinking before growing, lost hosts, removals."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from msgspec.structs import replace

from wattspan.fleet.allotment import (
    MAX_POWER,
    Allotment,
    AllotmentBook,
    BudgetBelowFloorsError,
    HostInUseError,
    HostReport,
    accept_budgets,
    drain_host,
    power_bounds,
    remove_host,
)
from wattspan.fleet.allotment_planner import AllotmentPlan, plan_allotments

W = 1_000


class Row:
    """A row of hosts that acknowledge what they get, unless they are silent."""

    def __init__(self, **budgets: int) -> None:
        self.book = accept_budgets(AllotmentBook(), {"": 10_000 * W, **budgets})
        self.reports: dict[str, HostReport] = {}
        self.silent: set[str] = set()

    def join(self, *names: str, **changes: object) -> None:
        for name in names:
            usual = HostReport(
                session=f"{name}-1", place="row", floor=100 * W, ceiling=800 * W, limit=100 * W
            )
            fields = {key: getattr(usual, key) for key in usual.__struct_fields__}
            self.reports[name] = HostReport(**(fields | changes))

    def change(self, name: str, **changes: object) -> None:
        self.reports[name] = replace(self.reports[name], **changes)

    def plan(self, least_change: int = 0) -> AllotmentPlan:
        plan = plan_allotments(self.book, self.reports, least_change=least_change)
        self.book = plan.book or self.book
        for name, one in plan.changed.items():
            if name in self.reports and name not in self.silent:
                self.change(name, acknowledged=one.sequence, limit=one.limit)
        return plan

    def settle(self) -> AllotmentPlan:
        for _ in range(5):
            if (plan := self.plan()).book is None:
                return plan
        raise AssertionError("the transition does not end")

    @property
    def limits(self) -> Mapping[str, int]:
        return {name: one.allotment.limit // W for name, one in self.book.hosts.items()}


@pytest.fixture
def row() -> Row:
    """Two hosts of 100 W to 800 W under 1,000 W."""
    row = Row(row=1_000 * W)
    row.join("a", "b")
    row.settle()
    return row


# ------------------------------------------------------------------------------------- budgets


def test_hosts_share_a_budget_like_the_devices_of_a_host(row: Row) -> None:
    assert row.limits == {"a": 500, "b": 500}


def test_budgets_apply_at_every_place() -> None:
    row = Row(**{"row/rack-1": 400 * W, "row/rack-1/a": 150 * W})
    row.join("a", "b", place="row/rack-1")
    row.join("c", place="row/rack-2")
    row.settle()
    assert row.limits == {"a": 113, "b": 286, "c": 800}
    row.book = accept_budgets(row.book, {"": 900 * W, "row/rack-1/a": 150 * W})
    row.settle()
    assert row.limits["a"] < 150
    assert 897 <= sum(row.limits.values()) <= 900


def test_host_without_a_place_is_in_the_fleet() -> None:
    row = Row(**{"": 500 * W})
    row.join("a", place="")
    row.settle()
    assert row.limits == {"a": 500}
    assert row.plan().nodes[""].allotted == 500 * W


def test_idle_host_leaves_its_power_to_others(row: Row) -> None:
    row.change("a", demand=150 * W)
    row.settle()
    assert row.limits == {"a": 200, "b": 800}


def test_higher_priority_is_served_first(row: Row) -> None:
    row.change("a", priority=200)
    row.settle()
    assert row.limits == {"a": 800, "b": 200}


def test_budget_below_the_floors_is_refused_with_the_figures(row: Row) -> None:
    with pytest.raises(BudgetBelowFloorsError, match=r"row, 150 W, is 50 W below .* 200 W") as at:
        accept_budgets(row.book, {"row": 150 * W})
    assert (at.value.place, at.value.budget, at.value.floors) == ("row", 150 * W, 200 * W)
    with pytest.raises(BudgetBelowFloorsError, match=r"its 1 host, which"):
        accept_budgets(row.book, {"row/a": 50 * W})


@pytest.mark.parametrize(
    ("budgets", "cause"),
    [
        ({"row 1": W}, "'row 1' is not a place"),
        ({"row//a": W}, "is not a place"),
        ({"": 0}, "budget of the fleet must be above 0"),
        ({"row": MAX_POWER + 1}, "budget of row must be above 0"),
    ],
)
def test_invalid_budget_is_refused(budgets: dict[str, int], cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        accept_budgets(AllotmentBook(), budgets)


def test_lowered_budget_is_in_force_once_hosts_have_acknowledged(row: Row) -> None:
    row.book = accept_budgets(row.book, {"row": 600 * W})
    row.silent = {"b"}
    row.plan()
    assert row.plan().nodes["row"].headroom == -200 * W
    row.silent.clear()
    row.change("b", acknowledged=row.book.hosts["b"].allotment.sequence)
    assert row.settle().nodes["row"].headroom >= 0
    assert row.limits == {"a": 300, "b": 300}


# --------------------------------------------------------------------------------- transitions


def test_limits_shrink_before_others_grow(row: Row) -> None:
    row.silent = {"a"}
    row.change("a", demand=100 * W)
    plan = row.plan()
    assert row.limits == {"a": 200, "b": 500}  # b waits for a
    assert plan.changed.keys() == {"a"}
    assert row.plan().book is None
    row.change("a", acknowledged=row.book.hosts["a"].allotment.sequence)
    row.settle()
    assert row.limits == {"a": 200, "b": 800}


def test_next_leader_continues_from_the_stored_book(row: Row) -> None:
    row.silent = {"a"}
    row.change("a", demand=100 * W)
    row.plan()
    row.book = msgspec.json.decode(msgspec.json.encode(row.book), type=AllotmentBook)
    row.change("a", demand=None)
    row.plan()  # a second allotment, while the first is not acknowledged
    assert power_bounds(row.book.hosts["a"], row.reports["a"]).limit == 500 * W
    assert row.limits == {"a": 500, "b": 500}


def test_small_changes_are_left_out_unless_power_is_missing(row: Row) -> None:
    row.change("a", demand=495 * W)
    assert row.plan(least_change=10 * W).book is None
    row.change("a", demand=480 * W)
    assert row.plan(least_change=10 * W).changed.keys() == {"a"}
    row.join("c")
    assert row.plan(least_change=1_000 * W).changed.keys() >= {"a", "b"}


# ------------------------------------------------------------------------------ joins and leaves


def test_host_that_joins_waits_until_others_have_given_up_its_floor(row: Row) -> None:
    row.silent = {"a", "b"}
    row.join("c")
    waiting = row.plan().waiting
    assert waiting == {"c": "c waits for 100 W that other hosts of row have to give up first."}
    assert "c" not in row.book.hosts
    row.silent.clear()
    for name in ("a", "b"):
        row.change(name, acknowledged=row.book.hosts[name].allotment.sequence)
    assert row.settle().waiting == {}
    assert sum(row.limits.values()) <= 1_000


def test_host_that_joins_counts_with_the_limit_that_it_has() -> None:
    row = Row(row=1_000 * W)
    row.join("a", limit=700 * W)
    row.silent = {"a"}
    row.plan()
    assert row.book.hosts["a"].limit_bound == 800 * W
    row.join("b", limit=300 * W)
    row.plan()
    assert "b" not in row.book.hosts


def test_host_whose_floor_does_not_fit_is_not_admitted(row: Row) -> None:
    row.join("c", floor=801 * W, ceiling=900 * W, limit=801 * W)
    sentence = row.settle().waiting["c"]
    assert sentence.startswith("c is not admitted: its floor of 801 W and the 200 W")
    assert "budget of 1000 W" in sentence
    assert row.limits == {"a": 500, "b": 500}


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"place": "row 1"}, "is not a place"),
        ({"floor": 900 * W}, "no range of power"),
        ({"floor": -1}, "no range of power"),
        ({"ceiling": MAX_POWER + 1}, "no range of power"),
        ({"limit": -1}, "is no power"),
    ],
)
def test_invalid_report_is_named(row: Row, changes: dict[str, object], cause: str) -> None:
    row.join("c", **changes)
    row.change("a", **changes)
    waiting = row.settle().waiting
    assert cause in waiting["c"]
    assert cause in waiting["a"]
    assert "keeps its allotment" in waiting["a"]
    assert row.limits == {"a": 500, "b": 500}


def test_host_that_reports_another_place_keeps_its_allotment(row: Row) -> None:
    row.change("a", place="row-2")
    assert "registered at 'row'" in row.plan().waiting["a"]
    assert row.limits == {"a": 500, "b": 500}


def test_raised_floor_counts_at_once(row: Row) -> None:
    row.change("a", floor=600 * W)
    plan = row.plan()
    assert plan.nodes["row"].headroom == -100 * W
    row.settle()
    assert row.limits["a"] >= 600
    assert row.limits["b"] <= 400


def test_drained_host_is_allotted_its_floor_and_not_admitted_again(row: Row) -> None:
    row.book = drain_host(row.book, "a")
    row.settle()
    assert row.limits == {"a": 100, "b": 800}
    del row.reports["a"]
    row.book = remove_host(row.book, "a", None)
    row.join("a", session="a-2")
    assert row.settle().waiting == {"a": "a is not admitted: it is drained."}
    row.book = drain_host(row.book, "a", drained=False)
    row.settle()
    assert row.limits == {"a": 500, "b": 500}


def test_host_in_contact_is_not_removed(row: Row) -> None:
    with pytest.raises(HostInUseError, match="a is in contact and may use 500 W"):
        remove_host(row.book, "a", row.reports["a"])
    with pytest.raises(KeyError):
        remove_host(row.book, "c", None)


# --------------------------------------------------------------------------------- lost contact


def test_lost_host_counts_with_the_lower_one_of_limit_and_safe_allotment(row: Row) -> None:
    row.change("b", demand=0)
    row.settle()
    assert row.limits == {"a": 800, "b": 200}
    del row.reports["a"]
    assert row.plan().nodes["row"].enforceable == 700 * W
    row.settle()
    assert row.limits == {"a": 800, "b": 500}
    row.join("a", session="a-2", limit=500 * W, floor=100 * W)
    row.plan()
    assert power_bounds(row.book.hosts["a"], row.reports["a"]).limit == 500 * W
    row.settle()
    assert sum(row.limits.values()) == 1_000


def test_holding_adopts_newer_allotments_of_its_session_only() -> None:
    holding = Allotment(limit=300, safe=200, session="s", sequence=5)
    newer = Allotment(session="s", sequence=6, limit=400, safe=250)
    assert holding.adopt(newer) == Allotment(limit=400, safe=250, session="s", sequence=6)
    assert holding.adopt(replace(newer, session="other")) is holding
    assert holding.adopt(replace(newer, sequence=5)) is holding
    assert holding.lost().adopt(newer) == Allotment.initial(200, 200)
    assert holding.begin("t") == Allotment.initial(200, 200, "t")
