"""Power into energy: the trapezoid rule over samples stamped when they were read.

Equal samples are samples: power that does not change is energy all the same.

A GPU's energy: its counter where it has one, its integrated power where it has not.
"""

from __future__ import annotations

from collections import deque

from wattspan.model import MILLISECOND, SECOND, Instant, Microjoules

MAX_GAP = 2 * SECOND
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
        """Integrated and counted energy over the same stretches; None before there was one."""
        if not self._compared_halves and not self._counted:
            return None
        return Microjoules(self._compared_halves // 2_000_000), Microjoules(self._counted)


FROZEN_AFTER = 5 * SECOND
FROZEN_POWER = 1_000_000  # uJ: a counter that missed a whole joule does not count


class CounterPeriod:
    """How often a counter moves, from the times at which it was seen to have moved.

    Nobody who reads at an interval can see a finer step than that, so the answer is an upper
    bound. 100 ms, the step of most GPUs, is assumed until enough was seen.
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

    def saw(self, mono: int, counter: int) -> None:
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
        if abs(rounded - self.resolution) * 5 > self.resolution:  # leave the domain in peace
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
        """The energy up to ``at`` from what was read then, or None if that tells nothing.

        ``refused``: there is no counter. A counter that merely failed this time is waited for.
        """
        bridged = power is None or self.integral.feed(at, power, counter)
        if counter is not None:
            self.step.saw(at.mono, counter)
            self._watch_for_frost(at, counter)
        if counter is not None and not self.frozen:
            self._choose(derived=False)
            return counter
        if power is None or not (refused or self.frozen):
            return None
        self._choose(derived=True)
        if not bridged:
            self.epoch += 1
        return self.integral.energy

    def _choose(self, *, derived: bool) -> None:
        if self.derived is not None and self.derived != derived:
            self.epoch += 1
        self.derived = derived

    def _watch_for_frost(self, at: Instant, counter: int) -> None:
        """Some stacks have a counter that answers and never moves."""
        if self._moved is None or self._moved[0] != counter:
            self._moved = (counter, at.mono, self.integral.energy)
            self.frozen = False
            return
        _, since, integral = self._moved
        missed = self.integral.energy - integral
        self.frozen = at.mono - since >= FROZEN_AFTER and missed >= FROZEN_POWER

    @property
    def resolution(self) -> int:
        return self.step.resolution
