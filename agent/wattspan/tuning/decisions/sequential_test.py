"""How often something is missed: bounds that stay true however often one looks.

A miss is a request that took longer than the latency that must hold. The bound is a test by
betting: against the claim that at least a part ``p`` of requests miss, a stake is multiplied by
the likelihood ratio of a smaller part at every request. If the claim is true, no betting makes
the stake ``1 / error`` times what it was with more probability than ``error``, at any time
(Ville's inequality), so a claim that was outbid so far is refuted for good. The bets are spread
over smaller parts of several sizes, "never" among them, since nobody knows the true one.

How sure a mean is, however often and whenever one looks.

The values are log ratios of paired, interleaved stretches of work. The bound is that of a
t-test martingale: a likelihood ratio of "the standardised mean is drawn from N(0, 1/GRAVITY)"
against "it is 0", whatever the variance (Rouder et al. 2009 give it as a Bayes factor; that it
may be watched and stopped at will is Ville's inequality). The interval is what is not rejected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

_ZERO_MISS_STAKE = 0.5
"""The part of the stake on "no request ever misses": it is lost with the first that does."""

_ODDS = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 15 / 16, 31 / 32)
"""The rest goes in equal parts on odds so many times those of the claim."""

_HALVINGS = 26
_ALARM_ODDS_FACTORS = (2.0, 8.0, 32.0)
"""The alarm listens for odds of a miss so many times those that are allowed."""


@dataclass(frozen=True, slots=True)
class MissCounts:
    """Requests and how many of them missed, in groups that were served together.

    Requests that were served together wait for each other, so misses come in crowds and tell
    less than as many strangers would. ``spread`` is what keeps account of that: the sum over
    the groups of misses squared per request.
    """

    requests: int = 0
    misses: int = 0
    groups: int = 0
    spread: float = 0.0

    def add(self, requests: int, misses: int) -> MissCounts:
        """With one group more; one without requests tells nothing."""
        if not requests:
            return self
        return MissCounts(
            self.requests + requests,
            self.misses + misses,
            self.groups + 1,
            self.spread + misses**2 / requests,
        )

    @property
    def ratio(self) -> float | None:
        """The part that missed, None without requests."""
        return self.misses / self.requests if self.requests else None

    @property
    def dispersion(self) -> float:
        """How many requests weigh no more than one that stood alone, at least 1.

        The variance of the groups' misses over what independent ones would have: Pearson's
        statistic by its degrees of freedom.
        """
        hits = self.requests - self.misses
        if self.groups < 2 or not self.misses or not hits:
            return 1.0
        expected = self.misses * hits / self.requests**2
        excess = self.spread - self.misses**2 / self.requests
        return max(1.0, excess / expected / (self.groups - 1))

    def at_most(self, error: float, dispersion: float = 1.0) -> float:
        """What the true part does not exceed, but for a probability of ``error``.

        ``crowding`` is what is known of it from elsewhere: crowds that have not come yet cannot
        be seen here, and without it the bound is too good where few groups have most misses.
        """
        weight = 1 / max(self.dispersion, dispersion)
        return _at_most(self.requests * weight, self.misses * weight, error)

    def at_least(self, error: float) -> float:
        """What the true part does not fall short of, but for a probability of ``error``."""
        weight = 1 / self.dispersion
        hits = self.requests - self.misses
        return 1 - _at_most(self.requests * weight, hits * weight, error)


@lru_cache(maxsize=128)  # it is asked at every turn, and changes with every block
def _at_most(requests: float, misses: float, error: float) -> float:
    """The least part that has been refuted, as near as matters; 1 if none has been."""
    wanted_pairs = math.log(1 / error)
    low, high = (misses / requests if requests else 0.0), 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _log_wealth(requests, misses, middle) >= wanted_pairs:
            high = middle
        else:
            low = middle
    return high


def _log_wealth(requests: float, misses: float, ratio: float) -> float:
    """The logarithm of the stake against "at least ``part`` miss"; it rises with ``part``."""
    share = math.log((1 - _ZERO_MISS_STAKE) / len(_ODDS))
    bets = [share + _gain(requests, misses, ratio, odds) for odds in _ODDS]
    if not misses:
        bets.append(math.log(_ZERO_MISS_STAKE) - requests * math.log1p(-ratio))
    best = max(bets)
    return best + math.log(sum(math.exp(bet - best) for bet in bets))


def _gain(requests: float, misses: float, ratio: float, odds: float) -> float:
    """The logarithm of the likelihood ratio of ``odds`` times the odds of ``part``, over it."""
    return misses * math.log(odds) - requests * math.log1p(ratio * (odds - 1))


@dataclass(frozen=True, slots=True)
class MissAlarm:
    """Rings soon after misses become more than allowed, and rarely before.

    A cumulative sum (Page) for each of a few odds, which never falls below nothing. At a rate of
    misses just allowed it rings once in ``patience`` requests or more seldom.
    """

    allowed: float
    patience: int = 100_000
    _sums: tuple[float, ...] = (0.0,) * len(_ALARM_ODDS_FACTORS)

    def add(self, requests: int, misses: int) -> MissAlarm:
        """With what came since, in the order in which it came or nearly so."""
        return replace(
            self,
            _sums=tuple(
                max(0.0, reached + _gain(requests, misses, self.allowed, odds))
                for reached, odds in zip(self._sums, _ALARM_ODDS_FACTORS, strict=True)
            ),
        )

    @property
    def alarmed(self) -> bool:
        return max(self._sums) >= math.log(self.patience * len(_ALARM_ODDS_FACTORS))


PRIOR_WEIGHT = 4.0
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


NO_EVIDENCE = Evidence(0, 0.0, 0.0)


def half_width(n: int, error: float) -> float:
    """Of a one-sided bound on a mean of ``n``, in deviations of one value; may be infinite."""
    if n < 2:
        return math.inf
    free, spread = n - 1, 1 + n / PRIOR_WEIGHT
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
