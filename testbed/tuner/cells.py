"""The cells of the table: which jobs, under which disturbances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from testbed.tuner.curves import ITERATION_SECONDS, Curve, curves
from testbed.tuner.plants import Phase, Plant

MIN_HELD_UNITS = 6_000
"""Shorter jobs need not hold a certified setting."""

UNITS = 24_000
"""Five hours of steps of 0.75 s."""

SHORT_STEP = 0.03
"""Seconds of one step of the short jobs."""

MILD: dict[str, Any] = {"drift": 0.015, "episodes_every": 2_000}
ROUGH: dict[str, Any] = {"drift": 0.03, "episodes_every": 2_000, "stragglers": 0.01}


@dataclass(frozen=True)
class Cell:
    """One plant, and its purpose."""

    plant: Plant
    group: str  # its table
    quiet: bool = True  # noise only
    null: bool = False  # no cap saves anything
    crooked: bool = False  # its curve is not monotonic: leaving it uncapped is correct
    share: float | None = None  # the goal, where it does not follow from the noise

    @property
    def goal(self) -> float | None:
        """Required part of the oracle's saving; None where it is not a criterion."""
        if self.null or self.crooked:
            return None
        if self.share is not None:
            return self.share
        return 0.85 if self.plant.cv <= 0.02 else 0.75 if self.plant.cv <= 0.05 else 0.6

    @property
    def steps_goal(self) -> int | None:
        """Required median of steps until a setting is held; None where it is not a criterion."""
        if self.goal is None or self.plant.cv > 0.05 or self.plant.units < MIN_HELD_UNITS:
            return None
        return 1_200 if self.plant.cv <= 0.02 else 2_500


def cells() -> list[Cell]:
    """All of them, names unique."""
    found = [*_curves(), *_iterations(), *_disturbed(), *_short(), *_null()]
    names = [cell.plant.name for cell in found]
    if len(set(names)) != len(names):
        raise ValueError(f"two cells have the same name: {sorted(names)}")
    return found


def quick() -> list[Cell]:
    """A handful that shows most."""
    wanted = {
        "v100-resnet50, CV 1 %, quiet",
        "v100-resnet50, CV 5 %, mild",
        "a40-bert-huge-pp8, real iterations",
        "pro-qwen14b, CV 5 %, mild",
        "flat, CV 5 %",
        "later a steeper job, CV 5 %",
    }
    return [cell for cell in cells() if cell.plant.name in wanted]


def _curves() -> Iterator[Cell]:
    """Every curve with every noise, with and without mild disturbances."""
    names = (
        "v100-resnet50",
        "v100-bert",
        "v100-shufflenet",
        "a40-resnet50",
        "a40-bert",
        "a40-resnet18",
        "h100-llama",
        "pro-qwen14b",
    )
    for name in names:
        for cv in (0.01, 0.05, 0.10):
            for what, more in (("quiet", {}), ("mild", MILD)):
                label = f"{name}, CV {cv * 100:.0f} %, {what}"
                yield Cell(
                    Plant(label, curves()[name], cv=cv, **more),
                    "curves",
                    quiet=not more,
                    crooked=name == "a40-resnet18",
                )


def _iterations() -> Iterator[Cell]:
    for name, seconds in ITERATION_SECONDS.items():
        plant = Plant(
            f"{name}, real iterations",
            curves()[name],
            units=6_000,
            step=seconds,
            cv=0.0,
            iterations=True,
        )
        yield Cell(plant, "iterations")


def _disturbed() -> Iterator[Cell]:
    """One job, one thing that happens to it at a time."""
    job = curves()["a40-resnet50"]
    steeper = curves()["a40-bert-huge-pp8"]
    steep = replace(steeper, devices=1, draw=job.draw, iterations={})
    kinds: dict[str, dict[str, Any]] = {
        "drift 3 %": {"drift": 0.03},
        "a neighbour's visits": {"episodes_every": 2_000},
        "later a steeper job": {"phases": (Phase(0.4, steep),)},
        "later longer steps": {"phases": (Phase(0.4, job, 1.5),)},
        "later a job with no slope": {"phases": (Phase(0.4, job.flat()),)},
        "growing steps": {"growth": 0.5},
        "stragglers": {"stragglers": 0.01},
        "checkpoints": {"pauses_every": 1_500},
        "varied work": {"varied_work": True},
        "lying spans": {"lying": True},
        "slow settling": {"settle": (2.0, 4.0)},
        "late energy": {"energy_lag": 5.0, "counter_step": 1.0},
        "short steps": {"step": 0.1, "units": 120_000},
        "long steps": {"step": 6.0, "units": 6_000},
        "rough": ROUGH,
    }
    for what, more in kinds.items():
        for cv in (0.01, 0.05, 0.10) if what in ("lying spans", "rough") else (0.05,):
            yield Cell(
                Plant(f"{what}, CV {cv * 100:.0f} %", job, **{"cv": cv, **more}),
                "disturbed",
                quiet=False,
            )
    bumpy = curves()["v100-resnet50"].times("bumpy", {200.0: 1.15})
    yield Cell(Plant("a bump in the curve, CV 5 %", bumpy, cv=0.05), "disturbed", quiet=False)


def _short() -> Iterator[Cell]:
    """Jobs of one and of ten minutes."""
    for name in ("a40-resnet50", "v100-bert"):
        for minutes, share in ((1, 0.4), (10, 0.8)):
            plant = Plant(
                f"{name}, {minutes} min of 30 ms",
                curves()[name],
                units=round(60 * minutes / SHORT_STEP),
                step=SHORT_STEP,
                cv=0.02,
            )
            yield Cell(plant, "short", share=share)


def _null() -> Iterator[Cell]:
    """Jobs without a possible saving."""
    flat = curves()["v100-resnet50"].flat()
    for cv in (0.01, 0.05, 0.10):
        yield Cell(
            Plant(f"flat, CV {cv * 100:.0f} %", flat, cv=cv, **MILD), "null", quiet=False, null=True
        )
    for cv in (0.01, 0.05):
        yield Cell(Plant(f"inert, CV {cv * 100:.0f} %", _inert(), cv=cv), "null", null=True)
    cliff = curves()["h100-llama"].times("cliff", {600.0: 1.12, 500.0: 1.35})
    yield Cell(Plant("cliff at once, CV 5 %", cliff, cv=0.05), "null", null=True)


def _inert() -> Curve:
    """Decoding on an H200: it draws less than any cap that is allowed."""
    job = curves()["h100-llama"].flat()
    return replace(job, name="inert", draw=230.0, workload="decoding, draws 230 of 700 W")
