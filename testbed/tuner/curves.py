"""Reaction of a job to a cap: measured points, straight lines between them.

``data/README.md`` says where each point comes from.
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).with_name("data")


class Effect(NamedTuple):
    """Effect of a cap: time and energy per unit of work, against the highest cap."""

    time: float
    energy: float


class Iteration(NamedTuple):
    """One real iteration, against the mean at its cap."""

    time: float
    energy: float


@dataclass(frozen=True)
class Curve:
    """Points by cap in watts, ascending; the last one is the original setting.

    ``draw`` is one device's mean power there. ``iterations`` are the real ones by cap, in the
    order in which they came, where they were recorded.
    """

    name: str
    gpu: str
    workload: str
    draw: float
    watts: tuple[float, ...]
    effects: tuple[Effect, ...]
    devices: int = 1
    second_hand: bool = False
    iterations: dict[float, tuple[Iteration, ...]] = field(default_factory=dict, hash=False)

    @property
    def original(self) -> float:
        return self.watts[-1]

    @property
    def least(self) -> float:
        return self.watts[0]

    def at(self, watts: float) -> Effect:
        """The effect of a cap; beyond the measured ones, that of the nearest."""
        right = bisect_right(self.watts, watts)
        if right == 0:
            return self.effects[0]
        if right == len(self.watts):
            return self.effects[-1]
        low, high = self.watts[right - 1], self.watts[right]
        part = (watts - low) / (high - low)
        (time0, energy0), (time1, energy1) = self.effects[right - 1], self.effects[right]
        return Effect(time0 + part * (time1 - time0), energy0 + part * (energy1 - energy0))

    def nearest(self, watts: float) -> float:
        """The measured cap that is nearest."""
        return min(self.watts, key=lambda one: abs(one - watts))

    def power(self, watts: float) -> float:
        """Mean power of one device under a cap."""
        time, energy = self.at(watts)
        return self.draw * energy / time

    def flat(self) -> Curve:
        """The same job, had the cap no effect on it at all."""
        effects = tuple(Effect(1.0, 1.0) for _ in self.watts)
        return replace(self, name=f"{self.name}, flat", effects=effects)

    def times(self, name: str, changed: dict[float, float]) -> Curve:
        """The same with other time ratios at some caps, at the same power there."""
        effects = []
        for watts, (time, energy) in zip(self.watts, self.effects, strict=True):
            new = changed.get(watts, time)
            effects.append(Effect(new, energy * new / time))
        return replace(self, name=name, effects=tuple(effects))


@cache
def curves() -> dict[str, Curve]:
    """All curves by name."""
    found = {curve.name: curve for curve in (*_measured(), *_second_hand())}
    for name, recorded in _iterations().items():
        found[name] = _with_iterations(found[name], recorded)
    return found


def _rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="") as file:
        return list(csv.DictReader(file))


def _by_curve(name: str) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for row in _rows(name):
        found.setdefault(row["curve"], []).append(row)
    return {
        curve: sorted(rows, key=lambda row: float(row["limit_w"])) for curve, rows in found.items()
    }


def _measured() -> list[Curve]:
    found = []
    for name, rows in _by_curve("curves.csv").items():
        time, energy = float(rows[-1]["time_s"]), float(rows[-1]["energy_j"])
        effects = tuple(
            Effect(float(row["time_s"]) / time, float(row["energy_j"]) / energy) for row in rows
        )
        watts = tuple(float(row["limit_w"]) for row in rows)
        gpu, workload = rows[0]["gpu"], rows[0]["workload"]
        found.append(Curve(name, gpu, workload, energy / time, watts, effects))
    return found


def _second_hand() -> list[Curve]:
    return [
        Curve(
            name,
            rows[0]["gpu"],
            rows[0]["workload"],
            float(rows[0]["draw_w"]),
            tuple(float(row["limit_w"]) for row in rows),
            tuple(Effect(float(row["time_ratio"]), float(row["energy_ratio"])) for row in rows),
            second_hand=True,
        )
        for name, rows in _by_curve("second_hand.csv").items()
    ]


def _iterations() -> dict[str, dict[float, list[tuple[float, float]]]]:
    found: dict[str, dict[float, list[tuple[float, float]]]] = {}
    for row in _rows("iterations.csv"):
        by_cap = found.setdefault(row["curve"], {}).setdefault(float(row["limit_w"]), [])
        by_cap.append((float(row["time_s"]), float(row["energy_j"])))
    return found


def _with_iterations(curve: Curve, recorded: dict[float, list[tuple[float, float]]]) -> Curve:
    """Each cap's point is the mean of its iterations, of all eight devices together."""
    means = {
        watts: (sum(t for t, _ in rows) / len(rows), sum(e for _, e in rows) / len(rows))
        for watts, rows in recorded.items()
    }
    watts = tuple(sorted(means))
    time, energy = means[watts[-1]]
    devices = 8
    return replace(
        curve,
        draw=energy / time / devices,
        watts=watts,
        effects=tuple(Effect(means[one][0] / time, means[one][1] / energy) for one in watts),
        devices=devices,
        iterations={
            one: tuple(Iteration(t / means[one][0], e / means[one][1]) for t, e in recorded[one])
            for one in watts
        },
    )


ITERATION_SECONDS = {
    "a40-bert-huge-pp8": 7.94,
    "a40-t5-3b-pp8": 25.0,
    "a40-wide-resnet-pp8": 15.7,
}
"""How long a real iteration takes at the original setting."""
