"""What energy costs and emits: rates by the kilowatt-hour, and totals that lose nothing. Pure.

Everything is whole numbers: rates and totals in billionths of a unit, energy in microjoules. What
is less than a billionth is carried to the next energy, so that however often the energy is asked
for, and however small its portions are, the total is that of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from wattspan.model import DomainAccount, Microjoules, RatedEnergy, RateOrigin

KILOWATT_HOUR = 3_600_000_000_000
"""Microjoules."""

BILLION = 10**9

MAX_RATE = 1_000_000
"""No rate is more than this, in units by the kilowatt-hour: what claims to be is a mistake."""


def billionths(rate: float) -> int | None:
    """``rate`` as it is written, in billionths; None if it is below zero, beyond all, or no number.

    0.3 is 300000000, and not what the nearest binary fraction would come to.
    """
    if not 0 <= rate <= MAX_RATE:
        return None
    return round(Fraction(repr(rate)) * BILLION)


class RateAccumulator:
    """Weighs energy as it is spent, at a rate that may change or not be known.

    ``before`` is what the scale of an earlier run showed; it counts if it was of the same unit.
    """

    __slots__ = ("_origin", "_rest", "_total", "_unit", "_unknown")

    def __init__(self, unit: str, origin: RateOrigin, before: RatedEnergy | None = None) -> None:
        self._unit, self._origin = unit, origin
        self._rest = 0  # of a billionth, in microjoules times billionths
        self._total = self._unknown = 0
        if before is not None and before.unit == unit:
            self._total, self._unknown = before.total, int(before.unknown)

    def put(self, energy: int, rate: int | None) -> RatedEnergy:
        """``energy`` more was spent, at ``rate``; how it all stands now."""
        if rate is None:
            self._unknown += energy
        else:
            whole, self._rest = divmod(energy * rate + self._rest, KILOWATT_HOUR)
            self._total += whole
        return RatedEnergy(self._unit, self._origin, rate, self._total, Microjoules(self._unknown))


class CoverEnergy:
    """How much the cover has spent since it was last asked for.

    ``accounts`` are the books that were opened: what they hold was spent, and weighed, before.
    """

    def __init__(self, accounts: Iterable[DomainAccount] = ()) -> None:
        self._seen = {account.domain.id: int(account.energy) for account in accounts}

    def spent(self, accounts: Iterable[DomainAccount]) -> int:
        """The rise of the cover's members; what others spend is theirs once they are members."""
        spent = 0
        for account in accounts:
            rise = account.energy - self._seen.get(account.domain.id, 0)
            if rise > 0:
                self._seen[account.domain.id] = int(account.energy)
                spent += rise if account.domain.in_cover else 0
        return spent
