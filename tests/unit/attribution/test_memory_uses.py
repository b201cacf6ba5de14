"""Memory energy by misses, and the stated error of CPU time as its proxy."""

from __future__ import annotations

import pytest
from testbed.simulated_host import DRAM

from wattspan.attribution.division import split
from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.attribution.memory_uses import MISS_SPREAD, MemoryUses
from wattspan.model import (
    SECOND,
    Attribution,
    Consumer,
    Counts,
    HwType,
    Instant,
    Microjoules,
    Milliwatts,
    Payer,
    Reading,
    Tick,
    Usage,
)

A, B, C = (Consumer(number, 1) for number in (1, 2, 3))


def usage(counts: dict[Payer, Counts] | None, *payers: Payer) -> Usage:
    """The use of a second, in which each payer is busy on one CPU."""
    spent = dict.fromkeys(payers, int(SECOND))
    start, end = Instant(SECOND, 0), Instant(2 * SECOND, 0)
    return Usage("cpu:0", start, end, spent, capacity=16 * SECOND, counts=counts)


def counts(misses: int) -> Counts:
    return Counts(SECOND, SECOND, SECOND, SECOND, misses)


def test_energy_is_divided_by_misses_with_the_same_sum() -> None:
    uses = MemoryUses()
    given = usage({A: counts(3 * 10**8), B: counts(10**8)}, A, B)
    divided, unsure, _ = uses.divided(given)
    assert sum(divided.spent.values()) == 2 * SECOND
    assert divided.spent[A] / divided.spent[B] == pytest.approx(3, rel=0.05)
    assert unsure == 0
    assert uses.counters.recent


def test_misses_of_multiplexed_counters_stand_for_the_whole_time() -> None:
    half = Counts(SECOND // 2, SECOND // 2, SECOND // 2, SECOND // 2, 10**8)
    divided, _, _ = MemoryUses().divided(usage({A: half, B: counts(2 * 10**8)}, A, B))
    assert divided.spent[A] / divided.spent[B] == pytest.approx(1, rel=0.02)


def test_payer_without_counts_has_the_mean_of_a_cpu_second_and_no_certainty() -> None:
    given = usage({A: counts(3 * 10**8), B: counts(10**8)}, A, B, C)
    divided, _, doubts = MemoryUses().divided(given)
    assert divided.spent[C] == SECOND
    energies = split(3000, list(divided.spent.values()))
    found = doubts(3000, zip(divided.spent, energies, strict=True))
    assert found[2] == 2000
    assert found[0] < 1000


@pytest.mark.parametrize(
    "counted",
    [None, {}, {A: counts(0), B: counts(0)}, {A: counts(5)._replace(cycles=0)}, {C: counts(5)}],
)
def test_energy_by_cpu_time_may_be_of_anybody(counted: dict[Payer, Counts] | None) -> None:
    uses = MemoryUses()
    given = usage(counted, A, B)
    divided, _, doubts = uses.divided(given)
    assert divided is given
    assert doubts(1000, [(A, 500), (B, 500)]) == [500, 500]
    assert doubts(1000, [(A, 10), (B, 990)]) == [990, 990]
    assert not uses.counters.recent


def test_error_of_misses_is_that_of_their_different_costs() -> None:
    _, _, doubts = MemoryUses().divided(usage({A: counts(5), B: counts(5)}, A, B))
    most = 500 * MISS_SPREAD / (500 * MISS_SPREAD + 500) * 1000
    assert doubts(1000, [(A, 500), (B, 500)]) == [most - 500] * 2
    assert doubts(1000, [(A, 1000)]) == [0]


def _second(counted: dict[Payer, Counts] | None) -> tuple[Attribution, str]:
    ledger = Ledger(LedgerSettings(idle_powers={HwType.MEMORY: Milliwatts(1000)}))
    first, last = (
        Reading(DRAM.id, Instant(n * SECOND, 0), Microjoules(n * 5_000_000)) for n in (1, 2)
    )
    ledger.apply(Tick(first.at, {"rapl": (DRAM,)}, (first,)))
    (found,) = ledger.apply(Tick(last.at, {}, (last,), (), (usage(counted, A, B),)))
    return found, ledger.snapshot(last.at, "host").account(DRAM.id).method


def test_ledger_divides_memory_by_misses() -> None:
    found, method = _second({A: counts(3 * 10**8), B: counts(10**8)})
    assert (found.idle, sum(one.energy for one in found.shares)) == (1_000_000, 4_000_000)
    assert found.shares[0].energy == pytest.approx(3_000_000, rel=0.02)
    assert method == "counters"


def test_ledger_states_the_error_of_memory_by_cpu_time() -> None:
    found, method = _second(None)
    assert [one.energy for one in found.shares] == [2_000_000, 2_000_000]
    assert found.doubts == (2_000_000, 2_000_000)
    assert method == "cpu-time-proxy"
