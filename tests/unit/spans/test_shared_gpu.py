"""Spans on a GPU that another process uses as well: simulated, from samples to errors."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

import pytest

from wattspan.attribution.ledger import attribute
from wattspan.attribution.settlement import Settlement
from wattspan.model import (
    Consumer,
    Domain,
    HwType,
    Instant,
    Interval,
    Microjoules,
    Nanoseconds,
    Provenance,
)
from wattspan.sources.nvml.processes import ProcessSample, UsageMeter
from wattspan.spans.energy_division import ProcessSpans
from wattspan.spans.power_model import PowerModel
from wattspan.spans.process_energy import DomainStep, append_share
from wattspan.spans.profiles import EnergyProfile
from wattspan.spans.step_division import StepDivider
from wattspan.spans.values import Span, SpanColumns

MS = 10**6
WATTS = 460  # of a fully used GPU, above its idle power
NEIGHBOUR = 0.25  # use of the GPU by another process
STEP, PERIOD, BATCH = 100, 167, 500  # milliseconds: counter, utilisation samples, settlement
ME, OTHER = Consumer(1, 1), Consumer(2, 1)
GPU = Domain(
    "gpu", HwType.GPU, "GPU", "nvml", Provenance.EMULATED,
    resource="gpu", resolution=STEP * MS, usage_step=150 * MS,
)  # fmt: skip


class Burst(NamedTuple):
    """A span that begins and ends with its load; milliseconds."""

    start: int
    end: int
    load: float

    @property
    def energy(self) -> float:
        """Microjoules."""
        return WATTS * self.load * (self.end - self.start) * 1000

    def used(self, start: int, end: int) -> float:
        """Milliseconds of a fully used GPU inside a period."""
        return max(0, min(end, self.end) - max(start, self.start)) * self.load


def bursts(count: int, lengths: Sequence[int]) -> Iterator[Burst]:
    draw, at = random.Random(1), 1000
    for _ in range(count):
        at += draw.randrange(50, 700)
        length = draw.choice(lengths)
        yield Burst(at, at + length, draw.uniform(0.4, 0.95))
        at += length


def instant(at: int) -> Instant:
    return Instant(at * MS, at * MS)


def errors(made: Sequence[Burst]) -> Iterator[tuple[int, float]]:
    """The length of each span and the error of its exclusive energy, relative to the truth."""
    meter, settlement = UsageMeter("gpu", instant(0)), Settlement(0, 10**10)
    profile, process = EnergyProfile(), ProcessSpans(steps=StepDivider(PowerModel(), "process"))
    todo, stamps = list(made), iter(range(PERIOD, made[-1].end + 3000, PERIOD))
    stamp = next(stamps)
    for begin in range(0, made[-1].end + 2000, STEP):
        end = begin + STEP
        near = [burst for burst in made if begin - 1000 < burst.end and burst.start < end]
        spent = WATTS * 1000 * (sum(b.used(begin, end) for b in near) + NEIGHBOUR * STEP)
        energy = Microjoules(round(spent))
        interval = Interval("gpu", instant(begin), instant(end), energy, Nanoseconds(4 * MS))
        settlement.add(interval, "gpu")
        while stamp <= end:
            mine = sum(burst.used(stamp - PERIOD, stamp) for burst in near)
            meter.add_samples(
                [
                    ProcessSample(stamp * MS, one.pid, one, int(use * 100))
                    for one, use in ((ME, mine / PERIOD), (OTHER, NEIGHBOUR))
                    if int(use * 100)
                ]
            )
            stamp = next(stamps)
        if end % BATCH:
            continue
        for usage in meter.usages(instant(end - PERIOD), frozenset(), named=True):
            settlement.add_usage(usage)
        for settled in settlement.due(instant(end - PERIOD - 2 * STEP)):
            attribution = attribute(settled.interval, settled.usage, covered=settled.covered)
            own = dict(attribution.shares).get(ME, Microjoules(0))
            step = DomainStep.of(GPU, settled.interval, settled.interval.energy)
            append_share(profile, GPU, step, own)
            profile.merge()
        ready = [burst for burst in todo if burst.end * MS <= profile.watermark]
        todo = todo[len(ready) :]
        later = [burst for burst in todo if burst.start * MS < profile.watermark]
        results = process.settle(spans(ready), profile, 10**18, waiting=[spans(later)])
        for burst, result in zip(ready, results, strict=True):
            yield burst.end - burst.start, result.exclusive[HwType.GPU] / burst.energy - 1


def spans(made: Sequence[Burst]) -> SpanColumns:
    return SpanColumns.of(
        [
            Span(bytes(16), b.start.to_bytes(8, "big"), b"", "s", f"{b.end - b.start} ms",
                 b.start * MS, b.end * MS)
            for b in made
        ]
    )  # fmt: skip


@pytest.mark.parametrize(("length", "bias", "p95"), [(100, 0.08, 0.25), (300, 0.04, 0.1)])
def test_recurring_spans_have_their_energy_beside_another_process(
    length: int, bias: float, p95: float
) -> None:
    found = [e for each, e in errors(list(bursts(300, (100, 300)))) if each == length][60:]
    assert abs(fmean(found)) < bias
    assert sorted(map(abs, found))[len(found) * 95 // 100] < p95
