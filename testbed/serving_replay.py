"""A recorded trace of requests, served in virtual time under a rule that chooses clocks."""

from __future__ import annotations

import csv
import gzip
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

from testbed.continuous_batching import ModelCosts
from testbed.latency_pages import LatencyPages
from testbed.serving_plant import VirtualServer
from wattspan.model import SECOND
from wattspan.tuning.decisions.engine_load import EngineLoad
from wattspan.tuning.decisions.load import LoadSample, LoadTracker
from wattspan.tuning.decisions.load_cells import LatencyObjective, RequestTimes
from wattspan.tuning.decisions.load_tracking import (
    LoadObservation,
    TrackingPolicy,
    begin_tracking,
    track,
)
from wattspan.tuning.decisions.values import EnergyPoint

TRACE = Path(__file__).parent / "data" / "azure_llm_conv.csv.gz"
SIZE = 0.7
TTFT, TBT = 0.4, 0.1
SETTINGS = (1980, 1590, 1185)
PERIOD = 5
EXTRA = 0.005


def objectives_of(ttft: float) -> tuple[LatencyObjective, ...]:
    """Limits at the 99th percentile; that of the first token in seconds."""
    return (
        LatencyObjective(True, round(ttft * SECOND), 0.01),
        LatencyObjective(False, round(TBT * SECOND), 0.01),
    )


OBJECTIVES = objectives_of(TTFT)
Arrival = tuple[float, int, int]


class News(NamedTuple):
    """The observation of the tuner after a tick: at ``now``, with the joules so far."""

    now: int
    sample: LoadSample | None
    requests: Sequence[RequestTimes]
    energy: float
    generated: Sequence[EnergyPoint] | None = None


Control = Callable[[News], int]
Source = Callable[[VirtualServer, float], News | None]


