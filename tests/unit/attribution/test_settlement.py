"""Settlement: intervals wait for usage, with a timeout."""

import pytest

from wattspan.attribution.ledger import attribute
from wattspan.attribution.settlement import Settlement
from wattspan.model import (
    SECOND,
    Consumer,
    Counts,
    IdlePolicy,
    Instant,
    Interval,
    Microjoules,
    Usage,
)

ME, YOU, HOLDER = (Consumer(pid, pid) for pid in (1, 2, 3))
PATIENCE, KEEP = 3 * SECOND, 15 * SECOND


def interval(start: int, end: int, energy: int = 1000) -> Interval:
    return Interval("d", Instant(start, 0), Instant(end, 0), Microjoules(energy))


def usage(start: int, end: int, **rest: object) -> Usage:
    return Usage("r", Instant(start, 0), Instant(end, 0), **{"spent": {ME: 50}, **rest})  # type: ignore[arg-type]


def test_interval_waits_until_its_usage_is_known() -> None:
    settlement = Settlement(PATIENCE, KEEP)
    settlement.add(interval(0, 100), "r")
    assert settlement.due(Instant(200, 0)) == []
    assert settlement.pending("d") == 1000
    settlement.add_usage(usage(0, 50))
    assert settlement.due(Instant(200, 0)) == []
    settlement.add_usage(usage(50, 100))
    (settled,) = settlement.due(Instant(200, 0))
    assert settled.covered == 100
    assert settled.usage.spent == {ME: 100}
    assert settlement.pending("d") == 0


def test_interval_settles_with_partial_usage_after_its_patience() -> None:
    settlement = Settlement(PATIENCE, KEEP)
    settlement.add_usage(usage(0, 40))
    settlement.add(interval(0, 100), "r")
    assert settlement.due(Instant(99 + PATIENCE, 0)) == []
    (settled,) = settlement.due(Instant(100 + PATIENCE, 0))
    assert settled.covered == 40


def test_intervals_of_all_domains_settle_in_the_order_of_their_ends() -> None:
    settlement = Settlement(PATIENCE, KEEP)
    for domain in ("a", "b"):
        for start in (0, 100):
            settlement.add(interval(start, start + 100)._replace(domain_id=domain), "r")
    settlement.add_usage(usage(0, 200))
    settled = [one.interval for one in settlement.due(Instant(200, 0))]
    assert [(one.end.mono, one.domain_id) for one in settled] == [
        (100, "a"), (100, "b"), (200, "a"), (200, "b")
    ]  # fmt: skip


def test_usage_counts_by_its_overlap_with_the_interval() -> None:
    settlement = Settlement(PATIENCE, KEEP)
    settlement.add(interval(75, 125), "r")
    settlement.add_usage(usage(0, 100, spent={ME: 400}, unclaimed=40, capacity=100))
    settlement.add_usage(
        usage(100, 200, spent={ME: 40, YOU: 80}, capacity=100, present=frozenset({YOU}))
    )
    (settled,) = settlement.due(Instant(200, 0))
    assert settled.usage.spent == {ME: 110, YOU: 20}
    assert settled.usage.unclaimed == 10
    assert settled.usage.capacity == 50
    assert settled.usage.present == {YOU}
    assert settled.usage.end.mono - settled.usage.start.mono == settled.covered == 50


def test_counts_are_merged_by_overlap_unless_some_are_unknown() -> None:
    settlement = Settlement(PATIENCE, KEEP)
    for domain in ("a", "b"):
        start = 75 if domain == "a" else 150
        settlement.add(interval(start, start + 75)._replace(domain_id=domain), "r")
    mine, yours = Counts(40, 80, 120, 160, 4), Counts(8, 8, 8, 8, 8)
    settlement.add_usage(usage(0, 100, counts={ME: mine}))
    settlement.add_usage(usage(100, 200, counts={ME: mine, YOU: yours}))
    settlement.add_usage(usage(200, 300))
    first, second = settlement.due(Instant(300, 0))
    assert first.usage.counts == {ME: Counts(30, 60, 90, 120, 3), YOU: Counts(4, 4, 4, 4, 4)}
    assert second.usage.counts is None


