"""Jobs whose boards draw less than the lowest permitted cap: the tuner lowers their clocks instead.

Each run is the whole tuner on the simulated host of the tests, with
``knobs = ["gpu_power", "gpu_clock"]`` and the other settings at their defaults. The score is the
truth of the simulation over the whole run, learning included, relative to the same steps at the
highest clock. The oracle is the fixed clock with the least energy within the budget.

Two boards, whose caps go from 700 W to 420 W: an assumption, so that no cap binds. A change of the
clock acts at once.

- ``a40-gpt3``: time and energy of a step at each clock are measured (Perseus, A40).
- ``decode``: the law of the emulated inference server, for a batch that decodes. Nothing of it is
  measured.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.tuner.clock_knob --runs 5
"""

from __future__ import annotations

import argparse
import csv
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from testbed.clock_scaling import costs_at_clock
from testbed.continuous_batching import ModelCosts
from testbed.tuned_host import Gpu, Host, MemoryCapper

from benchmarks.machine import describe
from benchmarks.tuner.curves import Curve, Effect
from benchmarks.tuner.stats import clopper_pearson, mean
from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.emulation.boards import H100
from wattspan.model import Knob

BUDGET, LOWEST, CLOCK_STEP = 0.05, 0.6, 15
NOISES = (0.01, 0.05)
DATA = Path(__file__).parents[1] / "data" / "a40_gpt3_clocks.csv"
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
        assert self.curve is not None
        assert self.capper is not None
        return self.capper.clocked.get(self.device, self.curve.original)

    @property
    def power(self) -> int:
        assert self.curve is not None
        return round(1000 * self.curve.power(self.clock))

    @property
    def slowdown(self) -> float:
        assert self.curve is not None
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
    assert host.capper is not None
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
    assert row is not None
    return Outcome(
        noise,
        took / done - 1,
        1 - gpu.energy / (curve.draw * done * 1e6),
        gpu.clock,
        None if row.committed is None else row.committed / 1e9,
        any(one.decision.caps for one in host.book.decided if one.knob is Knob.GPU_POWER),
    )


def row(curve: Curve, found: Sequence[Outcome]) -> str:
    """The runs of one job as a line of the table."""
    best, at = oracle(curve)
    over = sum(one.slowdown > BUDGET for one in found)
    held = sorted(one.committed for one in found if one.committed is not None)
    clocks = sorted(one.clock for one in found)
    return (
        f"| {curve.name}, CV {found[0].noise:.0%} | {curve.workload} | {curve.draw:.0f} W "
        f"| {over}/{len(found)} | {max(one.slowdown for one in found):.2%} "
        f"| {mean([one.saving for one in found]):.1%} | {best:.1%} "
        f"| {mean([one.saving for one in found]) / best:.0%} "
        f"| {clocks[0]:.0f}-{clocks[-1]:.0f} ({at:.0f}) of {curve.original:.0f} MHz "
        f"| {f'{held[len(held) // 2]:.0f} s' if held else 'never'} "
        f"| {sum(one.capped for one in found)} |"
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=5, help="of each job")
    parser.add_argument("--hours", type=float, default=1.0, help="simulated time of each run")
    options = parser.parse_args(words)
    print(f"{describe()}; simulated, {options.hours:g} hours a run.\n")
    print(
        "| job | curve | draw | over the budget | largest slowdown | saving | oracle | share "
        "| last clocks (oracle) | held after, median | runs with a power cap |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    everything: list[Outcome] = []
    for curve in clock_curves():
        for noise in NOISES:
            found = [
                run(curve, noise, seed, 3600 * options.hours) for seed in range(1, options.runs + 1)
            ]
            everything += found
            print(row(curve, found), flush=True)
    over = sum(one.slowdown > BUDGET for one in everything)
    print(
        f"\nOver the budget of {BUDGET:.0%}: {over} of {len(everything)} runs "
        f"(95 % bound {clopper_pearson(over, len(everything), one_sided=True)[1]:.0%})."
    )


if __name__ == "__main__":
    main()
