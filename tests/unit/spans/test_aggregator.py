"""Totals by span name, exemplars, and displacement of names."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from testbed.joined_spans import CPU, GPU, S, joined, moment
from testbed.requirements import ROOT

from wattspan.attribution.top_n import MIN_LISTED_TIME, STALE_AFTER
from wattspan.model import HwType, SpanAccounts, SpanRow
from wattspan.spans.aggregator import (
    EXEMPLAR_LIFETIME,
    RANK_EVERY,
    SpanAggregator,
    shortened_name,
)
from wattspan.spans.values import Outcome, SpanEnergyColumns

MANY = 4


def rows(totals: SpanAggregator) -> dict[tuple[str, str], SpanRow]:
    return {(row.service, row.name): row for row in totals.accounts().rows}


def names(totals: SpanAggregator) -> set[str]:
    return {name for _, name in rows(totals)}


def full(totals: SpanAggregator, joules: int = 10) -> SpanAggregator:
    """Every name that there is room for, ``a`` to ``d``, is taken."""
    totals.add([joined(name, {CPU: joules}) for name in "abcd"], moment(0))
    return totals


# ------------------------------------------------------------------------------ counting


def test_spans_of_one_name_add_up() -> None:
    totals = SpanAggregator(MANY)
    totals.add(
        [
            joined("pay", {CPU: 5, GPU: 7}, start=0, end=3, tokens=(10, 2)),
            joined("pay", {CPU: 1}, start=1, end=2, tokens=(0, 3)),
            joined("ship", {CPU: 2}),
        ],
        moment(5),
    )
    pay = rows(totals)["shop", "pay"]
    assert (pay.energy, pay.count, pay.time) == ({CPU: 6, GPU: 7}, 2, 4 * S)
    assert pay.tokens == {"input": 10, "output": 5}
    assert rows(totals)["shop", "ship"].tokens == {}


def test_spans_with_a_missing_part_bound_the_row_of_their_name() -> None:
    totals = SpanAggregator(MANY)
    totals.add(
        [
            joined("cut", {CPU: 5, GPU: 7}, outcome=Outcome.PARTIAL),
            joined("late", {CPU: 1}, outcome=Outcome.LATE),
            joined("early", {CPU: 1, GPU: 1}, start=2, end=3),
            joined("whole", {CPU: 1, GPU: 1}, start=5, end=6),
        ],
        moment(9),
        "",
        {GPU: moment(4).mono, HwType.MEMORY: moment(9).mono},
    )
    assert {name: row.bounded for (_, name), row in rows(totals).items()} == {
        "cut": {CPU, GPU}, "late": {CPU, GPU}, "early": {GPU}, "whole": set(),
    }  # fmt: skip
    totals.add([joined("cut", {CPU: 5}, start=5, end=6)], moment(10))
    assert rows(totals)["shop", "cut"].bounded == {CPU, GPU}
    restored = SpanAggregator(MANY, totals.accounts().rows)
    assert rows(restored)["shop", "early"].bounded == {GPU}


def test_same_name_in_two_services_is_two_rows() -> None:
    totals = SpanAggregator(MANY)
    totals.add([joined("get", {CPU: 1}), joined("get", {CPU: 2}, service="bank")], moment(0))
    assert {key: row.energy[CPU] for key, row in rows(totals).items()} == {
        ("shop", "get"): 1,
        ("bank", "get"): 2,
    }


def test_measured_zero_energy_is_zero_not_absent() -> None:
    totals = SpanAggregator(MANY)
    totals.add([joined("idle", {CPU: 0})], moment(0))
    assert rows(totals)["shop", "idle"].energy == {CPU: 0}


@pytest.mark.parametrize(
    ("outcome", "counts"),
    [(outcome, outcome in ("joined", "partial", "late")) for outcome in Outcome],
)
def test_spans_with_known_energy_are_counted(outcome: Outcome, counts: bool) -> None:
    """Otherwise joules per call and per token would look too low."""
    totals = SpanAggregator(MANY)
    energy = {CPU: 3} if counts else {}
    totals.add([joined("pay", energy, outcome=outcome, tokens=(1, 1))], moment(0))
    assert [row.count for row in totals.accounts().rows] == ([1] if counts else [])
    assert totals.accounts().outcomes == dict.fromkeys(Outcome, 0) | {outcome: 1}


def test_spans_of_one_batch_are_counted_by_their_own_outcome() -> None:
    totals = SpanAggregator(MANY)
    mixed = (Outcome.JOINED, Outcome.NO_ENERGY, Outcome.JOINED, Outcome.PARTIAL)
    totals.add([joined("pay", {CPU: 3}, outcome=outcome) for outcome in mixed], moment(0))
    assert [row.count for row in totals.accounts().rows] == [3]
    found = totals.accounts().outcomes
    assert (found["joined"], found["no_energy"], found["partial"]) == (2, 1, 1)


def test_energy_is_counted_for_all_outcomes() -> None:
    totals = SpanAggregator(MANY)
    totals.add([joined("pay", {CPU: 3}, outcome=Outcome.ABANDONED)], moment(0))
    (row,) = totals.accounts().rows
    assert (row.energy, row.count) == ({CPU: 3}, 0)


def test_unjoined_spans_are_counted_by_outcome() -> None:
    totals = SpanAggregator(MANY)
    totals.outcome(Outcome.UNKNOWN_PROCESS, 3)
    totals.outcome(Outcome.NOT_BELIEVED)
    found = totals.accounts().outcomes
    assert (found["unknown_process"], found["not_believed"], found["joined"]) == (3, 1, 0)


def test_outside_energy_has_an_account_for_each_service() -> None:
    totals = SpanAggregator(MANY)
    for service, kind, energy in (("shop", CPU, 3), ("shop", CPU, 4), ("shop", GPU, 1)):
        totals.outside(service, kind, energy)
    assert totals.accounts().outside == {("shop", "", CPU): 7, ("shop", "", GPU): 1}


def test_services_beyond_the_limit_share_an_outside_account() -> None:
    totals = SpanAggregator(2)
    for service in "abcd":
        totals.outside(service, CPU, 1)
    assert totals.accounts().outside == {
        ("a", "", CPU): 1,
        ("b", "", CPU): 1,
        ("other", "", CPU): 2,
    }


@pytest.mark.parametrize("claim", [-5, 2**63])
def test_token_counts_are_limited(claim: int) -> None:
    totals = SpanAggregator(MANY)
    totals.add([joined("chat", {CPU: 1}, tokens=(7, 7))], moment(0))
    totals.add([joined("chat", {CPU: 1}, tokens=(claim, claim))] * 100, moment(1))
    tokens = rows(totals)["shop", "chat"].tokens
    assert all(7 <= count <= 10**9 + 7 for count in tokens.values())


def test_time_of_spans_is_limited_to_covered_time() -> None:
    totals = SpanAggregator(MANY)
    old = joined("old", {CPU: 1}, start=-(10**9), end=0, outcome=Outcome.PARTIAL)
    measured = old._replace(inclusive=old.inclusive._replace(covered=5 * S))
    totals.add([measured] * 10, moment(0))
    totals.add([joined("old", {CPU: 1}, start=5, end=4)], moment(0))
    assert rows(totals)["shop", "old"].time == 50 * S
    whole = SpanEnergyColumns.of([joined("new", {CPU: 1}), joined("new", {CPU: 1}, end=3)])
    totals.add(whole.picked(list), moment(0))
    assert rows(totals)["shop", "new"].time == 4 * S


def test_other_row_uses_no_slot() -> None:
    totals = SpanAggregator(1)
    for name in "ab":
        totals.add([joined(name, {CPU: 1})], moment(0))
    for second in range(0, 2 * STALE_AFTER // S, 10):
        totals.add([joined("a", {CPU: 1})], moment(second))
    for name in "bc":
        totals.add([joined(name, {CPU: 1})], moment(2 * STALE_AFTER // S))
    assert rows(totals).keys() == {("shop", "a"), ("other", "other")}


def test_name_of_the_other_row_displaces_none() -> None:
    totals = full(SpanAggregator(MANY))
    totals.add([joined("other", {CPU: 1000}, service="other")], moment(10))
    assert rows(totals)["other", "other"].energy == {CPU: 1000}
    assert totals.released == {}


def test_accounts_include_figures_of_others() -> None:
    totals = SpanAggregator(MANY)
    totals.received(5)
    others = SpanAccounts(refused={"invalid_id": 1}, forward_drops={"full": 1}, open=2, deferred=7)
    assert totals.accounts(others) == replace(
        others, received=5, outcomes=dict.fromkeys(map(str, Outcome), 0)
    )


def test_rows_are_the_same_object_while_nothing_changes() -> None:
    totals = full(SpanAggregator(MANY))
    assert totals.accounts().rows is totals.accounts(SpanAccounts(forwarded=2)).rows


def test_reported_accounts_never_change() -> None:
    totals = full(SpanAggregator(MANY))
    totals.outside("shop", CPU, 1)
    shown = totals.accounts()
    before = repr(shown)
    totals.add([joined("a", {CPU: 5, GPU: 1}, tokens=(1, 1))], moment(1))
    totals.outside("shop", CPU, 1)
    totals.outcome(Outcome.FUTURE)
    assert totals.accounts() != shown
    assert repr(shown) == before


def test_unchanged_rows_are_reused() -> None:
    totals = full(SpanAggregator(MANY))
    before = rows(totals)
    totals.add([joined("a", {CPU: 1})], moment(1))
    after = rows(totals)
    assert after["shop", "b"] is before["shop", "b"]
    assert after["shop", "a"].energy == {CPU: 11}


# ----------------------------------------------------------------------------------- exemplars


def exemplar_of(totals: SpanAggregator, kind: HwType = CPU) -> int:
    """Microjoules of the row of ``a``."""
    return rows(totals)["shop", "a"].exemplars[kind].energy


def test_exemplar_is_the_recent_span_with_the_most_energy() -> None:
    totals = SpanAggregator(MANY)
    spans = [joined("a", {CPU: energy}, end=end) for end, energy in enumerate((3, 9, 5), start=1)]
    totals.add(spans, moment(4))
    exemplar = rows(totals)["shop", "a"].exemplars[CPU]
    assert exemplar.energy == 9
    assert (exemplar.trace, exemplar.span) == (spans[1].span.trace.hex(), spans[1].span.id.hex())
    assert exemplar.wall == moment(2).wall


def test_exemplar_is_replaced_by_any_later_span_after_its_lifetime() -> None:
    totals = SpanAggregator(MANY)
    fresh = EXEMPLAR_LIFETIME // S
    totals.add([joined("a", {CPU: 9}, end=1), joined("a", {CPU: 2}, end=1 + fresh)], moment(20))
    assert exemplar_of(totals) == 9
    totals.add([joined("a", {CPU: 2}, end=2 + fresh)], moment(20))
    assert exemplar_of(totals) == 2


def test_exemplar_is_never_replaced_by_an_older_span() -> None:
    """Prometheus takes no exemplar that is older than the newest it has of the series."""
    totals = SpanAggregator(MANY)
    totals.add([joined("a", {CPU: 3}, end=5)], moment(6))
    totals.add([joined("a", {CPU: 9}, end=4)], moment(6))
    assert exemplar_of(totals) == 3


def test_exemplars_are_by_hardware_type_and_absent_without_energy() -> None:
    totals = SpanAggregator(MANY)
    totals.add(
        [joined("a", {CPU: 9, GPU: 0}, end=1), joined("a", {CPU: 2, GPU: 0}, end=2)], moment(3)
    )
    assert set(rows(totals)["shop", "a"].exemplars) == {CPU}
    totals.add([joined("a", {CPU: 1, GPU: 4}, end=3)], moment(3))
    assert (exemplar_of(totals), exemplar_of(totals, GPU)) == (9, 4)


# -------------------------------------------------------------------------------------- bounds


def test_names_beyond_the_limit_share_one_row() -> None:
    totals = full(SpanAggregator(MANY))
    totals.add([joined("e", {CPU: 1}), joined("f", {CPU: 2}), joined("a", {CPU: 3})], moment(1))
    found = rows(totals)
    assert (found["other", "other"].energy, found["other", "other"].count) == ({CPU: 3}, 2)
    assert found["shop", "a"].energy == {CPU: 13}
    assert len(found) == MANY + 1


def test_stale_name_is_removed_and_restarts_at_zero() -> None:
    totals = full(SpanAggregator(MANY))
    later = STALE_AFTER // S
    totals.add([joined(name, {CPU: 1}) for name in "bcd"], moment(later - 1))
    totals.add([joined("e", {CPU: 1})], moment(later - 1))
    assert names(totals) == {"a", "b", "c", "d", "other"}
    totals.add([joined("f", {CPU: 1})], moment(later))
    assert names(totals) == {"b", "c", "d", "f", "other"}
    assert totals.released == {CPU: 10}
    totals.add([joined("a", {CPU: 2})], moment(3 * later))
    assert rows(totals)["shop", "a"].energy == {CPU: 2}


def test_many_names_of_a_user_leave_another_users_names_their_accounts() -> None:
    totals = SpanAggregator(MANY)
    totals.add([joined(name, {CPU: 1}) for name in "abcdefgh"], moment(0), "eve")
    totals.add([joined("x", {CPU: 7}), joined("y", {CPU: 1})], moment(1), "alice")
    for second in range(2, 200, 10):
        flood = [joined(f"{second}-{number}", {CPU: 10**6}) for number in range(50)]
        totals.add(flood, moment(second), "eve/0123456789ab")
        totals.accounts()
    found = {(row.name, row.owner) for row in totals.accounts().rows}
    assert {("x", "alice"), ("y", "alice")} <= found
    assert len(found) <= MANY + 1


def test_waiting_names_of_a_user_leave_room_for_those_of_another() -> None:
    totals = SpanAggregator(MANY)
    totals.add([joined(name, {CPU: 1}) for name in "abcd"], moment(0), "eve")
    totals.add([joined(name, {CPU: 1}) for name in "ab"], moment(0), "alice")
    totals.accounts()
    totals.add([joined(str(number), {CPU: 1}) for number in range(50)], moment(5), "eve")
    totals.add([joined("x", {CPU: 1000})], moment(5), "alice")
    totals.add([joined("a", {CPU: 100})], moment(RANK_EVERY // S), "alice")
    assert ("x", "alice") in {(row.name, row.owner) for row in totals.accounts().rows}


def test_services_of_a_user_leave_another_users_service_its_outside_account() -> None:
    totals = SpanAggregator(2)
    for number in range(20):
        totals.outside(f"s{number}", CPU, 1, "eve")
    totals.outside("shop", CPU, 5, "alice")
    assert totals.accounts().outside["shop", "alice", CPU] == 5


def test_restored_accounts_beyond_the_limit_are_released() -> None:
    rows = full(SpanAggregator(MANY)).accounts().rows
    again = SpanAggregator(MANY - 1, rows)
    assert len(again.accounts().rows) == MANY - 1
    assert again.released == {CPU: 10}


def test_name_with_most_of_the_energy_displaces_the_least_at_once() -> None:
    totals = full(SpanAggregator(MANY))
    used = [joined(name, {CPU: 10}) for name in "acd"]
    totals.add([*used, joined("b", {CPU: 1}), joined("e", {CPU: 1000})], moment(10))
    found = rows(totals)
    assert names(totals) == {"a", "c", "d", "e", "other"}
    assert (found["shop", "e"].energy, found["shop", "e"].count) == ({}, 0)
    assert found["other", "other"].energy == {CPU: 1000}
    assert totals.released == {CPU: 10 + 1}
    totals.add([joined("e", {CPU: 7})], moment(20))
    assert rows(totals)["shop", "e"].energy == {CPU: 7}


def test_name_with_more_energy_displaces_the_least_after_its_safe_time() -> None:
    totals = full(SpanAggregator(MANY))
    for second in range(10, MIN_LISTED_TIME // S + 1, 10):
        assert "e" not in names(totals)
        used = [joined(name, {CPU: 10}) for name in "acd"]
        totals.add([*used, joined("b", {CPU: 1}), joined("e", {CPU: 12})], moment(second))
    assert names(totals) == {"a", "c", "d", "e", "other"}
    assert totals.released == {CPU: 10 + 6}


def test_waiting_name_with_an_account_displaces_none() -> None:
    totals = full(SpanAggregator(MANY))
    before = moment(STALE_AFTER // S - 1)
    totals.add([joined(name, {CPU: 10}) for name in "abd"], before)
    totals.add([joined("e", {CPU: 1000})], before)
    # The name ``c`` has become stale, so there is room for the waiting name.
    totals.add([joined("e", {CPU: 5})], moment(STALE_AFTER // S))
    assert names(totals) == {"a", "b", "d", "e", "other"}
    assert rows(totals)["shop", "e"].energy == {CPU: 5}


def test_waiting_name_takes_a_free_place() -> None:
    totals = full(SpanAggregator(MANY))
    last = STALE_AFTER // S
    totals.add([joined(name, {CPU: 10}) for name in "ab"], moment(last - 1))
    assert "e" not in names(totals)
    totals.add([joined("e", {CPU: 1})], moment(last - 1))
    # The names ``c`` and ``d`` are removed together, and only ``f`` takes a place at once.
    totals.add([joined("f", {CPU: 1})], moment(last))
    assert names(totals) == {"a", "b", "f", "other"}
    used = [joined(name, {CPU: 10}) for name in "abf"]
    totals.add(used, moment(last + RANK_EVERY // S))
    assert names(totals) == {"a", "b", "e", "f", "other"}
    assert totals.released == {CPU: 10 + 10}


def test_name_with_slightly_more_energy_displaces_none() -> None:
    totals = full(SpanAggregator(MANY))
    for second in range(10, 2 * MIN_LISTED_TIME // S, 10):
        used = [joined(name, {CPU: 10}) for name in "abcd"]
        totals.add([*used, joined("e", {CPU: 15})], moment(second))
        totals.accounts()
    assert names(totals) == {"a", "b", "c", "d", "other"}


def test_names_used_once_displace_none_and_are_not_remembered() -> None:
    totals = full(SpanAggregator(MANY))
    for second in range(MIN_LISTED_TIME // S, MIN_LISTED_TIME // S + 100, RANK_EVERY // S):
        used = [joined(name, {CPU: 10}) for name in "abcd"]
        once = [joined(f"GET /user/{second}/{n}", {CPU: 10}) for n in range(1000)]
        totals.add([*used, *once], moment(second))
        totals.accounts()
        assert len(totals._waiting) <= 4 * MANY
    assert names(totals) == {"a", "b", "c", "d", "other"}


def test_long_names_are_cut_and_stay_distinct() -> None:
    totals = SpanAggregator(MANY)
    long = "x" * 300
    for name in (long, long + "y", long):
        totals.add([joined(name, {CPU: 1}, service=long)], moment(0))
    found = rows(totals)
    assert sorted(row.count for row in found.values()) == [1, 2]
    assert all(len(text) == 128 for key in found for text in key)


def test_name_with_surrogates_can_be_cut() -> None:
    assert len(shortened_name("\ud800" * 200)) == 128
    assert shortened_name("short") == "short"


# ------------------------------------------------------------------------------------- restart


def test_totals_continue_from_a_checkpoint() -> None:
    totals = SpanAggregator(MANY)
    totals.add([joined("chat", {CPU: 5}, start=0, end=1, tokens=(3, 4))], moment(1))
    totals.outside("shop", CPU, 9)
    shown = totals.accounts()
    again = SpanAggregator(MANY, shown.rows, shown.outside, now=moment(2).mono)
    assert [(row.energy, row.time, row.count) for row in again.accounts().rows] == [
        ({CPU: 5}, 1 * S, 1)
    ]
    again.add([joined("chat", {CPU: 1}, start=2, end=3, tokens=(1, 1))], moment(3))
    again.outside("shop", CPU, 1)
    row = rows(again)["shop", "chat"]
    assert (row.energy, row.time, row.count) == ({CPU: 6}, 2 * S, 2)
    assert row.tokens == {"input": 4, "output": 5}
    assert again.accounts().outside == {("shop", "", CPU): 10}


# ---------------------------------------------------------------------------------------- docs


def test_guide_lists_all_outcomes_and_the_counted_ones() -> None:
    guide = (ROOT / "docs" / "how-to" / "see-spans.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (yes|no)\b.*\|$", guide, re.MULTILINE))
    counted = {
        outcome: "yes" if outcome in ("joined", "partial", "late") else "no" for outcome in Outcome
    }
    assert rows == counted
