"""The regression of the power of a package over the CPU time of its consumers, with its idle power.

The mean power of a window of about a second is modelled as

    power = idle + common * total + bend * curved(total) + sum(difference_i * use_i) + noise

where ``use_i`` is the CPU time of consumer i per time of the window, ``total`` that of everybody,
and ``common`` the power of a CPU that is busy for an average consumer. The idle power is one of the
unknowns: learned first from the total alone, it takes the part of the differences that varies with
the total (the bias of an omitted variable), and so do the differences that are learned after it.

Every unknown has a normal prior, so the solution is that of a ridge regression whose ridge is the
ratio of the variances of the noise and of the prior (Hoerl and Kennard, "Ridge regression: biased
estimation for nonorthogonal problems", Technometrics 12, 1970; Lindley and Smith, "Bayes estimates
for the linear model", J. R. Stat. Soc. B 34, 1972). A consumer that does not vary keeps the common
power, with the deviation of its prior. Old windows fade exponentially, the priors do not (Kulhavy
and Zarrop, "On a general concept of forgetting", Int. J. Control 58, 1993): what is no longer
observed returns to its prior.

The sums are kept as one symmetric matrix with the power in row 0. Sweeping its other rows
(Goodnight, "A tutorial on the SWEEP operator", The American Statistician 33, 1979) gives the
solution, its covariance and the sum of squares; sweeping one and deleting it removes a consumer,
whose power in the past stays unknown (the Schur complement of its row).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from operator import mul
from typing import NamedTuple

from wattspan.util.linear_systems import swept

MEMORY = 60.0
"""Seconds after which a window has a weight of 1/e."""

POWER, IDLE, COMMON, BEND, REST, FIRST = range(6)
"""Rows of the matrix. REST is the difference of the consumers without a row of their own, which
is used for nothing; the rows of consumers begin with FIRST."""

DRIFT = 0.02
"""Standard deviation of an idle power since it was observed at rest, relative to it: it drifts with
the temperature."""

DIFFERENCE = 0.4
"""Standard deviation of the powers of consumers for equal CPU time, relative to their mean: about
that of two equally frequent kinds with a ratio of 1 to 2.3, or of an even spread from 1 to 5."""

_FIRST_NOISE = 0.002  # relative to the mean power
_NOISE_WINDOWS = 4.0  # the weight of the noise that is known before, in seconds
_LEAST_NOISE = 0.001  # relative to the mean power: counters are updated every millisecond
_LEAST_COMMON = 0.02  # of the power for each CPU
_LEAST_LEVEL, _LEAST_TOTAL = 1e-3, 1e-6  # mean watts and CPUs from which anything is learned
_HUBER = 3.0  # standard deviations from which on a window loses weight
_DEVIANT = 5.0  # standard deviations of a window that the powers do not explain
_CHANGED = 4  # deviant windows, less the others since, after which a consumer has changed
_MAX_CORRELATION = 0.9  # of consecutive residuals
_ROUNDS = 4  # of the first solution, for its noise
_CHANCE = 3.0  # standard deviations of the fit of equal powers, within which they are equal
_LEAST_DEVIATION = 1e-4  # of a prior, relative to the noise: sums of squares keep their digits
_TINY = 1e-12
_LARGEST_EXPONENT = 700.0
_LEAST_PRETENDED, _MOST_PRETENDED = 0.01, 0.75  # of the information on a use, by its errors
_STATED_CURVED = 0.3  # least part of the curve in the stated covariances


class NormalPrior(NamedTuple):
    """The knowledge of an unknown before the windows: mean and standard deviation, in watts."""

    mean: float
    deviation: float


CURVED = 0.05
"""Probability that power is a curve of load, before the windows show it."""

LINE, CURVE = NormalPrior(0.0, 0.03), NormalPrior(0.5, 0.5)
"""Priors of the bend relative to the common power. Dynamic power goes with f·V²: cores that turbo
from 2.6 to 3.6 GHz when few are active have a bend of 1. A wide prior alone explains the powers of
steady consumers by a curve that nothing shows, and a narrow one denies the curves that exist."""


@dataclass(slots=True)
class PowerFit:
    """A solution: the unknowns in watts, by row, and their covariances.

    ``values[POWER]`` and ``covariances[POWER]`` are 0. ``noise`` is the standard deviation of the
    power of a window. ``trust`` is the part of the differences that their errors permit to use,
    0 if equal powers explain the windows as well: the factor of the positive-part estimator of
    James and Stein (Baranchik, Stanford technical report 51, 1964), for the sum of squares that the
    differences explain beyond their degrees of freedom and three standard deviations of chance.
    """

    values: list[float]
    covariances: list[list[float]]
    noise: float
    trust: float = 0.0
    scale: float = 1.0  # the variance of a window in the covariances

    def spread(self, row: Sequence[float]) -> float:
        """The variance of the sum of the unknowns with the factors ``row``."""
        return max(0.0, float(sum(map(mul, row, self.products(row)))))

    def products(self, row: Sequence[float]) -> list[float]:
        """The covariance of each unknown with the sum of ``row``."""
        return [sum(map(mul, one, row)) for one in self.covariances]


class PowerRegression:
    """The sums of the equations of one package, and their solution in watts.

    The first rows from FIRST on are those of ``terms`` that are no consumers'.
    """

    def __init__(self, terms: int = 0) -> None:
        self._sums = [[0.0] * FIRST for _ in range(FIRST)]
        self._errors = [0.0] * FIRST  # sums of the variances of the errors of uses, by row
        self._noise = 0.0  # standard deviation of the power of a window, before the present ones
        self.fit: PowerFit | None = None
        self._deviants = 0
        self._residual = self._products = self._squares = 0.0
        self._terms = terms
        for _ in range(terms):
            self.admit()

    @property
    def windows(self) -> float:
        """The weight of the windows, in seconds."""
        return self._sums[IDLE][IDLE]

    @property
    def means(self) -> list[float]:
        """The mean of each column over the windows; 0 without any."""
        whole = max(self.windows, _TINY)
        return [one / whole for one in self._sums[IDLE]]

    def clear(self) -> None:
        """Forget all windows."""
        self._sums = [[0.0] * len(self._sums) for _ in self._sums]
        self._errors = [0.0] * len(self._sums)
        self._deviants = 0
        self._products = self._squares = 0.0

    def fade(self, kept: float) -> None:
        """Let all windows have the part ``kept`` of their weight."""
        self._sums = [[kept * each for each in one] for one in self._sums]
        self._errors = [kept * each for each in self._errors]

    def admit(self) -> None:
        """Append the row of a consumer."""
        for one in self._sums:
            one.append(0.0)
        self._sums.append([0.0] * (len(self._sums) + 1))
        self._errors.append(0.0)
        if (fit := self.fit) is not None:
            for one in fit.covariances:
                one.append(0.0)
            fit.covariances.append([0.0] * len(fit.values))
            fit.covariances[-1].append((DIFFERENCE * self._common()) ** 2)
            fit.values.append(0.0)

    def renew(self, place: int) -> None:
        """Forget the power of a row whose consumers have changed; that of others stays known."""
        ridge = (self._deviation() / max(_TINY, DIFFERENCE * self._common())) ** 2
        self._sums[place][place] += max(_TINY, ridge)
        self._sums = swept(self._sums, place)
        for one in self._sums:
            one[place] = 0.0
        self._sums[place] = [0.0] * len(self._sums)
        self._errors[place] = 0.0

    def remove(self, place: int) -> None:
        """Remove the row of a consumer, whose power in the past remains unknown."""
        self.renew(place)
        self._sums = _without(self._sums, place)
        del self._errors[place]
        if self.fit is not None:
            del self.fit.values[place]
            self.fit.covariances = _without(self.fit.covariances, place)

    def _deviation(self) -> float:
        return self._noise if self.fit is None else self.fit.noise

    def _common(self) -> float:
        """The common power of a busy CPU, the scale of the priors.

        The last fit may be of windows that are forgotten, with far less use: no CPU draws more
        than all power in relation to the use.
        """
        means = self.means
        share = means[POWER] / max(means[COMMON], _TINY)
        known = share / 2 if self.fit is None else self.fit.values[COMMON]
        return min(share, max(_LEAST_COMMON * share, known))

    # ----------------------------------------------------------------------------------- learn

    def add(self, row: Sequence[float], seconds: float, errors: Sequence[float] = ()) -> None:
        """Add a window of some ``seconds``: its power and its uses, in the order of the rows.

        ``errors`` are the variances of the errors of the uses; () if they are exact.
        A window that the present solution does not explain has less weight (Huber, "Robust
        estimation of a location parameter", 1964). Several of them mean that the work of a consumer
        has changed, and the past is forgotten.
        """
        weight, kept = seconds * self._trusted(row), exp(-seconds / MEMORY)
        for one, factor in zip(self._sums, row, strict=True):
            scaled = weight * factor
            one[:] = [kept * old + scaled * new for old, new in zip(one, row, strict=True)]
        news = errors or [0.0] * len(row)
        self._errors = [
            kept * old + weight * new for old, new in zip(self._errors, news, strict=True)
        ]

    def _trusted(self, row: Sequence[float]) -> float:
        """The weight of a window by its residual, which enters the statistics of residuals."""
        fit = self.fit
        if fit is None:
            return 1.0
        uses = [0.0, *row[1:]]
        residual = row[POWER] - sum(map(mul, fit.values, uses))
        deviation = sqrt(fit.noise**2 + fit.spread(uses))
        limited = max(-_HUBER * deviation, min(_HUBER * deviation, residual))
        deviates = abs(residual) > _DEVIANT * deviation
        if not deviates:
            # The first solutions predict badly, most of all with terms, and consecutive residuals
            # are alike by that alone. Without terms this stays a margin of the stated errors.
            scaled = limited / deviation if self._terms and deviation else limited
            self._products += (scaled * self._residual - self._products) / MEMORY
            self._squares += (scaled * scaled - self._squares) / MEMORY
            self._residual = scaled
        self._deviants = max(0, self._deviants + (1 if deviates else -1))
        if self._deviants >= _CHANGED:
            self._noise = fit.noise
            self.clear()
            return 1.0
        if deviates:
            return 0.0
        return limited / residual if residual else 1.0

    def solve(self, idle: NormalPrior | None = None) -> None:
        """Find the present :attr:`fit`, with what is known of the idle power.

        There is none without power or without use: their sums would vanish in rounding errors.
        """
        means = self.means
        level, total = means[POWER], means[COMMON]
        if level < _LEAST_LEVEL or total < _LEAST_TOTAL:
            self.fit = None
            return
        common, self._noise = self._common(), self._noise or _FIRST_NOISE * level
        priors = {
            IDLE: idle or NormalPrior(level / 2, level / 2),
            COMMON: NormalPrior(level / total / 2, level / total / 2),
        }
        for place in range(REST, len(self._sums)):
            priors[place] = NormalPrior(0.0, DIFFERENCE * common)
        for _ in range(_ROUNDS if self.fit is None else 1):
            noise = max(self._deviation(), _LEAST_NOISE * level)
            self.fit = self._solved(priors, common, noise)

    def _solved(self, priors: Mapping[int, NormalPrior], common: float, noise: float) -> PowerFit:
        """The solution for a standard deviation of the noise, with the one that it leaves."""
        matrix = [one[:] for one in self._sums]
        ridges = {place: _add_prior(matrix, place, one, noise) for place, one in priors.items()}
        equal = _bent([one[:REST] for one in matrix[:REST]], (IDLE, COMMON), common, noise)
        found = _bent(matrix, priors, common, noise)
        # With priors the expected sum of squares is the number of windows times the variance.
        squares = max(0.0, found.squares) + _NOISE_WINDOWS * self._noise**2
        variance = squares / (self.windows + _NOISE_WINDOWS)
        scale = variance * self._inflation()
        differences = range(REST, len(matrix))
        freedom = sum(1 - ridges[place] * found.inverse[place][place] for place in differences)
        chance = freedom + _CHANCE * sqrt(2 * max(0.0, freedom))
        explained = max(_TINY, (equal.squares - found.squares) / scale)
        return PowerFit(
            found.values,
            [[scale * each for each in one] for one in found.inverse],
            sqrt(variance),
            max(0.0, 1 - chance / explained),
            scale,
        )

    def stated(self, fit: PowerFit) -> PowerFit:
        """The present ``fit`` with covariances without what errors of the uses pretend.

        The expected products of observed uses are those of the true ones and, on the diagonal, the
        variances of their errors (Fuller, "Measurement Error Models", 1987, 2.2): two equal uses
        seem to vary apart. These variances are subtracted (Sherman and Morrison, Ann. Math. Stat.
        21, 1950), as far as they raise a variance to four times at most.
        """
        found = fit.covariances
        for place, error in enumerate(self._errors):
            own = found[place]
            part = min(_MOST_PRETENDED, error * own[place] / max(_TINY, fit.scale))
            if part > _LEAST_PRETENDED:
                factor = part / (own[place] * (1 - part))
                scaled = [factor * each for each in own]
                found = [
                    [each + one[place] * other for each, other in zip(one, scaled, strict=True)]
                    for one in found
                ]
        return replace(fit, covariances=found)

    def _inflation(self) -> float:
        """The factor of variances for correlated residuals (Bartlett 1935, as in power_curve)."""
        found = self._products / self._squares if self._squares > 0 else 0.0
        correlation = min(_MAX_CORRELATION, max(0.0, found))
        return (1 + correlation) / (1 - correlation)


def _add_prior(matrix: list[list[float]], place: int, prior: NormalPrior, noise: float) -> float:
    """Add the information of a prior to sums; returns its ridge."""
    ridge = (noise / max(_TINY, prior.deviation, _LEAST_DEVIATION * noise)) ** 2
    matrix[place][place] += ridge
    matrix[place][POWER] += ridge * prior.mean
    matrix[POWER][place] += ridge * prior.mean
    matrix[POWER][POWER] += ridge * prior.mean**2
    return ridge


class _Solution(NamedTuple):
    """Unknowns by row, their covariances relative to the noise, and the sum of squares."""

    values: list[float]
    inverse: list[list[float]]
    squares: float


def _bent(matrix: list[list[float]], rows: Iterable[int], common: float, noise: float) -> _Solution:
    """The solution of sums with the priors of the unknowns ``rows``, and with those of the bend.

    It is the mean of a line and of a curve by their likelihoods (Hoeting et al., "Bayesian model
    averaging: a tutorial", Statistical Science 14, 1999). The square root of the likelihoods is
    taken, since neither law is the true one (Gruenwald and van Ommen, "Inconsistency of Bayesian
    inference for misspecified linear models", Bayesian Analysis 12, 2017).
    """
    for row in rows:
        matrix = swept(matrix, row)
    likelihoods, solutions = [], []
    for probability, prior in ((1 - CURVED, LINE), (CURVED, CURVE)):
        bent = [one[:] for one in matrix]
        scaled = NormalPrior(prior.mean * common, prior.deviation * common)
        ridge = _add_prior(bent, BEND, scaled, noise)
        occam = log(ridge / bent[BEND][BEND]) / 2
        bent = swept(bent, BEND)
        likelihoods.append(log(probability) + occam - bent[POWER][POWER] / (4 * noise**2))
        solutions.append(bent)
    line, curve = solutions
    likely = 1 / (1 + exp(min(_LARGEST_EXPONENT, likelihoods[0] - likelihoods[1])))
    values = [_mixed(likely, one[POWER], two[POWER]) for one, two in zip(line, curve, strict=True)]
    squares, values[POWER] = values[POWER], 0.0
    mixed = _covariances(line, values, noise), _covariances(curve, values, noise)
    curved = max(likely, _STATED_CURVED)
    straight = 1 - curved
    inverse = [
        [straight * one + curved * two for one, two in zip(*lines, strict=True)]
        for lines in zip(*mixed, strict=True)
    ]
    return _Solution(values, inverse, squares)


def _covariances(
    solved: list[list[float]], around: Sequence[float], noise: float
) -> list[list[float]]:
    """The mean products of the differences from the values ``around``, relative to the noise."""
    offs = [(one[POWER] - mean) / noise for one, mean in zip(solved, around, strict=True)]
    offs[POWER] = 0.0
    found = [
        [each + off * other for each, other in zip(row, offs, strict=True)]
        for row, off in zip(solved, offs, strict=True)
    ]
    found[POWER] = [0.0] * len(found)
    for row in found:
        row[POWER] = 0.0
    return found


def _mixed(part: float, one: float, other: float) -> float:
    return (1 - part) * one + part * other


def _without(matrix: list[list[float]], place: int) -> list[list[float]]:
    """The matrix without one row and column."""
    return [[*row[:place], *row[place + 1 :]] for at, row in enumerate(matrix) if at != place]
