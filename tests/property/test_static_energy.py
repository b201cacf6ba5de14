"""Static and dynamic energy: both add up to the exclusive energy, and change nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from wattspan.attribution.division import StaticDivider
from wattspan.attribution.ledger import attribute
from wattspan.model import (
    Consumer,
    HwType,
    IdlePolicy,
    Instant,
    Interval,
    Microjoules,
    Milliwatts,
    StaticBasis,
    Usage,
    energy_at,
)
from wattspan.spans.aggregator import SpanAggregator
from wattspan.spans.energy_division import ProcessSpans
from wattspan.spans.profiles import EnergyProfile
from wattspan.spans.values import Span, SpanEnergy, SpanEnergyColumns, SpanStart

CPU, GPU = HwType.CPU, HwType.GPU
TICK = 10
TICKS = 8

Ticks = Sequence[tuple[int, int, int, StaticBasis | None]]
"""CPU energy, GPU energy, its static part, and the basis, of each interval."""

ticks = st.lists(
    st.tuples(
        st.integers(0, 50),
        st.integers(0, 2**40),
        st.integers(0, 2**40),
        st.sampled_from([None, *StaticBasis, StaticBasis.FITTED]),
    ).map(lambda one: (one[0], one[1], min(one[1], one[2]), one[3])),
    min_size=TICKS,
    max_size=TICKS,
)
times = st.integers(0, TICKS * TICK)
spans = st.lists(
    st.builds(
        lambda ident, parent, a, b, weight: Span(
            bytes(16), bytes([ident]) * 8, bytes([parent]) * 8 if parent else b"", "s",
            f"n{ident % 3}", min(a, b), max(a, b), weight,
        ),
        st.integers(1, 20), st.integers(0, 20), times, times, st.none() | st.integers(1, 9),
    ),
    max_size=12,
    unique_by=lambda one: one.id,
)  # fmt: skip


def profile_of(spent: Ticks, *, split: bool) -> EnergyProfile:
    profile = EnergyProfile()
    for kind in (CPU, GPU):
        profile.expect(kind, kind, 0)
    for number, (cpu, gpu, static, basis) in enumerate(spent):
        period = Interval(
            "", Instant(number * TICK, 0), Instant(number * TICK + TICK, 0), Microjoules(0)
        )
        profile.add(CPU, CPU, period, cpu, 0)
        part = (static, basis) if split and basis is not None else None
        profile.add(GPU, GPU, period, gpu, 0, part)
    profile.finish()
    return profile


def settled(
    profile: EnergyProfile, batches: Sequence[Sequence[Span]], announced: Sequence[int]
) -> list[SpanEnergy]:
    process = ProcessSpans()
    for batch in batches:
        for span in batch:
            if span.id[0] in announced:
                process.open(SpanStart(span.id, span.parent, span.start, 1, 0))
    found = [one for batch in batches for one in process.settle(batch, profile, TICKS * TICK)]
    process.outside(profile, TICKS * TICK)
    return found


@given(ticks, spans, spans, st.lists(st.integers(1, 20), max_size=4))
def test_static_and_dynamic_energy_add_up_to_exclusive_energy(
    spent: Ticks, first: list[Span], second: list[Span], announced: list[int]
) -> None:
    batches = [first, [span for span in second if span.id not in {one.id for one in first}]]
    split = settled(profile_of(spent, split=True), batches, announced)
    plain = settled(profile_of(spent, split=False), batches, announced)
    assert [one.exclusive for one in split] == [one.exclusive for one in plain]
    assert all(one.static is None and one.basis is None for one in plain)
    for one in split:
        if one.basis is None:
            assert one.static is None
        else:
            assert 0 <= one.static <= one.exclusive[GPU]
    assert sum(one.static or 0 for one in split) <= sum(
        static for _, _, static, basis in spent if basis is not None
    )
    totals = SpanAggregator(10)
    totals.add(SpanEnergyColumns.of(split), Instant(1, 1))
    known = Counter[str]()
    for one in split:
        if one.basis is not None:
            known[one.span.name] += one.exclusive[GPU]
    for row in totals.accounts().rows:
        assert sum(map(sum, row.splits.values())) == known[row.name]


@example(spent=[(0, 0, 0, None)] * (TICKS - 1) + [(0, 1, 0, None)], cuts=[0])
@given(ticks, st.lists(times, min_size=1, max_size=5))
def test_splits_of_neighbouring_periods_add_up(spent: Ticks, cuts: list[int]) -> None:
    spent = [(cpu, gpu, static, StaticBasis.FITTED) for cpu, gpu, static, _ in spent]
    profile = profile_of(spent, split=True)
    edges = sorted({0, *cuts, TICKS * TICK})
    parts = [profile.between(a, b) for a, b in pairwise(edges)]
    static = dynamic = 0
    for part in parts:
        if part.split is not None:
            static, dynamic = static + part.split[0].static, dynamic + part.split[0].dynamic
            assert sum(part.split[0]) == part.energy[GPU]
    total = sum(gpu for _, gpu, *_ in spent)
    if total:
        assert static + dynamic == total
        assert static <= sum(one[2] for one in spent)


@given(
    st.integers(0, 10**9),
    st.lists(st.integers(0, 10**8), max_size=5),
    st.integers(0, 10**6),
    st.integers(0, 10**9),
    st.sampled_from(list(IdlePolicy)),
)
def test_static_parts_of_consumers_and_idle_are_at_most_power_times_time(
    energy: int, spent: list[int], power: int, idle: int, policy: IdlePolicy
) -> None:
    period = Interval("gpu", Instant(0, 0), Instant(10**8, 0), Microjoules(energy))
    usage = Usage("gpu", period.start, period.end, {Consumer(n, 1): s for n, s in enumerate(spent)})
    divided = attribute(period, usage, idle_due=idle, policy=policy)
    share = StaticDivider().divide(period, divided.idle, Milliwatts(power), 10**8)
    parts = [share.of(each.energy) for each in divided.shares]
    whole = min(energy, energy_at(power, 10**8))
    assert sum(parts) <= max(0, whole - divided.idle)
    assert all(part <= each.energy for part, each in zip(parts, divided.shares, strict=True))
    if not divided.unattributed and divided.shares:
        assert sum(parts) > max(0, whole - divided.idle) - len(parts)
