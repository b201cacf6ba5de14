"""Predictions for settings without a trial, only for the choice of the next trial.

A Gaussian process over the places of the settings on their knobs, with a Matérn kernel of order
3/2, which permits bends (Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006,
sections 2.2 and 4.2). No figure of a study comes from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import dist, exp, sqrt
from typing import NamedTuple

from wattspan.attribution.linear_systems import solved

Place = tuple[float, ...]
"""The position of a setting on each knob, from 0 to 1."""

REACH = 0.25
"""Length scale of the kernel: figures at half of a knob's range are hardly related."""

PRIOR_SPREAD = 0.2
"""Standard deviation of a logarithm around the baseline that is assumed at first."""

_PRIOR_WEIGHT = 2.0
"""The assumed spread counts as so many settings."""


class PlacedFigure(NamedTuple):
    """The logarithm of a figure relative to the baseline's, and its variance, above 0."""

    place: Place
    value: float
    variance: float


class Prediction(NamedTuple):
    """The mean of a logarithm relative to the baseline's, and its variance."""

    mean: float
    variance: float


def predictions(observations: Sequence[PlacedFigure], places: Sequence[Place]) -> list[Prediction]:
    """The prediction for each of ``places``, which may have observations too.

    The spread of the process is learned from the observations.
    """
    values = [one.value for one in observations]
    (weights,) = _solutions(observations, PRIOR_SPREAD**2, [values])
    prior = PRIOR_SPREAD**2 * _PRIOR_WEIGHT
    explained = sum(map(float.__mul__, values, weights))
    spread = (prior + explained) / (_PRIOR_WEIGHT + len(values))
    crosses = [[_kernel(one.place, place) for one in observations] for place in places]
    weights, *columns = _solutions(observations, spread, [values, *crosses])
    return [
        Prediction(
            sum(map(float.__mul__, cross, weights)),
            spread * max(0.0, 1.0 - sum(map(float.__mul__, cross, column))),
        )
        for cross, column in zip(crosses, columns, strict=True)
    ]


def _solutions(
    observations: Sequence[PlacedFigure], spread: float, rights: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Solutions of the correlation matrix with the noise, for the ``rights``."""
    matrix = [
        [
            _kernel(one.place, other.place) + (one.variance / spread if one is other else 0.0)
            for other in observations
        ]
        for one in observations
    ]
    return solved(matrix, rights)


def _kernel(one: Place, other: Place) -> float:
    scaled = sqrt(3) * dist(one, other) / REACH
    return (1 + scaled) * exp(-scaled)
