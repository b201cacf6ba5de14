"""The use of a package by each payer, as performance counters tell it.

A CPU-second at a high clock draws more than one at a low clock, a thread whose sibling is busy
draws less than one alone on its core, and traffic to memory draws power beside both. CPU time does
not tell them, counters of each payer do:

    use_i = time_i * clock_i^2.5 * (1 + a * log(clock_i) + b * retired_i) + c * misses_i

``clock`` is the ratio of cycles to reference cycles: dynamic power goes with f·V², and voltage with
the clock, less than in proportion. ``retired`` is the number of instructions in a cycle relative to
the payer's own mean, less 1: a busy sibling lowers it, and so does waiting for memory. It is
relative because programs differ in it for other reasons than power (the within estimator of panel
data: Mundlak, "On the pooling of time series and cross section data", Econometrica 46, 1978).
``a``, ``b`` and ``c`` are common to all payers of the package, and unknowns of the regression that
learns the power of each for such a use (:mod:`~wattspan.attribution.consumer_powers`). Without
variation they are 0.

Counts that cannot be right are missing. A payer without counts keeps its last terms. Without any,
it has the mean use of a CPU-second in the last minute, and the change of the clock that the others
have in common: relative to the clock of each when its counts began. One that leaves takes its
changes with it. With its learned power, no use differs from the mean of CPU time by more than the
root of eight.

The coefficients are common, so a user may move them by what his counters show. The stated error of
a share therefore contains all that they have moved, and what they may be wrong by chance: nobody
else is moved beyond it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import ceil, exp, log, sqrt
from typing import NamedTuple, cast

from wattspan.attribution.consumer_powers import (
    LARGEST_RATIO,
    STATED,
    ConsumerPowers,
    Doubts,
    Owner,
    TermPower,
)
from wattspan.attribution.power_curve import Extrapolation
from wattspan.attribution.power_regression import MEMORY, NormalPrior
from wattspan.model import MILLISECOND, SECOND, Counts, Interval, Microjoules, Payer, Usage

CLOCK_POWER = 2.5
"""The power of the clock with which dynamic power rises: 3 with a voltage in proportion, 1 with a
constant one."""

TERMS = 3
"""The terms with learned coefficients: of the clock, of retired instructions and of misses."""

LEAST_COUNTED = 0.5
"""The part of the CPU time that must have counts."""

EDGES = 8 * MILLISECOND
"""The error of a CPU time, whose edges are at ticks of the kernel."""

_LARGEST = sqrt(LARGEST_RATIO)
_CLOCKS = 0.05, 10.0  # credible cycles for each reference cycle
_CLOCK_RANGE = log(_LARGEST) / CLOCK_POWER  # logarithm of the ratio to the mean clock
_MOST_CYCLES = 10.0  # credible cycles in a nanosecond
_MOST_RETIRED = 16.0  # credible instructions in a cycle
_MOST_MISSES = 1.0  # credible misses in a nanosecond of a CPU
_TIMES = 0.25, 4.0  # credible counted times in the CPU time
_MISS_TIME = 10.0  # nanoseconds of CPU time that a miss may cost, as the scale of its prior
_SETTLING = 5 * SECOND  # periods with counts, of the reference of a payer
_RETIRED = -0.9, 1.0  # the used range of relative changes
_CLOCK_DEVIATION = 0.2  # least one of the power of the clock
_LEAST_FACTOR = 0.1  # of the terms
_MAX_REMEMBERED = 2000
_FORGOTTEN = 60 * SECOND  # without counts: the method is another


class Terms(NamedTuple):
    """The counters of one payer in one period.

    ``clock`` is the logarithm of the ratio to the reference clock, ``misses`` are those in a
    nanosecond of CPU time.
    """

    clock: float
    retired: float
    misses: float


class CountedUsage(NamedTuple):
    """CPU time, and what the counters tell of each payer.

    ``clocked`` is the use at the clock of each, in nanoseconds of a CPU at the reference clock.
    Without counters it is CPU time. ``terms`` may be earlier ones, from which nothing is learned;
    those of this period are ``counted``. ``moved`` is the logarithm of the ratio of the use of
    those without counts to the mean use.
    """

    timed: Usage
    clocked: Usage
    terms: Mapping[Payer, Terms]
    counted: bool
    moved: float = 0.0

    def sums(self, uses: Mapping[Payer, int]) -> tuple[float, float, float]:
        """The sums of the terms, for these uses by the power of each payer; in nanoseconds."""
        clock = retired = misses = 0.0
        times = self.timed.spent
        for payer, (of_clock, of_retired, of_misses) in self.terms.items():
            use = uses[payer]
            clock += use * of_clock
            retired += use * of_retired
            misses += times[payer] * of_misses
        return clock, retired, misses * _MISS_TIME

    def weighed(self, powers: ConsumerPowers, *, surely: bool = False) -> Usage:
        """The use in proportion to the power of each payer; ``surely`` as for those powers."""
        if not self.terms:
            return powers.weighed(self.clocked, surely=surely)
        clock, retired, misses = (one.ratio for one in _bounded_terms(powers.terms))
        spent, times, terms = dict(self.clocked.spent), self.timed.spent, self.terms
        for payer, (of_clock, of_retired, _) in terms.items():
            factor = 1 + clock * of_clock + retired * of_retired
            spent[payer] = round(spent[payer] * max(_LEAST_FACTOR, factor))
        weighed = powers.weighed(replace(self.clocked, spent=spent), surely=surely)
        spent = dict(weighed.spent)
        if misses:
            for payer, one in terms.items():
                spent[payer] += round(misses * _MISS_TIME * one.misses * times[payer])
        mean = (sum(spent.values()) + weighed.unclaimed) / max(1, self.timed.busy)
        most, least = mean * _LARGEST, 0.0 if surely else mean / _LARGEST
        for payer, use in spent.items():
            time = times[payer]
            if not least * time <= use <= most * time:
                spent[payer] = round(min(max(use, least * time), most * time))
        return replace(weighed, spent=spent)

    def doubts(self, powers: ConsumerPowers, *, surely: bool = False) -> Doubts:
        """The errors of shares, as of ``powers``, and those of the counters besides."""
        others_of = partial(powers.doubts, surely=surely)
        if not (errors := self._errors(powers.terms) if self.terms else {}):
            return others_of
        largest = max(errors.values()) + self.moved

        def found(active: int, shares: Iterable[tuple[Payer, int]]) -> list[Microjoules]:
            known = [*shares]
            others = others_of(active, known)
            stated = [
                other + ceil(errors.get(payer, largest) * energy)
                for (payer, energy), other in zip(known, others, strict=True)
            ]
            return cast("list[Microjoules]", [min(active, one) for one in stated])

        return found

    def _errors(self, powers: Iterable[TermPower]) -> dict[Payer, float]:
        """The errors of shares by their counters, relative to them: see the module."""
        uses, times, terms = self.clocked.spent, self.timed.spent, self.terms
        whole = max(1, sum(map(uses.__getitem__, terms)))
        mean_clock, mean_retired, mean_misses = (each / whole for each in self.sums(uses))
        clock, retired, misses = _bounded_terms(powers)
        of_clock = abs(clock.ratio) + STATED * max(_CLOCK_DEVIATION, clock.deviation)
        of_retired = max(retired.ratio, 1 - retired.ratio)
        of_misses = misses.ratio + STATED * misses.deviation
        return {
            payer: of_clock * abs(one.clock - mean_clock)
            + of_retired * abs(one.retired - mean_retired)
            + of_misses * abs(_MISS_TIME * one.misses * times[payer] / use - mean_misses)
            for payer, one in terms.items()
            if (use := uses[payer]) > 0
        }


class Division(NamedTuple):
    """The use by which energy is divided, and what finds the errors of shares.

    Of its unclaimed use, ``unsure`` nanoseconds may be idle energy.
    """

    usage: Usage
    unsure: int
    doubts: Doubts


class CounterTime:
    """The presence of counters in the last minute: a label, which seldom changes."""

    def __init__(self) -> None:
        self._without = int(_FORGOTTEN)

    @property
    def recent(self) -> bool:
        return self._without < _FORGOTTEN

    def pass_by(self, usage: Usage, *, counted: bool) -> None:
        """Add the period of ``usage``."""
        self._without = 0 if counted else self._without + usage.end.mono - usage.start.mono


class CountedUses:
    """The uses of one package by its payers, and what a unit of use costs each."""

    def __init__(self) -> None:
        self.powers = ConsumerPowers()
        self._others = ConsumerPowers(TERMS)  # of the other method, with counters or without
        self._learned = self._left = 0  # when something was learned of these and of the others
        self._references: dict[Payer, _Reference] = {}
        self._pace = 1.0  # the mean use of a CPU-second with counts in the last minute, at level 0
        self._paced = 0.0  # the weight of that
        self._period = 0  # number of the last period with counts
        self._level = 0.0  # the clock in it, relative to that of the same payers before
        self.counters = CounterTime()

    @property
    def idle(self) -> Extrapolation | None:
        """The idle power of one fit with the powers of consumers, while those differ."""
        return self.powers.idle if self.powers.learned else None

    def learn(
        self, interval: Interval, counted: CountedUsage, owner: Owner, idle: NormalPrior | None
    ) -> None:
        """Learn what uses cost from the energy of the whole package; see ConsumerPowers.learn.

        Nothing is learned from a period whose counts are absent for a while.
        """
        usage, sums = counted.clocked, tuple[float, ...]()
        if self.powers.terms:
            if not counted.counted:
                return
            sums = counted.sums(self.powers.weighed(usage).spent)
        self._learned = usage.end.mono
        self.powers.learn(interval.energy, interval.duration, usage, owner, idle, sums)

    def divided(self, counted: CountedUsage, *, surely: bool = False) -> Division:
        """The use weighed by its cost; ``surely`` as for the powers of consumers."""
        usage = counted.weighed(self.powers, surely=surely)
        unsure = usage.unclaimed - counted.clocked.unclaimed
        return Division(usage, unsure, counted.doubts(self.powers, surely=surely))

    def counted(self, usage: Usage) -> CountedUsage:
        """``usage`` with its counters. A payer without any has the mean use of a CPU-second.

        CPU time and counted use have different powers. Those of a method that returns are the less
        certain, the longer nothing was learned of them.
        """
        if not (usage.counts or self.counters.recent):
            return CountedUsage(usage, usage, {}, counted=False)
        counted, spent = self._count(usage), usage.spent
        self.counters.pass_by(usage, counted=counted)
        if bool(self.powers.terms) != self.counters.recent:
            self.powers, self._others = self._others, self.powers
            self._learned, self._left = self._left, self._learned
            self.powers.fade((usage.start.mono - self._learned) / SECOND)
        if not self.counters.recent:
            return CountedUsage(usage, usage, {}, counted)
        terms: dict[Payer, Terms] = {}
        clocks, whole, pace, moved = 0.0, 0, self._pace, 0.0
        for payer, used in spent.items():
            if used > 0 and (known := self._references.get(payer)) is not None:
                terms[payer] = known.terms
                whole += used
                clocks += used * known.terms.clock
        factors: dict[Payer, float] = {}
        if whole:
            least, most = clocks / whole - _CLOCK_RANGE, clocks / whole + _CLOCK_RANGE
            factors = {
                payer: exp(CLOCK_POWER * min(max(one.clock, least), most))
                for payer, one in terms.items()
            }
            # Those without counts have the change that others have in common, as of the clock of
            # all cores: another mix of them, whose clocks differ, must not pass for a change.
            mean = sum(spent[payer] * each for payer, each in factors.items()) / whole
            level = exp(CLOCK_POWER * min(max(self._level, -_CLOCK_RANGE), _CLOCK_RANGE))
            kept = exp((usage.start.mono - usage.end.mono) / SECOND / MEMORY)
            self._paced = 1 - kept + kept * self._paced
            self._pace += (mean / level - self._pace) * (1 - kept) / self._paced
            pace = min(max(self._pace * level, mean / _LARGEST), mean * _LARGEST)
            moved = abs(log(pace / mean))
        return CountedUsage(usage, _clocked(usage, factors, pace), terms, counted, moved)

    def _count(self, usage: Usage) -> bool:
        """Update the terms of the payers with credible counts; False if these are too few."""
        known, spent, size = self._references, usage.spent, 0
        shared, above, begun = 0, 0.0, list[_Reference]()
        self._period += bool(usage.counts)
        if len(known) > _MAX_REMEMBERED:
            self._references = known = {payer: known[payer] for payer in spent if payer in known}
        for payer, counts in (usage.counts or {}).items():
            used = spent.get(payer, 0)
            if used > 0 and credible(used, counts):
                if (reference := known.get(payer)) is None:
                    reference = known[payer] = _Reference()
                stays = reference.period == self._period - 1
                reference.count(counts, usage.end.mono - usage.start.mono, self._period)
                size += used
                if stays:
                    shared += used
                    above += used * (reference.terms.clock - reference.base)
                else:
                    begun.append(reference)
        if size:
            self._level = above / shared if shared else 0.0
        for reference in begun:
            reference.base = reference.terms.clock - self._level
        return size > 0 and size >= LEAST_COUNTED * sum(spent.values())


class _Reference:
    """The last terms of a payer, and its instructions in a cycle in its first seconds.

    Later ones are relative to these. They stay, since what is learned would change with them.
    """

    terms = Terms(0.0, 0.0, 0.0)
    period = -1  # that of the terms
    base = 0.0  # the clock at level 0, since it has counts in each period

    def __init__(self) -> None:
        self._time = self._instructions = self._cycles = 0

    def count(self, counts: Counts, length: int, period: int) -> None:
        """Update the terms from the counts of a numbered period of this length."""
        retired, clock = 0.0, log(counts.cycles / counts.reference)
        if self._time < _SETTLING:
            self._time += length
            self._instructions += counts.instructions
            self._cycles += counts.cycles
        else:
            mean = counts.cycles * self._instructions
            change = counts.instructions * self._cycles / mean - 1
            retired = min(max(change, _RETIRED[0]), _RETIRED[1])
        self.terms, self.period = Terms(clock, retired, counts.misses / counts.time), period


def credible(used: int, counts: Counts) -> bool:
    """True if ``counts`` can be those of a payer with so many nanoseconds of CPU time."""
    time, cycles, reference, instructions, misses = counts
    if time <= 0 or cycles <= 0 or reference <= 0 or instructions <= 0 or misses < 0:
        return False
    least, most = _TIMES
    return (
        least * used - EDGES <= time <= most * used + EDGES
        and _CLOCKS[0] * reference <= cycles <= _CLOCKS[1] * reference
        and cycles <= _MOST_CYCLES * time
        and instructions <= _MOST_RETIRED * cycles
        and misses <= _MOST_MISSES * time
    )


def _bounded_terms(powers: Iterable[TermPower]) -> tuple[TermPower, TermPower, TermPower]:
    """The powers of the terms within the bounds of physics."""
    clock, retired, misses = powers
    return (
        clock._replace(ratio=min(max(clock.ratio, -1.0), 1.0)),
        retired._replace(ratio=min(max(retired.ratio, 0.0), 1.0)),
        misses._replace(ratio=max(misses.ratio, 0.0)),
    )


def _clocked(usage: Usage, factors: Mapping[Payer, float], pace: float) -> Usage:
    """``usage`` with these factors of the uses, and the mean one ``pace`` of all others."""
    spent = {payer: round(used * factors.get(payer, pace)) for payer, used in usage.spent.items()}
    unclaimed = round(usage.unclaimed * pace)
    mean = (sum(spent.values()) + unclaimed) / usage.busy if usage.busy else pace
    return replace(
        usage,
        spent=spent,
        unclaimed=unclaimed,
        capacity=None if usage.capacity is None else round(usage.capacity * mean),
        metered=None if usage.metered is None else round(usage.metered * mean),
    )
