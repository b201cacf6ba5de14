"""Usual responses of jobs to power caps, fitted to published curves, and their error.

The log of the time per work, and the fall of the log of the power, are ``a*x + b*x**2`` of the
depth ``x`` of a cap below the origin, which is 1.25 times the mean draw or the highest limit. The
prior of the tuner (``POWER_CAP_PRIOR``) is the mean and the covariance of ``a`` and ``b`` over
jobs. Its error is measured with each job left out: by the curves of the others alone, and with
one measured cap of the job, as the tuner has it after its first comparison.

    python -m benchmarks.tuner.prior curves_power_limit.csv

The file is published by the authors of Zeus (Apache-2.0): columns ``source``, ``gpu``,
``workload``, ``config``, ``power_limit_w``, ``time_s``, ``avg_power_w``.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from testbed.tuner.stats import mean, quantile

from wattspan.tuning.decisions.estimates import CurvePrior, Prior, ResponsePoint, fit_curve

ORIGIN = 1.25
"""The highest cap with an effect, relative to the mean draw."""

_SLOWEST = 1.3  # time ratio beyond which no cap is of interest
_LOWEST = 0.55  # of the highest limit
_FIRST = 0.15  # depth of the measured cap
_NOISE = 0.005  # standard deviation of its log ratio


class Job(NamedTuple):
    """Points of one job: depth, log of the time ratio, fall of the log of the power."""

    name: str
    points: tuple[tuple[float, float, float], ...]


def jobs(path: Path) -> list[Job]:
    """The jobs of a file of curves with at least two useful caps."""
    rows: dict[str, list[tuple[float, float, float]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            name = " ".join(row[one] for one in ("source", "gpu", "workload", "config"))
            values = (float(row[one]) for one in ("power_limit_w", "time_s", "avg_power_w"))
            rows.setdefault(name, []).append(tuple(values))  # type: ignore[arg-type]
    found = []
    for name, caps in rows.items():
        top, time, draw = max(caps)
        origin = min(top, ORIGIN * draw)
        points = tuple(
            ((origin - cap) / origin, math.log(t / time), -math.log(power / draw))
            for cap, t, power in sorted(caps)
            if _LOWEST * top <= cap < origin and t < _SLOWEST * time
        )
        if len(points) >= 2:
            found.append(Job(name, points))
    return found


def fit(chosen: Sequence[Job]) -> CurvePrior:
    """Means and covariances of the coefficients of these jobs."""
    return CurvePrior(
        _prior([_parabola([(x, t) for x, t, _ in one.points]) for one in chosen]),
        _prior([_parabola([(x, p) for x, _, p in one.points]) for one in chosen]),
    )


def _parabola(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares through the origin."""
    x2, x3, x4 = (sum(x**power for x, _ in points) for power in (2, 3, 4))
    xy, xxy = sum(x * y for x, y in points), sum(x * x * y for x, y in points)
    determinant = x2 * x4 - x3 * x3
    return (xy * x4 - xxy * x3) / determinant, (x2 * xxy - x3 * xy) / determinant


def _prior(found: Sequence[tuple[float, float]]) -> Prior:
    linear, square = mean([a for a, _ in found]), mean([b for _, b in found])
    return Prior(
        linear,
        square,
        mean([(a - linear) ** 2 for a, _ in found]),
        mean([(b - square) ** 2 for _, b in found]),
        mean([(a - linear) * (b - square) for a, b in found]),
    )


def errors(chosen: Sequence[Job]) -> tuple[list[float], list[float]]:
    """Errors of predicted log times, each job left out: from the others, and with one cap."""
    alone, measured = [], []
    for left_out in chosen:
        prior = fit([one for one in chosen if one.name != left_out.name])
        first = min(left_out.points, key=lambda one: abs(one[0] - _FIRST))
        point = ResponsePoint(round(1e6 * (1 - first[0])), first[1], -first[2], _NOISE**2)
        before, after = fit_curve([], 1e6, prior), fit_curve([point], 1e6, prior)
        for x, time, _ in left_out.points:
            alone.append(before.time(1e6 * (1 - x)) - time)
            if x != first[0]:
                measured.append(after.time(1e6 * (1 - x)) - time)
    return alone, measured


def main(words: Sequence[str] | None = None) -> None:
    (path,) = sys.argv[1:] if words is None else words
    chosen = jobs(Path(path))
    print(f"{len(chosen)} jobs: {fit(chosen)}")
    for name, found in zip(("without a cap", "with one cap"), errors(chosen), strict=True):
        sizes = [abs(one) for one in found]
        print(
            f"left out, {name}: error of the log time, median {quantile(sizes, 0.5):.3f}, "
            f"90 % {quantile(sizes, 0.9):.3f}, of {len(found)} caps"
        )


if __name__ == "__main__":
    main()
