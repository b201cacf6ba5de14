"""Jobs to tune: a curve, its duration, and other events.

Random events are drawn before the run, by unit of work. So the same seed means the same
luck for every method, and a run with caps differs from the run without in nothing but the caps.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from random import Random

from testbed.tuner.curves import Curve


@dataclass(frozen=True)
class Phase:
    """From ``begins`` (a part of the units) on, the job is another one."""

    begins: float
    curve: Curve
    slower: float = 1.0


@dataclass(frozen=True)
class Plant:
    """A job. Times are seconds at the original setting, deviations are of the logarithm."""

    name: str
    curve: Curve
    units: int = 24_000
    step: float = 0.75
    cv: float = 0.01
    drift: float = 0.0  # standard deviation of an AR(1) process
    drift_units: int = 300  # over which it forgets
    episodes_every: int = 0  # mean number of units between the neighbour's visits
    episode_units: int = 60
    episode: float = 0.15
    phases: tuple[Phase, ...] = ()
    stragglers: float = 0.0  # the part of units with a Pareto tail, which no cap lengthens
    pauses_every: int = 0  # units between checkpoints
    pause: float = 30.0
    growth: float = 0.0  # growth of the step at the end
    varied_work: bool = False  # the work of a unit varies, and is reported
    lying: bool = False  # spans are as long as ever; the time between them is not
    iterations: bool = False  # noise is that of real iterations
    settle: tuple[float, float] = (0.2, 1.0)  # seconds until a cap has all its effect
    counter_step: float = 0.1  # seconds between steps of the energy counter
    energy_lag: float = 1.0  # seconds until an energy reading is known
    work: int = 1
    floor: float = 0.6  # of the original: lower caps are not allowed

    @property
    def changes(self) -> bool:
        """True if the job changes into another one during the run."""
        return bool(self.phases or self.growth)

    def floor_watts(self) -> int:
        return math.ceil(max(self.curve.least, self.floor * self.curve.original))


@dataclass(frozen=True)
class Luck:
    """Events of one run: by unit, seconds of work, seconds of nothing after it, power."""

    work: array[float]
    dead: array[float]
    power: array[float]
    amount: array[int]
    pick: array[float] | None = None  # which real iteration, where noise is that

    def total(self) -> float:
        return math.fsum(self.work) + math.fsum(self.dead)


def luck(plant: Plant, seed: int) -> Luck:
    """All that chance does to a run of ``plant``."""
    random = Random(f"{plant.name}/{seed}")
    work = array("d", _noise(plant, random))
    _drift(plant, random, work)
    _episodes(plant, random, work)
    _course(plant, work)
    amount = array("q", [plant.work]) * plant.units
    if plant.varied_work:
        for at in range(plant.units):
            amount[at] = random.randint(256, 2048)
            work[at] *= amount[at] / 1152
    dead = array("d", bytes(8 * plant.units))
    _stragglers(plant, random, dead)
    if plant.pauses_every:
        for at in range(plant.pauses_every, plant.units, plant.pauses_every):
            dead[at] += plant.pause * random.uniform(0.7, 1.5)
    spread = 0.5 * plant.cv
    dead[-1] = 0.0  # the job ends with its last unit
    gauss = random.gauss
    power = array("d", [1.0 + spread * gauss(0.0, 1.0) for _ in range(plant.units)])
    return Luck(work, dead, power, amount, _picks(plant, random) if plant.iterations else None)


def _noise(plant: Plant, random: Random) -> list[float]:
    if plant.iterations or not plant.cv:
        return [plant.step] * plant.units
    sigma = math.sqrt(math.log1p(plant.cv**2))
    mean = math.log(plant.step) - sigma**2 / 2
    gauss, exp = random.gauss, math.exp
    return [exp(gauss(mean, sigma)) for _ in range(plant.units)]


def _drift(plant: Plant, random: Random, work: array[float]) -> None:
    if not plant.drift:
        return
    keep = math.exp(-1 / plant.drift_units)
    kick = plant.drift * math.sqrt(1 - keep**2)
    level = random.gauss(0.0, plant.drift)
    for at in range(plant.units):
        level = keep * level + random.gauss(0.0, kick)
        work[at] *= math.exp(level)


def _episodes(plant: Plant, random: Random, work: array[float]) -> None:
    if not plant.episodes_every:
        return
    at = int(random.expovariate(1 / plant.episodes_every))
    while at < plant.units:
        end = min(at + plant.episode_units, plant.units)
        for one in range(at, end):
            work[one] *= 1 + plant.episode
        at = end + int(random.expovariate(1 / plant.episodes_every))


def _course(plant: Plant, work: array[float]) -> None:
    """Deterministic events: phases and growth."""
    for phase in plant.phases:
        for at in range(int(phase.begins * plant.units), plant.units):
            work[at] *= phase.slower
    if plant.growth:
        for at in range(plant.units):
            work[at] *= 1 + plant.growth * at / plant.units


def _stragglers(plant: Plant, random: Random, dead: array[float]) -> None:
    """A wait of half a step at least, twenty at most, with a tail of index 1.5."""
    if not plant.stragglers:
        return
    for at in range(plant.units):
        if random.random() < plant.stragglers:
            dead[at] = plant.step * min(0.5 * random.paretovariate(1.5), 20.0)


def _picks(plant: Plant, random: Random) -> array[float]:
    """Places in a cap's recorded iterations, 0 to 1, in runs of six: neighbours stay neighbours."""
    found = array("d")
    while len(found) < plant.units:
        begin = random.random()
        found.extend(begin + one / 60 for one in range(6))
    return found[: plant.units]