def test_merged_usage_of_unknown_capacity_has_unknown_capacity() -> None:
    settlement = Settlement(PATIENCE, KEEP)
    settlement.add(interval(0, 200), "r")
    settlement.add_usage(usage(0, 100, capacity=100))
    settlement.add_usage(usage(100, 200, capacity=None))
    (settled,) = settlement.due(Instant(200, 0))
    assert settled.usage.capacity is None


def test_usage_after_the_settlement_is_counted_as_late() -> None:
    settlement = Settlement(PATIENCE, KEEP)
    settlement.add(interval(0, 100), "r")
    (settled,) = settlement.due(Instant(100 + PATIENCE, 0))
    assert settled.usage is None
    settlement.add_usage(usage(0, 100))
    assert settlement.late == 1
    settlement.add_usage(usage(100, 200))
    assert settlement.late == 1


def test_usage_without_duration_is_ignored() -> None:
    settlement = Settlement(PATIENCE, KEEP)
    settlement.add_usage(usage(100, 100))
    settlement.add(interval(0, 100), "r")
    assert settlement.due(Instant(100, 0)) == []


def test_old_usage_is_removed() -> None:
    settlement = Settlement(PATIENCE, KEEP)
    settlement.add_usage(usage(0, 100))
    settlement.due(Instant(101 + KEEP, 0))
    settlement.add(interval(0, 100), "r")
    (settled,) = settlement.due(Instant(101 + KEEP, 0))
    assert settled.usage is None


def test_resource_without_usage_does_not_delay_others() -> None:
    settlement = Settlement(PATIENCE, KEEP)
    settlement.add(interval(0, 100), "silent")
    other = Interval("e", Instant(0, 0), Instant(100, 0), Microjoules(7))
    settlement.add(other, "r")
    settlement.add_usage(usage(0, 100))
    (settled,) = settlement.due(Instant(100, 0))
    assert settled.interval is other


@pytest.mark.parametrize("covered", [100, 60, 0])
@pytest.mark.parametrize("due", [0, 300, 1000, 5000])
def test_withheld_energy_is_unattributed_and_bounded(due: int, covered: int) -> None:
    spent = usage(0, 100, unclaimed=50) if covered else None
    shared = attribute(interval(0, 100), spent, covered=covered or None, withheld_due=due)
    active = 1000 - min(due, 1000)
    assert shared.withheld == min(due, 1000)
    assert shared.idle == 0
    consumers = sum(share.energy for share in shared.shares)
    assert consumers == active * covered // 200
    assert consumers + shared.unattributed == 1000


@pytest.mark.parametrize(("second", "metered"), [(30, 40), (None, None)])
def test_merged_usage_has_metered_use_if_all_parts_have(
    second: int | None, metered: int | None
) -> None:
    settlement = Settlement(PATIENCE, KEEP)
    settlement.add(interval(50, 200), "r")
    settlement.add_usage(usage(0, 100, metered=20))
    settlement.add_usage(usage(100, 200, metered=second))
    (settled,) = settlement.due(Instant(200, 0))
    assert settled.usage.metered == metered


@pytest.mark.parametrize(
    ("policy", "charged"),
    [
        (IdlePolicy.SEPARATE, {ME: 60, YOU: 30}),
        (IdlePolicy.PROPORTIONAL, {ME: 60 + 7, YOU: 30 + 3}),
        (IdlePolicy.EQUAL, {ME: 60 + 4, YOU: 30 + 3, HOLDER: 3}),
    ],
)
def test_idle_energy_is_divided_by_its_policy_among_those_present(
    policy: IdlePolicy, charged: dict[Consumer, int]
) -> None:
    used = usage(0, 100, spent={ME: 2, YOU: 1}, present=frozenset({ME, HOLDER}))
    divided = attribute(interval(0, 100, 100), used, idle_due=10, policy=policy)
    assert dict(divided.shares) == charged
    assert divided.idle == 100 - sum(charged.values())
    unused = attribute(interval(0, 100, 100), usage(0, 100, spent={}), idle_due=10, policy=policy)
    assert (unused.shares, unused.idle) == ((), 10)
