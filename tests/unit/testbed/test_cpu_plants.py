"""The laws of emulated CPU packages: what processes owe is what the package draws."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed.cpu_plants import (
    ADDITIVE,
    COUNTERS,
    LEAKING,
    MEMORY,
    PLANTS,
    SMT,
    TURBO,
    CpuPlant,
    EnergyCounter,
    Work,
)

EACH_PLANT = pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)


@EACH_PLANT
@given(st.data())
def test_powers_owed_and_idle_power_are_the_power_of_the_package(
    plant: CpuPlant, data: st.DataObject
) -> None:
    cpus = data.draw(st.permutations(range(plant.cpus)))
    edges = sorted(data.draw(st.lists(st.integers(0, plant.cpus), min_size=4, max_size=4)))
    works = {
        i: Work(
            tuple(cpus[first:last]),
            data.draw(st.floats(0, 1)),
            data.draw(st.floats(2, 8)),
            data.draw(st.floats(0, 50)),
        )
        for i, (first, last) in enumerate(pairwise(edges))
    }
    if len(works[0].cpus) > 1:  # two processes that take turns on their CPUs
        works[0] = works[0]._replace(busy=works[0].busy / 2)
        works[9] = works[0]._replace(busy=works[0].busy / 3, cost=16.0)
    warmth = data.draw(st.floats(0, 1))
    owed = plant.owed(works)
    assert min(owed.values()) >= 0
    total = plant.idle(warmth) + sum(owed.values())
    assert total == pytest.approx(plant.package(works, warmth), rel=1e-12)


@EACH_PLANT
def test_one_process_alone_measures_the_stated_ratio_of_costs(plant: CpuPlant) -> None:
    plant = replace(plant, uncore=0.0)  # the same for all
    powers = [plant.package({0: Work((0,), 1.0, cost)}) - plant.idle() for cost in (3.0, 12.0)]
    assert powers[1] / powers[0] == pytest.approx(4)


@pytest.mark.parametrize("plant", [one for one in PLANTS if one.smt], ids=lambda one: one.name)
@pytest.mark.parametrize("cost", [6.0, 24.0])
def test_busy_pair_of_siblings_costs_little_more_than_one_thread(
    plant: CpuPlant, cost: float
) -> None:
    own, other = Work((0,), 1.0, 6.0), Work((plant.cores,), 1.0, cost)
    alone = [plant.package({0: one}) - plant.idle() for one in (own, other)]
    pair = plant.package({0: own, 1: other}) - plant.idle()
    assert 1.2 <= pair / (sum(alone) / 2) <= 1.5
    assert plant.owed({0: own, 1: other})[0] < plant.owed({0: own})[0]


@EACH_PLANT
def test_more_active_cores_have_no_higher_clock_and_draw_more(plant: CpuPlant) -> None:
    clocks = [plant.clock(active) for active in range(plant.cores + 1)]
    works = [{0: Work(tuple(range(active)), 1.0, 5.0)} for active in range(plant.cores + 1)]
    powers = [plant.package(work) for work in works]
    assert clocks == sorted(clocks, reverse=True)
    assert powers == sorted(set(powers))


def test_neighbour_changes_what_a_process_owes_by_the_clock_alone() -> None:
    own, neighbour = Work((0,), 1.0, 5.0), Work(tuple(range(1, 16)), 1.0, 5.0)
    both = {0: own, 1: neighbour}
    assert ADDITIVE.owed(both)[0] == ADDITIVE.owed({0: own})[0] == 5.0
    assert TURBO.owed({0: own})[0] > 1.5 * TURBO.owed(both)[0]


def test_counters_count_the_clock_the_siblings_and_the_traffic_of_each() -> None:
    alone = Work((0,), 0.5, 8.0, traffic=6.4, ipc=2.0)
    beside = Work((SMT.cores,), 1.0, 4.0, ipc=1.0)
    rates = SMT.rates({0: alone, 1: beside})
    assert rates[0].cycles == rates[0].reference == pytest.approx(0.5 * 2.6e9)
    assert rates[0].instructions == pytest.approx(0.5 * 2.6e9 * 2 * SMT.retired)
    assert rates[1].instructions == pytest.approx(2.6e9 * (0.5 + 0.5 * SMT.retired))
    assert (rates[0].misses, rates[1].misses) == (pytest.approx(1e8), 0)
    assert SMT.rates({0: alone})[0].instructions == pytest.approx(2.6e9)
    lone = TURBO.rates({0: alone})[0]
    assert lone.cycles / lone.reference == pytest.approx(TURBO.clock(0.5) / 2.6)
    assert SMT.retired != SMT.smt / 2  # type: ignore[operator]


def test_memory_traffic_is_owed_apart_from_cpu_time_and_leakage_by_nobody() -> None:
    still, moving = Work((0,), 0.5, 5.0), Work((1,), 0.5, 5.0, traffic=10.0)
    owed = MEMORY.owed({0: still, 1: moving})
    assert owed[1] - owed[0] == pytest.approx(10 * MEMORY.joules_per_gigabyte)
    assert LEAKING.package({0: still}, 1.0) - LEAKING.package({0: still}) == pytest.approx(2.1)
    assert SMT.package({}) == SMT.idle()


@pytest.mark.parametrize("counter", COUNTERS, ids=lambda counter: counter.name)
@given(st.floats(0, 1), st.floats(-4, 4), st.floats(0, 1), st.floats(1e6, 1e12))
def test_counter_is_at_most_two_updates_and_a_delay_old(
    counter: EnergyCounter, phase: float, error: float, delay: float, energy: float
) -> None:
    assert 0 <= counter.age(phase, error, delay) <= 2 * counter.period + counter.late_by
    assert abs(counter.value(energy) - energy) <= counter.unit + 1
