"""A server of language-model requests, emulated as a queue before so many slots.

Arrivals and lengths are those of real chat requests; the service times are a model's, no
measurement: so much for each prompt token and so much for each generated one.
"""

from __future__ import annotations

import csv
import gzip
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import cache
from itertools import count, takewhile
from typing import NamedTuple

from testbed.requirements import ROOT
from wattspan.tuning.decisions.blocks import Block
from wattspan.tuning.decisions.values import WorkUnit

S = 10**9
PREFILL = 100_000  # nanoseconds a prompt token
DECODE = 15_000_000  # nanoseconds a generated token


class Request(NamedTuple):
    at: int
    prompt: int
    generated: int


@cache
def trace() -> tuple[Request, ...]:
    """The requests of six minutes; see the fixtures' README for their origin."""
    path = ROOT / "tests" / "fixtures" / "azure_llm_conv.csv.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    moments = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    return tuple(
        Request(
            round((at - moments[0]).total_seconds() * S),
            int(row["ContextTokens"]),
            int(row["GeneratedTokens"]),
        )
        for at, row in zip(moments, rows, strict=True)
    )


def repeated(speed: float = 1.0) -> Iterator[Request]:
    """The trace over and over, ``speed`` times as dense, without end."""
    requests = trace()
    length = requests[-1].at + S
    for lap in count():
        for request in requests:
            yield request._replace(at=round((lap * length + request.at) / speed))


def serve(
    requests: Iterable[Request], slots: int, slowdown: Callable[[int], float]
) -> Iterator[WorkUnit]:
    """The requests as units of work, in the order of their begin; their work is tokens.

    ``slowdown`` is the factor of the service time by its start time.
    """
    free = [0] * slots
    for request in requests:
        begin = max(request.at, heapq.heappop(free))
        time = request.prompt * PREFILL + request.generated * DECODE
        end = begin + round(time * slowdown(begin))
        heapq.heappush(free, end)
        yield WorkUnit(request.at, end, request.generated)


def switched(
    cap: float, block: int, slots: int, speed: float, blocks: int
) -> tuple[list[WorkUnit], Sequence[bool]]:
    """Units under a cap that slows service ``cap`` times, in blocks of the order ABBA."""
    capped = [(False, True, True, False)[number % 4] for number in range(blocks)]

    def slowdown(at: int) -> float:
        return cap if capped[min(at // block, blocks - 1)] else 1.0

    requests = takewhile(lambda request: request.at < blocks * block, repeated(speed))
    return sorted(serve(requests, slots, slowdown), key=lambda unit: unit.end), capped


def request_block(
    start: int, end: int, arrived: int, ended: int, work: float, time: int, late: int = 0
) -> Block:
    """A block of requests: their work and their latencies in nanoseconds, of those that ended."""
    return Block(0, start, end, ended, work, time, time, 0.0, None, 0, arrived, late)


def load_sample(units: Iterable[WorkUnit], start: int, end: int, limit: int) -> Block:
    """The requests of ``units`` from ``start`` to before ``end``; ``limit`` is in nanoseconds."""
    arrived = ended = time = late = 0
    work = 0.0
    for unit in units:
        arrived += start <= unit.start < end
        if start <= unit.end < end:
            ended += 1
            work += unit.work
            time += unit.end - unit.start
            late += unit.end - unit.start > limit
    return request_block(start, end, arrived, ended, work, time, late)
