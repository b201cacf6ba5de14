"""True time and energy of a run at one fixed setting, and the best such setting: the oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from testbed.tuner.curves import Curve
from testbed.tuner.job import IDLE, Job
from testbed.tuner.plants import Luck, Plant


@dataclass(frozen=True)
class Total:
    """A whole run: seconds and joules."""

    time: float
    energy: float


@dataclass(frozen=True)
class Stretch:
    """Units under one curve: their seconds of work, and the same weighed with power."""

    curve: Curve
    work: float
    powered: float


class Truth:
    """One run's luck, added up once, so that any fixed setting's total is a small sum."""

    def __init__(self, plant: Plant, luck: Luck) -> None:
        self.plant, self.luck = plant, luck
        self._dead = math.fsum(luck.dead)
        begins = [(0, plant.curve)]
        begins += [(int(phase.begins * plant.units), phase.curve) for phase in plant.phases]
        ends = [begin for begin, _ in begins[1:]] + [plant.units]
        self._stretches = [
            Stretch(
                curve,
                math.fsum(luck.work[begin:end]),
                math.fsum(map(float.__mul__, luck.work[begin:end], luck.power[begin:end])),
            )
            for (begin, curve), end in zip(begins, ends, strict=True)
        ]

    def at(self, watts: float) -> Total:
        """The total at a fixed setting. Exact, but for the chance in recorded iterations."""
        time, energy = self._dead, 0.0
        for stretch in self._stretches:
            ratio, spent = stretch.curve.at(watts)
            full = stretch.curve.draw * stretch.curve.devices
            time += stretch.work * ratio
            energy += stretch.powered * full * spent
        watts_idle = self._stretches[-1].curve.draw * self._stretches[-1].curve.devices * IDLE
        return Total(time, energy + self._dead * watts_idle)

    def uncapped(self) -> Total:
        if not self.plant.iterations:
            return self.at(self.plant.curve.original)
        return run_at(self.plant, self.luck, self.plant.curve.original)

    @cached_property
    def base_ends(self) -> list[float]:
        """When each unit would end without caps."""
        steps = map(float.__add__, self.luck.work, self.luck.dead)
        through = list(accumulate(steps))
        return [end - dead for end, dead in zip(through, self.luck.dead, strict=True)]

    def oracle(self, budget: float) -> tuple[float, Total]:
        """The setting that spends least within the budget, of all that are allowed."""
        return _oracle(self, budget)


@lru_cache(maxsize=8)
def _oracle(truth: Truth, budget: float) -> tuple[float, Total]:
    original = truth.plant.curve.original
    base = truth.at(original)
    best, least = original, base
    for watts in range(truth.plant.floor_watts(), int(original)):
        total = truth.at(watts)
        if total.time <= base.time * (1 + budget) and total.energy < least.energy:
            best, least = watts, total
    return best, least


def run_at(plant: Plant, luck: Luck, watts: float) -> Total:
    """The same by running it."""
    job = Job(plant, luck)
    job.start_at(watts)
    job.finish()
    return Total(job.time, job.spent)
