"""The load and the latencies of a server, from the Prometheus pages of its engine.

Two pages show how many requests and tokens came between them, and how long the requests took, by
the buckets of a histogram. Each bucket's requests become a few entries with a number and a latency
within it, at the time between the pages: arrivals are the ended requests and the growth of those in
flight.

A request belongs to all settings since its arrival, which a page does not tell. Entries therefore
begin before their first page by their latency, or by twice the mean duration of requests where the
latency is known at their end. Times of single tokens are weighted as requests: as many entries as
requests have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wattspan.inference.engine_metrics import EngineReading, Figure, Progress, progress
from wattspan.inference.latency_histograms import (
    LatencyBucket,
    LatencyPage,
    bound_of,
    observed,
    spread,
)
from wattspan.model import SECOND, Consumer
from wattspan.tuning.decisions.load import LoadSample
from wattspan.tuning.decisions.load_cells import LatencyObjective, RequestTimes
from wattspan.tuning.decisions.values import EnergyPoint

MAX_REQUESTS = 20_000
"""Latencies of one kind between two pages; more requests are represented by so many."""

_DURATIONS = 2  # mean durations that a request which has ended may have lasted
_LONGEST_DURATION = 600 * SECOND  # of a request: its settings are not remembered for longer
_RECENT = 50  # requests over which durations are averaged and latencies are missed
_ENOUGH = 0.5  # share of them with a latency
_OFFSET_STEP = (5**0.5 - 1) / 2  # fills an interval evenly: the golden ratio
_TITLES = {True: "time to the first token", False: "time between tokens"}


class EnginePageRead(NamedTuple):
    """A page of an engine, read each ``interval`` at ``at``, and the engine's processes.

    ``listener`` has answered, and is the first one; None if the kernel does not show it.
    """

    engine: str
    interval: int
    at: int
    counters: EngineReading
    latencies: LatencyPage
    processes: tuple[Consumer, ...] = ()
    listener: Consumer | None = None


class EngineProgress(NamedTuple):
    """The work between two pages; ``generated`` are cumulative tokens, which may begin anew."""

    sample: LoadSample
    requests: list[RequestTimes]
    generated: tuple[EnergyPoint, ...]


@dataclass(slots=True)
class _Observed:
    """How many latencies of one kind the recent requests should have, and have."""

    whole: bool = False  # the last page had all series of the one before
    requests: int = 0
    latencies: int = 0
    few: bool = False

    def add(self, requests: int, buckets: Sequence[LatencyBucket] | None) -> None:
        self.whole = buckets is not None
        self.requests += requests
        self.latencies += sum(one.number for one in buckets or ())
        if self.requests >= _RECENT:
            self.few = self.latencies < _ENOUGH * self.requests
            self.requests = self.latencies = 0


@dataclass(slots=True)
class EngineLoad:
    """The load of one engine, from its pages in the order of time."""

    objectives: Sequence[LatencyObjective]
    last: EnginePageRead | None = None
    _whole: bool = False  # the last page had all series of the one before
    _generated: EnergyPoint | None = None
    _offset: float = 0.5
    _observed: dict[bool, _Observed] = field(default_factory=dict)  # by `first`
    _lasting: float = 0.0  # request nanoseconds of the recent requests
    _ended: float = 0.0

    def add(self, page: EnginePageRead) -> EngineProgress | None:
        """The work since the last page; None if it is unknown, as after a restart.

        The counters of another process are no continuation: its first page begins anew.
        """
        before = self.last
        if before is not None and page.at <= before.at:
            return None
        if before is not None and before.processes[:1] and page.processes[:1]:
            others = set(before.processes).isdisjoint(page.processes)
            if others or page.processes[0] not in before.processes:
                self.forget()
                before = None
        self.last = page
        if before is None:
            return None
        whole = self._whole
        done = progress(before.counters, page.counters, whole=whole)
        self._whole = done is not None
        was, is_now = in_flight(before), in_flight(page)
        ended = None if done is None else done.figures.get(Figure.REQUESTS)
        if done is None or ended is None or was is None or is_now is None:
            self._generated, self._observed = None, {}
            return None
        tokens = done.tokens
        sample = LoadSample(
            before.at,
            page.at,
            (was + is_now) / 2,
            max(0, round(ended + is_now - was)),
            round(ended),
            tokens.get("input", 0.0),
            tokens.get("output", 0.0),
        )
        self._lasting += sample.in_flight * (sample.end - sample.start)
        self._ended += sample.completions
        requests = [
            entry
            for one in (True, False)
            for entry in self._entries(before, page, sample, first=one, whole=whole)
        ]
        if self._ended > 2 * _RECENT:
            self._lasting, self._ended = self._lasting * _RECENT / self._ended, _RECENT
        return EngineProgress(sample, requests, self._points(done, before.at, page.at))

    def forget(self) -> None:
        """Begin anew with the next page."""
        self.last, self._generated, self._whole = None, None, False
        self._observed, self._lasting, self._ended = {}, 0.0, 0.0

    @property
    def missing(self) -> str:
        """The figure that the last page lacks, as a clause; "" for none."""
        if self.last is None:
            return ""
        kind = self.last.counters.page.kind
        if in_flight(self.last) is None or Figure.REQUESTS not in self.last.counters.samples:
            return f"the page of its {kind} engine does not count its requests, or not yet"
        for one in self.objectives:
            if not self.last.latencies.of(first=one.first):
                return f"the page of its {kind} engine has no histogram of the {_TITLES[one.first]}"
            if one.first in self._observed and self._observed[one.first].few:
                return f"the page of its {kind} engine shows too few of the {_TITLES[one.first]}"
        return ""

    @property
    def bounds(self) -> list[int | None]:
        """The bound that stands for the limit of each objective; None if none does yet."""
        pages = LatencyPage() if self.last is None else self.last.latencies
        return [bound_of(one.limit, pages.of(first=one.first)) for one in self.objectives]

    def _entries(
        self,
        before: EnginePageRead,
        page: EnginePageRead,
        sample: LoadSample,
        *,
        first: bool,
        whole: bool,
    ) -> list[RequestTimes]:
        limits = [one.limit for one in self.objectives if one.first is first]
        old, new = before.latencies, page.latencies
        if not limits:
            return []
        known, buckets = self._observed.setdefault(first, _Observed()), None
        if first or old.by_token is new.by_token:
            continued = whole and known.whole
            buckets = observed(old.of(first=first), new.of(first=first), whole=continued)
        # Requests of a burst have their first tokens long before they end.
        due = min(sample.arrivals, sample.completions) if first else sample.completions
        known.add(due, buckets)
        if not buckets:
            return []
        count, offset, back = sum(one.number for one in buckets), 0.5, 0
        if not first and new.by_token:
            count = sample.completions
            self._offset = offset = (self._offset + _OFFSET_STEP) % 1
        elif not first:
            duration = min(self._lasting / max(1.0, self._ended), _LONGEST_DURATION)
            back = round(_DURATIONS * duration)
        times = spread(buckets, min(count, MAX_REQUESTS), limits, offset)
        start, end = sample.start - back, sample.end
        if first:
            return [RequestTimes(start - one, end, one, number=many) for one, many in times]
        again = any(one.first for one in self.objectives)
        return [
            RequestTimes(start - one, end, None, one, again=again, number=many)
            for one, many in times
        ]

    def _points(self, done: Progress, start: int, end: int) -> tuple[EnergyPoint, ...]:
        tokens = done.tokens.get("output")
        if tokens is None:
            return ()
        before, self._generated = self._generated, None
        begun = before or EnergyPoint(start, 0)
        self._generated = EnergyPoint(end, begun.energy + round(tokens))
        return (self._generated,) if before else (begun, self._generated)


def in_flight(page: EnginePageRead) -> float | None:
    """The running and waiting requests of a page; None if it lacks one of them."""
    running, waiting = page.counters.sum(Figure.RUNNING), page.latencies.waiting
    return None if running is None or waiting is None else running + waiting
