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

from testbed.continuous_batching import ModelCosts
from testbed.serving_plant import VirtualServer
from wattspan.model import MILLISECOND, SECOND
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
OBJECTIVES = (
    LatencyObjective(True, round(TTFT * SECOND), 0.01),
    LatencyObjective(False, 100 * MILLISECOND, 0.01),
)
Arrival = tuple[float, int, int]
Control = Callable[[LoadSample, Sequence[RequestTimes], float], int]


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


def serve(arrivals: Sequence[Arrival], control: Control, *, tick: float = 1.0) -> ServedReplay:
    """Serve all arrivals; ``control`` returns the setting after each tick."""
    server = VirtualServer(arrivals, ModelCosts().scaled(SIZE))
    end = arrivals[-1][0] + 15
    at, told, export = 0.0, 0, float(PERIOD)
    last = (0.0, 0.0, 0)
    batch: list[RequestTimes] = []
    clocks: list[tuple[float, int]] = []
    while at < end:
        at += tick
        server.advance(at)
        ended = server.finished[told:]
        told = len(server.finished)
        batch += [
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
        if at >= export:
            export, requests, batch = export + PERIOD, batch, []
        span = server.now - last[0]
        if span > 0:
            sample = LoadSample(
                round(last[0] * SECOND),
                round(server.now * SECOND),
                (server.in_flight - last[1]) / span,
                server.arrivals - last[2],
                len(ended),
                sum(one.input_tokens or 0 for one in requests),
                sum(one.output_tokens or 0 for one in requests),
            )
            last = server.now, server.in_flight, server.arrivals
            server.set_clock(SETTINGS[control(sample, requests, server.energy)])
        clocks.append((at, server.clock))
    missed = sum(one.to_first > TTFT or one.between > TBT for one in server.finished)
    return ServedReplay(server.energy / server.tokens, missed / len(server.finished), clocks)


def fixed(setting: int) -> Control:
    return lambda sample, requests, energy: setting


def by_bin(table: Sequence[int], dwell: float = 0.0) -> Control:
    """An oracle's settings of the bins 3, 4 and 5, in the present bin; lower and higher ones alike.

    It raises the setting at once, and lowers it by one step in ``dwell`` seconds.
    """
    tracker = LoadTracker(PERIOD * SECOND)
    setting, lowered = 0, 0

    def control(sample: LoadSample, requests: Sequence[RequestTimes], energy: float) -> int:
        nonlocal tracker, setting, lowered
        tracker = tracker.add(sample)
        wanted = table[min(max(tracker.bin, 3), 5) - 3]
        if wanted < setting or not dwell:
            setting = wanted
        elif wanted > setting and sample.end - lowered >= dwell * SECOND:
            setting, lowered = setting + 1, sample.end
        return setting

    return control


def tracking(*, every_bin: bool = False) -> Control:
    """The tuner's own decisions."""
    policy = TrackingPolicy(OBJECTIVES, SETTINGS, PERIOD * SECOND, every_bin=every_bin)
    state = begin_tracking(policy, 0)

    def control(sample: LoadSample, requests: Sequence[RequestTimes], energy: float) -> int:
        nonlocal state
        meter = (EnergyPoint(sample.end, round(energy * 1e6)),)
        state = track(state, LoadObservation(sample.end, sample, requests, meter))
        return state.setting

    return control
