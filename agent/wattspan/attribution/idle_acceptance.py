"""Acceptance of a learned idle power: firm, or doubtful with a wider range.

An idle power that was extrapolated from a host under load is compared with that of an equal device
of the host, with the one of an earlier run, and with the range that any processor has. A
contradiction never changes the learned power, because devices and firmware differ: it widens the
stated error up to the other figure, and energy that may be idle by it is withheld from processes.
An idle power observed at rest is firm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from wattspan.model import Milliwatts

EQUAL_DEVICES = 0.25
"""Idle powers of equal devices differ by less than this part of the larger one; so do those of one
device before and after a change of its firmware or its settings."""

LEAST_SHARE = 0.02
"""Lower bound of the idle power as a part of the power under load: laptops have a little more."""


class LearnedIdle(NamedTuple):
    """An idle power in milliwatts, and its evidence.

    ``error`` is the half-width of its 95 % range, ``observed`` is True if it was seen at rest.
    ``load_power`` is the mean power under the observed load, ``largest`` the largest idle power
    that it permits.
    """

    power: Milliwatts
    error: float
    observed: bool
    load_power: float
    largest: float


class AcceptedIdle(NamedTuple):
    """The error with which an idle power is stated; ``firm`` is False if it is doubtful."""

    error: float
    firm: bool = True
    above: Milliwatts = Milliwatts(0)
    """Power above the idle power that may be idle too, in milliwatts."""


def accept_idle(
    learned: LearnedIdle,
    equals: Iterable[LearnedIdle] = (),
    earlier: Milliwatts | None = None,
) -> AcceptedIdle:
    """Compare with ``equals``, the equal devices of the host, and with an ``earlier`` run."""
    if learned.observed:
        return AcceptedIdle(learned.error)
    others = [(one.power, one.error) for one in equals]
    if earlier is not None:
        others.append((earlier, 0.0))
    bounds = [
        bound
        for power, error in others
        if _contradicts(learned, power, error)
        for bound in (power - error, power + error)
    ]
    if learned.power < LEAST_SHARE * learned.load_power:
        bounds.append(learned.largest)
    if not bounds:
        return AcceptedIdle(learned.error)
    widest = max(abs(bound - learned.power) for bound in bounds)
    above = max(0.0, max(bounds) - learned.power)
    return AcceptedIdle(max(learned.error, widest), firm=False, above=Milliwatts(math.ceil(above)))


def _contradicts(learned: LearnedIdle, power: Milliwatts, error: float) -> bool:
    """True if two idle powers differ by more than equal devices do, with both errors."""
    tolerance = learned.error + error + EQUAL_DEVICES * max(learned.power, power)
    return abs(learned.power - power) > tolerance
