"""Latencies on the Prometheus pages of serving engines: how many requests took how long.

A histogram counts the observations since the start of the engine up to each of its bounds; two
pages show those of the time between them. Engines observe the time between tokens as the mean of a
finished request, or for each token. Names and default bounds: ``vllm/v1/metrics/loggers.py``,
``sglang/srt/metrics/collector.py``, ``tensorrt_llm/metrics/collector.py``, TGI's
``router/src/server.rs``, Dynamo's documentation of metrics.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from wattspan.inference.engine_metrics import (
    EnginePage,
    EngineReading,
    KnownSeries,
    OtherPageError,
    PageError,
    Samples,
    read_page,
    read_page_with,
)
from wattspan.model import SECOND

Labels = tuple[tuple[str, str], ...]
Histograms = Mapping[Labels, Mapping[float, float]]
"""Observations up to each bound (seconds; infinity for all), by the other labels of a series."""

_LONGEST = 1e9  # seconds: no bound of a histogram is larger, and others overflow
_DIFFERENT = 32  # latencies of one bucket between two pages


class LatencyNames(NamedTuple):
    """The names of an engine's latencies, the best first, and its default bounds in seconds.

    ``between`` are means of requests, ``tokens`` times of single tokens. ``waiting`` counts the
    requests outside of the batch; "" if the running ones include them. Unknown bounds are empty.
    """

    first: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    waiting: str = ""
    first_bounds: tuple[float, ...] = ()
    between_bounds: tuple[float, ...] = ()

    def has(self, *, first: bool) -> bool:
        """True if the engine has the time to the first token, or that between tokens."""
        return bool(self.first if first else self.between + self.tokens)


_FIRST_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_BETWEEN_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
LATENCIES: Mapping[str, LatencyNames] = {
    "vllm": LatencyNames(
        ("vllm:time_to_first_token_seconds",),
        ("vllm:request_time_per_output_token_seconds",),
        ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        "vllm:num_requests_waiting",
        _FIRST_BOUNDS,
        _BETWEEN_BOUNDS,
    ),
    "sglang": LatencyNames(
        ("sglang:time_to_first_token_seconds",),
        (),
        ("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
        "sglang:num_queue_reqs",
        (
            0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0,
            200.0, 400.0,
        ),
        (
            0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08,
            0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0,
        ),
    ),
    "tgi": LatencyNames(
        between=("tgi_request_mean_time_per_token_duration",), waiting="tgi_queue_size"
    ),
    "tensorrt-llm": LatencyNames(
        ("trtllm_time_to_first_token_seconds",),
        ("trtllm_time_per_output_token_seconds",),
        (),
        "trtllm_num_requests_waiting",
        _FIRST_BOUNDS,
        _BETWEEN_BOUNDS,
    ),
    "dynamo": LatencyNames(
        first=("dynamo_frontend_time_to_first_token_seconds",),
        tokens=("dynamo_frontend_inter_token_latency_seconds",),
    ),
}  # fmt: skip
"""The latencies by the kind of the engine; the others have none."""


class LatencyPage(NamedTuple):
    """The latencies of one page. ``by_token``: the times between tokens are those of tokens.

    ``waiting`` is 0 if the running requests include the waiting ones, None if it is unknown.
    """

    first: Histograms = MappingProxyType({})
    between: Histograms = MappingProxyType({})
    by_token: bool = False
    waiting: float | None = None

    def of(self, *, first: bool) -> Histograms:
        return self.first if first else self.between


def read_tracked_page(
    body: bytes, kind: str = "auto", known: KnownSeries | None = None
) -> tuple[EngineReading, LatencyPage]:
    """The counters and the latencies of an engine's page, from one scan; PageError.

    A page that has too many samples together with its latencies has none.
    """
    try:
        page, samples = read_page_with(body, kind, latency_names(kind), known)
    except OtherPageError:
        raise
    except PageError:
        return read_page(body, kind, known), LatencyPage()
    return page, read_latencies(samples, page.page)


def latency_names(kind: str) -> list[str]:
    """The names of the latencies on the pages of a kind, or of all for "auto"."""
    return [
        one
        for name, names in LATENCIES.items()
        if kind in ("auto", name)
        for one in (
            *(f"{each}_bucket" for each in names.first + names.between + names.tokens),
            *filter(None, [names.waiting]),
        )
    ]


def read_latencies(samples: Samples, page: EnginePage) -> LatencyPage:
    """The latencies among the samples of a page."""
    names = LATENCIES.get(page.kind)
    if names is None:
        return LatencyPage()

    def best(candidates: Iterable[str]) -> Histograms:
        found = (_histograms(samples.get(f"{one}_bucket", ()), page.ranks) for one in candidates)
        return next(filter(None, found), {})

    between, waiting = best(names.between), None if names.waiting else 0.0
    queues: dict[Labels, float] = {}
    for labels, value in samples.get(names.waiting, ()):
        key = _without(labels, page.ranks)
        queues[key] = max(value, queues.get(key, 0.0))
    return LatencyPage(
        best(names.first),
        between or best(names.tokens),
        not between,
        sum(queues.values()) if queues else waiting,
    )


def _histograms(samples: Iterable[tuple[Labels, float]], ranks: frozenset[str]) -> Histograms:
    found: dict[Labels, dict[float, float]] = {}
    for labels, value in samples:
        key, bound = _bucket(labels, ranks)
        if bound is not None:
            own = found.setdefault(key, {})
            own[bound] = max(value, own.get(bound, 0.0))  # ranks report the same requests
    return found


@lru_cache(maxsize=1024)
def _bucket(labels: Labels, ranks: frozenset[str]) -> tuple[Labels, float | None]:
    """The series and the bound of a bucket; pages have the same ones again and again."""
    return _without(labels, {"le", *ranks}), _bound(dict(labels).get("le", ""))


def _without(labels: Labels, names: Collection[str]) -> Labels:
    return tuple(one for one in labels if one[0] not in names)


def _bound(text: str) -> float | None:
    try:
        bound = float(text)
    except ValueError:
        return None
    return bound if 0 <= bound <= _LONGEST or bound == math.inf else None  # not for NaN either


class LatencyBucket(NamedTuple):
    """The number of observations above ``low`` and up to ``high`` nanoseconds (None: no bound)."""

    low: int
    high: int | None
    number: int


def observed(
    before: Histograms, after: Histograms, *, whole: bool = False
) -> list[LatencyBucket] | None:
    """The observations between two pages of one process; None if they are unknown.

    They are if a count has fallen, as after a restart, if a bucket or the last bound is missing or
    new, and if less observations are up to a bound than up to a lower one. A series that the
    earlier page lacks counts from 0 if that page was ``whole``, and else begins with the later one:
    its counts may be older. A page without any series is never whole.
    """
    found: list[LatencyBucket] = []
    for labels in after.keys() | before.keys() if whole and before else before.keys():
        new = after.get(labels, {})
        old = before.get(labels, dict.fromkeys(new, 0.0))
        if old.keys() != new.keys() or math.inf not in new:
            return None
        bounds = sorted(new)
        grown = [0, *(round(new[bound] - old[bound]) for bound in bounds)]
        if any(more < less for less, more in pairwise(grown)):
            return None
        edges = [0, *(None if math.isinf(one) else round(one * SECOND) for one in bounds)]
        for (low, high), (less, more) in zip(pairwise(edges), pairwise(grown), strict=True):
            if more > less:
                found.append(LatencyBucket(low or 0, high, more - less))
    return found


def spread(
    buckets: Sequence[LatencyBucket], count: int, limits: Sequence[int], offset: float = 0.5
) -> list[tuple[int, int]]:
    """So many latencies in nanoseconds, spread like the observations: each with its number.

    They ascend. Each is above the lower and up to the upper bound of its bucket, by interpolation
    of the logarithm; a bucket has a few different ones. Within a bucket that holds one of
    ``limits`` inside, all are at its upper bound: a limit counts as the next lower bound.
    ``offset`` from 0 to 1 is the place of the first latency among the observations that it stands
    for.
    """
    found = Counter[int]()
    total = sum(one.number for one in buckets)
    begun = reached = 0  # latencies and observations up to the bucket
    for bucket in sorted(buckets, key=lambda one: (one.low, one.high is None, one.high)):
        reached += bucket.number
        until = math.floor(reached * count / total - offset) + 1 if reached < total else count
        own = max(0, min(count, until) - begun)
        parts = min(own, _DIFFERENT)
        for part in range(parts):
            first, end = own * part // parts, own * (part + 1) // parts
            rank = (begun + (first + end - 1) / 2 + offset) * total / count
            inside = min(1.0, max(0.0, 1 - (reached - rank) / bucket.number))
            found[_within(bucket, inside, limits)] += end - first
        begun += own
    return sorted(found.items())  # the buckets of two series may overlap


def _within(bucket: LatencyBucket, part: float, limits: Sequence[int]) -> int:
    low, high = bucket.low, bucket.high
    if high is None:
        return max(low, *limits) + 1
    if any(low < limit < high for limit in limits):
        return high
    inside = low * (high / low) ** part if low else high * part
    return min(high, max(low + 1, round(inside)))


def bound_of(limit: int, histograms: Histograms) -> int | None:
    """The largest bound up to a limit in nanoseconds that all series have; None without one."""
    bounds = [
        {round(one * SECOND) for one in each if one < math.inf} for each in histograms.values()
    ]
    common = set.intersection(*bounds) if bounds else set()
    return max((one for one in common if one <= limit), default=None)
