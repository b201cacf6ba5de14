"""A job at work in simulated time: it spends energy, and finishes units faster or slower."""

from __future__ import annotations

import math
from collections import deque
from random import Random

from testbed.tuner.curves import Curve
from testbed.tuner.plants import Luck, Plant

from wattspan.tuning.decisions.values import EnergyPoint, WorkUnit

IDLE = 0.3
"""The part of its power that a device draws while its job waits for something else."""

_GRAIN = 0.05  # seconds: the effect of a settling cap is constant for so long


class Job:
    """One run of a plant. ``time`` in seconds, ``spent`` in joules, ``ends`` by unit."""

    def __init__(self, plant: Plant, luck: Luck, seed: int = 0) -> None:
        self.plant = plant
        self.time = 0.0
        self.spent = 0.0
        self.ends: list[float] = []
        self.units: list[WorkUnit] = []  # finished and not yet taken
        self.cap = plant.curve.original
        self.log: list[tuple[float, float]] = []  # writes by time
        self._luck = luck
        self._points: deque[EnergyPoint] = deque()  # read and not yet known
        self._random = Random(f"{plant.name}/{seed}/job")
        self._settled = 0.0
        self._from = self.cap
        self._changed = 0.0
        self._begun = 0.0
        self._at = 0
        self._left = self._work(0)
        self._dead = 0.0
        self._power = 0.0
        self._curve, self._pace = plant.curve, 1.0
        self._switches = [(int(p.begins * plant.units), p.curve) for p in plant.phases]
        self._know()

    @property
    def done(self) -> bool:
        return self._at >= self.plant.units

    def start_at(self, watts: float) -> None:
        """Have this cap in force from the beginning."""
        self.cap = self._from = watts
        self._left = self._work(0)
        self._know()

    def set_cap(self, watts: float) -> None:
        """Write a cap now; it takes its time to work."""
        if watts == self.cap:
            return
        self._from = self._effective()
        self.cap, self._changed = watts, self.time
        self._settled = self.time + self._random.uniform(*self.plant.settle)
        self.log.append((self.time, watts))
        self._know()

    def become(self, curve: Curve, pace: float = 1.0) -> None:
        """Be another job from now on, ``pace`` times slower at any setting."""
        self._curve, self._pace = curve, pace
        self._know()

    def slowdown(self) -> float:
        """True slowdown of the current job by the current cap."""
        return self._curve.at(self.cap).time - 1

    def draw(self) -> float:
        """Watts of one device at this instant."""
        if self._dead:
            return self._curve.draw * IDLE
        power = self._effect[1] / self._curve.devices * self._random.uniform(0.9, 1.1)
        return min(power, self.cap * 1.02)

    def run_units(self, count: int) -> None:
        """On, until so many more units are finished or the job is."""
        goal = min(self._at + count, self.plant.units)
        while self._at < goal:
            self._advance(math.inf, goal)

    def finish(self) -> None:
        """On to the job's end, unobserved: no units and no readings are kept."""
        settled = self.plant.settle[1] / self.plant.step
        self.run_units(2 + math.ceil(settled))
        if self._luck.pick is not None:
            self.run_units(self.plant.units)
        luck, time, spent = self._luck, self.time, self.spent
        while not self.done:
            until = min(
                self._switches[0][0] if self._switches else self.plant.units, self.plant.units
            )
            ratio, power = self._effect
            idle = self._curve.draw * self._curve.devices * IDLE
            dead = self._dead
            for at in range(self._at, until):
                lasts = luck.work[at] * ratio
                time += dead + lasts
                spent += dead * idle + power * luck.power[at] * lasts
                self.ends.append(time)
                dead = luck.dead[at]
            self._at, self._dead = until, dead
            self.time, self.spent = time, spent
            self._turn()

    def advance(self, until: float) -> None:
        """On, until a moment or the job's end."""
        while self.time < until and not self.done:
            self._advance(until, self.plant.units)

    def read(self) -> None:
        """Read the stepped energy counter."""
        tick = math.floor(self.time / self.plant.counter_step + 1e-9) * self.plant.counter_step
        energy = self.spent - self._power * (self.time - tick)
        self._points.append(EnergyPoint(int(self.time * 1e9), round(energy * 1e3) * 1000))

    def take(self, now: float) -> list[EnergyPoint]:
        """The readings that are known by now; each once."""
        known = (now - self.plant.energy_lag) * 1e9
        taken = []
        while self._points and self._points[0].at <= known:
            taken.append(self._points.popleft())
        return taken

    def _advance(self, until: float, goal: int) -> None:
        """On at one effect: to ``until``, to a grain's end while settling, or to the goal."""
        if self.time < self._settled:
            until = min(until, self.time + _GRAIN, self._settled)
            self._know()
        luck, lying = self._luck, self.plant.lying
        works, deads, powers, amounts = luck.work, luck.dead, luck.power, luck.amount
        ratio, full = self._effect
        time, spent, begun, left, dead = self.time, self.spent, self._begun, self._left, self._dead
        at, power = self._at, self._power
        while at < goal and time < until:
            if dead:
                lasts = min(dead, until - time)
                power = self._idle
                time += lasts
                spent += power * lasts
                dead = dead - lasts if lasts < dead else 0.0
                begun = time
                continue
            power = full * powers[at]
            lasts = left * ratio
            if time + lasts > until:
                left -= (until - time) / ratio
                spent += power * (until - time)
                time = until
                break
            time += lasts
            spent += power * lasts
            end = begun + works[at] if lying else time
            self.units.append(WorkUnit(int(begun * 1e9), int(end * 1e9), amounts[at]))
            self.ends.append(time)
            dead, begun = deads[at], time
            at += 1
            if at < len(works):
                left = self._work(at) if luck.pick is not None else works[at]
            if self._switches and at >= self._switches[0][0]:
                break
        self.time, self.spent, self._begun, self._left, self._dead = time, spent, begun, left, dead
        self._at, self._power = at, power
        self._turn()

    def _work(self, at: int) -> float:
        luck = self._luck
        if luck.pick is None:
            return luck.work[at]
        recorded = self.plant.curve.iterations[self.plant.curve.nearest(self.cap)]
        return luck.work[at] * recorded[int(luck.pick[at] * len(recorded)) % len(recorded)].time

    def _turn(self) -> None:
        """Into the next phase, where one begins, and to a cap's full effect."""
        while self._switches and self._at >= self._switches[0][0]:
            self._curve = self._switches.pop(0)[1]
        if self._curve is not self._effect_of or (
            self.time >= self._settled and self._effect_at != self.cap
        ):
            self._know()

    def _effective(self) -> float:
        """The cap as it works now, on its way from the last one."""
        if self.time >= self._settled:
            return self.cap
        part = (self.time - self._changed) / (self._settled - self._changed)
        return self._from + part * (self.cap - self._from)

    def _know(self) -> None:
        """Current speed, and the power of all its devices."""
        self._effect_at, self._effect_of = self._effective(), self._curve
        ratio, energy = self._curve.at(self._effect_at)
        full = self._curve.draw * self._curve.devices
        self._effect, self._idle = (ratio * self._pace, full * energy / ratio), full * IDLE
