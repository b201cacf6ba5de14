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
    announcers = SpanAnnouncers(
        1024, IdentityResolver(ManualClock(), FakeKernel(ManualClock())), lambda *_: False
    )

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
            known.add(
                OWNER,
                SpanColumns.of(
                    [
                        Span(
                            ident(number), bytes(8), b"", "", "prefill_forward", 10**18 + at, 2**64
                        )
                        for at in (*range(64), 2**64)
                    ]
                ),
            )

    return flood


@pytest.mark.parametrize(
    ("kind", "warm", "count", "most"),
    [
        (services, 600, 2000, 300_000),
        (ended_ranks, 10, 500, 100_000),
        (announcements, 300, 300, 200_000),
        (stages, 1, 300, 300_000),
    ],
)
def test_flood_of_spans_takes_bounded_memory(
    kind: Callable[[], Flood], warm: int, count: int, most: int
) -> None:
    flood = kind()
    flood(1, warm)
    gc.collect()
    tracemalloc.start()
    flood(1 + warm, count)
    gc.collect()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < most