@cache
def trace() -> tuple[Arrival, ...]:
    """Seconds, prompt tokens and generated tokens of each request."""
    with gzip.open(TRACE, "rt", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    return tuple(
        ((at - times[0]).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for at, row in zip(times, rows, strict=True)
    )


def rotated(part: float) -> list[Arrival]:
    """The trace from another place on, and then its beginning."""
    length = trace()[-1][0] + 0.2
    return sorted(((at - part * length) % length, prompt, output) for at, prompt, output in trace())


def bursty(laps: int = 1, slow: float = 0.6, fast: float = 1.8) -> list[Arrival]:
    """Twelve minutes at ``slow`` times the speed of the trace, then three at ``fast`` times."""
    length = trace()[-1][0] + 0.2
    arrivals: list[Arrival] = []
    clock = before = 0.0
    for lap in range(laps):
        for at, prompt, output in trace():
            step = lap * length + at - before
            before = lap * length + at
            clock += step / (slow if clock % 900 < 720 else fast)
            arrivals.append((clock, prompt, output))
    return arrivals


def doubled(seed: int, *, rate: float = 5.5, at: float = 1200, after: float = 30) -> list[Arrival]:
    """Poisson arrivals with the lengths of the trace, whose rate doubles at ``at``."""
    chance = random.Random(seed)
    arrivals: list[Arrival] = []
    clock = 0.0
    while clock < at + after:
        clock += chance.expovariate(rate * (2 if clock >= at else 1))
        _, prompt, output = chance.choice(trace())
        arrivals.append((clock, prompt, output))
    return arrivals


@dataclass
class ServedReplay:
    """A run: joules per token, ratio of requests over a limit, clocks in force."""

    energy: float
    missed: float
    clocks: list[tuple[float, int]] = field(default_factory=list)


class Announced:
    """The announced spans of a server: the load at once, the figures of requests each 5 s."""

    def __init__(self) -> None:
        self._told, self._export = 0, float(PERIOD)
        self._last = (0.0, 0.0, 0)
        self._batch: list[RequestTimes] = []

    def __call__(self, server: VirtualServer, at: float) -> News | None:
        ended = server.finished[self._told :]
        self._told = len(server.finished)
        self._batch += [
            RequestTimes(
                round(one.arrived * SECOND),
                round(one.ended * SECOND),
                round(one.to_first * SECOND),
                round(one.between * SECOND) if one.output > 1 else None,
                one.prompt,
                one.output,
            )
            for one in ended
        ]
        requests: Sequence[RequestTimes] = ()
        if at >= self._export:
            self._export, requests, self._batch = self._export + PERIOD, self._batch, []
        now, in_flight, arrivals = self._last
        span = server.now - now
        if span <= 0:
            return None
        sample = LoadSample(
            round(now * SECOND),
            round(server.now * SECOND),
            (server.in_flight - in_flight) / span,
            server.arrivals - arrivals,
            len(ended),
            sum(one.input_tokens or 0 for one in requests),
            sum(one.output_tokens or 0 for one in requests),
        )
        self._last = server.now, server.in_flight, server.arrivals
        return News(sample.end, sample, requests, server.energy)


class Scraped:
    """The page of an engine, read each ``interval`` seconds; ``by_token``: it times tokens."""

    def __init__(
        self, interval: int, objectives: Sequence[LatencyObjective], *, by_token: bool = False
    ) -> None:
        self._interval, self._due = interval, 0.0
        self._load, self._pages = EngineLoad(objectives), LatencyPages(by_token=by_token)
        self._begun, self._ended = set[int](), 0
        self._prompt = 0

    def __call__(self, server: VirtualServer, at: float) -> News | None:
        now = round(server.now * SECOND)
        if at < self._due:
            return News(now, None, (), server.energy, ())
        self._due = at + self._interval
        ended = server.finished[self._ended :]
        self._ended = len(server.finished)
        for one in (*server.generating, *ended):
            if id(one) not in self._begun:
                self._begun.add(id(one))
                self._pages.first.add(one.to_first)
                self._prompt += one.prompt
        for one in ended:
            self._begun.discard(id(one))
            if one.output > 1:
                self._pages.between.add(one.between)
                self._pages.tokens.add(one.between, one.output - 1)
        counts = {"running": server.present, "finished": self._ended, "prompt": self._prompt}
        page = self._pages.read(now, self._interval * SECOND, generated=server.tokens, **counts)
        found = self._load.add(page)
        if found is None:
            return News(now, None, (), server.energy, ())
        return News(now, found.sample, found.requests, server.energy, found.generated)


def serve(
    arrivals: Sequence[Arrival],
    control: Control,
    *,
    tick: float = 1.0,
    source: Source | None = None,
    objectives: Sequence[LatencyObjective] = OBJECTIVES,
) -> ServedReplay:
    """Serve all arrivals; ``control`` returns the setting after each tick.

    It hears of the requests by ``source``, announced spans without one.
    """
    server = VirtualServer(arrivals, ModelCosts().scaled(SIZE))
    end = arrivals[-1][0] + 15
    at, source = 0.0, source or Announced()
    clocks: list[tuple[float, int]] = []
    while at < end:
        at += tick
        server.advance(at)
        if (news := source(server, at)) is not None:
            server.set_clock(SETTINGS[control(news)])
        clocks.append((at, server.clock))
    missed = sum(
        any(
            (one.to_first if each.first else one.between) * SECOND > each.limit
            for each in objectives
        )
        for one in server.finished
    )
    return ServedReplay(server.energy / server.tokens, missed / len(server.finished), clocks)


def fixed(setting: int) -> Control:
    return lambda news: setting


def by_bin(table: Sequence[int], dwell: float = 0.0) -> Control:
    """An oracle's settings of the bins 3, 4 and 5, in the present bin; lower and higher ones alike.

    It raises the setting at once, and lowers it by one step in ``dwell`` seconds.
    """
    tracker = LoadTracker(PERIOD * SECOND)
    setting, lowered = 0, 0

    def control(news: News) -> int:
        nonlocal tracker, setting, lowered
        if (sample := news.sample) is None:
            return setting
        tracker = tracker.add(sample)
        wanted = table[min(max(tracker.bin, 3), 5) - 3]
        if wanted < setting or not dwell:
            setting = wanted
        elif wanted > setting and sample.end - lowered >= dwell * SECOND:
            setting, lowered = setting + 1, sample.end
        return setting

    return control


def tracking(
    *, every_bin: bool = False, objectives: Sequence[LatencyObjective] = OBJECTIVES
) -> Control:
    """The tuner's own decisions."""
    policy = TrackingPolicy(tuple(objectives), SETTINGS, PERIOD * SECOND, every_bin=every_bin)
    state = begin_tracking(policy, 0)

    def control(news: News) -> int:
        nonlocal state
        now, sample, requests, energy, generated = news
        meter = (EnergyPoint(now, round(energy * 1e6)),)
        heard = LoadObservation(now, sample, requests, meter, generated=generated)
        state = track(state, heard)
        return state.setting

    return control
