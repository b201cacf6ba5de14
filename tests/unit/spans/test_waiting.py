"""The delay of a sender's spans, and the shares of spans that wait."""

from __future__ import annotations

import pytest

from wattspan.model import MILLISECOND, SECOND, HwType, Instant, Interval, Microjoules
from wattspan.spans.energy_division import ProcessSpans
from wattspan.spans.profiles import EnergyProfile
from wattspan.spans.values import MAX_DURATION, Outcome, Span, SpanColumns
from wattspan.spans.waiting_spans import (
    CLOCK_ERROR,
    MAX_AWAITED_PARENTS,
    MAX_HELD_DURATION,
    MAX_HOLD,
    ReceiptDelay,
    SpanOverlaps,
    WaitingShares,
)

CPU = HwType.CPU
NEVER = 2**70


def learned(*delays: float, duration: float = 0.0, repeats: int = 1) -> int:
    """The hold after batches of one span each, received so many seconds after their end."""
    delay = ReceiptDelay()
    for number in range(repeats):
        for each in delays:
            end = (100 + number) * SECOND
            start = end - round(duration * SECOND)
            delay.add([start], [end], end + round(each * SECOND))
    return delay.hold


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.03, 0.5, 1.0, 4.0, 5.5])
def test_hold_is_the_delay_of_the_sender(delay: float) -> None:
    assert delay * SECOND < learned(delay) <= delay * 1.125 * SECOND + 2 * MILLISECOND


def test_hold_includes_most_of_the_durations_of_short_spans() -> None:
    assert learned(0.1, duration=0.3) == learned(0.4)
    assert learned(0.1, duration=60) == learned(0.1 + MAX_HELD_DURATION / SECOND)


def test_hold_is_limited() -> None:
    assert learned(MAX_HOLD / SECOND) == MAX_HOLD


@pytest.mark.parametrize("delay", [-1.0, MAX_HOLD / SECOND + 0.1, 3600.0])
def test_delays_beyond_the_limit_are_not_waited_for(delay: float) -> None:
    assert learned(delay) == 0


def test_one_slow_span_in_a_thousand_is_not_waited_for() -> None:
    assert learned(3.0, *[0.01] * 999) == learned(0.01)
    assert learned(3.0, *[0.01] * 99) == learned(3.0)


def test_earlier_delays_fade() -> None:
    delay = ReceiptDelay()
    for seconds, batches in ((5, 100), (1, 2000)):
        for number in range(batches):
            delay.add([0] * 16, [0] * 16, seconds * SECOND)
            if number == 0:
                assert delay.hold >= 5 * SECOND
    assert delay.hold < 1.2 * SECOND


def test_first_span_of_a_large_batch_is_examined() -> None:
    delay, ends = ReceiptDelay(), [number * SECOND // 100 for number in range(512)]
    delay.add(ends, ends, ends[-1])
    assert delay.hold >= ends[-1]


# ------------------------------------------------------------------------------------ overlaps


def span(ident: int, start: int, end: int) -> Span:
    """From and to milliseconds."""
    own = ident.to_bytes(8)
    return Span(bytes(16), own, b"", "s", "n", start * MILLISECOND, end * MILLISECOND)


def child(ident: int, parent: int, start: int, end: int) -> Span:
    return span(ident, start, end)._replace(parent=parent.to_bytes(8))


def beside(*batches: list[Span]) -> list[bool]:
    """For each batch, if one of its spans was open beside others."""
    overlaps = SpanOverlaps()
    return [overlaps.add(SpanColumns.of(batch)) for batch in batches]


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ([span(1, 0, 10), span(2, 10, 20), span(3, 25, 30)], False),
        ([span(1, 0, 10), span(2, 9, 20)], True),
        ([span(1, 0, 10), span(2, 2, 8)], True),
        ([child(2, 1, 2, 8), span(1, 0, 10)], False),
        ([child(2, 1, 0, 10), span(1, 0, 10)], False),
        ([child(3, 2, 3, 4), child(2, 1, 2, 8), span(1, 0, 10)], False),
        ([child(3, 2, 3, 4), span(1, 0, 10)], True),
        ([child(2, 1, 2, 5), child(3, 1, 4, 8), span(1, 0, 10)], True),
        ([child(2, 1, 2, 12), span(1, 0, 10)], True),
        ([span(1, 0, 10), span(2, 5, 5), span(3, 8, 2)], False),
        ([], False),
    ],
    ids=[
        "in turn", "crossing", "within another", "child", "child of the same time", "grandchild",
        "grandchild of an unknown parent", "children together", "longer than its parent",
        "without time", "none",
    ],
)  # fmt: skip
def test_spans_of_a_batch_are_open_beside_others(batch: list[Span], found: bool) -> None:
    assert beside(batch) == [found]


