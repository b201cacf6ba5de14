"""Student's t distribution, and the F distribution of a ratio of variances."""

from __future__ import annotations

from functools import lru_cache
from math import exp, lgamma, log, log1p

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
