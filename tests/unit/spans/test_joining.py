"""Joining: division of a process's energy among its spans."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import pytest

from wattspan.model import SECOND, HwType, Instant, Interval, Microjoules
from wattspan.spans.energy_division import MAX_LOCKED, ProcessSpans
from wattspan.spans.fair_division import CoveredStretch, CoveredTime
from wattspan.spans.profiles import EnergyProfile
from wattspan.spans.values import MAX_DURATION, Outcome, Span, SpanEnd, SpanEnergy, SpanStart
from wattspan.spans.weights import MAX_WEIGHT, GenerationalCache

CPU, GPU, MEMORY = HwType.CPU, HwType.GPU, HwType.MEMORY
MS = 1_000_000
NEVER = 2**70
POWER = {CPU: 1_000_000, MEMORY: 100_000, GPU: 10_000_000}  # microjoules a second


def known(until: int = 10_000, kinds: Sequence[HwType] = tuple(POWER)) -> EnergyProfile:
    """A process that spends evenly, known up to ``until`` milliseconds."""
    profile = EnergyProfile()
    for kind in kinds:
        profile.expect(kind, kind, 0)
    extend(profile, 0, until, kinds)
    return profile


def extend(
    profile: EnergyProfile, start: int, until: int, kinds: Sequence[HwType] = tuple(POWER)
) -> None:
    for begin in range(start, until, 100):
        edges = Instant(begin * MS, 0), Instant((begin + 100) * MS, 0)
        for kind in kinds:
            profile.add(kind, kind, Interval(kind, *edges, Microjoules(0)), POWER[kind] // 10, 0)


def span(
    ident: int,
    start: float,
    end: float,
    parent: int = 0,
    *,
    weight: int | None = None,
) -> Span:
    """From and to milliseconds."""
    return Span(
        trace=bytes(16),
        id=ident.to_bytes(8, "big"),
        parent=parent.to_bytes(8, "big") if parent else b"",
        service="s",
        name="n",
        start=round(start * MS),
        end=round(end * MS),
        weight=weight,
    )


def started(
    ident: int, at: float, parent: int = 0, thread: int = 1, cpu: float | None = None
) -> SpanStart:
    above = parent.to_bytes(8, "big") if parent else b""
    return SpanStart(ident.to_bytes(8, "big"), above, round(at * MS), thread, clock(cpu))


def ended(ident: int, at: float, thread: int = 1, cpu: float | None = None) -> SpanEnd:
    return SpanEnd(ident.to_bytes(8, "big"), round(at * MS), thread, clock(cpu))


def clock(cpu: float | None) -> int:
    """A thread's CPU clock, long since started; 0 if it was not asked."""
    return 0 if cpu is None else round((1000 + cpu) * MS)


def milliseconds(result: SpanEnergy, kind: HwType = CPU) -> float:
    """The exclusive energy of a kind, as the time that the whole process needs to spend it."""
    return round(result.exclusive[kind] * 1000 / POWER[kind], 1)


def test_single_span_has_the_energy_of_its_process() -> None:
    (result,) = ProcessSpans().settle([span(1, 150, 350)], known(), NEVER)
    assert result.outcome is Outcome.JOINED
    assert milliseconds(result) == milliseconds(result, GPU) == 200
    assert result.exclusive == result.inclusive.energy
    assert result.inclusive.covered == result.span.end - result.span.start


def test_energy_during_a_child_is_the_childs() -> None:
    batch = [span(2, 200, 300, 1), span(1, 100, 500), span(3, 350, 400, 1)]
    child, parent, other = ProcessSpans().settle(batch, known(), NEVER)
    assert [milliseconds(r) for r in (parent, child, other)] == [250, 100, 50]
    assert parent.inclusive.energy[CPU] == 400_000


