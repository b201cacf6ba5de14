"""Exact division of whole amounts, of energy among the payers of a resource, of static energy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from wattspan.model import IdlePolicy, Interval, Milliwatts, PartUsage, Payer, Usage, energy_at


def split(total: int, weights: Sequence[int]) -> list[int]:
    """``total`` divided in proportion to ``weights``, by largest remainder (Hamilton's method).

    The parts are whole, never negative, add up to ``total`` exactly, and each differs from its
    exact proportion by less than one. Ties go to the earlier weight. ``sum(weights)`` must be
    positive; ValueError if a weight is negative or all are zero.
    """
    whole = sum(weights)
    if whole <= 0 or min(weights) < 0:
        raise ValueError("weights must not be negative, nor all zero")
    parts = [total * weight // whole for weight in weights]
    left = total - sum(parts)
    if left:
        remainders = [total * weight % whole for weight in weights]
        by_remainder = sorted(range(len(weights)), key=remainders.__getitem__, reverse=True)
        for i in by_remainder[:left]:
            parts[i] += 1
    return parts


def fair_parts(wanted: Sequence[int], total: int) -> list[int]:
    """The max-min fair parts of ``total``: as much as wanted, or as much as any other has.

    Equal parts differ by one at most.
    """
    parts, left = [0] * len(wanted), total
    for number, i in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        parts[i] = min(wanted[i], left // (len(wanted) - number))
        left -= parts[i]
    return parts


class PayerEnergies(NamedTuple):
    """Payers with their active and idle energies; ``idle`` is [] if no payer is charged for any."""

    payers: list[Payer]
    active: list[int]
    idle: list[int]


def divide_among_payers(
    use: Usage | PartUsage, active: int, idle: int, policy: IdlePolicy
) -> PayerEnergies:
    """Divide ``active`` microjoules by ``spent``, and ``idle`` ones by ``policy``.

    The part of unclaimed use is no payer's. Idle energy is divided among the present payers, or
    is no payer's if there are none or if it has an account of its own.
    """
    payers = [payer for payer, spent in use.spent.items() if spent > 0]
    weights = [use.spent[payer] for payer in payers]
    energies = list[int]()
    if payers:
        *energies, _ = split(active, [*weights, max(0, use.unclaimed)])
    if policy is IdlePolicy.SEPARATE:
        return PayerEnergies(payers, energies, [])
    if policy is IdlePolicy.EQUAL:
        others = sorted(use.present.difference(payers), key=repr)
        payers, energies = [*payers, *others], [*energies, *[0] * len(others)]
        weights = [1] * len(payers)
    return PayerEnergies(payers, energies, split(idle, weights) if payers else [])


class StaticShare(NamedTuple):
    """The static part of the energy of a board's interval that is not in the idle account."""

    static: int
    active: int

    def of(self, energy: int) -> int:
        """The static part of a share of ``active``, rounded down."""
        return energy * self.static // self.active if self.active else 0


class StaticDivider:
    """Divides the static energy of one board as the ledger divides its energy.

    The static energy of an interval is at most its energy. The idle account pays its own part; the
    rest is in the shares, in proportion to them.
    """

    def __init__(self) -> None:
        self._deficit = 0

    def divide(
        self, interval: Interval, idle: int, power: Milliwatts, resolution: int
    ) -> StaticShare:
        """The static part of one interval, of which ``idle`` microjoules are in the idle account.

        ``resolution`` is the period of the counter's steps.
        A counter that moves in steps shows no energy in one interval and twice as much in the
        next: the deficit of the first one, of at most two steps, is added to the second.
        """
        due = energy_at(power, interval.duration) + self._deficit
        static = min(int(interval.energy), due)
        self._deficit = min(due - static, energy_at(power, 2 * resolution))
        return StaticShare(max(0, static - idle), interval.energy - idle)
