"""The energy counter and the power sensor of an emulated board, in whole numbers.

Power is piecewise constant: a *segment* has a beginning and a power in milliwatts, so energy is
an exact sum of milliwatts times nanoseconds, which are picojoules.
"""

from __future__ import annotations

from typing import NamedTuple

PICOJOULES = 1_000_000  # in a microjoule


class Segment(NamedTuple):
    """``power`` milliwatts from ``start`` to ``end``, nanoseconds of the monotonic clock."""

    start: int
    end: int
    power: int


History = tuple[Segment, ...]


def extended(history: History, segment: Segment, keep: int) -> History:
    """``history`` with ``segment`` at its end, without what ended ``keep`` ns before that end."""
    if segment.end <= segment.start:
        return history
    if history and history[-1].power == segment.power and history[-1].end == segment.start:
        history, segment = history[:-1], Segment(history[-1].start, segment.end, segment.power)
    cut = 0
    while cut < len(history) and history[cut].end <= segment.end - keep:
        cut += 1
    return (*history[cut:], segment)


def mean_power(history: History, start: int, end: int) -> int | None:
    """The mean power between two times in milliwatts; None where nothing is remembered.

    Before the history begins the board is taken to have drawn what it first drew.
    """
    if not history or end <= start:
        return None
    energy = sum(
        max(0, min(end, part.end) - max(start, part.start)) * part.power for part in history
    )
    missing = max(0, min(end, history[0].start) - start)
    return (energy + missing * history[0].power) // (end - start)


def last_edge(born: int, period: int, now: int) -> int:
    """The latest time not after ``now`` that lies whole periods after ``born``."""
    return born + (now - born) // period * period


def picojoules(power: int, duration: int) -> int:
    """The exact energy of ``power`` milliwatts over ``duration`` nanoseconds."""
    return power * duration
