"""Certainty of sums, accounts and the host."""

from dataclasses import replace

import pytest
from testbed.snapshots import busy_host

from wattspan.model import (
    Certainty,
    DomainAccount,
    Failure,
    GapReason,
    HwType,
    Microjoules,
    SourceHealth,
    Trouble,
)

KNOWN, LOWER_BOUND, UNKNOWN = Certainty


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ((), UNKNOWN),
        ((KNOWN,), KNOWN),
        ((KNOWN, KNOWN), KNOWN),
        ((UNKNOWN, UNKNOWN), UNKNOWN),
        ((KNOWN, UNKNOWN), LOWER_BOUND),
        ((LOWER_BOUND,), LOWER_BOUND),
        ((LOWER_BOUND, UNKNOWN), LOWER_BOUND),
        ((KNOWN, LOWER_BOUND), LOWER_BOUND),
    ],
)
def test_sum_is_as_certain_as_its_parts(parts: tuple[Certainty, ...], whole: Certainty) -> None:
    assert Certainty.of_sum(parts) is whole


def first() -> DomainAccount:
    return busy_host().domains[0]


@pytest.mark.parametrize(
    ("changes", "energy", "consumers"),
    [
        ({}, KNOWN, KNOWN),
        ({"gaps": {GapReason.LOST: 0}}, KNOWN, KNOWN),
        ({"gaps": {GapReason.LOST: 1}}, LOWER_BOUND, LOWER_BOUND),
        ({"gaps": {GapReason.SUSPEND: 1}}, LOWER_BOUND, KNOWN),
        ({"withheld": Microjoules(1)}, KNOWN, LOWER_BOUND),
        ({"energy": Microjoules(0), "measured": False}, UNKNOWN, UNKNOWN),
        ({"energy": Microjoules(0), "gaps": {GapReason.ABSENT: 1}}, UNKNOWN, UNKNOWN),
        ({"energy": Microjoules(0)}, KNOWN, KNOWN),
    ],
)
def test_account_is_bounded_by_gaps_and_withheld_energy(
    changes: dict[str, object], energy: Certainty, consumers: Certainty
) -> None:
    account = replace(first(), **changes)  # type: ignore[arg-type]
    assert account.divided == first().energy
    assert account.energy_certainty is energy
    assert account.consumers_certainty is consumers


def test_host_without_domains_is_unknown() -> None:
    nothing = replace(busy_host(), domains=())
    assert nothing.host_energy == (0, UNKNOWN)
    assert nothing.host_power == (0, UNKNOWN)
    assert nothing.attribution_certainty == {}
    assert nothing.bounded_powers == frozenset()


def test_domain_that_is_gone_and_never_was_measured_bounds_no_sum() -> None:
    host = busy_host()
    whole = tuple(replace(account, gaps={}, idle_power=1) for account in host.domains)
    never = replace(whole[0], energy=Microjoules(0), measured=False, present=False, power=None)
    left = replace(host, domains=(never, *whole[1:]))
    assert left.host_energy[1] is KNOWN
    assert left.host_power[1] is KNOWN
    assert left.attribution_certainty[HwType.CPU] is KNOWN
    assert left.bounded_powers == frozenset()


def test_domain_that_its_source_cannot_read_bounds_the_power() -> None:
    host = busy_host()
    whole = tuple(replace(account, gaps={}, idle_power=1) for account in host.domains)
    vanished = replace(whole[0], present=False, power=None, silent=True)
    removed = replace(host, domains=(vanished, *whole[1:]), health=())
    assert removed.host_power[1] is KNOWN
    assert removed.bounded_powers == frozenset()
    failure = Failure("rapl", "zone", Trouble.ABSENT, "it vanished", domain_id=vanished.domain.id)
    lost = replace(removed, health=(SourceHealth("rapl", True, 9, 1, (failure,)),))
    assert lost.lost == {vanished.domain.id}
    assert lost.host_power == (removed.host_power[0], LOWER_BOUND)
    assert lost.bounded_powers == {HwType.CPU}
    field = replace(lost, domains=whole)
    assert field.lost == frozenset(), "a failing field of a present domain"


def test_part_of_a_gpu_without_a_sensor_is_a_division() -> None:
    gpu = next(one.domain for one in busy_host().domains if one.domain.hw_type is HwType.GPU)
    assert [one.is_division for one in (gpu, replace(gpu, parent="GPU"))] == [False, True]
