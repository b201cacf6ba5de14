"""Invariant 1: conservation, to the microjoule."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from wattspan.attribution.division import split
from wattspan.attribution.ledger import attribute
from wattspan.model import (
    Consumer,
    IdlePolicy,
    Instant,
    Interval,
    Microjoules,
    Payer,
    Remainder,
    Usage,
)

payers = st.one_of(
    st.builds(Consumer, st.integers(1, 30), st.integers(0, 3)),
    st.builds(Remainder, st.sampled_from(["/a", "/b"])),
)
usages = st.builds(
    lambda spent, unclaimed, present: Usage(
        "cpu:0", Instant(0, 0), Instant(10**9, 0), spent, unclaimed, 2 * 10**9, frozenset(present)
    ),
    st.dictionaries(payers, st.integers(0, 10**10), max_size=12),
    st.integers(0, 10**10),
    st.sets(payers, max_size=5),
)
intervals = st.builds(
    lambda energy, duration: Interval(
        "d", Instant(0, 0), Instant(duration, 0), Microjoules(energy)
    ),
    st.integers(0, 10**12),
    st.integers(1, 10**11),
)


@given(st.integers(0, 10**15), st.lists(st.integers(0, 10**12), min_size=1).filter(any))
def test_split_adds_up_and_each_part_is_exact_within_one(total: int, weights: list[int]) -> None:
    parts = split(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert part >= 0
        assert abs(part - Fraction(total * weight, sum(weights))) < 1
        if weight == 0:
            assert part == 0


@given(
    interval=intervals,
    usage=st.none() | usages,
    covered=st.none() | st.integers(0, 10**11),
    idle_due=st.integers(0, 10**12),
    policy=st.sampled_from(IdlePolicy),
)
def test_attribution_has_no_remainder(
    interval: Interval,
    usage: Usage | None,
    covered: int | None,
    idle_due: int,
    policy: IdlePolicy,
) -> None:
    result = attribute(
        interval,
        usage,
        covered=covered,
        idle_due=idle_due,
        policy=policy,
    )
    assert (
        result.idle + result.unattributed + sum(share.energy for share in result.shares)
        == interval.energy
    )
    assert result.idle >= 0
    assert result.unattributed >= 0
    assert all(share.energy > 0 for share in result.shares)
    names: list[Payer] = [share.payer for share in result.shares]
    assert len(names) == len(set(names))


@given(interval=intervals, usage=usages, idle_due=st.integers(1, 10**12))
def test_payers_without_use_pay_no_active_energy(
    interval: Interval, usage: Usage, idle_due: int
) -> None:
    result = attribute(interval, usage, idle_due=idle_due)
    charged = {share.payer for share in result.shares}
    assert charged <= {payer for payer, spent in usage.spent.items() if spent > 0}


@given(interval=intervals, usage=usages, idle_due=st.integers(1, 10**12))
def test_idle_energy_is_the_amount_due_or_the_whole(
    interval: Interval, usage: Usage, idle_due: int
) -> None:
    idle = attribute(interval, usage, idle_due=idle_due).idle
    assert idle == min(interval.energy, idle_due)


@given(interval=intervals, usage=usages, idle_due=st.integers(1, 10**12))
def test_dividing_policies_leave_no_idle_energy_with_payers_present(
    interval: Interval, usage: Usage, idle_due: int
) -> None:
    users = any(spent > 0 for spent in usage.spent.values())
    equal = attribute(interval, usage, idle_due=idle_due, policy=IdlePolicy.EQUAL)
    proportional = attribute(interval, usage, idle_due=idle_due, policy=IdlePolicy.PROPORTIONAL)
    if users or usage.present:
        assert equal.idle == 0
    if users:
        assert proportional.idle == 0
