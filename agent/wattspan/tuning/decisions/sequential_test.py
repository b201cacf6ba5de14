"""Sequential tests: confidence bounds that are valid at any time, and change-point detection.

**Ratio of misses.** A miss is a request that exceeded the latency limit. The bound is a test by
betting: against the hypothesis that at least a ratio ``p`` of requests miss, a stake is multiplied
by the likelihood ratio of a smaller ratio at every request. If the hypothesis is true, the stake
ever grows to ``1 / error`` times its initial value with a probability of at most ``error`` (Ville's
inequality). The bets are spread over several smaller ratios, among them zero.

**Mean of log ratios** of paired blocks. The bound is that of a t-test martingale: the likelihood
ratio of "the standardised mean is drawn from N(0, 1/PRIOR_WEIGHT)" against "it is 0", for any
variance (Rouder et al. 2009 give it as a Bayes factor; that it may be read and stopped at any time
is Ville's inequality). The interval contains the values that are not rejected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from wattspan.tuning.decisions.blocks import Block, meter_error

_ZERO_MISS_STAKE = 0.5
"""The share of the stake on "no request ever misses", which the first miss loses."""

_ODDS = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 15 / 16, 31 / 32)
"""The rest of the stake is bet equally on these multiples of the hypothesis' odds."""

_HALVINGS = 26
_ALARM_ODDS_FACTORS = (2.0, 8.0, 32.0)
"""Multiples of the allowed odds of a miss that the alarm detects."""


@dataclass(frozen=True, slots=True)
class MissCounts:
    """Requests and misses, in groups of requests that were served together.

    Such requests wait for each other, so that their misses are correlated. ``spread`` is the sum
    over groups of misses squared per request.
    """

    requests: int = 0
    misses: int = 0
    groups: int = 0
    spread: float = 0.0

    def add(self, requests: int, misses: int) -> MissCounts:
        """Add a group; one without requests is ignored."""
        if not requests:
            return self
        return MissCounts(
            self.requests + requests,
            self.misses + misses,
            self.groups + 1,
            self.spread + misses**2 / requests,
        )

    def plus(self, other: MissCounts) -> MissCounts:
        """The groups of both."""
        return MissCounts(
            self.requests + other.requests,
            self.misses + other.misses,
            self.groups + other.groups,
            self.spread + other.spread,
        )

    @property
    def ratio(self) -> float | None:
        """The ratio of misses; None without requests."""
        return self.misses / self.requests if self.requests else None

    @property
    def dispersion(self) -> float:
        """Variance of the groups' misses relative to independent misses, at least 1.

        This is Pearson's statistic divided by its degrees of freedom.
        """
        hits = self.requests - self.misses
        if self.groups < 2 or not self.misses or not hits:
            return 1.0
        expected = self.misses * hits / self.requests**2
        excess = self.spread - self.misses**2 / self.requests
        return max(1.0, excess / expected / (self.groups - 1))

    def at_most(self, error: float, dispersion: float = 1.0) -> float:
        """Upper bound of the true ratio, for a probability of ``error``.

        ``dispersion`` is a lower bound of the dispersion, known from other groups: where few
        groups have most misses, the observed one may be too small.
        """
        weight = 1 / max(self.dispersion, dispersion)
        return _at_most(self.requests * weight, self.misses * weight, error)

    def surely_below(self, ratio: float, error: float, dispersion: float = 1.0) -> bool:
        """True if ``at_most`` is at most ``ratio``, without the search for the bound."""
        weight = 1 / max(self.dispersion, dispersion)
        requests, misses = self.requests * weight, self.misses * weight
        if not 0 < ratio < 1 or misses >= ratio * requests:
            return False
        return _log_wealth(requests, misses, ratio) >= math.log(1 / error)

    def at_least(self, error: float) -> float:
        """Lower bound of the true ratio, for a probability of ``error``."""
        weight = 1 / self.dispersion
        hits = self.requests - self.misses
        return 1 - _at_most(self.requests * weight, hits * weight, error)


