"""The powers of the consumers of a package for equal CPU time, learned, and their uncertainty.

CPU time is not power: a CPU-second of vector code costs several times as much as one that waits
for memory. :class:`ConsumerPowers` learns what a CPU-second of each consumer costs where their uses
vary (:mod:`~wattspan.attribution.power_regression`), and weighs the CPU time by it before energy is
divided. All energy is still divided, in whole microjoules: a weight moves energy from one consumer
to another.

The largest consumers have an unknown of their own. The others are one for each principal, since no
user's work may change what another's costs; beyond a limit they keep the common power, as does
everybody whose use does not vary. Their uncertainty is that of the prior, which says how much the
powers of processes differ.

The use may be another one than CPU time, such as that of performance counters, with sums of
further terms that draw power (:mod:`~wattspan.attribution.counted_uses`): their coefficients are
common to all consumers, and unknowns of the same regression.

Not excluded is a consumer that changes its own power for equal CPU time at the very moments at
which another's use changes: nothing distinguishes it from power of the other. Weights are bounded,
so that any two differ by a factor of eight at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import nlargest
from itertools import filterfalse
from math import ceil, exp, hypot, inf, sqrt
from operator import mul
from typing import NamedTuple, TypeVar, cast

from wattspan.attribution.power_curve import Extrapolation
from wattspan.attribution.power_regression import (
    BEND,
    COMMON,
    DIFFERENCE,
    DRIFT,
    FIRST,
    IDLE,
    MEMORY,
    POWER,
    REST,
    NormalPrior,
    PowerFit,
    PowerRegression,
)
from wattspan.model import SECOND, Microjoules, Payer, Principal, Usage, fills

WINDOW = SECOND
"""The period of an equation. Readings of energy and of CPU time have edges of their own, whose
errors do not grow with the window."""

MAX_CONSUMERS = 16
"""Consumers and groups with an unknown of their own; the regression costs the cube of it."""

LARGEST_RATIO = 8.0
"""The largest ratio of the powers of two consumers for equal CPU time."""

TICK_ERROR = 0.0016
"""Standard deviation in seconds of the CPU time of a thread in a window, whose edges are at ticks
of 4 ms: 4 ms divided by the root of 6."""

STATED = 2.5
"""Standard deviations of the stated uncertainty: two for 95 % of a normal distribution, and a
quarter more for the errors of the uses themselves, which the regression takes for exact, and for
laws that are not quite those of the regression."""

_SETTLED = 3  # windows with use after which a process may have an unknown of its own
_SURELY = 2.0  # variances of the error of a use, up to which its variation may be error
_REPLACES = 1.5  # the use of a consumer, relative to that of the one whose place it takes
_FAIRLY = 0.25  # the same, if the other's user has the most rows
_LEAST_USE = 1e-3  # mean CPUs of a consumer that is remembered
_MAX_REMEMBERED = 2000
_ENOUGH = 10.0  # seconds of windows before the powers are used
_ABSENCE = 600.0  # seconds without a window after which nothing is kept
_FEW = 1.2 * _ENOUGH  # seconds of windows that are kept until then
_CREDIBLE = 1.96  # standard deviations of the largest idle power, for lower bounds
_LEAST_POWER = 0.02  # of a busy CPU, relative to the power for each CPU in use
_YOUNG = 20.0  # seconds of windows up to which each has a solution; later every fifth
_SOLVE_EVERY = 5
_SHOWN = 12  # solutions with equal powers, after which the powers count as not learned
_RESTS = 0.1  # use of a window at rest, relative to the largest of the last minute
_UNSEEN = 0.04
"""Power that the first busy CPU causes, such as that of caches that are awake, relative to the mean
active power: a standard deviation. Windows under load show it as idle power."""

_LARGEST = sqrt(LARGEST_RATIO)
_UNEVEN = 0.04
"""Standard deviation of the power by which a package departs from the law of the fit between rest
and the present load, relative to the active power. What others do not explain is the power of the
consumers that do not vary, and so are departures."""
_MISFIT = 0.003
"""Power that the fit leaves unexplained of a window, relative to the power, from which on such
departures are seen: several times that of a package with a straight line of power."""
_BENDS_APART = 0.4
"""Standard deviation of the part of a consumer in the curve of power, relative to its part of the
use: all have the same part in a common clock, and none in the pairs of siblings of others."""
_TINY = 1e-9

Owner = Callable[[Payer], Principal | None]
Doubts = Callable[[int, Iterable[tuple[Payer, int]]], list[Microjoules]]
"""Finds the possible errors of shares of active energy."""

Key = Payer | Principal
T = TypeVar("T")


class TermPower(NamedTuple):
    """The power of a term relative to that of a unit of use, and its standard deviation."""

    ratio: float
    deviation: float


_UNKNOWN_TERM = TermPower(0.0, DIFFERENCE)


class _Equation:
    """Energy and use of adjacent intervals: microjoules and nanoseconds."""

    def __init__(self, terms: int) -> None:
        self.energy = self.duration = self.load = self.unclaimed = self.capacity = 0
        self.bounded = True  # the capacity is known
        self.spent: dict[Payer, int] = {}
        self.terms = [0.0] * terms

    def add(self, energy: int, duration: int, usage: Usage, terms: Sequence[float]) -> None:
        # Usage and interval rarely have the same length: scale usage to the interval.
        length = max(1, usage.end.mono - usage.start.mono)
        self.energy += energy
        self.duration += duration
        self.load += usage.load * duration // length
        self.unclaimed += usage.unclaimed * duration // length
        self.capacity += (usage.capacity or 0) * duration // length
        self.bounded &= bool(usage.capacity)
        spent, now = self.spent, usage.spent
        if length != duration:
            now = {payer: used * duration // length for payer, used in now.items()}
        for payer, used in now.items():
            spent[payer] = spent.get(payer, 0) + used
        if terms:
            part = duration / length
            self.terms = [old + part * new for old, new in zip(self.terms, terms, strict=True)]

    @property
    def bend(self) -> float:
        """The use by which a curve of power differs from a line, in CPUs."""
        if not self.bounded:
            return 0.0
        load = min(1.0, self.load / max(1, self.capacity))
        return self.load / self.duration * (1 - load)


class _Variation:
    """The mean and the variance of a use, by which its errors are told from its variation.

    The kernel counts the time of a running thread at its ticks, so a steady use seems to vary. An
    observed variation that is smaller than the truth's explains less power than it should: the
    slope is attenuated. The regression gets the expected use instead, given the observed one
    (regression calibration: Carroll et al., "Measurement Error in Nonlinear Models", 2006, ch. 4).
    """

    def __init__(self) -> None:
        self._weight = self._mean = self._square = 0.0

    def smoothed(self, use: float, seconds: float, threads: int) -> float:
        """The expected use in a window whose ``use`` was observed, of at least some threads."""
        kept = exp(-seconds / MEMORY)
        weight = self._weight * kept + seconds
        change, part = use - self._mean, seconds / weight
        self._mean += part * change
        self._square = (1 - part) * (self._square + part * change * change)
        self._weight = weight
        error = TICK_ERROR**2 * max(1.0, threads, use) / seconds**2
        true = max(0.0, 1 - _SURELY * error / self._square) if self._square > 0 else 0.0
        return self._mean + true * (use - self._mean)


class ConsumerPowers:
    """The powers of the consumers of one package. Powers are in watts, uses in CPUs.

    There are ``terms`` beside the uses of consumers, by rows from FIRST on.
    """

    def __init__(self, terms: int = 0) -> None:
        self._regression = PowerRegression(terms)
        self._first = FIRST + terms
        self.terms = [_UNKNOWN_TERM] * terms
        """The powers of the terms, 0 while they are not known."""
        self._keys: list[Key] = []  # of the rows from the first one of a consumer on
        self._rows: dict[Payer, int] = {}  # of consumers, and of payers since the last window
        self._uses: dict[Key, float] = {}  # decaying means
        self._ages: Counter[Key] = Counter()  # windows with use
        self._variations: dict[Key | None, _Variation] = {}  # of the rows; None: REST
        self._window = _Equation(terms)
        self._peak = 0.0  # decaying maximum of the use of a window
        self._windows = 0  # with use
        self._unsolved = 0  # windows since the last solution
        self._rest: NormalPrior | None = None  # the idle power of the solution from elsewhere
        self._ratios = [1.0] * self._first  # used powers by row, relative to that of REST
        self._errors = [STATED * DIFFERENCE] * self._first  # stated errors, relative to the shares
        # Powers with the largest idle power, relative to the used ones.
        self._certain = [1.0] * self._first
        self._errors_surely = self._errors  # the errors, relative to the shares by those powers
        self._equal = _SHOWN  # solutions since the last one with different weights

    @property
    def stated(self) -> bool:
        """True if consumers have had different weights for most of the last minute.

        It is a label, which must not change with every solution.
        """
        return self._equal < _SHOWN

    @property
    def learned(self) -> bool:
        """True if consumers have different weights."""
        return not self._equal

    @property
    def idle(self) -> Extrapolation | None:
        """The idle power of the same solution; None before there are enough windows."""
        fit, means = self._regression.fit, self._regression.means
        if fit is None or self._regression.windows < _ENOUGH:
            return None
        power, deviation = fit.values[IDLE], sqrt(max(0.0, fit.covariances[IDLE][IDLE]))
        active = means[POWER] - power
        deviation = hypot(deviation, DRIFT * power if self._rest else _UNSEEN * active)
        slope = fit.values[COMMON] * means[COMMON]
        return Extrapolation(power * 1e3, deviation * 1e3, active * 1e3, max(0.0, slope) * 1e3)

    # ----------------------------------------------------------------------------------- learn

    def learn(
        self,
        energy: int,
        duration: int,
        usage: Usage,
        owner: Owner,
        idle: NormalPrior | None = None,
        terms: Sequence[float] = (),
    ) -> None:
        """Add ``energy`` microjoules of the whole package in ``duration`` nanoseconds.

        ``usage`` may be longer, with the same use all along, and so are the sums of the ``terms``.
        ``owner`` tells the principal of a payer; ``idle`` is an idle power that was observed, now
        or in an earlier run.
        """
        # Most short processes begin and end within a window: their rows are needed before its end.
        for payer in filterfalse(self._rows.__contains__, usage.spent):
            self._rows[payer] = self._place_of_many(payer, owner)
        window = self._window
        window.add(energy, duration, usage, terms)
        if not fills(WINDOW, window.duration, duration):
            return
        self._window = _Equation(len(terms))
        uses = {
            payer: spent / window.duration for payer, spent in window.spent.items() if spent > 0
        }
        seconds, load = window.duration / SECOND, window.load / window.duration
        if load > self._peak / _RESTS:
            self._regression.clear()
        self._peak = max(load, self._peak * exp(-seconds / MEMORY))
        if load < self._peak * _RESTS:
            self._rows = {one: row for one, row in self._rows.items() if one in self._uses}
            return  # its power is that of ``idle``, and would outweigh all that it is not
        self._place(uses, seconds, owner)
        self._windows += 1
        row = [0.0] * (self._first + len(self._keys))
        row[POWER], row[IDLE], row[BEND] = window.energy / window.duration * 1e3, 1.0, window.bend
        row[REST] = window.unclaimed / window.duration
        row[FIRST : self._first] = [each / window.duration for each in window.terms]
        members = [0] * len(row)
        for payer, use in uses.items():
            place = self._rows.get(payer, REST)
            row[place] += use
            members[place] += 1
        row[COMMON] = load
        errors = [0.0] * len(row)
        for place, key in ((REST, None), *enumerate(self._keys, self._first)):
            observed, variation = row[place], self._variations.setdefault(key, _Variation())
            row[place] = variation.smoothed(observed, seconds, members[place])
            row[COMMON] += row[place] - observed
            # Threads in step have the same errors: they add up.
            errors[place] = (2 * TICK_ERROR * max(1.0, members[place], observed) / seconds) ** 2
        self._regression.add(row, seconds, errors)
        self._unsolved += 1
        if self._regression.windows < _YOUNG or self._unsolved >= _SOLVE_EVERY:
            self._unsolved, self._rest = 0, idle
            self._regression.solve(idle)
            self._weigh()

    def fade(self, seconds: float) -> None:
        """Go on after so many ``seconds`` without a window: what was learned is less certain.

        It fades as under windows, down to the weight of few of them, and is forgotten at last.
        """
        few = min(1.0, _FEW / max(_TINY, self._regression.windows))
        kept = max(exp(-max(0.0, seconds) / MEMORY), few) if seconds <= _ABSENCE else 0.0
        self._uses = {key: kept * mean for key, mean in self._uses.items()}
        self._peak *= kept
        self._window = _Equation(len(self.terms))
        self._regression.fade(kept)
        self._regression.solve(self._rest)
        self._weigh()

    def _place(self, uses: Mapping[Payer, float], seconds: float, owner: Owner) -> None:
        """Find the rows of payers, after the largest consumers have got rows of their own."""
        kept = exp(-seconds / MEMORY)
        new = 1 - kept
        self._uses = means = {key: kept * mean for key, mean in self._uses.items()}
        for payer, use in uses.items():
            means[payer] = means.get(payer, 0.0) + new * use
        self._ages.update(uses.keys())
        self._choose(uses, owner)
        own, means = set(self._keys), self._uses
        owners = {payer: whose for payer in uses if payer not in own and (whose := owner(payer))}
        for payer, whose in owners.items():
            means[whose] = means.get(whose, 0.0) + new * uses[payer]
        self._ages.update(owners.values())
        self._choose(owners.values(), owner)
        places = {key: place for place, key in enumerate(self._keys, self._first)}
        self._rows = {payer: places.get(whose, REST) for payer, whose in owners.items()}
        self._rows |= {key: row for key, row in places.items() if not isinstance(key, Principal)}

    def _choose(self, candidates: Iterable[Key], owner: Owner) -> None:
        """Give rows to the largest consumers, instead of to ones that have become small."""
        uses = self._uses
        if len(uses) > _MAX_REMEMBERED:
            largest = nlargest(_MAX_REMEMBERED // 2, uses, key=uses.__getitem__)
            self._uses = uses = {key: uses[key] for key in {*largest, *self._keys} & uses.keys()}
            self._ages = Counter({key: self._ages[key] for key in uses})
        waiting = sorted(
            (
                key
                for key in {*candidates}.difference(self._keys)
                if uses.get(key, 0.0) > _LEAST_USE and self._ages[key] >= _SETTLED
            ),
            key=uses.__getitem__,
        )
        while waiting and len(self._keys) < MAX_CONSUMERS:
            self._admit(waiting.pop(), owner)
        users = [_user(one, owner) for one in self._keys] if waiting else []
        smallest = self._smallest(users) if waiting else {}
        for own, key in {_user(one, owner): one for one in waiting}.items():  # the largest of each
            # No user's many processes take the rows of others': the one with the most yields first.
            most, mine = max(smallest), users.count(own)
            rows, needed = (most, _FAIRLY) if most > mine + 1 else (mine, _REPLACES)
            least, place = smallest[rows]
            if uses[key] > needed * least:
                removed = self._keys.pop(place)
                users[place:] = [*users[place + 1 :], own]
                self._variations.pop(removed, None)
                self._regression.remove(self._first + place)
                self._regression.renew(self._place_of_many(removed, owner))
                self._admit(key, owner)
                smallest = self._smallest(users)

    def _admit(self, key: Key, owner: Owner) -> None:
        self._regression.renew(self._place_of_many(key, owner))
        if self.terms and self._windows < _ENOUGH:
            # Before consumers have rows, their different powers pass for those of the terms.
            self._regression.clear()
        self._keys.append(key)
        self._regression.admit()
        self._unsolved = _SOLVE_EVERY

    def _place_of_many(self, key: Key, owner: Owner) -> int:
        """The row of a consumer without a row of its own."""
        whose = None if isinstance(key, Principal) else owner(key)
        return self._first + self._keys.index(whose) if whose in self._keys else REST

    def _smallest(self, users: Sequence[Hashable]) -> dict[int, tuple[float, int]]:
        """The least use of a row and its place, among users with at least some number of rows."""
        rows = Counter(users)
        places = [(self._uses.get(one, 0.0), place) for place, one in enumerate(self._keys)]
        return {
            many: min(one for one, user in zip(places, users, strict=True) if rows[user] >= many)
            for many in {0, *rows.values()}
        }

    def _weigh(self) -> None:
        """Find the used powers of the present solution, and their errors."""
        fit, means = self._regression.fit, self._regression.means
        size = self._first + len(self._keys)
        if fit is None:
            self._ratios, self._errors = [1.0] * size, [STATED * DIFFERENCE] * size
            self._certain, self._errors_surely = [1.0] * size, self._errors
            self._equal += 1
            self.terms = [_UNKNOWN_TERM] * len(self.terms)
            return
        common = fit.values[COMMON] + self._tilt() * fit.values[BEND]
        powers, uses = [common + each for each in self._of(fit.values)], self._of(means)
        mean = sum(map(mul, powers, uses)) / max(_TINY, sum(uses))
        least = _LEAST_POWER * means[POWER] / means[COMMON]
        surely = min(common, mean) >= least and self._regression.windows >= _ENOUGH
        mean, trust = max(mean, least), fit.trust if surely else 0.0
        departures = self._departures(fit, powers, seen=True)
        used = [
            mean
            * min(max(1 + trust * _beyond(each - mean, departure) / mean, 1 / _LARGEST), _LARGEST)
            for each, departure in zip(powers, departures, strict=True)
        ]
        self._ratios = self._by_row(1.0, [each / used[0] for each in used])
        self.terms = [
            TermPower(
                trust * fit.values[row] / used[0],
                sqrt(max(0.0, fit.covariances[row][row])) / used[0],
            )
            for row in range(FIRST, self._first)
        ]
        self._state_errors(fit, used, powers)
        self._equal = 0 if any(ratio != 1 for ratio in self._ratios) else self._equal + 1

    def _departures(
        self, fit: PowerFit, powers: Sequence[float], *, seen: bool = False
    ) -> list[float]:
        """The errors of powers, from REST on, by departures from the law of the fit, in watts.

        With ``seen``, by those that the fit itself shows.

        The power of consumers that do not vary is what the others leave over: it follows from the
        idle power, and has the departures between rest and the present load.
        """
        means, tilt = self._regression.means, self._tilt()
        known = inf if self._rest is None else max(_TINY, self._rest.deviation) ** 2
        misfit = (fit.noise / (_MISFIT * means[POWER])) ** 2
        size = _UNEVEN * (means[POWER] - fit.values[IDLE]) / known
        size *= misfit if seen else hypot(1, misfit)
        slope = fit.covariances[COMMON][IDLE] + tilt * fit.covariances[BEND][IDLE]
        with_idle = [slope + one[IDLE] for one in self._of(fit.covariances)]
        uses = self._of(means)
        total = max(_TINY, sum(map(mul, powers, uses)))
        whole = sum(map(mul, with_idle, uses)) / total
        return [
            abs(size * (one - whole * each)) for one, each in zip(with_idle, powers, strict=True)
        ]

    def _state_errors(self, fit: PowerFit, used: Sequence[float], powers: Sequence[float]) -> None:
        """Find the stated errors of shares by row, relative to the shares.

        They are `STATED` standard deviations, by the law of propagation of uncertainty (JCGM
        100:2008, 5.2.2): the relative error of a share is that of its power, less that of the mean
        power of all uses, with the covariances of both.
        """
        tilt, idles, stated = self._tilt(), fit.covariances[IDLE], self._regression.stated(fit)
        covariances = stated.covariances
        uses = list(self._regression.means)
        uses[POWER] = uses[IDLE] = 0.0
        uses[BEND] = tilt * uses[COMMON]
        total = max(_TINY, sum(map(mul, used, self._of(uses))))
        products = stated.products(uses)
        whole = sum(map(mul, products, uses)) / total**2
        slopes = [
            one + tilt * other
            for one, other in zip(covariances[COMMON], covariances[BEND], strict=True)
        ]
        idle_deviation = max(_TINY, sqrt(max(0.0, idles[IDLE])))
        departures = self._departures(fit, used)
        slope_variance = slopes[COMMON] + tilt * slopes[BEND]
        slope_product = products[COMMON] + tilt * products[BEND]
        errors, certainties, surely = list[float](), list[float](), list[float]()
        rows = (REST, *range(self._first, len(covariances)))
        for row, each, power, departure in zip(rows, used, powers, departures, strict=True):
            variance = slope_variance + 2 * slopes[row] + covariances[row][row]
            variance += (each - power) ** 2 + (_BENDS_APART * tilt * fit.values[BEND]) ** 2
            if row == REST or isinstance(self._keys[row - self._first], Principal):
                variance += (DIFFERENCE * used[0]) ** 2  # of one among several
            with_idle = idles[COMMON] + tilt * idles[BEND] + idles[row]
            variance += departure**2
            certain = max(0.0, 1 + _CREDIBLE * min(0.0, with_idle) / (idle_deviation * each))
            shared = 2 * (slope_product + products[row]) / (total * each)
            error = STATED * sqrt(max(0.0, variance / each**2 - shared + whole))
            errors.append(error)
            certainties.append(certain)
            surely.append((error + 1 - certain) / max(_TINY, certain))
        self._certain, self._errors = self._by_row(1.0, certainties), self._by_row(0.0, errors)
        self._errors_surely = self._by_row(0.0, surely)

    def _of(self, rows: Sequence[T]) -> list[T]:
        """The values of consumers in those of all rows: of REST, and of those with their own."""
        return [rows[REST], *rows[self._first :]]

    def _by_row(self, other: float, values: Sequence[float]) -> list[float]:
        """The values of consumers by row, and ``other`` in all other rows."""
        return [*[other] * REST, values[0], *[other] * (self._first - FIRST), *values[1:]]

    def _tilt(self) -> float:
        """The bend for a unit of use at the mean load.

        Consumers owe the power that they have in common, as of the clock of all cores and of the
        caches, in proportion to CPU time, so that the parts of all are the active power.
        """
        means = self._regression.means
        return means[BEND] / max(_TINY, means[COMMON])

    # ---------------------------------------------------------------------------------- divide

    def weighed(self, usage: Usage, *, surely: bool = False) -> Usage:
        """``usage`` with CPU time in proportion to the powers of the consumers.

        It is unchanged while there are none, and where they do not differ. ``surely``: in
        proportion to the powers that they have if the idle power is the largest within its error,
        and the rest is unclaimed. So each consumer has a lower bound while the idle power is
        unknown, near to the truth for those whose use varies.
        """
        if not self.learned:
            return usage
        rows, ratios = self._rows, self._ratios
        spent = {
            payer: used if (ratio := ratios[rows.get(payer, REST)]) == 1 else round(used * ratio)
            for payer, used in usage.spent.items()
        }
        if not surely:
            return replace(usage, spent=spent)
        certain = self._certain
        least = {payer: int(used * certain[rows.get(payer, REST)]) for payer, used in spent.items()}
        unsure = sum(spent.values()) - sum(least.values())
        return replace(usage, spent=least, unclaimed=usage.unclaimed + unsure)

    def doubts(
        self, active: int, shares: Iterable[tuple[Payer, int]], *, surely: bool = False
    ) -> list[Microjoules]:
        """The errors of ``shares`` of ``active`` microjoules that unknown powers may cause.

        ``surely`` as for the usage by which ``active`` was divided.
        """
        rows, errors = self._rows, self._errors_surely if surely else self._errors
        large = active if surely else active // 8
        found = [
            ceil(errors[rows.get(payer, REST)] * energy)
            if energy <= large
            else ceil(min(errors[rows.get(payer, REST)] * energy, _largest_error(energy, active)))
            for payer, energy in shares
        ]
        within = max(found, default=0) <= active
        return cast("list[Microjoules]", found if within else [min(active, one) for one in found])


def _beyond(difference: float, deviation: float) -> float:
    """The part of a difference that its error permits to use: none of it within two deviations."""
    within = min(1.0, 2 * deviation / max(_TINY, abs(difference)))
    return difference * (1 - within**4)


def _user(key: Key, owner: Owner) -> Hashable:
    """The user of a consumer, with all containers; None if it is unknown."""
    principal = key if isinstance(key, Principal) else owner(key)
    # As the first level of `Principal.path`, without its tuples: it is found of each process.
    return None if principal is None else principal.pod or principal.user


def _largest_error(energy: int, active: int) -> float:
    """The error of a share of ``active`` if any two powers differ by the largest ratio at most."""
    others = active - energy
    product = energy * others * (LARGEST_RATIO - 1)
    return product / max(1, min(LARGEST_RATIO * energy + others, energy + LARGEST_RATIO * others))
