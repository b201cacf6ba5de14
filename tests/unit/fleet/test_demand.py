"""fleet.demand: the power for which a host asks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattspan.fleet.allotment import held_power, next_demand

POWERS = st.integers(0, 10**7)


@pytest.mark.parametrize(
    ("previous", "power", "limit", "demand"),
    [
        (None, None, 500, None),
        (400, None, 500, None),
        (None, 300, 500, 345),
        (None, 450, 500, 625),  # limited: it may want more
        (None, 600, 500, 750),
        (400, 300, 500, 392),  # falls slowly
        (300, 300, 500, 345),
        (None, 50, 500, 200),
        (None, 1000, 900, 1000),
    ],
)
def test_demand_follows_the_power(
    previous: int | None, power: int | None, limit: int, demand: int | None
) -> None:
    assert next_demand(previous, power, limit, 200, 1000) == demand


def test_demand_of_a_tuned_host_is_that_without_its_tuner() -> None:
    assert next_demand(600, 450, 450, 200, 1000, tuned=150) == 750


@pytest.mark.parametrize(
    ("powers", "tuned"),
    [
        ({"gpu:a": 400, "gpu:b": 190}, 800),
        ({"gpu:a": 320, "gpu:b": 150}, 800),  # training waits for its data now and then
        ({"gpu:a": 70, "gpu:b": 190}, 500),
        ({"gpu:a": 70, "gpu:b": 120}, 0),
        ({}, 800),
    ],
)
def test_only_devices_at_work_are_held_back_by_their_tuners(
    powers: dict[str, int], tuned: int
) -> None:
    assert held_power({"gpu:a": (400, 300), "gpu:b": (200, 500)}, powers) == tuned


@given(limit=st.integers(200, 700), idle=st.integers(0, 120))
def test_host_whose_tuned_jobs_pause_asks_for_little_more_than_it_draws(
    limit: int, idle: int
) -> None:
    watts, original = 1000, 700_000
    held = {"gpu:a": (limit * watts, original - limit * watts)}

    def asks(before: int | None, power: int) -> int | None:
        tuned = held_power(held, {"gpu:a": power})
        return next_demand(before, power, limit * watts, 20 * watts, original, tuned)

    demand = asks(None, limit * watts)
    assert demand == original
    for _ in range(200):
        demand = asks(demand, idle * watts)
    assert demand == max(20 * watts, round(idle * watts * 1.15))


@given(previous=st.none() | POWERS, power=POWERS, limit=POWERS, low=POWERS, more=POWERS)
def test_demand_is_within_the_range_of_the_host(
    previous: int | None, power: int, limit: int, low: int, more: int
) -> None:
    demand = next_demand(previous, power, limit, low, low + more)
    assert low <= demand <= low + more


def test_limited_host_reaches_its_maximum_in_few_steps() -> None:
    demand, limit = None, 200
    for _ in range(8):
        demand = next_demand(demand, limit, limit, 200, 1000)
        limit = demand or limit
    assert demand == 1000
