"""The static part of spans: shared as their energy is, with its basis, in accounts and rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testbed.joined_spans import joined, moment

from wattspan.model import (
    MILLISECOND,
    HwType,
    Instant,
    Interval,
    Microjoules,
    StaticBasis,
    StaticSplit,
)
from wattspan.spans.aggregator import SpanAggregator
from wattspan.spans.energy_division import ProcessSpans
from wattspan.spans.profiles import EnergyProfile
from wattspan.spans.values import Span, SpanEnergy, SpanEnergyColumns, SpanStart

CPU, GPU = HwType.CPU, HwType.GPU
FITTED, CONFIGURED, LOWER = StaticBasis.FITTED, StaticBasis.CONFIGURED, StaticBasis.LOWER_BOUND
TICK = 100 * MILLISECOND
BEGIN = 10**12
SPENT, STATIC = 20_000_000, 6_000_000  # uJ in a tick


class Host:
    """One process; its boards spend 200 W each, of which 60 W are static."""

    def __init__(self, *boards: str) -> None:
        self.profile = EnergyProfile()
        self.spans = ProcessSpans()
        self.at = BEGIN
        self.boards = boards or ("gpu0",)

    def run(
        self, ticks: int, *bases: StaticBasis | None, energy: int = SPENT, cpu: bool = False
    ) -> None:
        bases = bases or (FITTED,) * len(self.boards)
        for _ in range(ticks):
            start, self.at = self.at, self.at + TICK
            if cpu:
                self._add("cpu0", CPU, start, 5_000_000, None)
            for board, basis in zip(self.boards, bases, strict=True):
                static = None if basis is None else (min(energy, STATIC), basis)
                self._add(board, GPU, start, energy, static)

    def _add(
        self,
        key: str,
        kind: HwType,
        start: int,
        energy: int,
        static: tuple[int, StaticBasis] | None,
    ) -> None:
        period = Interval(key, Instant(start, 0), Instant(self.at, 0), Microjoules(energy))
        self.profile.add(key, kind, period, energy, 0, static)

    def settle(self, *spans: Span) -> list[SpanEnergy]:
        return list(self.spans.settle(spans, self.profile, self.at))


def span(number: int, start: float, end: float, parent: bytes = b"") -> Span:
    """From and to a tick."""
    return Span(
        bytes(16), bytes([number] * 8), parent, "s", f"n{number}",
        BEGIN + round(start * TICK), BEGIN + round(end * TICK),
    )  # fmt: skip


def test_static_part_is_shared_by_concurrent_spans() -> None:
    host = Host()
    host.run(10)
    one, other = host.settle(span(1, 0, 10), span(2, 5, 10))
    assert (one.static, other.static) == (45_000_000, 15_000_000)
    assert (one.exclusive[GPU], other.exclusive[GPU]) == (150_000_000, 50_000_000)
    assert one.basis is other.basis is FITTED


def test_static_part_belongs_to_the_leaf_span() -> None:
    host = Host()
    host.run(10)
    parent, child = host.settle(span(1, 0, 10), span(2, 2, 4, bytes([1] * 8)))
    assert (parent.static, child.static) == (48_000_000, 12_000_000)


def test_inclusive_energy_has_its_split() -> None:
    host = Host()
    host.run(10)
    found = host.profile.between(BEGIN, BEGIN + 5 * TICK)
    assert found.split == (StaticSplit(Microjoules(30_000_000), Microjoules(70_000_000)), FITTED)


def test_spans_without_known_static_power_have_no_split() -> None:
    host = Host()
    host.run(10, None)
    (known,) = host.settle(span(1, 0, 10))
    assert (known.static, known.basis) == (None, None)
    assert host.profile.between(BEGIN, host.at).split is None


def test_basis_of_a_span_is_the_least_certain_in_it() -> None:
    host = Host()
    host.run(10, LOWER)
    host.run(10, FITTED)
    bases = [one.basis for one in host.settle(span(1, 0, 5), span(2, 5, 15), span(3, 15, 20))]
    assert bases == [LOWER, LOWER, FITTED]


def test_span_that_began_before_the_static_power_was_known_has_no_split() -> None:
    host = Host()
    host.run(10, None)
    host.run(10, FITTED)
    host.run(10, None)
    spans = [span(1, 5, 15), span(2, 12, 18), span(3, 18, 25), span(4, 12, 12)]
    found = host.settle(*spans)
    assert [one.basis for one in found] == [None, FITTED, None, FITTED]
    assert found[0].static is None
    assert found[0].exclusive[GPU] > 0


def test_period_before_the_profile_has_no_basis() -> None:
    host = Host()
    host.run(3)
    host.run(3, CONFIGURED)
    assert host.profile.bases([BEGIN - TICK], [BEGIN + TICK]) == [None]


def test_basis_of_several_boards_is_the_least_certain() -> None:
    host = Host("gpu0", "gpu1")
    host.run(10, FITTED, CONFIGURED)
    host.run(10, LOWER, CONFIGURED)
    host.run(10, CONFIGURED, CONFIGURED)
    host.run(10, CONFIGURED, None)
    found = host.settle(*(span(n + 1, 10 * n + 2, 10 * n + 8) for n in range(4)))
    assert [one.basis for one in found] == [FITTED, LOWER, CONFIGURED, None]
    assert found[0].static == 2 * 6 * STATIC


def test_board_without_energy_of_the_process_does_not_matter() -> None:
    host = Host()
    for _ in range(10):
        host.run(1)
        idle = Interval("gpu1", Instant(host.at - TICK, 0), Instant(host.at, 0), Microjoules(9))
        host.profile.add("gpu1", GPU, idle, 0, 0, None)
    (found,) = host.settle(span(1, 2, 8))
    assert found.basis is FITTED


def test_static_part_never_exceeds_the_energy() -> None:
    host = Host()
    host.run(10, energy=4_000_000)
    (found,) = host.settle(span(1, 0, 10))
    assert found.static == found.exclusive[GPU] == 40_000_000


def test_static_part_of_a_partly_known_interval_is_proportional() -> None:
    host = Host()
    host.run(2)
    overlapping = Interval(
        "gpu0", Instant(host.at - TICK, 0), Instant(host.at + TICK, 0), Microjoules(2 * SPENT)
    )
    host.profile.add("gpu0", GPU, overlapping, 2 * SPENT, 0, (2 * STATIC, FITTED))
    host.at += TICK
    found = host.profile.between(host.at - TICK, host.at)
    assert found.split == (StaticSplit(Microjoules(STATIC), Microjoules(SPENT - STATIC)), FITTED)


def test_announced_spans_have_static_parts() -> None:
    host = Host()
    host.spans.open(SpanStart(bytes([1] * 8), b"", BEGIN, 1, 0))
    host.run(10)
    one, other = host.settle(span(1, 0, 10), span(2, 5, 10))
    assert (one.static, other.static) == (45_000_000, 15_000_000)


def test_spans_of_hardware_that_joined_later_have_no_split() -> None:
    host = Host("gpu0")
    start = host.at
    for number in range(10):  # the CPU is known for a while before the GPU
        period = Interval(
            "cpu0", Instant(start + number * TICK, 0), Instant(start + (number + 1) * TICK, 0),
            Microjoules(100),
        )  # fmt: skip
        host.profile.add("cpu0", CPU, period, 100, 0)
    host.at = start + 60 * TICK
    for _ in range(10):
        host.run(1, cpu=True)
    early, late = host.settle(span(1, 1, 5), span(2, 62, 68))
    assert GPU not in early.exclusive
    assert (early.static, early.basis) == (None, None)
    assert late.basis is FITTED


def test_bases_are_bounded_in_number() -> None:
    host = Host()
    for _ in range(100):
        host.run(1, FITTED)
        host.run(1, CONFIGURED)
    assert host.profile.bases([BEGIN], [BEGIN + TICK]) == [None]
    assert host.profile.bases([host.at - TICK], [host.at]) == [CONFIGURED]


@pytest.mark.parametrize("kinds", [1, 2])
def test_profiles_with_static_parts_are_thinned(kinds: int) -> None:
    host = Host()
    host.profile = EnergyProfile(limit=64)
    host.profile.expect("gpu0", GPU, BEGIN)
    host.run(600, cpu=kinds == 2)
    found = host.profile.between(BEGIN, host.at)
    assert found.energy[GPU] == 600 * SPENT
    assert found.split is not None
    assert found.split[0].static == 600 * STATIC


# ------------------------------------------------------------------------------------- columns


def split_span(name: str, energy: int, static: int | None, basis: StaticBasis | None) -> SpanEnergy:
    one = joined(name, {GPU: energy})
    return one._replace(static=None if static is None else Microjoules(static), basis=basis)


def test_columns_keep_static_parts_of_rows() -> None:
    rows = [split_span("a", 100, 30, FITTED), split_span("b", 50, None, None)]
    columns = SpanEnergyColumns.of(rows)
    assert list(columns) == rows
    assert columns[0] == rows[0]
    assert list(columns[1:]) == rows[1:]
    plain = SpanEnergyColumns.of([rows[1]])
    assert (plain.static, plain.basis) == ((), ())


def test_accounts_add_splits_by_basis() -> None:
    totals = SpanAggregator(10)
    rows = [
        split_span("a", 100, 30, FITTED),
        split_span("a", 60, 10, FITTED),
        split_span("a", 50, 5, LOWER),
        split_span("a", 40, None, None),
        split_span("b", 7, 7, LOWER),
    ]
    totals.add(rows, moment(2))
    totals.add(rows[:2], moment(3))
    totals.add([joined("a", {GPU: 9})], moment(4))
    by_name = {row.name: row for row in totals.accounts().rows}
    assert by_name["a"].splits == {
        FITTED: StaticSplit(Microjoules(80), Microjoules(240)),
        LOWER: StaticSplit(Microjoules(5), Microjoules(45)),
    }
    assert by_name["b"].splits == {LOWER: StaticSplit(Microjoules(7), Microjoules(0))}
    again = SpanAggregator(10, tuple(by_name.values()), now=moment(5).mono)
    again.add(rows[:1], moment(6))
    (row,) = [row for row in again.accounts().rows if row.name == "a"]
    assert row.splits[FITTED] == StaticSplit(Microjoules(110), Microjoules(310))
    assert replace(row, splits={}).energy[GPU] == by_name["a"].energy[GPU] + 100


def test_worse_basis_is_the_less_certain_one() -> None:
    assert CONFIGURED.worse(FITTED) is FITTED.worse(CONFIGURED) is FITTED
    assert FITTED.worse(LOWER) is LOWER
