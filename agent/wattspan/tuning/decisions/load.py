"""Load of a server: requests in flight, token rates, its projection, and alarms about it.

The load is the moving average of the number of requests in flight, which by Little's law is the
arrival rate times the time in the server. It is known at once where starts are announced; token
counts are known only after the end of a request. Input and output tokens per second are averaged
apart, over a longer time: where one of them becomes larger relative to the requests in flight than
it usually is, the load is scaled up by as much, because these requests are heavier than those that
earlier evidence is about.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from wattspan.model import SECOND

BIN_RATIO = 2.0
"""Ratio of the bounds of a load bin; bin 0 ends at one request in flight."""

MAX_BIN = 40
"""The last bin, which has no upper bound: about a million requests in flight."""

RISE_WINDOW = 600 * SECOND
"""Time over which the usual rise of the load within a period is observed."""

RISE_QUANTILE = 0.95

_MAX_HISTORY = 128
_SLOW_PERIODS = 6  # of the moving average of requests in flight
_SPREAD_PERIODS = 24  # of the variance between both
_SURGE_DEVIATIONS = 3.0
_SURGE_RATIO = 2.0  # of arrivals to their usual rate, for which the test of arrivals is made
_SURGE_EVIDENCE = 4.0
"""Logarithm of the likelihood ratio at which arrivals surge.

Of Poisson arrivals at 5.5 a second, simulated: twice as many are known after 2 s (median), and in
57 of 60 runs within 4.5 s; usual ones are mistaken for a surge once in two minutes.
"""
_MAX_EVIDENCE = 1.3 * _SURGE_EVIDENCE  # so that the end of a surge is known soon
_DISPERSION_PERIODS = 120  # of the moving average of the dispersion of arrivals
_LEVEL_VARIANCE = 0.5 - 2 / (1 + _SLOW_PERIODS) + 0.5 / _SLOW_PERIODS
"""Variance of a level's latest value around its average, per arrival a period of a Poisson process.

