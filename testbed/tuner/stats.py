"""Confidence bounds of a rate, and other small statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence


def clopper_pearson(
    hits: int, trials: int, confidence: float = 0.95, *, one_sided: bool = False
) -> tuple[float, float]:
    """The exact interval of a binomial rate (Clopper and Pearson, 1934).

    One-sided, each end is the bound that holds by itself with that confidence.
    """
    if not 0 <= hits <= trials or trials < 1:
        raise ValueError(f"{hits} of {trials} trials is no rate")
    error = 1 - confidence if one_sided else (1 - confidence) / 2
    low = 0.0 if hits == 0 else _root(lambda p: 1 - _at_most(hits - 1, trials, p) - error)
    high = 1.0 if hits == trials else _root(lambda p: error - _at_most(hits, trials, p))
    return low, high


def quantile(values: Sequence[float], part: float) -> float:
    """Quantile by linear interpolation; NaN of an empty sequence."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def mean(values: Sequence[float]) -> float:
    """NaN of an empty sequence."""
    return math.fsum(values) / len(values) if values else math.nan


def _at_most(hits: int, trials: int, rate: float) -> float:
    """P(X <= hits) of a binomial, from logarithms: no term overflows."""
    if rate <= 0:
        return 1.0
    if rate >= 1:
        return 1.0 if hits >= trials else 0.0
    yes, no = math.log(rate), math.log1p(-rate)
    top = math.lgamma(trials + 1)
    return min(
        1.0,
        math.fsum(
            math.exp(
                top - math.lgamma(k + 1) - math.lgamma(trials - k + 1) + k * yes + (trials - k) * no
            )
            for k in range(hits + 1)
        ),
    )


def _root(rising: object) -> float:
    """Root on [0, 1] of a function that rises from below 0 to above 0."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if rising(middle) < 0:  # type: ignore[operator]
            low = middle
        else:
            high = middle
    return (low + high) / 2
