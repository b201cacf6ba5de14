"""Division by learned powers: exact, bounded, and the same for any order of the payers."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from wattspan.attribution.consumer_powers import LARGEST_RATIO, ConsumerPowers
from wattspan.attribution.ledger import attribute
from wattspan.attribution.power_regression import NormalPrior
from wattspan.model import (
    SECOND,
    Consumer,
    Instant,
    Interval,
    Microjoules,
    Payer,
    Principal,
    Remainder,
    Usage,
)

PAYERS: list[Payer] = [*(Consumer(pid, 1) for pid in range(1, 25)), Remainder("/a")]
windows = st.lists(
    st.tuples(
        st.integers(0, 500_000_000),
        st.dictionaries(st.sampled_from(PAYERS), st.integers(0, 4 * SECOND), max_size=25),
        st.integers(0, SECOND),
        st.none() | st.integers(1, 64 * SECOND),
    ),
    min_size=1,
    max_size=40,
)
priors = st.none() | st.builds(NormalPrior, st.floats(0, 300), st.floats(0, 50))


def usage(spent: dict[Payer, int], unclaimed: int = 0, capacity: int | None = None) -> Usage:
    return Usage("cpu:0", Instant(0, 0), Instant(SECOND, 0), spent, unclaimed, capacity)


def owner(payer: Payer) -> Principal | None:
    return Principal(payer.pid % 3) if isinstance(payer, Consumer) and payer.pid % 5 else None


@given(windows, priors, st.booleans())
def test_any_windows_divide_energy_exactly_within_the_bounds(
    history: list[tuple[int, dict[Payer, int], int, int | None]],
    idle: NormalPrior | None,
    surely: bool,
) -> None:
    powers = ConsumerPowers()
    for energy, spent, unclaimed, capacity in history:
        one = usage(spent, unclaimed, capacity)
        powers.learn(energy, SECOND, one, owner, idle)
        weighed = powers.weighed(one, surely=surely)
        interval = Interval("p", Instant(0, 0), Instant(SECOND, 0), Microjoules(energy))
        found = attribute(
            interval,
            weighed,
            doubts=lambda active, shares: powers.doubts(active, shares, surely=surely),
        )
        assert sum(share.energy for share in found.shares) + found.unattributed == energy
        assert all(doubt >= 0 for doubt in found.doubts)
    even = powers.weighed(usage(dict.fromkeys(PAYERS, 10**9))).spent
    assert max(even.values()) <= min(even.values()) * LARGEST_RATIO * 1.01
    found_idle = powers.idle
    assert found_idle is None or all(map(math.isfinite, found_idle))


extremes = st.lists(
    st.tuples(
        st.sampled_from([SECOND // 1000, SECOND // 10, SECOND, 3600 * SECOND]),
        st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 40.0, 300.0, 1e4]),  # watts
        st.sampled_from([1e-9, 1e-6, 1e-3, 1.0, 100.0]),  # the CPUs in use by all
        st.lists(st.integers(0, 1000), min_size=1, max_size=20),
        st.none() | st.tuples(st.sampled_from([0.0, 1e-6, 40.0]), st.sampled_from([0.0, 0.5, 1e3])),
    ),
    min_size=5,
    max_size=40,
)


@given(extremes)
@example([(SECOND, 40.0, 1e-9, [1], None)] * 3 + [(SECOND, 40.0, 1e-3, [1, 1], None)] * 30)
@example([(SECOND, 40.0, 1.0, [1, 2], None)] * 5 + [(3600 * SECOND, 0.0, 1.0, [1, 2], None)] * 2)
def test_windows_of_any_size_divide_energy(
    history: list[tuple[int, float, float, list[int], tuple[float, float] | None]],
) -> None:
    powers = ConsumerPowers()
    for duration, watts, cpus, parts, idle in history:
        energy, whole = int(watts * duration / 1e3), max(1, sum(parts))
        spent = {
            payer: int(cpus * duration * part / whole)
            for payer, part in zip(PAYERS, parts, strict=False)
        }
        one = Usage("cpu:0", Instant(0, 0), Instant(duration, 0), spent, capacity=128 * duration)
        powers.learn(energy, duration, one, owner, None if idle is None else NormalPrior(*idle))
        for surely in (False, True):
            weighed = powers.weighed(one, surely=surely)
            shares = [(payer, energy // len(spent)) for payer in spent]
            doubts = powers.doubts(energy, shares, surely=surely)
            assert all(0 <= doubt <= energy for doubt in doubts)
            assert sum(weighed.spent.values()) <= LARGEST_RATIO * (sum(spent.values()) + len(spent))


@given(
    st.permutations(PAYERS[:6]),
    st.lists(
        st.lists(st.integers(SECOND // 10, SECOND), min_size=6, max_size=6),
        min_size=15,
        max_size=30,
    ),
)
def test_order_of_payers_changes_no_weight(order: list[Payer], history: list[list[int]]) -> None:
    one, other = ConsumerPowers(), ConsumerPowers()
    for uses in history:
        spent = dict(zip(PAYERS[:6], uses, strict=True))
        power = 30 + sum((10 + place) * use for place, use in enumerate(uses)) / SECOND
        for powers, payers in ((one, PAYERS[:6]), (other, order)):
            listed = usage({payer: spent[payer] for payer in payers}, capacity=16 * SECOND)
            powers.learn(round(power * 1e6), SECOND, listed, owner)
    even = usage(dict.fromkeys(PAYERS[:6], 10**9))
    found, again = one.weighed(even).spent, other.weighed(even).spent
    assert [again[payer] for payer in PAYERS[:6]] == pytest.approx(
        [found[payer] for payer in PAYERS[:6]], rel=1e-3
    )
