"""Runs of iterations at a plan, compared with runs at the original clocks before and after."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from wattspan.tuning.decisions.sequential_test import Evidence, evidence

_MAX_PAIRS = 200
"""Comparisons that are kept, the latest ones."""

ORIGINAL_RUN = 2
"""Iterations of a run at the original clocks."""

_PLAN_RUN = 8
_MAX_DOUBLINGS = 4


def plan_run(comparisons: int) -> int:
    """The iterations of the next run at a plan, after so many comparisons."""
    return _PLAN_RUN << min(comparisons, _MAX_DOUBLINGS)


class IterationRun(NamedTuple):
    """Consecutive iterations at the same clocks: sums of the logarithms of time and energy."""

    iterations: int = 0
    time: float = 0.0
    metered: int = 0
    energy: float = 0.0

    def add(self, seconds: float, watts: float | None) -> IterationRun:
        run = self._replace(iterations=self.iterations + 1, time=self.time + math.log(seconds))
        if watts is None or watts <= 0:
            return run
        energy = self.energy + math.log(watts * seconds)
        return run._replace(metered=self.metered + 1, energy=energy)

    def plus(self, other: IterationRun) -> IterationRun:
        return IterationRun(
            self.iterations + other.iterations,
            self.time + other.time,
            self.metered + other.metered,
            self.energy + other.energy,
        )


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """The log ratios of one plan's time and energy per iteration to those of the original clocks.

    ``before`` and ``held`` are runs that wait for the run at the original clocks after them.
    """

    times: tuple[float, ...] = ()
    energies: tuple[float, ...] = ()
    before: IterationRun = field(default_factory=IterationRun)
    held: IterationRun = field(default_factory=IterationRun)

    def hold(self, run: IterationRun) -> PlanComparison:
        """Add a run at the plan."""
        return replace(self, held=run)

    def compare(self, after: IterationRun) -> PlanComparison:
        """Add a run at the original clocks, which completes a comparison if it is not the first."""
        before, held = self.before, self.held
        if not (before.iterations and held.iterations):
            return PlanComparison(self.times, self.energies, after)
        around = before.plus(after)
        times = (
            *self.times[1 - _MAX_PAIRS :],
            held.time / held.iterations - around.time / around.iterations,
        )
        energies = self.energies
        if held.metered and around.metered:
            saved = held.energy / held.metered - around.energy / around.metered
            energies = (*energies[1 - _MAX_PAIRS :], saved)
        return PlanComparison(times, energies, after)

    def drifted(self, after: IterationRun) -> float:
        """The log ratio of the times of both runs at the original clocks; 0 without the first."""
        if not self.before.iterations:
            return 0.0
        return after.time / after.iterations - self.before.time / self.before.iterations

    def slower(self, noise: float) -> Evidence:
        """The log ratio of the time, for iterations with this coefficient of variation."""
        return _evidence(self.times, noise)

    def energy(self, noise: float) -> Evidence:
        """The log ratio of the energy; of no comparisons, if no energy was measured."""
        return _evidence(self.energies, noise)


def _evidence(values: tuple[float, ...], noise: float) -> Evidence:
    return evidence(values, noise * math.sqrt(1 / _PLAN_RUN + 1 / (2 * ORIGINAL_RUN)))
