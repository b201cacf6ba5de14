"""Counters that stand still while CPUs work, for any sequence of values and loads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattspan.attribution.frozen_counters import FrozenCounters, frozen_failure
from wattspan.model import (
    SECOND,
    Consumer,
    Domain,
    HwType,
    Instant,
    Microjoules,
    Provenance,
    Reading,
    Trouble,
    Usage,
)

PACKAGE = Domain("p", HwType.CPU, "package-0", "x", Provenance.MEASURED, moves_with="cpu:0")
CARD = Domain("g", HwType.GPU, "card", "x", Provenance.MEASURED)
METER = Domain("m", HwType.CPU, "meter", "x", Provenance.DERIVED, moves_with="cpu:0")
DOMAINS = (PACKAGE, CARD, METER)


def at(second: int) -> Instant:
    return Instant(second * SECOND, second * SECOND)


def reading(domain: Domain, second: int, counter: int, epoch: int = 0) -> Reading:
    return Reading(domain.id, at(second), Microjoules(counter), epoch)


def usage(second: int, cpus: float, resource: str = "cpu:0") -> Usage:
    spent = {Consumer(1, 1): round(cpus * SECOND)}
    return Usage(resource, at(second - 1), at(second), spent, capacity=4 * SECOND)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 4)), min_size=1, max_size=60))
def test_kept_values_are_those_that_move_and_none_is_of_a_frozen_counter(
    steps: list[tuple[int, float]],
) -> None:
    counters, value, last, kept_before = FrozenCounters(), 0, -1, 0
    for second, (grown, cpus) in enumerate(steps, 1):
        value += grown * 1_000_000
        one = reading(PACKAGE, second, value)
        [kept], frozen = counters.moves(DOMAINS, [one])
        counters.add_usages([usage(second, cpus)])
        assert kept is (value != last)
        assert not (kept and frozen)
        if frozen:
            assert second - kept_before >= 3, "it stood still for some time"
            assert any(load >= 0.1 for _, load in steps[kept_before:second]), "while CPUs worked"
        if kept:
            last, kept_before = value, second


@given(st.lists(st.floats(0, 4), min_size=8, max_size=60), st.integers(0, 2**40))
def test_counter_without_observed_work_is_kept_and_never_frozen(
    loads: list[float], counter: int
) -> None:
    counters = FrozenCounters()
    for second, cpus in enumerate(loads, 1):
        one = reading(CARD, second, counter)
        assert counters.moves(DOMAINS, [one]) == ([True], frozenset())
        counters.add_usages([usage(second, cpus)])


@given(st.lists(st.floats(0.3, 4), min_size=20, max_size=20))
def test_work_of_another_socket_freezes_nothing(loads: list[float]) -> None:
    counters = FrozenCounters()
    for second, cpus in enumerate(loads, 1):
        assert not counters.moves(DOMAINS, [reading(PACKAGE, second, 7)])[1]
        counters.add_usages([usage(second, cpus, "cpu:1"), usage(second, 0.01)])


def test_usage_without_duration_and_repeated_reading_are_harmless() -> None:
    counters = FrozenCounters()
    counters.add_usages([Usage("cpu:0", at(1), at(1), {})])
    readings = [reading(METER, 1, 5), reading(METER, 1, 6), reading(METER, 2, 9)]
    assert counters.moves(DOMAINS, readings) == ([True, True, True], frozenset())


def test_counter_without_any_usage_is_held_and_not_frozen() -> None:
    counters = FrozenCounters()
    assert counters.moves(DOMAINS, [reading(PACKAGE, 1, 7)])[0] == [True]
    assert counters.moves(DOMAINS, [reading(PACKAGE, 9, 7)]) == ([False], frozenset())


def test_counter_of_another_epoch_begins_anew() -> None:
    counters = FrozenCounters()
    for second in range(1, 10):
        counters.moves(DOMAINS, [reading(PACKAGE, second, 7)])
        counters.add_usages([usage(second, 4)])
    assert counters.moves(DOMAINS, [])[1] == {"p"}
    again = reading(PACKAGE, 10, 7, epoch=1)
    assert counters.moves(DOMAINS, [again]) == ([True], frozenset())


@pytest.mark.parametrize(("cpus", "frozen"), [(4.0, {"m"}), (1.0, set())])
def test_constant_power_beside_a_change_of_the_load_is_frozen(cpus: float, frozen: set) -> None:
    counters = FrozenCounters()
    for second in range(1, 80):
        counters.moves(DOMAINS, [reading(METER, second, second * 10**6)])
        counters.add_usages([usage(second, cpus if second > 40 else 0.0)])
    assert counters.moves(DOMAINS, [])[1] == frozen
    failure = frozen_failure(METER)
    assert (failure.trouble, failure.domain_id) == (Trouble.STUCK, "m")
