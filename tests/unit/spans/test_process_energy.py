"""The steps of a domain, and shares that are merged when they are wanted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wattspan.attribution.division import StaticShare
from wattspan.model import (
    MILLISECOND,
    Domain,
    HwType,
    Instant,
    Interval,
    Microjoules,
    Nanoseconds,
    Provenance,
    StaticBasis,
)
from wattspan.spans.process_energy import (
    DomainStep,
    DomainSteps,
    ProcessEnergy,
    append_share,
)
from wattspan.spans.profiles import EnergyProfile

CPU = Domain("cpu0", HwType.CPU, "package-0", "fake", Provenance.MEASURED, resource="cpu")
GPU = Domain("gpu0", HwType.GPU, "gpu", "fake", Provenance.MEASURED, resource="gpu")


def step(start: int, end: int) -> DomainStep:
    return DomainStep(start, end, 1000, 0)


def steps(domain: Domain, *edges: tuple[int, int]) -> DomainSteps:
    found = DomainSteps(domain)
    for start, end in edges:
        found.add(step(start, end))
    return found


def test_step_that_ends_before_its_predecessor_is_ignored() -> None:
    found = DomainSteps(CPU)
    assert found.end == 0
    assert found.add(step(0, 100))
    assert not found.add(step(50, 100))
    assert len(found) == 1
    assert found.end == 100


def test_periods_are_those_without_a_gap() -> None:
    found = steps(CPU, (0, 100), (100, 200), (250, 300))
    found.trim(300)
    assert len(found) == 1
    assert list(found.periods(50, 270)) == [(50, 200), (250, 270)]
    assert list(found.periods(200, 250)) == []


def test_few_old_steps_are_not_removed() -> None:
    found = steps(CPU, *((i, i + 1) for i in range(100)))
    found.trim(20)
    assert len(found) == 100


def test_begin_of_a_time_is_that_of_its_step() -> None:
    found = steps(CPU, (100, 200))
    assert [found.begin(time) for time in (50, 100, 150, 250)] == [50, 100, 100, 250]


def test_redefined_domain_is_that_of_its_later_steps() -> None:
    found = steps(CPU)
    found.redefine(GPU)
    assert found.domain is GPU


def test_shares_of_several_payers_of_one_step_are_added() -> None:
    domains = {CPU.id: steps(CPU, (0, 100))}
    energy = ProcessEnergy()
    energy.add(CPU.id, 100, 3)
    energy.add(CPU.id, 100, 4)
    assert energy.waiting
    energy.merge(domains)
    assert not energy.waiting
    assert energy.profile.between(0, 100).energy == {HwType.CPU: 7}


def test_share_of_an_unknown_step_is_left_out() -> None:
    domains = {CPU.id: steps(CPU, (0, 100), (100, 200), (200, 300))}
    energy = ProcessEnergy()
    for end in (100, 150, 300, 900):
        energy.add(CPU.id, end, 5)
    energy.merge(domains)
    assert energy.profile.between(0, 300).energy == {HwType.CPU: 10}


def test_merge_without_new_steps_merges_nothing() -> None:
    domains = {CPU.id: steps(CPU, (0, 100))}
    energy = ProcessEnergy()
    assert [energy.merge(domains) for _ in range(2)] == [1, 0]


def test_profile_waits_for_the_first_step_of_an_expected_domain() -> None:
    for expected in (True, False):
        energy, domains = ProcessEnergy(), {CPU.id: steps(CPU, (0, 100))}
        energy.begin(CPU, 0, expected=True)
        energy.begin(GPU, 0, expected=expected)
        energy.merge(domains)
        assert energy.profile.watermark == (0 if expected else 100)


def test_copy_has_the_merged_energy_and_takes_further_shares() -> None:
    domains = {CPU.id: steps(CPU, (0, 100))}
    one = ProcessEnergy()
    one.begin(CPU, 0, expected=True)
    one.add(CPU.id, 100, 5)
    one.merge(domains)
    other = one.copy()
    domains[CPU.id].add(step(100, 200))
    for energy, own in ((one, 1), (other, 2)):
        energy.add(CPU.id, 200, own)
        energy.merge(domains)
    assert one.profile.between(0, 200).energy == {HwType.CPU: 6}
    assert other.profile.between(0, 200).energy == {HwType.CPU: 7}


def test_steps_of_a_used_gpu_stay_separate() -> None:
    """Its idle time after the kept steps is one interval."""
    found = steps(GPU, *((i * 100, i * 100 + 100) for i in range(10)))
    energy = ProcessEnergy()
    energy.add(GPU.id, 100, 5)
    assert energy.merge({GPU.id: found}) == 10
    for i in range(10, 30):
        found.add(step(i * 100, i * 100 + 100))
    found.trim(2000)
    assert energy.merge({GPU.id: found}) == 12
    assert energy.profile.covered(0, 3000) == 3000


@pytest.mark.parametrize("stale", [None, Nanoseconds(30 * MILLISECOND), Nanoseconds(5)])
def test_last_step_of_a_counter_has_no_more_energy_than_the_interval(
    stale: Nanoseconds | None,
) -> None:
    end = 20 * MILLISECOND
    interval = Interval(GPU.id, Instant(0, 0), Instant(end, 0), Microjoules(end), stale)
    board = replace(GPU, resolution=Nanoseconds(100 * MILLISECOND))
    assert DomainStep.of(board, interval, 7).edge == min(end, stale or end)


def test_static_part_of_a_share_follows_its_energy() -> None:
    found = DomainSteps(GPU)
    found.add(DomainStep(0, 100, 1000, 0, 0.0, (StaticShare(400, 1000), StaticBasis.FITTED)))
    energy = ProcessEnergy()
    energy.add(GPU.id, 100, 500)
    energy.merge({GPU.id: found})
    split = energy.profile.between(0, 100).split
    assert split is not None
    assert split[0].static == Microjoules(200)


def test_doubt_is_an_error_of_at_most_the_larger_part() -> None:
    errors = []
    for doubt in (0, 100, 600, 9_000):
        profile = EnergyProfile()
        append_share(profile, CPU, step(0, 100), 400, doubt)
        profile.merge()
        errors.append(profile.between(0, 100).uncertainty[HwType.CPU])
    assert errors[0] < errors[1] < errors[2] == errors[3]
