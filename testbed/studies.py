"""Studies of settings with known curves, for tests of the frontier."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from math import exp

from wattspan.frontier.statistics import LogPoint
from wattspan.frontier.trials import MeasuredDevice, PowerLimit, Setting, Study, Trial

Curve = Callable[[Setting], tuple[float, float]]
"""True seconds and joules per unit of work."""


def power_settings(*percents: float) -> list[Setting]:
    """Settings by power limit in percent; 100 is the original one."""
    return [Setting(None if percent == 100 else PowerLimit(percent / 100)) for percent in percents]


def study(settings: Sequence[Setting], *, repeat: int = 3, trials: Sequence[Trial] = ()) -> Study:
    return Study(
        created_unix=1.0,
        host="test",
        command=["train", "{batch}"],
        unit="stdout:step",
        devices=[
            MeasuredDevice(
                id="gpu:0", name="GPU 0", kind="gpu", provenance="emulated", original_watts=300.0
            )
        ],
        emulated=True,
        settings=list(settings),
        repeat=repeat,
        window_seconds=10.0,
        warm_up_seconds=5.0,
        trials=list(trials),
    )


def trial(setting: Setting, block: int, seconds: float, joules: float, **other: str) -> Trial:
    """A trial of 100 units of work, with seconds and joules a unit."""
    return Trial(
        setting=setting,
        block=block,
        started_unix=float(block),
        seconds=100 * seconds,
        units=100.0,
        joules=100 * joules,
        watts=joules / seconds,
        **other,  # type: ignore[arg-type]
    )


def noisy_trial(
    curve: Curve, setting: Setting, block: int, noise: float, rng: random.Random
) -> Trial:
    """A trial with relative ``noise`` in time and energy, each on its own."""
    seconds, joules = curve(setting)
    return trial(
        setting, block, seconds * exp(rng.gauss(0, noise)), joules * exp(rng.gauss(0, noise))
    )


def hypervolume(points: Iterable[LogPoint], reference: LogPoint) -> float:
    """The area that ``points`` dominate up to ``reference``; nothing beyond it counts."""
    area, height = 0.0, reference.energy
    for time, energy in sorted(points):
        if time < reference.time and energy < height:
            area += (reference.time - time) * (height - energy)
            height = energy
    return area