def test_parallel_spans_have_equal_shares() -> None:
    batch = [span(i, 100, 200) for i in range(1, 65)]
    results = ProcessSpans().settle(batch, known(), NEVER)
    assert {r.exclusive[GPU] for r in results} == {1_000_000 // 64}


def test_thousand_parallel_spans_are_divided_exactly() -> None:
    process, profile = ProcessSpans(), known()
    batch = [span(i, i / 10, 500 + i / 10, i // 2) for i in range(1, 1001)]
    results = process.settle(batch, profile, NEVER)
    given = {k: sum(r.exclusive[k] for r in results) for k in POWER}
    outside = process.outside(profile, NEVER)
    whole = profile.between(batch[0].start, profile.watermark).energy
    assert {k: given[k] + outside[k] for k in POWER} == whole


# ---------------------------------------------------------------------------------------- weights


def test_earlier_child_is_known_to_its_parent() -> None:
    process, profile = ProcessSpans(), known()
    process.settle([span(2, 100, 200, 1)], profile, NEVER)
    parent, other = process.settle([span(1, 0, 200), span(3, 0, 100)], profile, NEVER)
    assert milliseconds(parent) == milliseconds(other) == 50
    assert parent.outcome is Outcome.JOINED


def test_weights_by_attribute_apply_to_all_types() -> None:
    batch = [span(1, 0, 100, weight=300), span(2, 0, 100, weight=100), span(3, 0, 100)]
    results = ProcessSpans().settle(batch, known(), NEVER)
    for kind in POWER:
        assert [milliseconds(r, kind) for r in results] == [50, 16.7, 33.3]


def test_weights_are_limited() -> None:
    batch = [span(1, 0, 100, weight=-7), span(2, 0, 100, weight=2**90), span(3, 0, 100, weight=0)]
    results = ProcessSpans().settle(batch, known(), NEVER)
    assert results[1].exclusive[GPU] == pytest.approx(
        1_000_000 * MAX_WEIGHT / (MAX_WEIGHT + 2), abs=1
    )


# --------------------------------------------------------------------------------------- outcomes


def outcome(process: ProcessSpans, profile: EnergyProfile, each: Span, now: int = NEVER) -> Outcome:
    (result,) = process.settle([each], profile, now)
    if result.outcome not in (Outcome.JOINED, Outcome.PARTIAL, Outcome.LATE):
        assert not any(result.exclusive.values())
    return result.outcome


def test_settled_time_is_not_future_with_an_older_clock_reading() -> None:
    process, profile = ProcessSpans(), known(1000)
    assert outcome(process, profile, span(1, 100, 900), 800 * MS) is Outcome.JOINED
    assert outcome(process, profile, span(2, 100, 1001), 800 * MS) is Outcome.FUTURE


def test_invalid_spans_have_their_outcomes() -> None:
    process, profile = ProcessSpans(), known(1000)
    now = 2000 * MS
    assert outcome(process, profile, span(1, 200, 100), now) is Outcome.INVERTED
    assert outcome(process, profile, span(1, 100, 2001), now) is Outcome.FUTURE
    assert outcome(process, profile, span(1, 3000, 4000), now) is Outcome.FUTURE
    assert outcome(process, profile, span(1, 100, 200), now) is Outcome.JOINED
    assert outcome(process, profile, span(1, 300, 400), now) is Outcome.DUPLICATE
    assert outcome(process, profile, span(2, 500, 500), now) is Outcome.JOINED
    assert outcome(process, profile, span(3, -500, 50), now) is Outcome.PARTIAL
    assert outcome(process, profile, span(4, 900, 1100), now) is Outcome.PARTIAL
    assert outcome(process, profile, span(5, -500, -100), now) is Outcome.NO_ENERGY
    assert outcome(process, profile, span(6, 1500, 1600), now) is Outcome.NO_ENERGY
    assert outcome(ProcessSpans(), EnergyProfile(), span(7, 1, 2), now) is Outcome.NO_ENERGY
    start = 900 - MAX_DURATION / MS - 1  # as in vllm-project/vllm#46193, where it is in 1970
    assert outcome(process, profile, span(8, start, 900), now) is Outcome.INVERTED
    assert outcome(process, profile, span(9, start, 3000), now) is Outcome.FUTURE
    assert outcome(process, profile, span(10, 600, 700), now) is Outcome.JOINED
    assert len(process.settle([], profile, now)) == 0


def test_duplicates_within_a_batch_are_detected() -> None:
    results = ProcessSpans().settle([span(1, 0, 100), span(1, 0, 100)], known(), NEVER)
    assert [r.outcome for r in results] == [Outcome.JOINED, Outcome.DUPLICATE]
    assert milliseconds(results[0]) == 100


def test_unknown_type_is_absent_from_a_span() -> None:
    profile = known(1000, (CPU,))
    profile.add(GPU, GPU, Interval(GPU, Instant(SECOND, 0), Instant(2 * SECOND, 0), 0), 500, 0)
    extend(profile, 1000, 2000, (CPU,))
    before, after = ProcessSpans().settle([span(1, 0, 100), span(2, 1100, 1200)], profile, NEVER)
    assert set(before.exclusive) == {CPU}
    assert set(after.exclusive) == {CPU, GPU}


def test_span_in_a_gap_of_another_type_is_partial_and_keeps_its_energy() -> None:
    profile = known(1000)
    extend(profile, 1000, 9000, (CPU, MEMORY))  # the GPU is lost
    extend(profile, 9000, 9500)
    inside, beyond = ProcessSpans().settle(
        [span(1, 4000, 4200), span(2, 9300, 9400)], profile, NEVER
    )
    assert inside.exclusive == {CPU: 200_000, MEMORY: 20_000}
    assert (inside.outcome, beyond.outcome) == (Outcome.PARTIAL, Outcome.JOINED)


def test_cyclic_parents_are_ignored() -> None:
    batch = [span(1, 0, 100, 2), span(2, 0, 100, 1), span(3, 0, 100, 3)]
    results = ProcessSpans().settle(batch, known(), NEVER)
    assert sum(milliseconds(r) for r in results) == pytest.approx(100, abs=0.2)
    longer = [span(i, 0, 100, i + 1) for i in range(1, 200)]
    results = ProcessSpans().settle(longer, known(), NEVER)
    assert sum(r.exclusive[CPU] for r in results) == pytest.approx(100_000, abs=200)


def test_parent_may_begin_with_its_child() -> None:
    child, parent = ProcessSpans().settle([span(2, 0, 60, 1), span(1, 0, 100)], known(), NEVER)
    assert (milliseconds(child), milliseconds(parent)) == (60, 40)


def test_parent_that_begins_after_its_child_is_ignored() -> None:
    child, parent = ProcessSpans().settle([span(2, 0, 100, 1), span(1, 50, 100)], known(), NEVER)
    assert (milliseconds(child), milliseconds(parent)) == (75, 25)


def test_child_may_end_after_its_parent() -> None:
    child, parent = ProcessSpans().settle([span(2, 50, 200, 1), span(1, 0, 100)], known(), NEVER)
    assert (milliseconds(child), milliseconds(parent)) == (150, 50)


# ------------------------------------------------------------------------------------------- late


def test_parent_after_its_children_has_the_rest_and_is_not_late() -> None:
    process, profile = ProcessSpans(), known()
    process.settle([span(2, 100, 200, 1)], profile, NEVER)
    process.settle([span(3, 180, 300, 1), span(4, 50, 120, 1)], profile, NEVER)
    (parent,) = process.settle([span(1, 0, 400)], profile, NEVER)
    assert milliseconds(parent) == 150
    assert parent.outcome is Outcome.JOINED
    assert parent.inclusive.energy[CPU] == 400_000


def test_span_of_covered_time_is_late() -> None:
    process, profile = ProcessSpans(), known()
    process.settle([span(1, 100, 200)], profile, NEVER)
    (late,) = process.settle([span(2, 150, 250)], profile, NEVER)
    assert late.outcome is Outcome.LATE
    assert milliseconds(late) == 50
    (too_late,) = process.settle([span(3, 110, 240)], profile, NEVER)
    assert too_late.outcome is Outcome.LATE
    assert milliseconds(too_late) == 0
    assert too_late.inclusive.energy[CPU] == 130_000


def test_outside_energy_is_unclaimed_and_final() -> None:
    process, profile = ProcessSpans(), known(1000)
    assert process.since is None
    assert process.outside(profile, NEVER) == dict.fromkeys(POWER, 0)
    process.settle([span(1, 100, 200), span(2, 500, 600)], profile, NEVER)
    assert process.since == 100 * MS
    assert process.outside(profile, 300 * MS)[CPU] == 100_000
    assert process.outside(profile, 300 * MS)[CPU] == 0
    assert process.outside(profile, 550 * MS)[CPU] == 200_000
    (late,) = process.settle([span(3, 300, 500)], profile, NEVER)
    assert late.outcome is Outcome.LATE
    assert process.outside(profile, NEVER)[CPU] == 400_000


def test_outside_energy_never_falls() -> None:
    profile = EnergyProfile()
    for i, energy in enumerate((7, 1047, 1, 3)):
        edges = Instant(i * 10, 0), Instant((i + 1) * 10, 0)
        profile.add(CPU, CPU, Interval(CPU, *edges, Microjoules(0)), energy, 0)
    for at in range(1, 40):
        process = ProcessSpans()
        process.settle([span(1, at / MS, 40 / MS)], profile, NEVER)
        outside = process.outside(profile, NEVER)[CPU]
        process.open(started(2, 0))
        again = process.outside(profile, NEVER)[CPU]
        assert again >= 0
        process.expire(NEVER, NEVER)
        rest = process.outside(profile, NEVER)[CPU]
        alone = ProcessSpans().settle([span(1, at / MS, 40 / MS)], profile, NEVER)[0]
        assert outside + again + rest + alone.exclusive[CPU] == 7 + 1047 + 1 + 3


def test_displaced_span_is_the_one_that_started_last() -> None:
    process = ProcessSpans()
    for ident in (1, 2):
        process.open(started(ident, ident))
    process.displace()
    assert [process.awaits(span(ident, 0, 1).id) for ident in (1, 2)] == [True, False]


def test_earlier_span_extends_the_accounted_time() -> None:
    process, profile = ProcessSpans(), known(1000)
    process.settle([span(1, 500, 600)], profile, NEVER)
    process.settle([span(2, 100, 200)], profile, NEVER)
    assert process.outside(profile, 600 * MS)[CPU] == 300_000


# -------------------------------------------------------------------------------- announced spans


def test_announced_span_shares_from_its_start() -> None:
    process, profile = ProcessSpans(), known(1000)
    process.open(started(1, 0))
    process.open(started(2, 100))
    process.close(ended(2, 200))
    (short,) = process.settle([span(2, 100, 200)], profile, NEVER)
    assert milliseconds(short) == 50
    assert process.announced == 1
    process.close(ended(1, 300))
    (long,) = process.settle([span(1, 0, 300)], profile, NEVER)
    assert milliseconds(long) == 250
    assert long.outcome is Outcome.JOINED
    assert not process.announced


def test_announced_parent_has_no_energy_during_its_child() -> None:
    process, profile = ProcessSpans(), known(1000)
    process.open(started(1, 0, cpu=0))
    process.open(started(2, 100, 1, cpu=10))
    process.close(ended(2, 200, cpu=100))
    (child,) = process.settle([span(2, 100, 200, 1)], profile, NEVER)
    process.close(ended(1, 300, cpu=110))
    (parent,) = process.settle([span(1, 0, 300)], profile, NEVER)
    assert (milliseconds(child), milliseconds(parent)) == (100, 200)


def test_announced_spans_are_weighted_by_their_cpu_time() -> None:
    process, profile = ProcessSpans(), known(1000)
    for ident, cpu in ((1, 75), (2, 25)):
        process.open(started(ident, 0, thread=ident, cpu=5))
        process.close(ended(ident, 100, thread=ident, cpu=5 + cpu))
    process.open(started(3, 0, thread=3, cpu=0))
    process.close(ended(3, 0, thread=4, cpu=7))
    process.settle([span(9, 0, 1)], known(), NEVER)
    one, other = process.settle([span(1, 0, 100), span(2, 0, 100)], profile, NEVER)
    assert milliseconds(one) / milliseconds(other) == pytest.approx(3, rel=0.05)
    assert milliseconds(one, GPU) == milliseconds(other, GPU)


def test_announced_spans_are_weighted_by_attribute_after_receipt() -> None:
    process, profile = ProcessSpans(), known(1000)
    for ident in (1, 2):
        process.open(started(ident, 0))
        process.close(ended(ident, 100))
    batch = [span(1, 0, 100, weight=3), span(2, 0, 100, weight=1)]
    assert [milliseconds(r) for r in process.settle(batch, profile, NEVER)] == [75, 25]
    plain = ProcessSpans()
    plain.settle([span(1, 0, 100, weight=3)], profile, NEVER)
    later = plain.settle([span(2, 200, 300), span(3, 200, 300)], profile, NEVER)
    assert [milliseconds(r) for r in later] == [50, 50]


def test_announced_spans_can_have_equal_weights() -> None:
    process, profile = ProcessSpans(by_cpu=False), known(1000)
    for ident, cpu in ((1, 99), (2, 1)):
        process.open(started(ident, 0, thread=ident))
        process.close(ended(ident, 100, thread=ident, cpu=cpu))
    batch = [span(1, 0, 100), span(2, 0, 100)]
    assert [milliseconds(r) for r in process.settle(batch, profile, NEVER)] == [50, 50]


def test_unannounced_spans_share_with_announced_ones() -> None:
    process, profile = ProcessSpans(), known(1000)
    process.open(started(1, 100))
    process.close(ended(1, 300))
    batch = [span(1, 100, 300), span(2, 0, 200), span(3, 150, 200, 1)]
    told, plain, child = process.settle(batch, profile, NEVER)
    assert milliseconds(plain) == 100 + 25 + 25
    assert milliseconds(told) == 25 + 100
    assert milliseconds(child) == 25


def test_late_announcement_shares_the_rest() -> None:
    process, profile = ProcessSpans(), known(1000)
    process.open(started(1, 0))
    process.close(ended(1, 200))
    process.settle([span(1, 0, 200), span(2, 250, 300)], profile, NEVER)
    process.open(started(3, 150))
    process.close(ended(3, 400))
    (late,) = process.settle([span(3, 150, 400)], profile, NEVER)
    assert late.outcome is Outcome.LATE
    assert milliseconds(late) == 50 + 100


def test_end_without_announcement_is_that_of_the_received_span() -> None:
    process, profile = ProcessSpans(), known(1000)
    process.open(started(1, 100))
    (result,) = process.settle([span(1, 100, 250)], profile, NEVER)
    assert milliseconds(result) == 150
    assert not process.close(ended(1, 300))


def test_announced_span_beyond_the_watermark_is_partial() -> None:
    process, profile = ProcessSpans(), known(1000)
    process.open(started(1, 900))
    process.open(started(2, 1500))
    process.close(ended(1, 1200))
    partial, nothing = process.settle([span(1, 900, 1200), span(2, 1500, 1600)], profile, NEVER)
    assert partial.outcome is Outcome.PARTIAL
    assert milliseconds(partial) == 100
    assert nothing.outcome is Outcome.NO_ENERGY
    extend(profile, 1000, 2000)
    (other,) = process.settle([span(3, 1100, 1300)], profile, NEVER)
    assert milliseconds(other) == 200


@pytest.mark.parametrize("announces", [False, True])
def test_results_without_inclusive_energies_are_otherwise_equal(announces: bool) -> None:
    whole, brief, profile = ProcessSpans(), ProcessSpans(), known(1000, [CPU, MEMORY])
    extend(profile, 1000, 1500)  # the GPU is reported from here on
    if announces:
        assert whole.open(started(1, 100)) == brief.open(started(1, 100)) is True
    for batch in (
        [span(2, 200, 300, 1), span(1, 100, 500)],  # before there was a GPU
        [span(3, 900, 1100), span(4, 250, 310), span(5, 1400, 1600), span(6, 1700, 1800)],
        [span(7, 610, 610), *(span(i, 500 + 15 * i, 540 + 15 * i) for i in (8, 9, 12))],
        [span(16, 1200, 1300)],
    ):
        full = whole.settle(batch, profile, NEVER)
        bare = brief.settle(batch, profile, NEVER, inclusive=False)
        assert [(*one[:2], one.outcome, one.inclusive.covered) for one in bare] == [
            (*one[:2], one.outcome, one.inclusive.covered) for one in full
        ]
        assert not any(one.inclusive.energy for one in bare)
    assert {one.outcome for one in full} == {Outcome.JOINED}


def test_refused_announcement_is_joined_as_a_plain_span() -> None:
    process, profile = ProcessSpans(announced=1), known(1000)
    assert process.open(started(1, 100))
    assert not process.open(started(1, 100))
    assert not process.open(started(2, 100))
    assert process.close(ended(1, 200))
    assert not process.close(ended(1, 250))
    assert not process.close(ended(7, 250))
    results = process.settle([span(1, 100, 200), span(2, 100, 200)], profile, NEVER)
    assert [milliseconds(r) for r in results] == [50, 50]
    assert not process.open(started(1, 300))


def test_cyclic_or_younger_announced_parents_are_ignored() -> None:
    process, profile = ProcessSpans(), known(1000)
    for one, other in ((1, 2), (2, 1), (3, 3)):
        process.open(started(one, 0, other))
    process.open(started(4, 50, 5))
    process.open(started(5, 100))
    for ident in range(10, 110):
        process.open(started(ident, 0, ident + 1))
    for ident in (1, 2, 3, 4, 5, *range(10, 110)):
        process.close(ended(ident, 100 if ident != 5 else 200))
    batch = [span(i, 0, 100) for i in (1, 2, 3, 4, *range(10, 110))] + [span(5, 100, 200)]
    results = process.settle(batch, profile, NEVER)
    assert sum(r.exclusive[CPU] for r in results) == pytest.approx(200_000, abs=200)
    assert milliseconds(results[-1]) == 100


def test_energy_of_an_abandoned_span_becomes_outside_energy() -> None:
    process, profile = ProcessSpans(), known(1000)
    process.open(started(1, 0))
    process.open(started(2, 50, 1))
    process.open(started(3, 60, 1))
    process.open(started(4, 5000))
    process.settle([span(9, 0, 100)], profile, NEVER)
    assert process.outside(profile, 500 * MS)[CPU] == 0
    assert process.expire(40 * MS, 0) == 1
    assert process.expire(55 * MS, 0) == 1
    extend(profile, 1000, 2000)
    process.close(ended(3, 600))
    assert process.expire(0, 600 * MS) == 0
    assert process.expire(0, 601 * MS) == 1
    assert process.expire(NEVER, NEVER) == 1
    process.open(started(5, 700))
    assert process.expire(NEVER, NEVER) == 1
    (last,) = process.settle([span(6, 900, 1000)], profile, NEVER)
    assert milliseconds(last) == 100
    outside = process.outside(profile, NEVER)[CPU]
    given = profile.between(0, 2 * SECOND).energy[CPU] - outside
    assert given == pytest.approx(25_000 + 5_000 + 40_000 / 3 + 100_000, abs=5)


def test_abandoned_child_leaves_later_time_to_its_parent() -> None:
    process, profile = ProcessSpans(), known(1000)
    process.open(started(1, 0))
    process.open(started(2, 50, 1))
    process.open(started(3, 60, 1))
    process.close(ended(2, 200))
    process.settle([span(9, 0, 100)], profile, NEVER)
    process.close(ended(3, 90))  # announced late: time had passed it
    assert process.expire(0, 300 * MS) == 2
    (parent,) = process.settle([span(1, 0, 200)], profile, NEVER)
    assert milliseconds(parent) == 25 + 100
    process.settle([span(8, 210, 220, weight=7)], profile, NEVER)
    (unweighed,) = process.settle([span(10, 230, 240)], profile, NEVER)
    assert milliseconds(unweighed) == 10
    process.open(started(4, 300))
    process.close(ended(4, 310))
    process.settle([span(11, 300, 400)], profile, NEVER)
    assert process.expire(0, 311 * MS) == 1
    given = 25_000 + 5_000 + 40_000 / 3 + 125_000 + 10_000 + 10_000 + 95_000
    assert process.outside(profile, 400 * MS)[CPU] == pytest.approx(400_000 - given, abs=5)


def test_announcements_use_bounded_memory() -> None:
    process, profile = ProcessSpans(announced=200), known(10_000)
    alive = started(1, 0)
    process.open(alive)
    for i in range(2, 6000):
        process.open(started(i, i, 1))
        process.close(ended(i, i + 0.5 if i % 2 else NEVER // MS))
        process.settle([span(i, i, i + 0.5)], profile, NEVER)
    assert process.announced == 1
    assert len(process._announced.division.gained) < 2000
    assert len(process._announced._events) < 2000
    process.close(ended(1, 6000))
    (result,) = process.settle([span(1, 0, 6000)], profile, NEVER)
    assert result.exclusive[GPU] > 0
    outside = process.outside(profile, NEVER)
    assert all(energy >= 0 for energy in outside.values())


def test_announcements_beyond_the_watermark_wait() -> None:
    process, profile = ProcessSpans(), known(1000)
    process.open(started(1, 5000))
    (plain,) = process.settle([span(2, 100, 200)], profile, NEVER)
    assert milliseconds(plain) == 100
    assert process.outside(profile, 500 * MS)[CPU] == 300_000


# ------------------------------------------------------------------------------- old, thinned time


def spend(profile: EnergyProfile, energies: Sequence[int], first: int, last: int) -> None:
    """Add intervals of 100 ms with these energies."""
    for i in range(first, last):
        edges = Instant(i * 100 * MS, 0), Instant((i + 1) * 100 * MS, 0)
        profile.add(CPU, CPU, Interval(CPU, *edges, Microjoules(0)), energies[i], 0)


def test_late_spans_of_thinned_time_share_the_rest() -> None:
    profile, process = EnergyProfile(64), ProcessSpans()
    energies = [(i * 7919) % 100_000 for i in range(400)]

    spend(profile, energies, 0, 20)
    results = [
        *process.settle([span(i, i * 90, i * 90 + 45) for i in range(1, 20)], profile, NEVER)
    ]
    process.open(started(500, 1_950))
    results += process.settle([span(501, 1_960, 1_970)], profile, NEVER)
    spend(profile, energies, 20, 400)
    assert profile.thinned > 2 * SECOND
    assert process.outside(profile, 333 * MS)[CPU] >= 0
    lone = ProcessSpans()
    lone.settle([span(1, 100, 200)], profile, NEVER)
    assert 0 <= lone.outside(profile, 333 * MS)[CPU] <= sum(energies[:8])
    plain = ProcessSpans()
    plain.settle([span(1, 100, 200), span(2, 1900, 1950)], profile, NEVER)
    early = plain.outside(profile, 333 * MS)[CPU] + plain.outside(profile, NEVER)[CPU]
    assert 0 <= early <= sum(energies)
    results += process.settle(
        [span(100 + i, i * 300, i * 300 + 200) for i in range(20)], profile, NEVER
    )
    process.close(ended(500, 30_000))
    results += process.settle([span(500, 1_950, 30_000), span(502, 0, 40_000)], profile, NEVER)
    assert all(r.exclusive[CPU] >= 0 for r in results)
    spent = sum(r.exclusive[CPU] for r in results)
    assert spent <= sum(energies)
    first = process.outside(profile, 20 * SECOND)[CPU]
    assert first + process.outside(profile, NEVER)[CPU] + spent <= sum(energies)


def test_thinned_time_is_divided_once() -> None:
    energies = [2_000_000 * (i % 2) for i in range(60)]

    for early in ([(100, 200)], [(0, 100), (300, 400)], [(150, 250), (330, 470)]):
        for late in ([(200, 300)], [(110, 120), (210, 320)], [(0, 500)], [(260, 280), (500, 600)]):
            profile, process = EnergyProfile(16), ProcessSpans()
            spend(profile, energies, 0, 5)
            batch = [span(i, *times) for i, times in enumerate(early, 1)]
            results = [*process.settle(batch, profile, NEVER)]
            spend(profile, energies, 5, 60)
            assert profile.thinned > 600 * MS
            for i, times in enumerate(late, 10):
                results += process.settle([span(i, *times)], profile, NEVER)
            spent = sum(result.exclusive[CPU] for result in results)
            for until in (290 * MS, NEVER):
                outside = process.outside(profile, until)[CPU]
                assert outside >= 0
                spent += outside
            assert process.since == min(start for start, _ in early + late) * MS
            before = sum(energies[: process.since // (100 * MS)])  # no early span begins inside
            if process.since % (200 * MS) == 0:
                assert spent == sum(energies) - before
            assert spent <= sum(energies)


# ---------------------------------------------------------------------------------------- keeping


def test_adjacent_covered_stretches_merge_and_are_limited() -> None:
    covered = CoveredTime(3)
    for start, end in ((10, 20), (30, 40), (50, 60)):
        covered.add(CoveredStretch(start, end, start, end))
    assert [s[:2] for s in covered] == [(10, 20), (30, 40), (50, 60)]
    covered.add(CoveredStretch(62, 70, 62, 70))
    assert [s[:2] for s in covered] == [(10, 20), (30, 40), (50, 70)]
    covered.add(CoveredStretch(15, 35, 15, 35))
    assert list(covered) == [CoveredStretch(10, 40, 10, 40), CoveredStretch(50, 70, 50, 70)]
    covered.add(CoveredStretch(0, 100, 0, 100))
    assert list(covered) == [CoveredStretch(0, 100, 0, 100)]
    assert covered.inside(100, 120) == []
    assert covered.inside(99, 120) == [CoveredStretch(0, 100, 0, 100)]


class Time(int):
    """A time; the class counts the computed differences."""

    differences = 0

    def __sub__(self, other: int) -> int:
        Time.differences += 1
        return int(self) - other


@pytest.mark.parametrize("limit", [256, 1024])
def test_covered_time_beyond_the_limit_costs_few_steps_for_each_stretch(limit: int) -> None:
    covered, Time.differences = CoveredTime(limit), 0
    for start in range(0, 80 * limit, 20):
        covered.add(CoveredStretch(Time(start), Time(start + 1 + start // 20 % 9), start, start))
        assert len([*covered]) <= limit
    assert Time.differences < 20 * 4 * limit
    assert len([*covered]) > limit // 2


class Lock:
    """The profile grows as soon as it is released for the second time."""

    def __init__(self, process: ProcessSpans, profile: EnergyProfile) -> None:
        self._process, self._profile = process, profile
        self.divided: list[bool] = []  # at each release

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.divided.append(self._process.since is not None)
        if len(self.divided) == 2:
            extend(self._profile, 2000, 9000)


@pytest.mark.parametrize("announces", [False, True])
@pytest.mark.parametrize("count", [MAX_LOCKED, MAX_LOCKED + 1], ids=["few", "many"])
def test_many_spans_are_divided_while_the_profile_grows(count: int, announces: bool) -> None:
    batch = [span(i, i, i + 1500, i // 2) for i in range(1, count + 1)]
    found = []
    for locked in (False, True):
        process, profile = ProcessSpans(), known(2000)
        if announces:
            process.open(started(1, 1))
        lock = Lock(process, profile)
        results = process.settle(batch, profile, NEVER, lock=lock if locked else nullcontext())
        found.append(list(results))
    assert found[0] == found[1]
    assert lock.divided == [False, count <= MAX_LOCKED]


def test_cache_drops_the_oldest_keys() -> None:
    recent: GenerationalCache[int] = GenerationalCache(4)
    for i in range(5):
        recent[bytes([i])] = i
    assert recent.get(b"\x04") == 4
    assert recent.get(b"\x03") == 3
    assert b"\x00" not in recent
    assert recent.isdisjoint([b"\x00"])
    assert not recent.isdisjoint([b"\x02"])
    recent.bound(2)
    assert len(recent) <= 2


def test_cache_drops_keys_by_age() -> None:
    recent: GenerationalCache[int] = GenerationalCache(1000)
    recent.age(0, 100)
    recent[b"early"] = 1
    recent.age(99, 100)
    recent[b"late"] = 2
    recent.age(100, 100)
    recent.age(199, 100)
    assert recent.get(b"late") == 2
    assert recent.get(b"early") == 1
    recent.age(200, 100)
    assert len(recent) == 0


def test_full_generation_restarts_the_age() -> None:
    recent: GenerationalCache[int] = GenerationalCache(4)
    recent.age(0, 100)
    for i in range(2):
        recent[bytes([i])] = i  # full: a generation starts at 50, without an announcement
    recent.age(60, 100)
    recent.age(120, 100)
    assert len(recent) == 2
    recent.age(160, 100)
    recent.age(260, 100)
    assert len(recent) == 0


def test_repeated_span_with_a_forgotten_id_has_no_energy() -> None:
    process, profile = ProcessSpans(), known()
    process.age(0, 100)
    assert outcome(process, profile, span(1, 100, 200), NEVER) is Outcome.JOINED
    process.age(99, 100)
    assert outcome(process, profile, span(1, 100, 200), NEVER) is Outcome.DUPLICATE
    process.age(100, 100)
    process.age(200, 100)
    assert process.remembered == 0
    (again,) = process.settle([span(1, 100, 200)], profile, NEVER)
    assert again.outcome is Outcome.LATE
    assert not any(again.exclusive.values())


def test_retained_keys_outlive_their_generation() -> None:
    recent: GenerationalCache[int] = GenerationalCache(1000, keep=lambda key, value: key == b"open")
    recent[b"open"] = recent[b"closed"] = 1
    for now in range(50):
        recent.age(now * 100, 100)
    assert recent.get(b"open") == 1
    assert recent.get(b"closed") is None


def test_retained_keys_use_no_slots_of_others() -> None:
    asked: list[bytes] = []

    def keep(key: bytes, value: int) -> bool:
        asked.append(key)
        return True

    recent: GenerationalCache[int] = GenerationalCache(20, keep)
    for number in range(100):
        recent[bytes([number])] = number
    assert len(recent) == 100
    assert len(asked) < 1000  # and not the square of the number of keys
