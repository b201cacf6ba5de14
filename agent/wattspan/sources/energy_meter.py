"""Energy of a device: its counter where there is one, else the integral of its power.

Power is integrated by the trapezoid rule over samples stamped when they were read.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from wattspan.model import MILLISECOND, SECOND, Instant, Microjoules

MAX_GAP = 2 * SECOND
"""Over a longer period without a sample, the power is unknown."""


class PowerIntegral:
    """Ever-increasing microjoules from milliwatts, and a counter's energy over the same periods.

    Sums are kept in half milliwatt-nanoseconds (5e-13 J), so that nothing is lost to rounding.
    """

    def __init__(self) -> None:
        self._last: tuple[int, int, int | None] | None = None  # mono, milliwatts, microjoules
        self._halves = 0
        self._counted = 0
        self._compared_halves = 0

    def feed(self, at: Instant, power: int, counter: int | None) -> bool:
        """Add one sample, with the value of the energy counter at that time, if there is one.

        False if the time since the last sample is too long: the integral then does not grow over
        it, and the caller must report a gap.
        """
        last, self._last = self._last, (at.mono, power, counter)
        if last is None:
            return True
        since, before, counter_before = last
        elapsed = at.mono - since
        if not 0 < elapsed <= MAX_GAP:
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
        """Integrated and counted energy over the same periods; None before the first."""
        if not self._compared_halves and not self._counted:
            return None
        return Microjoules(self._compared_halves // 2_000_000), Microjoules(self._counted)


FROZEN_AFTER = 5 * SECOND
FROZEN_POWER = 1_000_000  # uJ: a counter that missed a whole joule does not count


class CounterPeriod:
    """The interval of a counter's moves, from the times at which moves were observed.

    A reader cannot observe a finer step than its own interval, so the result is an upper bound.
    100 ms, the step of most GPUs, is assumed until enough moves were observed.
    """

    START = 100 * MILLISECOND
    ENOUGH = 9
    _GRAIN = 5 * MILLISECOND

    def __init__(self) -> None:
        self._gaps: deque[int] = deque(maxlen=2 * self.ENOUGH + 1)
        self._moves = 0
        self._moved_at: int | None = None
        self._last: int | None = None
        self.resolution = self.START

    def observe(self, mono: int, counter: int) -> None:
        last, self._last = self._last, counter
        if last is None or counter == last:
            return
        if self._moved_at is not None:
            self._gaps.append(mono - self._moved_at)
            self._moves += 1
            if self._moves % self.ENOUGH == 0:
                self._settle()
        self._moved_at = mono

    def _settle(self) -> None:
        typical = sorted(self._gaps)[len(self._gaps) // 2]
        rounded = max(self._GRAIN, round(typical / self._GRAIN) * self._GRAIN)
        # Small changes do not redefine the domain.
        if abs(rounded - self.resolution) * 5 > self.resolution:
            self.resolution = rounded


class EnergyMeter:
    """Chooses between counter and integral, and changes ``epoch`` whenever the choice changes."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.integral = PowerIntegral()
        self.step = CounterPeriod()
        self.derived: bool | None = None  # None: nothing was read yet
        self.frozen = False
        self._moved: tuple[int, int, int] | None = None  # counter, when it moved, integral then

    def read(
        self, at: Instant, counter: Microjoules | None, power: int | None, *, refused: bool
    ) -> Microjoules | None:
        """The energy up to ``at`` from the values read then, or None if it is unknown.

        ``refused``: there is no counter. After a single failure the next value of a counter is
        awaited.
        """
        bridged = power is None or self.integral.feed(at, power, counter)
        if counter is not None:
            self.step.observe(at.mono, counter)
            self._check_frozen(at, counter)
        if counter is not None and not self.frozen:
            self._choose(derived=False)
            return counter
        if power is None or not (refused or self.frozen):
            return None
        self._choose(derived=True)
        if not bridged:
            self.epoch += 1
        return self.integral.energy

    @property
    def comparison(self) -> tuple[Microjoules | None, Microjoules | None]:
        """Integrated and counted energy over the same periods; None if it is unknown.

        Without a counter, the first is all that was integrated.
        """
        compared = self.integral.compared
        if compared is None:
            return (self.integral.energy if self.derived else None), None
        return compared

    def _choose(self, *, derived: bool) -> None:
        if self.derived is not None and self.derived != derived:
            self.epoch += 1
        self.derived = derived

    def _check_frozen(self, at: Instant, counter: int) -> None:
        """Some stacks have a counter that answers and never moves."""
        if self._moved is None or self._moved[0] != counter:
            self._moved = (counter, at.mono, self.integral.energy)
            self.frozen = False
            return
        _, since, integral = self._moved
        missed = self.integral.energy - integral
        self.frozen = at.mono - since >= FROZEN_AFTER and missed >= FROZEN_POWER


MIN_COMPARED_ENERGY = 5_000_000_000
"""Microjoules of integrated power before a counter is judged: more than five seconds of load."""


@dataclass(slots=True)
class CounterCheck:
    """Decides whether a counter fits the power that the board reports.

    ``misreports`` is true if one of both energies is more than ``ratio`` times the other.
    """

    ratio: float
    misreports: bool = False
    _since: tuple[int, int] = (0, 0)

    def observe(
        self, compared: tuple[Microjoules, Microjoules] | None, *, frozen: bool = False
    ) -> None:
        """``compared`` is the integrated and the counted energy of the same periods.

        The time in which the counter was ``frozen`` does not count.
        """
        if compared is None:
            return
        if frozen:
            self._since = compared
        integrated, counted = (all_ - old for all_, old in zip(compared, self._since, strict=True))
        if integrated >= MIN_COMPARED_ENERGY:
            most, least = max(integrated, counted), min(integrated, counted)
            self.misreports = most > least * self.ratio
