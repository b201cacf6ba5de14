"""How far off an answer may be."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, hypot, sqrt
from typing import NamedTuple

from wattspan.model import HwType, Microjoules
from wattspan.profiles.lanes import Lanes
from wattspan.profiles.rows import Blurs

DOUBTS = 4096  # kept at a time


class Doubt(NamedTuple):
    """By how many microjoules stretches between two rows may be wrong.

    What counters misplace at far edges is independent. What is unknown of the course is not:
    who works from one edge to the other is blurred alike at both. Together they make ``edges``.
    Within one slice the error grows with the length, by ``rates`` (times 2**32) a nanosecond.
    From the length ``far`` on the former holds for all kinds.
    """

    far: int
    edges: dict[HwType, Microjoules]
    rates: list[int]
    near: dict[int, dict[HwType, Microjoules]]  # by minus the length, as far as asked for


def doubt_of(lanes: Lanes, blurs: Sequence[Blurs], first: int, last: int, newest: int) -> Doubt:
    """What is doubtful of stretches from one row to another; ``newest`` is the last there is."""
    # The newest row is empty: it only ends the one before.
    until = last - 1 if last == newest > first else last
    edges, rates = [], []
    for lane in lanes.numbers:
        steps, courses, slants, walks = blurs[lane]
        walked = sqrt(max(0.0, walks[until] - walks[first]))
        step = hypot(steps[first], steps[until], walked)
        # One microjoule more, for what is rounded.
        edges.append(ceil(hypot(step, courses[first] + courses[until])) + 1)
        rates.append(ceil(max(slants[first], slants[until]) * 2**32) + 1)
    far = max((e << 32) // r + 1 for e, r in zip(edges, rates, strict=True))
    return Doubt(far, lanes.named(*edges), rates, {})


def near(lanes: Lanes, doubt: Doubt, length: int) -> dict[HwType, Microjoules]:
    """The uncertainty of a stretch shorter than ``far``, its length rounded to three bits."""
    size = (length | 7).bit_length() - 3
    rounded = -length >> size << size  # away from zero, whichever sign
    edges = zip(doubt.edges.values(), doubt.rates, strict=True)
    found = lanes.named(*(min(e, (r * -rounded >> 32) + 1) for e, r in edges))
    doubt.near[rounded] = found
    return found
