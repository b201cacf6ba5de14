"""CPU cost per span of dividing a process's energy among its spans.

Batches of 512 spans of a server: requests of depth three, about ten at once, with CPU, memory and
GPU energy, by column as the decoder makes them. CPU time of one thread. Only forwarded spans need
inclusive energies.

    .venv/bin/python -m benchmarks.join
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from testbed.machine import describe

from wattspan.model import HwType, Instant, Interval, Microjoules
from wattspan.spans.energy_division import ProcessSpans
from wattspan.spans.profiles import EnergyProfile
from wattspan.spans.values import Span, SpanColumns, SpanEnd, SpanStart

BATCH = 512
GOAL = 3.0  # microseconds
MS = 1_000_000
KINDS = {HwType.CPU: 900_000, HwType.MEMORY: 100_000, HwType.GPU: 10_000_000}  # uJ in 100 ms
NEVER = 1 << 62
AT_ONCE = 10


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--batches", type=int, default=60)
    chosen = options.parse_args()
    print(describe())
    print(
        f"\nCPU microseconds a span, batches of {BATCH}, 3 kinds of energy (goal: {GOAL:g}); "
        "median and best batch\n"
    )
    print("| spans a second | weighed | median | best | with inclusive, median |")
    print("|---|---|---:|---:|---:|")
    for rate in (100_000, 1_000):
        batches = list(requests(rate, min(chosen.batches, rate * 8 // BATCH)))
        profile = known(10 + batches[-1][-1].end // MS)
        columns = [SpanColumns.of(batch) for batch in batches]
        for weighed in ("alike", "CPU time"):
            found = []
            for inclusive in (False, True):
                process = ProcessSpans()
                if weighed != "alike":
                    announce(process, batches)
                settle = partial(process.settle, profile=profile, now=NEVER, inclusive=inclusive)
                found.append(costs(columns, settle))
            medians = [f"{statistics.median(cost):.1f}" for cost in found]
            print(f"| {rate:,} | {weighed} | {medians[0]} | {min(found[0]):.1f} | {medians[1]} |")


def costs(
    batches: Sequence[Sequence[Span]], join: Callable[[Sequence[Span]], object]
) -> list[float]:
    """The CPU microseconds a span of each batch."""
    found = []
    for batch in batches:
        began = time.thread_time_ns()
        join(batch)
        found.append((time.thread_time_ns() - began) / len(batch) / 1000)
    return found


def known(until: int) -> EnergyProfile:
    """A process's energy up to ``until`` milliseconds, its CPU clock sampled every 10 ms."""
    profile = EnergyProfile()
    for kind in KINDS:
        profile.expect(kind, kind, 0)
    for at in range(0, until + 110, 10):
        profile.sample(at * MS, at * MS * 7 // 10)
    for begin in range(0, until, 100):
        edges = Instant(begin * MS, 0), Instant((begin + 100) * MS, 0)
        for kind, energy in KINDS.items():
            interval = Interval(kind, *edges, Microjoules(energy))
            profile.add(kind, kind, interval, energy, energy // 100)
    return profile


def requests(rate: int, count: int) -> Iterator[list[Span]]:
    """Batches in the order of ends, as a processor exports them."""
    draw = random.Random(1)  # the same each time
    spans: list[Span] = []
    each = 6  # spans a request, about
    apart = 1e9 * each / rate
    at = 500 * MS
    while len(spans) < count * BATCH:
        at += int(draw.expovariate(1 / apart))
        length = int(apart * AT_ONCE * draw.uniform(0.5, 1.5))
        spans += request(at, length, draw)
    spans.sort(key=lambda span: span.end)
    for i in range(count):
        yield spans[i * BATCH : (i + 1) * BATCH]


def request(at: int, length: int, draw: random.Random) -> Iterator[Span]:
    """A server's span, two of its own below, and one or two below each."""
    trace = draw.randrange(1, AT_ONCE + 1).to_bytes(16, "big")  # also the number of the thread

    def span(name: str, parent: bytes, start: int, end: int) -> Span:
        return Span(trace, draw.randbytes(8), parent, "shop", name, start, end)

    root = span("GET /", draw.randbytes(8), at, at + length)
    yield root
    for half in range(2):
        begin = at + length // 10 + half * length * 45 // 100
        handler = span("handler", root.id, begin, begin + length * 4 // 10)
        yield handler
        middle = begin + length // 5
        yield span("query", handler.id, begin + length // 20, middle)
        if half:
            yield span("render", handler.id, middle, middle + length // 10)


def announce(process: ProcessSpans, batches: Sequence[Sequence[Span]]) -> None:
    """Tell of all starts and ends, as an instrumented application would have by then."""
    for batch in batches:
        for each in batch:
            thread, used = each.trace[-1], (each.end - each.start) // 3
            process.open(SpanStart(each.id, each.parent, each.start, thread, 1))
            process.close(SpanEnd(each.id, each.end, thread, 1 + used))


if __name__ == "__main__":
    main()