Both are exponential averages, over one period and over ``_SLOW_PERIODS``.
"""
_TOKEN_PERIODS = 12  # of the moving average of token rates
_MIX_TOLERANCE = 1.25  # ratio to the usual tokens per request that does not scale the load
_MIX_LIFETIME = 3600.0  # seconds over which the usual ratio is averaged
_GROWTH_DEVIATIONS = 3.0
_SILENT_PERIODS = 2
_SILENT_REQUESTS = 3  # mean durations of a request


def load_bin(load: float) -> int:
    """The bin of a load in requests in flight."""
    if load <= 1:
        return 0
    return min(math.ceil(math.log(load) / math.log(BIN_RATIO) - 1e-9), MAX_BIN)


def bin_bound(number: int) -> float:
    """The largest load of a bin."""
    return BIN_RATIO**number


class LoadSample(NamedTuple):
    """The requests of one stretch of time; consecutive samples have no gap.

    ``in_flight`` is their mean number, tokens are those of the requests whose end became known.
    """

    start: int
    end: int
    in_flight: float
    arrivals: int
    completions: int
    input_tokens: float = 0.0
    output_tokens: float = 0.0


class _TokenRates(NamedTuple):
    """Tokens per second, and requests in flight, averaged over the same time."""

    input: float = 0.0
    output: float = 0.0
    in_flight: float = 0.0

    def add(self, sample: LoadSample, weight: float) -> _TokenRates:
        seconds = (sample.end - sample.start) / SECOND
        return _TokenRates(
            self.input + weight * (sample.input_tokens / seconds - self.input),
            self.output + weight * (sample.output_tokens / seconds - self.output),
            self.in_flight + weight * (sample.in_flight - self.in_flight),
        )


class _Level(NamedTuple):
    """A quantity averaged over some periods, its latest value, and the variance of the latter."""

    average: float = 0.0
    latest: float = 0.0
    variance: float = 0.0
    periods: float = 0.0

    def add(self, value: float, span: float, *, calm: bool) -> _Level:
        """Add a value that lasted ``span`` periods; the variance is learned while it is calm."""
        periods = self.periods + span
        slow = max(-math.expm1(-span / _SLOW_PERIODS), min(span / periods, 1.0))
        average = self.average + slow * (value - self.average)
        fast = max(-math.expm1(-span), min(span / periods, 1.0))
        latest = self.latest + fast * (value - self.latest)
        variance = self.variance
        if calm:
            weight = -math.expm1(-span / _SPREAD_PERIODS)
            variance += weight * ((latest - average) ** 2 - variance)
        return _Level(average, latest, variance, periods)

    @property
    def rise(self) -> float:
        """The factor of a rise beyond chance, at the present rate of rise; else 1."""
        if self.average <= 0 or self.periods < _SLOW_PERIODS:
            return 1.0
        deviation = math.sqrt(max(self.variance, self.average / 4))
        if self.latest <= self.average + _SURGE_DEVIATIONS * deviation:
            return 1.0
        return self.trend

    @property
    def trend(self) -> float:
        """The value to expect at the present rate of rise, relative to the average."""
        return (2 * self.latest - self.average) / self.average


class _ArrivalTest(NamedTuple):
    """A cumulative sum (Page 1954) for ``_SURGE_RATIO`` times the ``usual`` arrivals a second.

    ``total`` is the log likelihood ratio of Poisson processes, divided by the ``dispersion`` of the
    arrivals, which is one for a Poisson process. The usual rate is that of the time when the total
    was last zero: the average soon contains the surge.
    """

    total: float = 0.0
    usual: float = 0.0
    dispersion: float = 1.0

    def add(self, sample: LoadSample, level: _Level, period: int) -> _ArrivalTest:
        """Add the arrivals of a sample; ``level`` has those before, per second."""
        if level.periods < _SLOW_PERIODS or level.average <= 0:
            return _ArrivalTest(dispersion=self.dispersion)
        span = sample.end - sample.start
        dispersion = self.dispersion
        if not self.surging:
            weight = -math.expm1(-span / (_DISPERSION_PERIODS * period))
            chance = _LEVEL_VARIANCE * level.average * SECOND / period
            dispersion += weight * ((level.latest - level.average) ** 2 / chance - dispersion)
        usual = self.usual if 0 < self.total < _SURGE_EVIDENCE else level.average
        expected = usual * span / SECOND
        gain = sample.arrivals * math.log(_SURGE_RATIO) - expected * (_SURGE_RATIO - 1)
        total = self.total + gain / max(1.0, dispersion)
        return _ArrivalTest(min(max(total, 0.0), _MAX_EVIDENCE), usual, dispersion)

    @property
    def surging(self) -> bool:
        return self.total >= _SURGE_EVIDENCE


class _PeriodCounts(NamedTuple):
    end: int = 0
    arrivals: int = 0
    completions: int = 0


@dataclass(frozen=True, slots=True)
class LoadTracker:
    """The load of one server, from consecutive samples; ``period`` is in nanoseconds."""

    period: int
    in_flight: _Level = field(default_factory=_Level)
    arrivals: _Level = field(default_factory=_Level)  # per second
    arrival_test: _ArrivalTest = field(default_factory=_ArrivalTest)
    rates: _TokenRates = field(default_factory=_TokenRates)
    usual: _TokenRates = field(default_factory=_TokenRates)
    seconds: float = 0.0
    history: tuple[tuple[int, float], ...] = ()  # time and load, one in a period
    periods: tuple[_PeriodCounts, ...] = ()  # complete ones, then the present one
    heard: int = 0  # time of the last start or end
    until: int = 0  # end of the last sample
    lasting: float = 0.0  # request seconds
    completed: int = 0

    def add(self, sample: LoadSample) -> LoadTracker:
        """Add the next sample; one without duration is ignored."""
        span = sample.end - sample.start
        if span <= 0:
            return self
        calm = not self.surging
        per_second = sample.arrivals * SECOND / span
        self = replace(
            self,
            in_flight=self.in_flight.add(sample.in_flight, span / self.period, calm=calm),
            arrivals=self.arrivals.add(per_second, span / self.period, calm=calm),
            arrival_test=self.arrival_test.add(sample, self.arrivals, self.period),
        )
        seconds = self.seconds + span / SECOND
        slow = max(-math.expm1(-span / (_TOKEN_PERIODS * self.period)), span / SECOND / seconds)
        usual = max(span / SECOND / _MIX_LIFETIME, span / SECOND / seconds)
        heard = sample.end if sample.arrivals or sample.completions or not self.heard else 0
        self = replace(
            self,
            rates=self.rates.add(sample, min(slow, 1.0)),
            usual=self.usual.add(sample, min(usual, 1.0)),
            seconds=seconds,
            heard=heard or self.heard,
            until=sample.end,
            lasting=self.lasting + sample.in_flight * span / SECOND,
            completed=self.completed + sample.completions,
            periods=self._counted(sample),
        )
        last = self.history[-1][0] if self.history else None
        spacing = max(self.period, RISE_WINDOW // _MAX_HISTORY)
        warm = seconds * SECOND >= 2 * _SLOW_PERIODS * self.period
        if warm and (last is None or sample.end - last >= spacing):
            recent = [one for one in self.history if one[0] > sample.end - RISE_WINDOW]
            self = replace(self, history=(*recent, (sample.end, self.load))[-_MAX_HISTORY:])
        return self

    @property
    def load(self) -> float:
        """Requests in flight, scaled up where they are heavier than usual.

        In a surge it is projected at the present rate of rise.
        """
        rise = max(self.in_flight.rise, self.arrivals_rise)
        return self.in_flight.average * rise * self.mix

    @property
    def arrivals_rise(self) -> float:
        """The factor of a surge of arrivals, at its present rate of rise; else 1."""
        return max(1.0, self.arrivals.trend) if self.arrival_test.surging else 1.0

    @property
    def surging(self) -> bool:
        """True if the requests in flight, or the arrivals, rise beyond chance."""
        return self.in_flight.rise > 1 or self.arrival_test.surging

    @property
    def usual_bin(self) -> int:
        """The bin of the averaged load, to which evidence belongs; in a surge it is lower."""
        return load_bin(self.in_flight.average * self.mix)

    @property
    def bin(self) -> int:
        """The bin of the load; in a surge at least the next one."""
        number = load_bin(self.load)
        return min(max(number, self.usual_bin + 1), MAX_BIN) if self.surging else number

    @property
    def mix(self) -> float:
        """The factor of requests that are heavier than usual, at least 1."""
        factor = 1.0
        if self.rates.in_flight <= 0 or self.usual.in_flight <= 0:
            return factor
        for rate, usual in (
            (self.rates.input, self.usual.input),
            (self.rates.output, self.usual.output),
        ):
            if usual > 0:
                ratio = (rate / self.rates.in_flight) / (usual / self.usual.in_flight)
                factor = max(factor, ratio / _MIX_TOLERANCE)
        return factor

    @property
    def projected(self) -> float:
        """The load a period ahead: a rise as at the 95th percentile of the last ten minutes."""
        loads = [load for _, load in self.history]
        rises = sorted(after / before for before, after in pairwise(loads) if before > 0)
        if not rises:
            return self.load
        rank = min(math.ceil(RISE_QUANTILE * len(rises)), len(rises)) - 1
        return self.load * max(1.0, rises[rank])

    @property
    def growing(self) -> bool:
        """True if in each of two periods more requests arrived than ended, beyond chance."""
        complete = self.periods[:-1]
        if len(complete) < 2 or any(one.arrivals <= one.completions for one in complete):
            return False
        arrivals = sum(one.arrivals for one in complete)
        completions = sum(one.completions for one in complete)
        excess = arrivals - completions
        return excess > _GROWTH_DEVIATIONS * math.sqrt(arrivals + completions)

    def silent(self, now: int) -> bool:
        """True if requests are in flight and none has started or ended for a long time."""
        if not self.heard or self.in_flight.latest < 0.01:
            return False
        mean = self.lasting / self.completed if self.completed else 0.0
        timeout = max(_SILENT_PERIODS * self.period, round(_SILENT_REQUESTS * mean * SECOND))
        return now - self.heard > timeout

    def _counted(self, sample: LoadSample) -> tuple[_PeriodCounts, ...]:
        if not self.periods or sample.start >= self.periods[-1].end:
            begun = _PeriodCounts(sample.start + self.period, sample.arrivals, sample.completions)
            return (*self.periods[-2:], begun)
        last = self.periods[-1]
        counted = last._replace(
            arrivals=last.arrivals + sample.arrivals,
            completions=last.completions + sample.completions,
        )
        return (*self.periods[:-1], counted)
