"""Conservation among the parts of a device: MIG instances have its energy, to the microjoule."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattspan.attribution.ledger import Ledger, LedgerSettings, attribute
from wattspan.attribution.parts import REST, usage_of_parts
from wattspan.attribution.settlement import Settlement
from wattspan.model import (
    SECOND,
    Attribution,
    Consumer,
    Domain,
    HwType,
    IdlePolicy,
    Instant,
    Interval,
    Microjoules,
    Milliwatts,
    PartUsage,
    Provenance,
    Reading,
    Tick,
    Usage,
)

BOARD = "gpu:GPU-a"
WHOLE = 1_000_000
IDS = ["gpu:MIG-1", "gpu:MIG-2", "gpu:MIG-3"]
A, B, C, D = (Consumer(pid, 1) for pid in (1, 2, 3, 4))

part_usages = st.builds(
    lambda size, spent, unclaimed, present, spread, guessed: PartUsage(
        "", size, spent, unclaimed, frozenset(present), spread, guessed
    ),
    st.integers(0, WHOLE // 3),
    st.dictionaries(st.sampled_from([A, B, C, D]), st.integers(0, 10**10), max_size=3),
    st.integers(0, 10**10),
    st.sets(st.sampled_from([A, B, C, D])),
    st.sampled_from([1.0, 2.5, math.inf]),
    st.booleans(),
)


def usage(parts: list[PartUsage], start: int = 0, end: int = SECOND, unclaimed: int = 0) -> Usage:
    named = [part._replace(domain_id=name) for part, name in zip(parts, IDS, strict=False)]
    whole = Usage(BOARD, Instant(start, start), Instant(end, end), {}, unclaimed, end - start)
    return usage_of_parts(whole, named, WHOLE)


usages = st.builds(usage, st.lists(part_usages, max_size=3), unclaimed=st.integers(0, 10**9))
intervals = st.builds(
    lambda energy, end: Interval(BOARD, Instant(0, 0), Instant(end, end), Microjoules(energy)),
    st.integers(0, 10**12),
    st.integers(1, 10**10),
)


@given(
    interval=intervals,
    used=usages,
    covered=st.none() | st.integers(0, 10**10),
    idle_due=st.integers(0, 10**12),
    withheld_due=st.integers(0, 10**9),
    policy=st.sampled_from(IdlePolicy),
)
def test_parts_have_the_energy_of_the_whole(
    interval: Interval,
    used: Usage,
    covered: int | None,
    idle_due: int,
    withheld_due: int,
    policy: IdlePolicy,
) -> None:
    result = attribute(
        interval,
        used,
        covered=covered,
        idle_due=idle_due,
        withheld_due=withheld_due,
        policy=policy,
    )
    assert sum(part.energy for part in result.parts) == interval.energy
    assert sum(part.consumers for part in result.parts) == sum(s.energy for s in result.shares)
    assert sum(part.idle for part in result.parts) == result.idle
    assert sum(part.unattributed for part in result.parts) == result.unattributed
    assert all(min(part[1:]) >= 0 for part in result.parts)
    assert all(share.energy > 0 for share in result.shares)


@given(interval=intervals, used=usages, idle_due=st.integers(0, 10**12))
def test_whole_is_divided_the_same_with_and_without_parts(
    interval: Interval, used: Usage, idle_due: int
) -> None:
    """Only roundings differ: one in each part."""
    flat = Usage(used.resource, used.start, used.end, used.spent, used.unclaimed, used.capacity)
    one = dict(attribute(interval, used, idle_due=idle_due).shares)
    other = dict(attribute(interval, flat, idle_due=idle_due).shares)
    for payer in one.keys() | other.keys():
        assert abs(one.get(payer, 0) - other.get(payer, 0)) <= 2 * (len(used.parts) + 1)


@given(st.lists(st.tuples(st.lists(part_usages, max_size=3), st.booleans()), min_size=1))
def test_usages_with_and_without_parts_are_merged(
    records: list[tuple[list[PartUsage], bool]],
) -> None:
    """The mode of a device may change inside an interval."""
    settlement = Settlement(SECOND, 100 * SECOND)
    for number, (parts, divided) in enumerate(records):
        record = usage(parts, number * SECOND, (number + 1) * SECOND)
        if not divided:
            record = Usage(record.resource, record.start, record.end, record.spent, 5)
        settlement.add_usage(record)
    end = len(records) * SECOND
    interval = Interval(BOARD, Instant(SECOND // 3, 0), Instant(end, end), Microjoules(999_999))
    settlement.add(interval, BOARD)
    ((_, merged, covered),) = settlement.due(Instant(end, end))
    assert merged is not None
    result = attribute(interval, merged, covered=covered, idle_due=123_456)
    divided = any(divided for _, divided in records)
    assert bool(result.parts) == divided
    if divided:
        assert sum(part.energy for part in result.parts) == interval.energy


truths = st.lists(st.floats(0, 1), min_size=3, max_size=3)


@given(truths, st.integers(1, 10**9), st.sets(st.sampled_from([0, 1, 2]), min_size=1))
def test_doubts_contain_any_truth_of_a_guessed_division(
    truth: list[float], energy: int, held: set[int]
) -> None:
    """The true energy of each instance is within the stated range, for any activity."""
    parts = [
        PartUsage(
            "", WHOLE // 7, {Consumer(10 + i, 1): SECOND} if i in held else {}, spread=math.inf
        )
        for i in range(3)
    ]
    interval = Interval(BOARD, Instant(0, 0), Instant(SECOND, 0), Microjoules(energy))
    result = attribute(interval, usage(parts))
    total = sum(truth[i] for i in held)
    doubts = result.doubts or (0,) * len(result.shares)
    for (payer, share), doubt in zip(result.shares, doubts, strict=True):
        part = truth[payer.pid - 10] / total if total else 1 / len(held)  # type: ignore[union-attr]
        assert abs(share - energy * part) <= doubt + 1


@given(
    st.lists(st.integers(1, 10**9), min_size=2, max_size=3),
    st.lists(st.floats(1, 2.5), min_size=3, max_size=3),
    st.integers(1, 10**9),
)
def test_doubts_contain_work_of_different_power(
    used: list[int], powers: list[float], energy: int
) -> None:
    """Equal use of multiprocessors draws up to 2.5 times as much in one instance as in another."""
    parts = [PartUsage("", 1, {Consumer(10 + i, 1): use}, spread=2.5) for i, use in enumerate(used)]
    interval = Interval(BOARD, Instant(0, 0), Instant(SECOND, 0), Microjoules(energy))
    result = attribute(interval, usage(parts))
    drawn = [use * power for use, power in zip(used, powers, strict=False)]
    doubts = result.doubts or (0,) * len(result.shares)
    for (payer, share), doubt in zip(result.shares, doubts, strict=True):
        truth = energy * drawn[payer.pid - 10] / sum(drawn)  # type: ignore[union-attr]
        assert abs(share - truth) <= doubt + 2


def board(**changes: object) -> Domain:
    return Domain(
        BOARD,
        HwType.GPU,
        "GPU",
        "nvml",
        Provenance.MEASURED,
        resource=BOARD,
        **changes,  # type: ignore[arg-type]
    )


def instance(name: str) -> Domain:
    return Domain(
        name, HwType.GPU, name, "nvml", Provenance.ESTIMATED, in_cover=False, parent=BOARD
    )


@given(
    st.lists(
        st.tuples(st.lists(part_usages, max_size=3), st.integers(0, 10**9)), min_size=2, max_size=12
    ),
    st.none() | st.integers(0, 300_000),
)
def test_ledger_books_instances_as_parts_of_their_board(
    steps: list[tuple[list[PartUsage], int]], idle: int | None
) -> None:
    powers = {} if idle is None else {HwType.GPU: Milliwatts(idle)}
    ledger = Ledger(LedgerSettings(idle_powers=powers))
    domains = {"nvml": [board(), *map(instance, IDS)]}
    counter, booked, attributions = 0, 0, list[Attribution]()
    for number, (parts, energy) in enumerate([([], 0), *steps]):
        at = Instant(number * SECOND, number * SECOND)
        counter += energy
        used = [usage(parts, at.mono - SECOND, at.mono)] if number else []
        readings = [Reading(BOARD, at, Microjoules(counter))]
        attributions += ledger.apply(Tick(at, domains, readings, usages=used))
        booked += sum(p.energy for a in attributions[-1:] for p in a.parts if p.domain_id != REST)
    snapshot = ledger.snapshot(at, "host")
    whole, *instances = snapshot.domains
    assert sum(one.energy for one in instances) == booked <= whole.energy
    for one in instances:
        assert one.energy == one.consumers + one.idle + one.unattributed
        assert one.idle <= whole.idle
    assert snapshot.cover == (whole,)


def test_idle_energy_of_an_instance_follows_its_size() -> None:
    parts = [PartUsage("", 3 * WHOLE // 7, {A: 100}), PartUsage("", WHOLE // 7, {B: 100})]
    interval = Interval(BOARD, Instant(0, 0), Instant(SECOND, 0), Microjoules(100_000_000))
    big, small, rest = attribute(interval, usage(parts), idle_due=70_000_000).parts
    assert big.idle == pytest.approx(30_000_000, abs=100)
    assert small.idle == pytest.approx(10_000_000, abs=100)
    assert (big.consumers, small.consumers) == (15_000_000, 15_000_000)
    assert (rest.domain_id, rest.consumers) == (REST, 0)


@pytest.mark.parametrize(
    ("policy", "charged"),
    [
        (IdlePolicy.SEPARATE, {A: 60, B: 30}),
        (IdlePolicy.PROPORTIONAL, {A: 60 + 3, B: 30 + 3}),
        (IdlePolicy.EQUAL, {A: 60 + 3, B: 30 + 2, C: 1}),
    ],
)
def test_idle_policy_applies_inside_each_instance(
    policy: IdlePolicy, charged: dict[Consumer, int]
) -> None:
    parts = [
        PartUsage("", WHOLE * 3 // 10, {A: 200}, present=frozenset([A])),
        PartUsage("", WHOLE * 3 // 10, {B: 100}, present=frozenset([B, C])),
        PartUsage("", WHOLE * 4 // 10, {}),
    ]
    interval = Interval(BOARD, Instant(0, 0), Instant(SECOND, 0), Microjoules(100))
    result = attribute(interval, usage(parts), idle_due=10, policy=policy)
    assert dict(result.shares) == charged
    assert result.idle == (10 if policy is IdlePolicy.SEPARATE else 4)


def test_users_of_one_instance_are_in_doubt_among_themselves_only() -> None:
    parts = [PartUsage("", 100, {A: 300}), PartUsage("", 100, {B: 50, C: 50}, users_guessed=True)]
    interval = Interval(BOARD, Instant(0, 0), Instant(SECOND, 0), Microjoules(400))
    result = attribute(interval, usage(parts))
    assert dict(result.shares) == {A: 300, B: 50, C: 50}
    assert result.doubts == (0, 50, 50)


def test_only_user_of_a_device_without_known_activity_is_not_in_doubt() -> None:
    parts = [
        PartUsage("", 100, {A: 300}, spread=math.inf),
        PartUsage("", 100, {}, spread=math.inf),
    ]
    interval = Interval(BOARD, Instant(0, 0), Instant(SECOND, 0), Microjoules(400))
    assert attribute(interval, usage(parts)).doubts == ()


def test_order_of_parts_is_kept() -> None:
    parts = usage([PartUsage("", 1, {}), PartUsage("", 1, {})]).parts
    assert [part.domain_id for part in parts] == [*itertools.islice(IDS, 2), REST]