@lru_cache(maxsize=128)  # called at every step, changes with every block
def _at_most(requests: float, misses: float, error: float) -> float:
    """The smallest rejected ratio; 1 if none is rejected."""
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
    """Log of the stake against "at least ``ratio`` miss"; it rises with ``ratio``."""
    share = math.log((1 - _ZERO_MISS_STAKE) / len(_ODDS))
    bets = [share + _gain(requests, misses, ratio, odds) for odds in _ODDS]
    if not misses:
        bets.append(math.log(_ZERO_MISS_STAKE) - requests * math.log1p(-ratio))
    best = max(bets)
    return best + math.log(sum(math.exp(bet - best) for bet in bets))


def _gain(requests: float, misses: float, ratio: float, odds: float) -> float:
    """Log likelihood ratio of ``odds`` times the odds of ``ratio``, over these."""
    return misses * math.log(odds) - requests * math.log1p(ratio * (odds - 1))


@dataclass(frozen=True, slots=True)
class MissAlarm:
    """Detects soon when more requests miss than allowed.

    A cumulative sum (Page) for each of a few odds. At the allowed ratio of misses, the mean number
    of requests between false alarms is at least ``patience``.
    """

    allowed: float
    patience: int = 100_000
    _sums: tuple[float, ...] = (0.0,) * len(_ALARM_ODDS_FACTORS)

    def add(self, requests: int, misses: int) -> MissAlarm:
        """Add later requests, in about their order."""
        return replace(
            self,
            _sums=tuple(
                max(0.0, reached + _gain(requests, misses, self.allowed, odds))
                for reached, odds in zip(self._sums, _ALARM_ODDS_FACTORS, strict=True)
            ),
        )

    def add_mixed(self, requests: int, misses: int) -> MissAlarm:
        """Add later requests in an unknown order, as if their misses came at even distances.

        Half a distance is before the first miss and behind the last one. The result is that of
        adding them one by one: a sum that was 0 before a miss was so before the first or the last.
        """
        if not misses:
            return self.add(requests, 0)
        half = (requests - misses) / (2 * misses)
        sums: list[float] = []
        for reached, odds in zip(self._sums, _ALARM_ODDS_FACTORS, strict=True):
            gain = _gain(requests, misses, self.allowed, odds)
            last = _gain(1 + half, 1, self.allowed, odds)
            every = gain - _gain(half, 0, self.allowed, odds)
            sums.append(max(0.0, reached + gain, every, last))
        return replace(self, _sums=tuple(sums))

    @property
    def alarmed(self) -> bool:
        return max(self._sums) >= math.log(self.patience * len(_ALARM_ODDS_FACTORS))


_LOG_RUN_LENGTH = 8.5
"""Logarithm of the mean number of pairs between false alarms, about 5,000."""

_EXCESS = 0.03
"""Distance of the excessive slowdown from the budget, as a log ratio."""

_MIN_WEIGHT = 1 / 32
_MAX_POWER_SHIFT = 0.06
_SUSPICIOUS_BLOCKS = 4
MIN_SHIFTED_BLOCKS = 24
"""Deviating blocks in a row after which the job counts as changed."""


@dataclass(frozen=True, slots=True)
class Cusum:
    """The sum of pairs against a rate, in parts of the alarm threshold (Page 1954).

    The rate lies between the usual slowdown and the excessive one. Pairs are conclusive but rare;
    ``inconclusive``: the last one permits no conclusion, so that the next one should be early.
    """

    total: float = 0.0
    pairs: int = 0
    inconclusive: bool = False

    @property
    def suspicious(self) -> bool:
        """True if the next comparison should be early."""
        return self.total > 0.3 or self.inconclusive

    @property
    def alarmed(self) -> bool:
        """True if the level must be released."""
        return self.total >= 1.0

    def add(self, ratio: float, usual: float, limit: float, deviation: float) -> Cusum:
        """Add a pair. One pair alone never alarms: one of its blocks may have been disturbed."""
        bad = limit + _EXCESS
        usual = min(max(usual, 0.0), limit)
        rate = (usual + bad) / 2
        height = max(deviation * deviation * _LOG_RUN_LENGTH / (bad - usual), 0.25 * (bad - usual))
        rise = min((ratio - rate) / height, 0.8)
        return Cusum(max(0.0, self.total + rise), self.pairs + 1)


