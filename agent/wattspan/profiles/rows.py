"""The merged function, what is doubtful of it, and how it is thinned."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from wattspan.model import MILLISECOND, SECOND
from wattspan.profiles.lanes import KINDS, Lanes

FINE = 20 * SECOND  # rows younger than this are never thinned while there is room


class Rows(NamedTuple):
    """The merged function, all in lanes; the last row is the watermark.

    From ``times[i]`` on the energy is ``energy[i]`` and rises by ``slope[i]`` a nanosecond.
    """

    times: list[int]
    energy: list[int]
    slope: list[int]


class Blurs(NamedTuple):
    """The doubts of one lane, as in a slice, for each row."""

    step: array[float]
    course: array[float]
    rate: array[float]
    walk: array[float]


def no_blurs() -> tuple[Blurs, ...]:
    return tuple(Blurs(array("f"), array("f"), array("f"), array("d")) for _ in KINDS)


def spaced(times: Sequence[int], scale: int) -> list[int]:
    """The rows that stay: those of one age lie about as far apart."""
    last = len(times) - 1
    kept = [last]
    for i in range(last - 1, 0, -1):
        age = times[last] - times[i]
        if age < FINE:
            apart = (scale - 1) * 10 * MILLISECOND
        else:
            apart = max(100 * MILLISECOND, age // 128) * scale
        if times[kept[-1]] - times[i - 1] > apart:
            kept.append(i)
    kept.append(0)
    return kept[::-1]


def blurred(
    lanes: Lanes, old: Rows, blurs: Sequence[Blurs], left: int, right: int
) -> list[tuple[float, ...]]:
    """The doubts about rows ``left`` to ``right`` once they are one straight line.

    What the line misses of the course that was known adds to what was not known before.
    """
    begin, length = old.times[left], old.times[right] - old.times[left]
    known = [lanes.energies(energy) for energy in old.energy[left : right + 1]]
    merged: list[tuple[float, ...]] = []
    for number, lane in enumerate(lanes.numbers):
        energies = [each[number] for each in known]
        power = (energies[-1] - energies[0]) / length
        off = slant = 0.0
        for i in range(left, right):
            line = energies[0] + power * (old.times[i] - begin)
            off = max(off, abs(energies[i - left] - line))
            risen = energies[i - left + 1] - energies[i - left]
            slant = max(slant, abs(risen / (old.times[i + 1] - old.times[i]) - power))
        step, course, rate, walk = (max(values[left:right]) for values in blurs[lane])
        merged.append((step, off + course, slant + rate, walk))
    return merged
