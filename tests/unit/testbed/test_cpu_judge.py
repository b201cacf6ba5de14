"""The judge of CPU energy by process, and the emulated package that it judges on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from testbed.cpu_costs import (
    AGENT,
    APART,
    COUNTED,
    SCENARIOS,
    EmulatedPackage,
    Process,
    Scenario,
    consumer,
    judge,
    two,
)
from testbed.cpu_judge import RULES, Charge, Moment, Score, owed_energies
from testbed.cpu_plants import ADDITIVE, SMT
from testbed.idle_baseline import BEGIN

from wattspan.model import SECOND

MOMENTS = [  # 90 J in 10 s; each process has a tenth of one of two CPUs, and they owe 10 and 20 J
    Moment(n * SECOND // 10, n * 900_000 + 7, (n * 10**7,) * 2, (n * 1e5, n * 2e5), (n * 1e7,) * 2)
    for n in range(101)
]


def test_rules_divide_what_they_see() -> None:
    charged = {name: rule.charges(MOMENTS, 2) for name, rule in RULES.items()}
    assert owed_energies(MOMENTS) == [1e7, 2e7]
    assert [round(one.energy) for one in charged["CPU time alone"]] == [15_000_000] * 2
    for peer in ("Kepler's rule", "Scaphandre's rule"):
        assert [round(one.energy) for one in charged[peer]] == [4_500_000] * 2
    assert RULES["Kepler's rule"].charges(MOMENTS[:11], 2) == []
    seconds = MOMENTS[::10]  # all read at the same times as before
    for name in ("Kepler's rule", "Scaphandre's rule"):
        assert RULES[name].charges(seconds, 2) == charged[name]


def test_score_counts_stated_ranges_and_lower_bounds() -> None:
    score = Score()
    score.add([Charge(9.0, 1.0), Charge(5.0, 1.0)], [10.0, 10.0], pooled=False)
    score.add([Charge(5.0, lower_bound=True), Charge(9.0)], [10.0, 5.0], pooled=True)
    assert score.errors == pytest.approx([0.1, 0.5, 1 / 15])
    assert (score.contained, score.lower_bounds, score.p95) == (2, 1, 0.5)


@pytest.mark.parametrize("scenario", [SCENARIOS[2], SCENARIOS[-2]], ids=lambda one: one.plant.name)
def test_package_spends_what_its_processes_owe_and_shows_no_more(scenario: Scenario) -> None:
    package = EmulatedPackage(scenario, random.Random(1))
    package.advance(BEGIN + 32 * SECOND)
    idle = scenario.plant.idle(0.02) * 32e6
    assert package.energy - sum(package.owed) == pytest.approx(idle, rel=0.01)
    assert 0 < package.counter() <= package.energy + 100_000
    seen = package.cpu_times().values()
    assert all(0 <= true - one <= 40_000_000 for one, true in zip(seen, package.spent, strict=True))


def test_package_shows_counters_of_the_true_cpu_time() -> None:
    scenario = replace(SCENARIOS[0], counted=True)
    package = EmulatedPackage(scenario, random.Random(1))
    package.advance(BEGIN + 60 * SECOND)
    for counts, spent in zip(package.counters().values(), package.spent, strict=True):
        assert 0 <= spent - counts.time <= 40_000_000
        assert counts.cycles / counts.reference == pytest.approx(1, abs=1e-6)
        assert counts.reference == pytest.approx(counts.time * 2.6, rel=1e-6)
    assert package.counters().keys() == {consumer(0), consumer(1)}


def test_process_may_change_its_cost_and_copy_a_load() -> None:
    processes = two(Process(4.0, (), APART, later=10.0), Process(4.0, (), APART, copies=0))
    package = EmulatedPackage(Scenario(ADDITIVE, processes, [], rested=False), random.Random(1))
    package.advance(BEGIN + 60 * SECOND)
    first, second = before = package.truth.owed
    package.advance(BEGIN + 120 * SECOND)
    assert first == second
    changed, same = (new - old for new, old in zip(package.truth.owed, before, strict=True))
    assert changed / same == pytest.approx(2.5)


def test_counters_tell_siblings_apart() -> None:
    scenario = next(one for one in SCENARIOS if one.plant is SMT)
    ((_, scores),) = judge(scenario, [1])
    assert scores[COUNTED].p95 <= 0.06 < scores[AGENT].p95
    assert scores[COUNTED].contained == 3


def test_truth_is_the_same_with_counters() -> None:
    packages = [
        EmulatedPackage(replace(SCENARIOS[2], counted=one), random.Random(1))
        for one in (False, True)
    ]
    for package in packages:
        package.advance(BEGIN + 40 * SECOND)
        package.counters()
        package.advance(BEGIN + 50 * SECOND)
    assert packages[0].truth == packages[1].truth


def test_judge_sees_the_error_of_cpu_time_where_costs_differ() -> None:
    ((row, scores),) = judge(SCENARIOS[1], [1])
    assert row.seconds == 30
    assert scores["CPU time alone"].p95 > 0.5
    assert len(scores[AGENT].errors) == 2