@dataclass(frozen=True, slots=True)
class LevelShift:
    """Usual log time and log power of blocks at one level, and the deviating blocks in a row.

    Blocks are frequent but ambiguous: a lasting shift only makes the next comparison earlier.
    ``scatter`` is the variance of the log times of the blocks that do not deviate.
    """

    level: int | None = None
    time: float = 0.0
    power: float | None = None
    shifted: int = 0
    blocks: int = 0
    scatter: float = 0.0

    @property
    def suspected(self) -> bool:
        """True if the next comparison should be early."""
        return self.shifted >= _SUSPICIOUS_BLOCKS

    @property
    def changed(self) -> bool:
        """True if the shift has lasted, so that the job counts as changed."""
        return self.shifted >= MIN_SHIFTED_BLOCKS

    def add(self, block: Block, deviation: float) -> LevelShift:
        """Add a block of the held level.

        Where more blocks deviate in a row than the usual values come from, these were the unusual
        ones, such as those during a short disturbance: the usual values are learned anew.
        """
        time = math.log(block.busy / block.work)
        power = None
        if block.energy is not None:
            power = math.log(block.energy / (block.end - block.start))
        if self.level != block.level or self.blocks == 0:
            return LevelShift(block.level, time, power, 0, 1)
        far = abs(time - self.time) > max(0.05, 4 * deviation, 3 * math.sqrt(self.scatter))
        if power is not None and self.power is not None:
            error = meter_error(block.end - block.start)
            far = far or abs(power - self.power) > max(_MAX_POWER_SHIFT, 3 * error)
        if far and self.blocks >= 4:
            if self.shifted >= self.blocks:
                return LevelShift(block.level, time, power, 0, 1)
            return replace(self, shifted=self.shifted + 1)
        weight = max(_MIN_WEIGHT, 1 / (self.blocks + 1))
        if power is not None and self.power is not None:
            power = self.power + weight * (power - self.power)
        return LevelShift(
            self.level,
            self.time + weight * (time - self.time),
            power if power is not None else self.power,
            0,
            self.blocks + 1,
            self.scatter + weight * ((time - self.time) ** 2 - self.scatter),
        )


PRIOR_WEIGHT = 4.0
"""Weight of the prior in pairs; bounds are tightest at a multiple of it."""

_CLIP = 3.0
_MAD = 1.4826  # times the median absolute deviation is a normal's standard deviation


class Evidence(NamedTuple):
    """The mean of ``n`` log ratios, and the standard deviation of one of them."""

    n: int
    mean: float
    deviation: float

    def upper(self, error: float) -> float:
        """Upper bound of the true mean, for a probability of ``error`` at any time."""
        return self.mean + half_width(self.n, error) * self.deviation

    def lower(self, error: float) -> float:
        """Lower bound of the true mean, for a probability of ``error`` at any time."""
        return self.mean - half_width(self.n, error) * self.deviation

    def likely(self, deviations: float) -> float:
        """The mean plus standard errors: valid for a single evaluation only."""
        return self.mean + deviations * self.deviation / math.sqrt(max(self.n, 1))


NO_EVIDENCE = Evidence(0, 0.0, 0.0)


def half_width(n: int, error: float) -> float:
    """Distance of the one-sided bound from a mean of ``n``, in standard deviations of a value."""
    if n < 2:
        return math.inf
    free, spread = n - 1, 1 + n / PRIOR_WEIGHT
    # One-sided: half of the prior has at most twice the two-sided ratio.
    level = (math.sqrt(spread) / (2 * error)) ** (2 / n)
    if level >= spread:
        return math.inf
    return math.sqrt(free * (level - 1) / (1 - level / spread) / n)


def pairs_needed(margin: float, deviation: float, error: float) -> float:
    """Approximate number of pairs for a bound as narrow as ``margin``; may be infinite."""
    if margin <= 0:
        return math.inf
    n = 4.0
    while half_width(int(n), error) * deviation > margin:
        n *= 1.25
        if n > 1e6:
            return math.inf
    return n


def evidence(values: Sequence[float], expected: float) -> Evidence:
    """Mean and standard deviation, robust against outliers.

    Values far from the median are clipped. ``expected`` is the standard deviation expected from
    the noise of single units; the result is never much smaller, because few values may be close
    together by chance.
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
    clipped = [low if one < low else min(one, high) for one in ordered]
    mean = math.fsum(clipped) / n
    variance = math.fsum([(one - mean) ** 2 for one in clipped]) / (n - 1)
    return Evidence(n, mean, max(math.sqrt(variance), 0.7 * expected))


def _median(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2
