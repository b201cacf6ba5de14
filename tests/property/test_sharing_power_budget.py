"""The division of a power budget, for all devices and limits."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from wattspan.model import CapKey, Knob
from wattspan.sharing.power_budget import SHARE_STEP, BudgetClaim, share_budget

MILLIWATTS = st.integers(0, 40_000)
Host = Mapping[CapKey, BudgetClaim]


@st.composite
def devices(draw: st.DrawFn) -> BudgetClaim:
    low, high = sorted((draw(MILLIWATTS), draw(MILLIWATTS)))
    return BudgetClaim(low, high, draw(st.integers(0, 3)), draw(st.none() | MILLIWATTS))


KEYS = st.builds(CapKey, st.just(Knob.GPU_POWER), st.text("abcdefgh", min_size=1, max_size=2))
HOSTS = st.dictionaries(KEYS, devices(), max_size=8)
LIMITS = st.integers(0, 240_000)


@given(HOSTS, LIMITS)
def test_shares_keep_the_limit_unless_the_minimums_exceed_it(host: Host, limit: int) -> None:
    minimums = sum(device.minimum for device in host.values())
    assert sum(share_budget(host, limit).values()) <= max(limit, minimums)


@given(HOSTS, LIMITS)
def test_less_than_a_watt_per_device_is_left_over(host: Host, limit: int) -> None:
    total = sum(share_budget(host, limit).values())
    minimums = sum(device.minimum for device in host.values())
    available = min(max(limit, minimums), sum(device.maximum for device in host.values()))
    assert available - len(host) * SHARE_STEP < total <= available or not host


@given(HOSTS, LIMITS)
def test_share_is_in_whole_watts_or_an_end_of_the_range(host: Host, limit: int) -> None:
    caps = share_budget(host, limit)
    assert all(
        caps[key] % SHARE_STEP == 0 or caps[key] in (one.minimum, one.maximum)
        for key, one in host.items()
    )


@given(HOSTS, LIMITS)
def test_every_share_is_within_the_range_of_its_device(host: Host, limit: int) -> None:
    caps = share_budget(host, limit)
    assert caps.keys() == host.keys()
    assert all(one.minimum <= caps[key] <= one.maximum for key, one in host.items())


@given(HOSTS, LIMITS, st.integers(0, 9_000))
def test_higher_limit_reduces_no_share(host: Host, limit: int, more: int) -> None:
    low, high = share_budget(host, limit), share_budget(host, limit + more)
    assert all(high[key] >= cap for key, cap in low.items())


@given(HOSTS, LIMITS)
def test_lower_priority_gets_its_want_only_after_a_higher_one(host: Host, limit: int) -> None:
    caps = share_budget(host, limit)
    for key, one in host.items():
        for other, lower in host.items():
            if one.priority > lower.priority and caps[key] < one.demand:
                gave_way = caps[other] == lower.minimum
                assert gave_way or one.demand - caps[key] < SHARE_STEP


@given(HOSTS, LIMITS, st.randoms())
def test_order_of_devices_does_not_matter(host: Host, limit: int, random: st.DataObject) -> None:
    items = list(host.items())
    random.shuffle(items)  # type: ignore[attr-defined]
    assert share_budget(dict(items), limit) == share_budget(host, limit)
