"""Units of work from received spans."""

from __future__ import annotations

from wattspan.config import TunedJobSettings
from wattspan.model import SECOND, Consumer
from wattspan.spans.values import Span, SpanColumns
from wattspan.tuning.job_work import JobUnits
from wattspan.tuning.work_units import ReceivedSpans

TRACE, STEP, FORWARD = b"t" * 16, b"s" * 8, b"f" * 8
FIRST, SECOND_RANK = Consumer(7, 1), Consumer(8, 1)


def received(consumer: Consumer, *spans: Span) -> ReceivedSpans:
    return ReceivedSpans(consumer, "trainer", SpanColumns.of(spans))


def step(start: int, end: int) -> Span:
    return Span(TRACE, STEP, b"", "trainer", "train_step", start, end)


def forward(start: int, end: int) -> Span:
    return Span(TRACE, FORWARD, STEP, "trainer", "forward", start, end)


def test_repeated_unit_of_a_process_counts_once() -> None:
    units = JobUnits("train_step", TunedJobSettings(span="train_step"))
    for _ in range(2):
        units.add(received(FIRST, step(1, 5)), 0, SECOND)
    assert len(units.drain()) == 1


def test_units_of_ranks_with_equal_ids_all_count() -> None:
    units = JobUnits("train_step", TunedJobSettings(span="train_step"))
    units.add(received(FIRST, step(1, 5)), 0, SECOND)
    units.add(received(SECOND_RANK, step(2, 6)), 1, SECOND)
    assert [(one.start, one.rank) for one in units.drain()] == [(1, 0), (2, 1)]


def test_units_of_a_second_run_with_the_ids_of_the_first_count() -> None:
    units = JobUnits("train_step", TunedJobSettings(span="train_step"))
    for number, at in enumerate((0, SECOND)):
        units.add(received(Consumer(7, number), step(at + 1, at + 5)), 0, 2 * SECOND)
    assert len(units.drain()) == 2


def test_compute_time_of_ranks_with_equal_ids_stays_apart() -> None:
    units = JobUnits("train_step", TunedJobSettings(span="train_step", compute="forward"))
    units.add(received(FIRST, forward(1, 4)), 0, SECOND)
    units.add(received(SECOND_RANK, forward(1, 2)), 1, SECOND)
    units.add(received(FIRST, step(1, 5)), 0, SECOND)
    units.add(received(SECOND_RANK, step(1, 5)), 1, SECOND)
    assert [one.compute for one in units.drain()] == [3, 1]
