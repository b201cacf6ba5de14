"""Names, times and processes of spans are their sender's choice: what is kept of them is bounded.

The first argument of each case is the number of the first of so many spans or processes, all of
which differ.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import pytest
from testbed.fake_kernel import FakeKernel

from wattspan.inference.traces import PrefillStages
from wattspan.ingest.identity_verification import IdentityResolver
from wattspan.model import SECOND, Consumer, Principal
from wattspan.service.span_announcers import MAX_ANNOUNCERS, SpanAnnouncers
from wattspan.spans.values import ReportedInstruction, Span, SpanColumns
from wattspan.testing import ManualClock
from wattspan.tuning.job_work import RankInstructions
from wattspan.tuning.work_units import ReceivedSpans, UnitSearch

OWNER = Principal(1000)
Flood = Callable[[int, int], None]


def ident(number: int) -> bytes:
    return number.to_bytes(8)


def services() -> Flood:
    search = UnitSearch()

    def flood(first: int, count: int) -> None:
        for number in range(first, first + count):
            spans = SpanColumns.of([Span(bytes(16), ident(number), b"", "", "step", 0, 1)])
            search.add(ReceivedSpans(Consumer(1, 1), f"service {number}", spans), (), SECOND)

    return flood


def ended_ranks() -> Flood:
    instructions = RankInstructions()

    def flood(first: int, count: int) -> None:
        for number in range(first, first + count):
            one = Span(bytes(16), ident(number), b"", "", "step", 0, 1)
            one = one._replace(instruction=ReportedInstruction(0, 0, "forward"))
            sent = ReceivedSpans(Consumer(number, 1), "", SpanColumns.of([one]))
            instructions.add(sent, 0, SECOND)
            instructions.keep([Consumer(number, 1)])
        instructions.drain()

    return flood


def announcements() -> Flood:
    resolver = IdentityResolver(ManualClock(), FakeKernel(ManualClock()))
    announcers = SpanAnnouncers(1024, resolver, lambda *_: False)
    processes = [Consumer(pid, 1) for pid in range(MAX_ANNOUNCERS)]

    def flood(first: int, count: int) -> None:
        for number in range(first, first + count):
            for process in processes:
                announcers.add(ident(number), OWNER, process)

    return flood


def stages() -> Flood:
    known = PrefillStages()

    def flood(first: int, count: int) -> None:
        for number in range(first, first + count):
            stage = Span(ident(number), bytes(8), b"", "", "prefill_forward", 0, 2**64)
            each = [stage._replace(start=10**18 + at) for at in (*range(64), 2**64)]
            known.add(OWNER, SpanColumns.of(each))

    return flood


@pytest.mark.parametrize(
    ("kind", "warm", "count", "most"),
    [
        (services, 300, 500, 60_000),
        (ended_ranks, 10, 500, 100_000),
        (announcements, 300, 150, 60_000),
        (stages, 1, 100, 100_000),
    ],
)
def test_flood_of_spans_takes_bounded_memory(
    kind: Callable[[], Flood], warm: int, count: int, most: int
) -> None:
    flood = kind()
    tracemalloc.start()  # before the tables are full: what is replaced does not grow
    used = []
    for first, number in ((1, warm), (1 + warm, count)):
        flood(first, number)
        gc.collect()
        used.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert used[1] - used[0] < most
