"""Alternatives to the tuner: nothing, one cap for all, a sweep, or knowing everything.

The sweep implements the rule published by Zeus (NSDI '23, its power limit optimizer):
from the highest limit to the lowest in strides of 25 W, ten steps of warm-up and forty measured
ones at each, once; then one limit for good. It runs in the job, so it acts between two steps and
sees its own time and energy exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from testbed.tuner.job import Job
from testbed.tuner.runner import Bench, Score, Watch

STRIDE, WARM_UP, MEASURED = 25, 10, 40


class Selector(StrEnum):
    """Which of the measured limits the sweep keeps."""

    SLOWDOWN = "sweep, lowest limit"  # of those within the permitted slowdown
    ENERGY = "sweep, least energy"  # at any cost in time


class Window(NamedTuple):
    """Time and energy of forty steps at one limit."""

    watts: float
    time: float
    energy: float


def select(selector: Selector, windows: Sequence[Window], budget: float) -> float:
    """The limit to keep; the first window is that of the highest one."""
    if selector is Selector.ENERGY:
        return min(windows, key=lambda one: one.energy).watts
    most = windows[0].time * (1 + budget)
    return min(one.watts for one in windows if one.time <= most)


def none(bench: Bench) -> Score:
    """No cap at all."""
    return bench.score("no cap", _fixed(bench, bench.plant.curve.original))


def static(bench: Bench, part: float = 0.8) -> Score:
    """One cap for every job, as many operators set it."""
    watts = max(bench.plant.curve.least, round(part * bench.plant.curve.original))
    return bench.score(f"static {part:.0%}", _fixed(bench, watts))


def oracle(bench: Bench) -> Score:
    """The best fixed setting, known from the beginning."""
    watts, _ = bench.truth.oracle(bench.terms.budget)
    return bench.score("oracle", _fixed(bench, watts))


def sweep(bench: Bench, selector: Selector) -> Score:
    """The whole run with a sweep at its beginning."""
    return bench.score(selector.value, *swept(bench, selector))


def swept(bench: Bench, selector: Selector) -> tuple[Job, Watch]:
    """The job after it. The sweep knows of no floor but the hardware's."""
    plant = bench.plant
    job, watch = Job(plant, bench.luck, bench.seed), Watch()
    windows: list[Window] = []
    job.run_units(1)
    watts = plant.curve.original
    while watts >= plant.curve.least and not job.done:
        job.set_cap(watts)
        job.run_units(WARM_UP)
        begun, spent = job.time, job.spent
        job.run_units(MEASURED)
        windows.append(Window(watts, job.time - begun, job.spent - spent))
        watts -= STRIDE
    if not job.done:
        job.set_cap(select(selector, windows, bench.terms.budget))
        watch.commit = len(job.ends), job.time
        job.finish()
    return job, watch


def _fixed(bench: Bench, watts: float) -> Job:
    job = Job(bench.plant, bench.luck, bench.seed)
    job.start_at(watts)
    job.finish()
    return job


METHODS = {
    "no cap": none,
    "static 80%": static,
    Selector.SLOWDOWN.value: lambda bench: sweep(bench, Selector.SLOWDOWN),
    Selector.ENERGY.value: lambda bench: sweep(bench, Selector.ENERGY),
    "oracle": oracle,
}
"""All baselines by name."""
