"""Cost and emissions of energy, at rates per kilowatt-hour.

All figures are integers: rates and totals in billionths of a unit, energy in microjoules. Fractions
of a billionth are carried over, so a total does not depend on the number and size of the portions.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from wattspan.model import DomainAccount, Microjoules, RatedEnergy, RateOrigin

KILOWATT_HOUR = 3_600_000_000_000
"""Microjoules."""

BILLION = 10**9

MAX_RATE = 1_000_000
"""The largest valid rate, in units per kilowatt-hour."""


def billionths(rate: float) -> int | None:
    """``rate`` in billionths by its decimal digits; None if negative, above ``MAX_RATE`` or NaN.

    0.3 is 300000000, not the rounded value of the nearest binary fraction.
    """
    if not 0 <= rate <= MAX_RATE:
        return None
    return round(Fraction(repr(rate)) * BILLION)


class RateAccumulator:
    """The total cost of energy at a rate that may change or be unknown.

    ``before`` is the total of an earlier run; it is continued if its unit is the same.
    """

    __slots__ = ("_origin", "_rest", "_total", "_unit", "_unknown")

    def __init__(self, unit: str, origin: RateOrigin, before: RatedEnergy | None = None) -> None:
        self._unit, self._origin = unit, origin
        self._rest = 0  # fraction of a billionth, in microjoules times billionths
        self._total = self._unknown = 0
        if before is not None and before.unit == unit:
            self._total, self._unknown = before.total, int(before.unknown)

    def add(self, energy: int, rate: int | None) -> RatedEnergy:
        """Add ``energy`` at ``rate`` (None: unknown); returns the totals."""
        if rate is None:
            self._unknown += energy
        else:
            whole, self._rest = divmod(energy * rate + self._rest, KILOWATT_HOUR)
            self._total += whole
        return RatedEnergy(self._unit, self._origin, rate, self._total, Microjoules(self._unknown))


class CoverEnergy:
    """The energy of the cover since the last call.

    ``accounts`` are from a checkpoint; their energy was added by an earlier run.
    """

    def __init__(self, accounts: Iterable[DomainAccount] = ()) -> None:
        self._seen = {account.domain.id: int(account.energy) for account in accounts}

    def spent(self, accounts: Iterable[DomainAccount]) -> int:
        """The increase of the cover's members; other domains count once they are members."""
        spent = 0
        for account in accounts:
            rise = account.energy - self._seen.get(account.domain.id, 0)
            if rise > 0:
                self._seen[account.domain.id] = int(account.energy)
                spent += rise if account.domain.in_cover else 0
        return spent
