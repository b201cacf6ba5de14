"""How sure a mean is, however often and whenever one looks.

The values are log ratios of paired, interleaved stretches of work. The bound is that of a
t-test martingale: a likelihood ratio of "the standardised mean is drawn from N(0, 1/GRAVITY)"
against "it is 0", whatever the variance (Rouder et al. 2009 give it as a Bayes factor; that it
may be watched and stopped at will is Ville's inequality). The interval is what is not rejected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

GRAVITY = 4.0
"""The prior's weight in pairs: bounds are tightest, for their error, at some multiple of it."""

_CLIP = 3.0
_MAD = 1.4826  # times the median absolute deviation is a normal's standard deviation


class Evidence(NamedTuple):
    """The mean of ``n`` log ratios, and the deviation of one of them."""

    n: int
    mean: float
    deviation: float

    def upper(self, error: float) -> float:
        """What the true mean exceeds with a probability of ``error`` at most, at any time."""
        return self.mean + half_width(self.n, error) * self.deviation

    def lower(self, error: float) -> float:
        """What the true mean falls short of with a probability of ``error`` at most."""
        return self.mean - half_width(self.n, error) * self.deviation

    def likely(self, deviations: float) -> float:
        """The mean and so many of its standard errors: for one look only."""
        return self.mean + deviations * self.deviation / math.sqrt(max(self.n, 1))


NOTHING = Evidence(0, 0.0, 0.0)


def half_width(n: int, error: float) -> float:
    """Of a one-sided bound on a mean of ``n``, in deviations of one value; may be infinite."""
    if n < 2:
        return math.inf
    free, spread = n - 1, 1 + n / GRAVITY
    # One-sided: the half of the prior above 0 has at most twice the two-sided ratio.
    level = (math.sqrt(spread) / (2 * error)) ** (2 / n)
    if level >= spread:
        return math.inf
    return math.sqrt(free * (level - 1) / (1 - level / spread) / n)


def pairs_needed(margin: float, deviation: float, error: float) -> float:
    """About how many pairs make the bound as narrow as ``margin``; may be infinite."""
    if margin <= 0:
        return math.inf
    n = 4.0
    while half_width(int(n), error) * deviation > margin:
        n *= 1.25
        if n > 1e6:
            return math.inf
    return n


def evidence(values: Sequence[float], expected: float) -> Evidence:
    """Mean and deviation, robust against the few pairs in which something else happened.

    Values far from the median are pulled in to where a normal's would hardly be; ``expected``
    is the deviation that the noise of single units leads one to expect, and the deviation told
    is never much less: few values may lie close together by chance.
    """
    n = len(values)
    if n == 0:
        return Evidence(0, 0.0, expected)
    if n == 1:
        return Evidence(1, values[0], expected)
    ordered = sorted(values)
    middle = _median(ordered)
    scale = max(_MAD * _median(sorted([abs(one - middle) for one in ordered])), expected)
    reach = _CLIP * scale * (1 + 2 / n)
    low, high = middle - reach, middle + reach
    kept = [low if one < low else min(one, high) for one in ordered]
    mean = math.fsum(kept) / n
    variance = math.fsum([(one - mean) ** 2 for one in kept]) / (n - 1)
    return Evidence(n, mean, max(math.sqrt(variance), 0.7 * expected))


def _median(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2
