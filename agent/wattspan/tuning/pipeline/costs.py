"""Costs of an instruction at each clock, beyond the power of a waiting GPU.

A rank that does not compute waits for another one, and its GPU then draws the blocking power. An
instruction of duration t and energy E therefore costs c(t) = E - P_block * t more than waiting
(Perseus, SOSP '24), and an iteration of duration T on N GPUs uses the sum of all costs and
N * P_block * T. Energies are those of a profile, in joules, and not of an account.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from wattspan.tuning.pipeline.dag import BadPipelineError, CostKey, InstructionKind

WARM_UP_ITERATIONS = 2
"""The first iterations of a measurement, which are slower and are left out."""


class ClockPoint(NamedTuple):
    """Time and energy of one instruction at one SM clock."""

    mhz: int
    seconds: float
    joules: float


class ProfileRow(NamedTuple):
    """One measurement of an instruction; ``iteration`` is None if it is not known."""

    key: CostKey
    point: ClockPoint
    iteration: int | None = None


class HullVertex(NamedTuple):
    """A duration that no other one beats, with its cost in joules."""

    seconds: float
    cost: float


class InstructionCost:
    """The clocks of one instruction, and its least cost as a convex function of its duration.

    ``points`` are sorted from the fastest, ``vertices`` are the corners of the convex function.
    """

    def __init__(self, points: Iterable[ClockPoint], blocking_watts: float) -> None:
        self.blocking_watts = blocking_watts
        self.by_clock = {point.mhz: point for point in points}
        self.points = tuple(
            sorted(self.by_clock.values(), key=lambda one: (one.seconds, one.joules))
        )
        self.vertices = _lower_hull(
            _pareto(HullVertex(one.seconds, self.cost(one)) for one in self.points)
        )
        self._seconds = [vertex.seconds for vertex in self.vertices]

    def cost(self, point: ClockPoint) -> float:
        """Joules beyond waiting for the same time."""
        return point.joules - self.blocking_watts * point.seconds

    @property
    def shortest(self) -> float:
        return self._seconds[0]

    @property
    def longest(self) -> float:
        """The useful duration of the least cost; a longer one costs more."""
        return self._seconds[-1]

    def least_cost(self, seconds: float) -> float:
        """The least cost within ``seconds``, on the convex function; its ends beyond them."""
        place = bisect_left(self._seconds, seconds)
        if place == 0:
            return self.vertices[0].cost
        if place == len(self.vertices):
            return self.vertices[-1].cost
        (t0, c0), (t1, c1) = self.vertices[place - 1 : place + 1]
        return c0 + (c1 - c0) * (seconds - t0) / (t1 - t0)

    def cheapest_point(self, seconds: float) -> ClockPoint:
        """The clock of the least cost within ``seconds``; the fastest if there is none."""
        within = [one for one in self.points if one.seconds <= seconds]
        return min(within, key=self.cost, default=self.points[0])


class PipelineProfile:
    """Time and energy of every instruction of a pipeline at every clock.

    All instructions have been measured at the same ``clocks``, sorted from the lowest.
    """

    def __init__(self, points: Mapping[CostKey, Sequence[ClockPoint]]) -> None:
        """BadPipelineError if a stage, an instruction or a clock is missing."""
        if not points:
            raise BadPipelineError("The profile has no instructions.")
        self.stage_count = 1 + max(key.stage for key in points)
        self.points = {key: tuple(sorted(of_key)) for key, of_key in points.items()}
        self.clocks = tuple(sorted({one.mhz for of_key in points.values() for one in of_key}))
        for stage in range(self.stage_count):
            if not any(key.stage == stage for key in points):
                raise BadPipelineError(
                    f"Stage {stage} of {self.stage_count} is missing from the profile."
                )
            for kind in InstructionKind:
                key = CostKey(stage, kind)
                if key not in points:
                    raise BadPipelineError(f"The {key} is missing from the profile.")
                measured = {one.mhz for one in points[key]}
                missing = next((mhz for mhz in self.clocks if mhz not in measured), None)
                if missing is not None:
                    raise BadPipelineError(f"The {key} was not measured at {missing} MHz.")

    def costs(self, blocking_watts: float) -> Mapping[CostKey, InstructionCost]:
        """The cost of each instruction for a GPU that draws ``blocking_watts`` while it waits."""
        return {key: InstructionCost(of_key, blocking_watts) for key, of_key in self.points.items()}


def profile_of(files: Iterable[Iterable[ProfileRow]]) -> PipelineProfile:
    """The profile of one or several measurements of the same pipeline.

    Within a measurement, the median over its iterations without the first ones. Energies at equal
    settings differ between measurements by up to 15 %, so each is scaled to the mean energy of all
    at the highest clock before their mean is taken. BadPipelineError.
    """
    measured = [_medians(rows) for rows in files]
    profiles = [PipelineProfile(points) for points in measured]
    if not profiles:
        raise BadPipelineError("There is no profile.")
    first = profiles[0]
    for number, one in enumerate(profiles[1:], 2):
        if one.stage_count != first.stage_count or one.clocks != first.clocks:
            raise BadPipelineError(
                f"Profile {number} has {one.stage_count} stages and {len(one.clocks)} clocks, and"
                f" the first has {first.stage_count} and {len(first.clocks)}, or has others."
            )
    uncapped = [_energy_at(one, one.clocks[-1]) for one in profiles]
    scales = [fmean(uncapped) / own for own in uncapped]
    return PipelineProfile(
        {
            key: [
                ClockPoint(
                    same[0].mhz,
                    fmean(one.seconds for one in same),
                    fmean(one.joules * scale for one, scale in zip(same, scales, strict=True)),
                )
                for same in zip(*(one.points[key] for one in profiles), strict=True)
            ]
            for key in first.points
        }
    )


def _medians(rows: Iterable[ProfileRow]) -> dict[CostKey, list[ClockPoint]]:
    groups: dict[CostKey, dict[int, list[ClockPoint]]] = {}
    for row in rows:
        if row.iteration is None or row.iteration >= WARM_UP_ITERATIONS:
            groups.setdefault(row.key, {}).setdefault(row.point.mhz, []).append(row.point)
    return {
        key: [
            ClockPoint(mhz, median(one.seconds for one in same), median(one.joules for one in same))
            for mhz, same in clocks.items()
        ]
        for key, clocks in groups.items()
    }


def _energy_at(profile: PipelineProfile, mhz: int) -> float:
    return sum(one.joules for of_key in profile.points.values() for one in of_key if one.mhz == mhz)


def _pareto(vertices: Iterable[HullVertex]) -> list[HullVertex]:
    """Those that are not beaten by one that is as fast and as cheap, from the fastest."""
    best: list[HullVertex] = []
    for one in sorted(vertices):
        if not best or one.cost < best[-1].cost:
            best.append(one)
    return best


def _lower_hull(vertices: Sequence[HullVertex]) -> tuple[HullVertex, ...]:
    """The corners of the largest convex function below them (Andrew 1979)."""
    hull: list[HullVertex] = []
    for one in vertices:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], one):
            hull.pop()
        hull.append(one)
    return tuple(hull)


def _slope(one: HullVertex, other: HullVertex) -> float:
    return (other.cost - one.cost) / (other.seconds - one.seconds)


def savings_per_second(cost: InstructionCost) -> list[float]:
    """Watts that each segment of the convex function gives back, from the fastest; they fall."""
    return [-_slope(one, other) for one, other in pairwise(cost.vertices)]
