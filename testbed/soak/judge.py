"""Trend test of a repeatedly sampled quantity. Pure.

A quantity may jump and may be a sawtooth; it may not rise permanently. So the trend
is the median of the slopes between all pairs of samples (Theil and Sen): up to a quarter of the
samples may lie anywhere at all without turning it. Only the second half of a run is judged: caches
and histories fill first.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

PAIRED = 240
"""Samples of which all pairs are looked at; more are first made fewer by medians."""

LEAST = 20
"""Least number of samples for a verdict."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Permitted growth: so much an hour at 100 ms a cycle, or so much in all.

    The second covers allocators and samples at the tip or foot of a tooth.
    """

    hourly: float
    noise: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Samples of one quantity; ``hourly`` is its trend, None for too few samples.

    ``rise`` is from the median of the first third that is judged to that of the last.
    """

    first: float
    median: float
    least: float
    most: float
    hourly: float | None
    rise: float
    grows: bool
    undecided: bool  # it rose, but by no more than an initial fill


def judge(samples: Sequence[tuple[float, float]], bound: Bound) -> Verdict:
    """Judge ``samples`` of hours at 100 ms a cycle and values; there must be one at least."""
    settled = samples[len(samples) // 2 :]
    values = [value for _, value in settled]
    slope = trend(settled)
    third = max(1, len(values) // 3)
    rise = statistics.median(values[-third:]) - statistics.median(values[:third])
    rising = slope is not None and slope > bound.hourly
    return Verdict(
        samples[0][1],
        statistics.median(values),
        min(values),
        max(values),
        slope,
        rise,
        rising and rise > bound.noise,
        rising and bound.noise / 4 < rise <= bound.noise,
    )


def trend(samples: Sequence[tuple[float, float]]) -> float | None:
    """The median slope of all pairs; None for fewer than LEAST samples, or all at one time."""
    if len(samples) < LEAST:
        return None
    slopes = [
        (later[1] - early[1]) / (later[0] - early[0])
        for early, later in combinations(_fewer(samples), 2)
        if later[0] > early[0]
    ]
    return statistics.median(slopes) if slopes else None


def _fewer(samples: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    size = -(-len(samples) // PAIRED)
    groups = [samples[start : start + size] for start in range(0, len(samples), size)]
    return [
        (statistics.median(at for at, _ in group), statistics.median(value for _, value in group))
        for group in groups
    ]
