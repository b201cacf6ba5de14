"""Student's t and the F distribution, and the steadiness of a command's speed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import exp, inf, lgamma, log, log1p, sqrt

_TOLERANCE = 1e-12


def upper_tail(t: float, freedom: float) -> float:
    """P(T > t) with ``freedom`` degrees of freedom.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.1.
    """
    half = 0.5 * _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)
    return half if t >= 0 else 1.0 - half


@lru_cache(maxsize=1024)
def quantile(probability: float, freedom: float) -> float:
    """The t with P(T <= t) = ``probability``, which is above 0 and below 1, by bisection."""
    if probability < 0.5:
        return -quantile(1.0 - probability, freedom)
    low, high = 0.0, 1.0
    while upper_tail(high, freedom) > 1.0 - probability:
        low, high = high, 2.0 * high
    while high - low > _TOLERANCE * max(1.0, high):
        middle = (low + high) / 2
        if upper_tail(middle, freedom) > 1.0 - probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def f_upper_tail(f: float, freedom: float, other: float) -> float:
    """P(F > f) with ``freedom`` of the numerator and ``other`` degrees of the denominator.

    Abramowitz and Stegun, 26.6.2.
    """
    return _incomplete_beta(other / (other + freedom * f), other / 2, freedom / 2)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (26.5.8)."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges slowly there
        return 1.0 - _incomplete_beta(1.0 - x, b, a)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)) / a
    return front / _continued_fraction(x, a, b)


def _continued_fraction(x: float, a: float, b: float) -> float:
    """1 + d1/(1 + d2/(1 + ...)), by the modified method of Lentz."""
    value = c = 1.0
    d, term = 0.0, 0
    while abs(c * d - 1.0) >= _TOLERANCE:
        term += 1
        m = term // 2
        if term % 2:
            factor = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            factor = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1.0 / (1.0 + factor * d)
        c = 1.0 + factor / c
        value *= c * d
    return value


# -------------------------------------------------------------------------------------- steadiness


SIGNIFICANCE = 0.001
"""Probability that a steady window is called unsteady: studies have up to hundreds of them."""

LEAST_CHANGE = 0.01
"""Relative change of the time per unit that does not matter."""

_BATCHES = 8
"""Batches of a half at most."""


def change_of_speed(completions: Sequence[tuple[int, float]], start: int, end: int) -> str:
    """A sentence if the time per unit of work changed in the second half of a window, else "".

    Consecutive units of work are averaged in batches, which makes their errors nearly independent
    (the method of batch means; Law, Simulation Modeling and Analysis, chapter 9). The variance of a
    batch comes from differences of neighbours (von Neumann 1941), so that a trend does not count as
    noise.

    ``completions`` are monotonic times in ascending order and the work that was completed at each.
    The window begins and ends with one. Fewer than two completions in a half tell nothing: "".
    """
    middle = (start + end) / 2
    first: list[tuple[int, float]] = []
    second: list[tuple[int, float]] = []
    inside = [one for one in completions if start <= one[0] <= end]
    for (before, _), (at, work) in pairwise(inside):
        (first if at <= middle else second).append((at - before, work))
    one, two = _batches(first), _batches(second)
    if min(len(one), len(two)) < 2:
        return ""
    change = sum(two) / len(two) - sum(one) / len(one)
    if abs(change) <= LEAST_CHANGE:
        return ""
    squares = sum((b - a) ** 2 for half in (one, two) for a, b in pairwise(half))
    variance = squares / 2 / (len(one) + len(two) - 2)
    error = sqrt(variance * (1 / len(one) + 1 / len(two)))
    t = abs(change) / error if error else inf
    if 2 * upper_tail(t, _freedom(len(one)) + _freedom(len(two))) > SIGNIFICANCE:
        return ""
    return f"A unit of work took {exp(change) - 1:+.1%} in the second half of the window."


def _batches(gaps: Sequence[tuple[int, float]]) -> list[float]:
    """Logarithms of the time per unit of work, in batches of consecutive units."""
    count = min(_BATCHES, len(gaps))
    bounds = [n * len(gaps) // count for n in range(count + 1)] if count else []
    return [
        log(sum(gap for gap, _ in gaps[low:high]) / sum(work for _, work in gaps[low:high]))
        for low, high in pairwise(bounds)
    ]


def _freedom(count: int) -> float:
    """Degrees of freedom of a variance from the differences of ``count`` neighbours."""
    differences = count - 1
    return 2 * differences**2 / (3 * differences - 1)
