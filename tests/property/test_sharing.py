"""What a power budget promises, whatever the devices and however low the limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wattspan.capper.limits import SHARE_STEP, BudgetDevice, share_budget

MILLIWATTS = st.integers(0, 40_000)


@st.composite
def sharers(draw: st.DrawFn) -> BudgetDevice:
    low, high = sorted((draw(MILLIWATTS), draw(MILLIWATTS)))
    want = draw(st.none() | MILLIWATTS)
    return BudgetDevice(draw(st.text("abcdefgh", min_size=1, max_size=2)), low, high,
                  draw(st.integers(0, 3)), want)  # fmt: skip


HOSTS = st.lists(sharers(), max_size=8, unique_by=lambda sharer: sharer.device)


@given(HOSTS, st.integers(0, 240_000), st.integers(0, 20_000))
def test_the_limit_is_kept_wherever_minimums_allow(
    host: list[BudgetDevice], limit: int, reserve: int
) -> None:
    shares = share_budget(host, limit, reserve=reserve)
    minimums = sum(sharer.minimum for sharer in host)
    assert shares.short == max(0, minimums - (limit - reserve))
    assert shares.total + reserve <= limit + shares.short


@given(HOSTS, st.integers(0, 240_000))
def test_less_than_a_watt_a_device_is_wasted(host: list[BudgetDevice], limit: int) -> None:
    shares = share_budget(host, limit)
    minimums, maxima = sum(s.minimum for s in host), sum(s.maximum for s in host)
    all_of_it = min(max(limit, minimums), maxima)
    assert all_of_it - len(host) * SHARE_STEP < shares.total <= all_of_it or not host


@given(HOSTS, st.integers(0, 240_000))
def test_a_share_is_in_whole_watts_or_an_end_of_the_range(
    host: list[BudgetDevice], limit: int
) -> None:
    caps = share_budget(host, limit).caps
    assert all(
        caps[s.device] % SHARE_STEP == 0 or caps[s.device] in (s.minimum, s.maximum) for s in host
    )


@given(HOSTS, st.integers(0, 240_000))
def test_everybody_stays_within_his_range(host: list[BudgetDevice], limit: int) -> None:
    caps = share_budget(host, limit).caps
    assert caps.keys() == {sharer.device for sharer in host}
    assert all(s.minimum <= caps[s.device] <= s.maximum for s in host)


@given(HOSTS, st.integers(0, 240_000), st.integers(0, 9_000))
def test_a_higher_limit_leaves_nobody_with_less(
    host: list[BudgetDevice], limit: int, more: int
) -> None:
    less, much = share_budget(host, limit).caps, share_budget(host, limit + more).caps
    assert all(much[device] >= cap for device, cap in less.items())


@given(HOSTS, st.integers(0, 240_000))
def test_a_lower_priority_gets_its_wish_only_after_a_higher_one(
    host: list[BudgetDevice], limit: int
) -> None:
    caps = share_budget(host, limit).caps
    wish = {
        s.device: s.maximum if s.want is None else min(max(s.want, s.minimum), s.maximum)
        for s in host
    }
    for one in host:
        for other in host:
            if one.priority > other.priority and caps[one.device] < wish[one.device]:
                gave_way = caps[other.device] == other.minimum
                assert gave_way or wish[one.device] - caps[one.device] < SHARE_STEP


@given(HOSTS, st.integers(0, 240_000), st.randoms())
def test_the_order_of_devices_does_not_matter(
    host: list[BudgetDevice], limit: int, random: st.DataObject
) -> None:
    other = list(host)
    random.shuffle(other)  # type: ignore[attr-defined]
    assert share_budget(other, limit) == share_budget(host, limit)
