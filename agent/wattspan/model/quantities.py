"""Energy, power and time as whole numbers, moments, and words that are keys."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, NewType

Microjoules = NewType("Microjoules", int)
Milliwatts = NewType("Milliwatts", int)
Nanoseconds = NewType("Nanoseconds", int)

SECOND = Nanoseconds(1_000_000_000)
MILLISECOND = Nanoseconds(1_000_000)


def energy_at(power: int, duration: int) -> Microjoules:
    """The energy ``power`` milliwatts amount to over ``duration`` nanoseconds, rounded down.

    1 mW times 1 ns is 1e-12 J, a millionth of a microjoule.
    """
    return Microjoules(power * duration // 1_000_000)


def mean_power(energy: int, duration: int) -> Milliwatts:
    """The mean power of ``energy`` microjoules over ``duration`` > 0 nanoseconds."""
    return Milliwatts(energy * 1_000_000 // duration)


class Word(StrEnum):
    """A word of the model: a string with a fixed set of values.

    Enum hashes members in Python, by name; they are keys of every account and label of every
    series, so here they hash like the strings they are, in C.
    """

    __hash__ = str.__hash__


class Instant(NamedTuple):
    """One moment on the host's clocks, in nanoseconds.

    Durations are differences of ``mono`` (it stands still while the host sleeps). ``wall`` is
    Unix time, for joins with the outside world only. ``asleep`` is how long the host has been
    suspended since boot (CLOCK_BOOTTIME minus CLOCK_MONOTONIC), so that a suspend and a stepped
    wall clock are never mistaken for each other.
    """

    mono: int
    wall: int
    asleep: int = 0