def test_span_that_began_before_the_end_of_an_earlier_batch_is_beside_it() -> None:
    error = CLOCK_ERROR // MILLISECOND
    assert beside([span(1, 0, 10)], [span(2, 10, 20)], [span(3, 15, 25)]) == [False, False, True]
    assert beside([span(1, 0, 10)], [span(2, 10 - error, 20)]) == [False, False]


def test_span_that_ends_after_its_receipt_is_beside_no_later_one() -> None:
    overlaps = SpanOverlaps()
    for start, end in ((0, 10**9), (60, 70), (80, 90)):
        batch = SpanColumns.of([span(start + 1, start, end)])
        assert not overlaps.add(batch, (start + 20) * MILLISECOND)


def test_parents_after_their_children_are_not_beside_them() -> None:
    batches = [
        [child(4, 3, 3, 5)],
        [child(5, 3, 6, 8), child(3, 2, 2, 9)],
        [child(2, 1, 1, 10), span(1, 0, 11)],
        [span(6, 12, 13)],
    ]
    assert beside(*batches) == [False] * 4


def test_only_the_newest_parents_are_awaited() -> None:
    children = [child(1000 + n, n, n * 10, n * 10 + 5) for n in range(1, MAX_AWAITED_PARENTS + 2)]
    for parent, found in ((2, False), (1, True)):
        assert beside(children, [span(parent, 1, 2000)]) == [False, found]


# -------------------------------------------------------------------------------------- shares


def known() -> EnergyProfile:
    """A process of 1 kW, which is a microjoule a nanosecond, for a second."""
    profile = EnergyProfile()
    profile.expect(CPU, CPU, 0)
    edges = Instant(0, 0), Instant(SECOND, 0)
    profile.add(CPU, CPU, Interval(CPU, *edges, Microjoules(0)), SECOND, 0)
    return profile


def test_span_of_a_later_batch_has_its_whole_share() -> None:
    process, profile = ProcessSpans(), known()
    first, second = span(1, 100, 300), SpanColumns.of([span(2, 200, 400)])
    (early,) = process.settle([first], profile, NEVER, waiting=[second])
    (later,) = process.settle(second, profile, NEVER)
    assert early.exclusive == later.exclusive == {CPU: 150 * MILLISECOND}
    assert early.outcome is later.outcome is Outcome.JOINED
    assert later.inclusive.energy == {CPU: 200 * MILLISECOND}


def test_later_batch_without_notice_is_late() -> None:
    process, profile = ProcessSpans(), known()
    process.settle([span(1, 100, 300)], profile, NEVER)
    (later,) = process.settle([span(2, 200, 400)], profile, NEVER)
    assert (later.exclusive, later.outcome) == ({CPU: 100 * MILLISECOND}, Outcome.LATE)


def test_repeated_span_shares_once() -> None:
    process, profile = ProcessSpans(), known()
    other = SpanColumns.of([span(2, 200, 400)])
    process.settle([span(1, 100, 300)], profile, NEVER, waiting=[other, other])
    results = [*process.settle(other, profile, NEVER), *process.settle(other, profile, NEVER)]
    assert [each.outcome for each in results] == [Outcome.JOINED, Outcome.DUPLICATE]
    assert results[0].exclusive == {CPU: 150 * MILLISECOND}


def test_waiting_span_with_a_repeated_id_leaves_its_time_to_the_first() -> None:
    process, profile = ProcessSpans(), known()
    other = SpanColumns.of([span(2, 500, 600), span(2, 200, 400)])
    (only,) = process.settle([span(1, 100, 300)], profile, NEVER, waiting=[other])
    assert only.exclusive == {CPU: 200 * MILLISECOND}


def test_invalid_waiting_spans_have_no_share() -> None:
    process, profile = ProcessSpans(), known()
    long = span(4, 299 - MAX_DURATION // MILLISECOND, 300)
    invalid = SpanColumns.of([span(2, 400, 200), span(3, 200, 2000), span(1, 150, 350), long])
    (only,) = process.settle([span(1, 100, 300)], profile, SECOND, waiting=[invalid])
    assert only.exclusive == {CPU: 200 * MILLISECOND}


def test_span_beside_earlier_ones_counts_in_the_batch_of_their_parent() -> None:
    overlaps, parent = SpanOverlaps(), span(9, 0, 400)
    assert not overlaps.add(SpanColumns.of([span(1, 100, 300)._replace(parent=parent.id)]))
    assert overlaps.add(SpanColumns.of([parent, span(2, 200, 250)._replace(parent=parent.id)]))


def test_span_without_a_waiting_share_has_none_to_settle() -> None:
    assert WaitingShares().pop(b"unknown") == (0, 0)


def test_share_of_a_span_that_is_never_settled_becomes_outside_energy() -> None:
    process, profile = ProcessSpans(), known()
    lost = SpanColumns.of([span(2, 200, 400)])
    process.settle([span(1, 100, 300)], profile, NEVER, waiting=[lost])
    assert process.outside(profile, 250 * MILLISECOND) == {CPU: 0}
    assert process.outside(profile, SECOND) == {CPU: 750 * MILLISECOND}
