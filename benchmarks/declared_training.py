"""Trainings that declare themselves, tuned with default settings over hours of simulated time.

Each run is the whole tuner with its declared jobs, on the simulated host of the tests: a GPU of
700 W whose reaction to a cap is a law of two numbers, and a job that declares a budget of 5 %.
Nothing else is configured. The score is the truth of the simulation: time and energy of all steps,
learning included, relative to the same steps at the original limit. The oracle is the fixed limit
with the least energy within the budget, among those that the tuner may set. At the end the job is
killed, and the limit must be the original one.

The real optimizer of Zeus runs on the same boards with the same steps and its constraint for the
same slowdown, if `scripts/test-tools all` has installed it and PyTorch; ``--zeus`` runs it alone.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.declared_training --processes 2
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

from testbed.machine import describe
from testbed.requirements import CLIENTS, TORCH
from testbed.tuned_host import DEFAULT, Gpu, Host
from testbed.tuned_host import Job as SimulatedJob
from testbed.tuner.stats import clopper_pearson, mean
from testbed.tuner.zeus_optimizer import on_boards

from wattspan.config import AutotuneSettings

BUDGET, LOWEST = 0.05, 0.6
NOISES, SLOPES = (0.01, 0.03), (0.1, 0.25)
WATTSPAN, ZEUS = "wattspan", "Zeus 0.16"


class Outcome(NamedTuple):
    """The truth of one run; ratios."""

    seed: int
    noise: float
    slowdown: float
    saving: float
    possible: float
    restored: bool

    @property
    def share(self) -> float:
        return self.saving / self.possible


def oracle(gpu: Gpu) -> float:
    """The largest saving of a fixed limit within the budget."""
    limits = (Gpu("oracle", gpu.draw, gpu.slope, cap) for cap in range(
        round(LOWEST * DEFAULT), gpu.draw, 1000
    ))  # fmt: skip
    return max(
        1 - one.power / gpu.draw * one.slowdown for one in limits if one.slowdown <= 1 + BUDGET
    )


def case(seed: int) -> tuple[float, float]:
    """The noise of a step, and the slope of the board."""
    return NOISES[seed % 2], SLOPES[seed // 2 % 2]


def zeus(seeds: Sequence[int], hours: float) -> Iterator[Outcome]:
    """The same boards and steps under the optimizer of Zeus."""
    jobs = [
        {"seed": seed, "noise": noise, "slope": slope, "step": SimulatedJob.step}
        for seed in seeds
        for noise, slope in [case(seed)]
    ]
    for found in on_boards(1 + BUDGET, hours * 3600, jobs):
        noise, slope = case(found["seed"])
        possible = oracle(Gpu("oracle", slope=slope))
        yield Outcome(noise=noise, possible=possible, **found)


def run(seed: int, hours: float) -> Outcome:
    noise, slope = case(seed)
    host = Host(settings=AutotuneSettings(mode="apply", declared="allow"))
    (gpu,) = host.gpus
    gpu.slope = slope
    job = host.train(noise=noise, random=random.Random(seed))
    host.declare(job, max_slowdown=BUDGET)
    began = host.clock.monotonic()
    host.run(hours * 3600)
    rng = random.Random(seed)
    done = sum(job.step * math.exp(rng.gauss(0.0, noise)) for _ in range(job.steps))
    if job.left is not None:
        done += job.step * math.exp(rng.gauss(0.0, noise)) - job.left
    took, energy = (host.clock.monotonic() - began) / 1e9, gpu.energy
    job.alive = False  # it was killed
    host.run(30)
    free = gpu.draw * done * 1000  # milliwatts and seconds: millijoules, in microjoules
    return Outcome(seed, noise, took / done - 1, 1 - energy / free, oracle(gpu), gpu.cap == DEFAULT)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--hours", type=float, default=2.0, help="simulated time of each run")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--zeus", action="store_true", help="only the optimizer of Zeus")
    options = parser.parse_args(words)
    if options.zeus and not (CLIENTS.exists() and TORCH.exists()):
        parser.error("Zeus or PyTorch is missing: run `scripts/test-tools all` first.")
    seeds = range(1, options.runs + 1)
    found: dict[str, list[Outcome]] = {}
    if not options.zeus:
        with ProcessPoolExecutor(options.processes) as pool:
            found[WATTSPAN] = list(pool.map(partial(run, hours=options.hours), seeds))
    if CLIENTS.exists() and TORCH.exists():
        found[ZEUS] = list(zeus(seeds, options.hours))
    print(f"{describe()}; simulated, {options.hours:g} hours a run.\n")
    print(
        f"| tuned by | noise of a step | runs | over {BUDGET:.0%} (95 % bound) | largest slowdown "
        "| saving | oracle | share | original limit after the kill |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, outcomes in found.items():
        for noise in NOISES:
            print(_row(name, f"{noise:.0%}", [one for one in outcomes if one.noise == noise]))
        print(_row(name, "all", outcomes))


def _row(tuned_by: str, name: str, found: Sequence[Outcome]) -> str:
    if not found:
        return f"| {tuned_by} | {name} | 0 | | | | | | |"
    over = sum(one.slowdown > BUDGET for one in found)
    return (
        f"| {tuned_by} | {name} | {len(found)} "
        f"| {over} (≤ {clopper_pearson(over, len(found))[1]:.0%}) "
        f"| {max(one.slowdown for one in found):.2%} "
        f"| {mean([one.saving for one in found]):.1%} "
        f"| {mean([one.possible for one in found]):.1%} "
        f"| {mean([one.share for one in found]):.0%} "
        f"| {sum(one.restored for one in found)} of {len(found)} |"
    )


if __name__ == "__main__":
    main()
