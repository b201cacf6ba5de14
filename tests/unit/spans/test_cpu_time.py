"""CPU time of announced spans."""

from __future__ import annotations

import pytest

from wattspan.spans.energy_division import ProcessSpans
from wattspan.spans.values import SpanEnd, SpanStart

SPAN = bytes(range(8))


@pytest.mark.parametrize(
    ("began", "ended", "thread", "cpu"),
    [
        (7_000, 9_500, 1, 2_500),
        (7_000, 9_500, 2, None),  # ended on another thread
        (0, 0, 1, None),  # its thread was alone
        (0, 9_500, 1, None),  # and then was not
        (7_000, 0, 1, None),  # the channel was reopened
        (7_000, 6_900, 1, 0),  # taken to have run, and had not
    ],
)
def test_cpu_time_of_a_span_is_known_if_both_ends_have_it(
    began: int, ended: int, thread: int, cpu: int | None
) -> None:
    process = ProcessSpans()
    process.open(SpanStart(SPAN, b"", 1_000, 1, began))
    process.close(SpanEnd(SPAN, 5_000, thread, ended))
    assert process._announced.records[SPAN].cpu == cpu
