"""Power into energy: the trapezoid rule over samples stamped when they were read.

Equal samples are samples: power that does not change is energy all the same.
"""

from __future__ import annotations

from wattspan.model import SECOND, Instant, Microjoules

BRIDGED = 2 * SECOND
"""Over a longer stretch without a sample, the power in between is not known."""


class PowerIntegral:
    """Ever-increasing microjoules from milliwatts, beside a counter's over the same stretches.

    Sums are kept in half milliwatt-nanoseconds (5e-13 J), so that nothing is lost to rounding
    however often it is fed.
    """

    def __init__(self) -> None:
        self._last: tuple[int, int, int | None] | None = None  # mono, milliwatts, microjoules
        self._halves = 0
        self._counted = 0
        self._compared_halves = 0

    def feed(self, at: Instant, power: int, counter: int | None) -> bool:
        """Take one sample, and what the energy counter read beside it, if there is one.

        False where the stretch since the last sample is too long to be bridged: the integral
        then stands still over it and its reader has to be told of a gap.
        """
        last, self._last = self._last, (at.mono, power, counter)
        if last is None:
            return True
        since, before, counter_before = last
        elapsed = at.mono - since
        if not 0 < elapsed <= BRIDGED:
            return elapsed <= 0
        halves = (before + power) * elapsed
        self._halves += halves
        if counter is not None and counter_before is not None and counter >= counter_before:
            self._compared_halves += halves
            self._counted += counter - counter_before
        return True

    @property
    def energy(self) -> Microjoules:
        """All that was integrated."""
        return Microjoules(self._halves // 2_000_000)

    @property
    def compared(self) -> tuple[Microjoules, Microjoules] | None:
        """Integrated and counted energy over the same stretches; None before there was one."""
        if not self._compared_halves and not self._counted:
            return None
        return Microjoules(self._compared_halves // 2_000_000), Microjoules(self._counted)
