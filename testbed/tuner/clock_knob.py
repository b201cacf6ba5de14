"""Jobs whose boards draw less than the lowest permitted cap, tuned by clocks in virtual time."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from testbed.clock_scaling import costs_at_clock
from testbed.continuous_batching import ModelCosts
from testbed.requirements import ROOT
from testbed.tuned_host import Gpu, Host, MemoryCapper
from testbed.tuner.curves import Curve, Effect

from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.emulation.boards import H100
from wattspan.model import Knob

BUDGET, LOWEST, CLOCK_STEP = 0.05, 0.6, 15
NOISES = (0.01, 0.05)
DATA = ROOT / "testbed" / "data" / "a40_gpt3_clocks.csv"
BATCH_CONTEXT = 16_000  # tokens of context that one iteration of the batch reads


@cache
def clock_curves() -> tuple[Curve, ...]:
    """Reactions to the clock: a curve's settings are megahertz here."""
    return _measured(), _decode()


def _measured() -> Curve:
    with DATA.open(newline="") as file:
        rows = [tuple(map(float, row.values())) for row in csv.DictReader(file)]
    return _curve("a40-gpt3", "A40", "training, measured", rows)


def _decode() -> Curve:
    silicon, rows = H100.silicon, []
    for mhz in range(silicon.min_mhz, silicon.max_mhz + 1, silicon.step_mhz):
        costs = costs_at_clock(ModelCosts(), silicon, mhz)
        time = costs.overhead + costs.weights_time + costs.context_time * BATCH_CONTEXT
        power = costs.active_power + silicon.idle / 1000
        energy = costs.weights_energy + costs.context_energy * BATCH_CONTEXT + power * time
        rows.append((float(mhz), time, energy))
    return _curve("decode", "H100", "decoding, emulated law", rows)


def _curve(name: str, gpu: str, workload: str, rows: Sequence[tuple[float, ...]]) -> Curve:
    """From clocks with the time and the energy of a step, ascending."""
    clocks, times, energies = zip(*rows, strict=True)
    effects = tuple(
        Effect(time / times[-1], energy / energies[-1])
        for time, energy in zip(times, energies, strict=True)
    )
    return Curve(name, gpu, workload, energies[-1] / times[-1], clocks, effects)


@dataclass
class ClockedGpu(Gpu):
    """A board that no cap limits, at the clock that its capper has locked."""

    curve: Curve | None = None
    capper: MemoryCapper | None = None

    @property
    def clock(self) -> float:
        return self.capper.clocked.get(self.device, self.curve.original)

    @property
    def power(self) -> int:
        return round(1000 * self.curve.power(self.clock))

    @property
    def slowdown(self) -> float:
        return self.curve.at(self.clock).time


class Outcome(NamedTuple):
    """The truth of one run. ``clock`` is the last one, ``committed`` the seconds to a held one."""

    noise: float
    slowdown: float
    saving: float
    clock: float
    committed: float | None
    capped: bool  # True if any power cap was tried


def oracle(curve: Curve) -> tuple[float, float]:
    """The largest saving of a fixed clock within the budget, and that clock."""
    clocks = range(math.ceil(LOWEST * curve.original), round(curve.original), CLOCK_STEP)
    return max(
        (1 - curve.at(clock).energy, float(clock))
        for clock in clocks
        if curve.at(clock).time <= 1 + BUDGET
    )


def run(curve: Curve, noise: float, seed: int, seconds: float) -> Outcome:
    """One job under the tuner for ``seconds`` of simulated time."""
    named = TunedJobSettings(service="trainer", span="train_step")
    host = Host(
        settings=AutotuneSettings(
            mode="apply", knobs=(Knob.GPU_POWER, Knob.GPU_CLOCK), job=(named,)
        )
    )
    host.capper.clocks, host.capper.highest_clock = True, round(curve.original)
    gpu = ClockedGpu(host.gpus[0].device, curve=curve, capper=host.capper)
    host.gpus[0] = gpu
    job = host.train(noise=noise, random=random.Random(seed))
    began = host.clock.monotonic()
    host.run(seconds)
    rng = random.Random(seed)
    done = sum(job.step * math.exp(rng.gauss(0.0, noise)) for _ in range(job.steps))
    if job.left is not None:
        done += job.step * math.exp(rng.gauss(0.0, noise)) - job.left
    took, row = (host.clock.monotonic() - began) / 1e9, host.row()
    return Outcome(
        noise,
        took / done - 1,
        1 - gpu.energy / (curve.draw * done * 1e6),
        gpu.clock,
        None if row.committed is None else row.committed / 1e9,
        any(one.decision.caps for one in host.book.decided if one.knob is Knob.GPU_POWER),
    )
