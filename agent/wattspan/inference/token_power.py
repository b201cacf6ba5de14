"""The energy of the tokens of a language model, learned from the counter steps of a GPU.

While requests are *active* (in prefill or decode), the energy of a step of the counter is

    a * prefill tokens + e * attention + b * decode tokens + c * context
    + i * iterations + d * active time

where *attention* and *context* are the sums of the context lengths over all prefill tokens and all
decode tokens. An *iteration* generates one token for each request in decode and reads the weights
of the model once. An engine batches its requests, so that no step shows one of them alone, but
steps with different mixtures of work show the coefficients: recursive least squares over periods of
some seconds, in information form with exponential forgetting, solved without negative coefficients.
Each model on a board has coefficients of its own, but for the active time, which is a power of the
board; the steps of several models are one system of equations. The models beyond a limit share the
coefficients of one *pool*, so that the number of unknowns does not depend on the number of models.

The time of a period is filled by iterations and prefill, so the work of iterations, of prefill and
of active time are nearly dependent. A ridge takes the shortest of the solutions that differ less
than the errors of the work allow to decide; the posterior covariance contains its bias.

A model is *identified* when the standard errors of the two parts of its mean energy, that of
prefill and all other, are a tenth of the whole at most. An engine with the same mixture of work all
the time never is.

Without active requests an engine has *idle* energy, beyond the idle energy of the board: GPU clocks
stay high while a process has a context.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from math import inf, sqrt
from operator import mul
from typing import Final, NamedTuple

from wattspan.model import SECOND
from wattspan.util.linear_systems import non_negative_solution, product, solved

LEAST_PERIOD, MOST_PERIOD = SECOND, 10 * SECOND
"""Limits of the period of one equation."""

PREFILLS_OF_A_PERIOD = 15
"""Consecutive steps are one equation: prompt tokens are spread evenly over prefill, but an engine
computes them in chunks, and the time of a decode token is not known exactly. Such a shift of work
matters less in a period that is long compared to prefill."""

ENOUGH_PERIODS, ENOUGH_TIME = 15, 30 * SECOND
"""Equations with a model, and their time, before it can be identified."""

MAX_ERROR = 0.1
"""Largest standard error of the parts of an identified model's mean energy, of the whole."""

MAX_MODELS = 8
"""Models of one board with coefficients of their own; all other ones share the pool's."""

MAX_COMBINATIONS = 16
"""Combinations of places in one period; the equations of the least recently used one are
forgotten."""

_FIRST_PERIODS = 10  # equations with a model before their residuals count
_MEMORY = 600.0  # seconds of a model's equations to which older ones fade
# Of the diagonal of the normal matrix: the work in a period is known to about 3 %, and its square
# is the least part of a coefficient's information that can be told from errors of the work.
_RIDGE = 1e-3


Place = str | None
"""The name of a model with a place of its own, or the pool."""

POOL: Final = None
"""The place that all other models share."""

MAX_COUNTED = 64
"""Models whose active time is known; those with the least of it are not counted."""

_CLEARLY = 2.0  # times the active time: models with nearly the same do not take turns


class ModelPlaces:
    """The models of a board with learned energy of their own; all others share one pool.

    Applications and clients choose the names of models, and any number of them may be active at
    once. The ``limit`` places belong to the models with the most active time, whose older part
    fades. Engines have equal parts of the active time, so that one engine with many names does not
    take the places of the others. Nothing is final: a pooled model gets a place once it has clearly
    more active time than a model that has one.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._placed: set[str] = set()
        self._active: dict[str, float] = {}  # faded seconds

    def of(self, model: str) -> Place:
        """The place of a model until the next ``turn``; it gets a free one if there is any."""
        if model in self._placed:
            return model
        if len(self._placed) >= self._limit:
            return POOL
        self._placed.add(model)
        return model

    def add(self, active: Mapping[str, float]) -> None:
        """Add seconds of active time of models."""
        for model, seconds in active.items():
            self._active[model] = self._active.get(model, 0.0) + seconds
        if len(self._active) > MAX_COUNTED:
            self._active = dict(nlargest(MAX_COUNTED, self._active.items(), key=lambda one: one[1]))

    def turn(self, kept: float) -> list[str]:
        """Fade the active time to the part ``kept``; returns the models that leave their places.

        Their places belong to pooled models from now on.
        """
        self._active = {model: kept * seconds for model, seconds in self._active.items()}
        time = self._active
        pooled = sorted(time.keys() - self._placed, key=lambda one: (-time[one], one))
        placed = sorted(self._placed, key=lambda one: (time.get(one, 0.0), one))
        left = []
        for model, other in zip(pooled, placed, strict=False):
            if time[model] <= _CLEARLY * time.get(other, 0.0):
                break
            left.append(other)
            self._placed.remove(other)
            self._placed.add(model)
        return left


class TokenWork(NamedTuple):
    """Work of inference in one period.

    ``context`` is the sum of the context lengths, in tokens, over all decode tokens. ``active`` is
    the time in seconds with active requests. Requests have equal parts of the iterations and of
    the time that they have in common.
    """

    prefill: float
    attention: float
    decode: float
    context: float
    iterations: float
    active: float

    def plus(self, other: TokenWork) -> TokenWork:
        return TokenWork(*(a + b for a, b in zip(self, other, strict=True)))


NO_WORK = TokenWork(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
_WIDTH = len(TokenWork._fields)


class TokenEnergy(NamedTuple):
    """Microjoules of a prefill or decode token, a token of context, an iteration, a second.

    The last one is the same for all models on a board.
    """

    prefill: float
    attention: float
    decode: float
    context: float
    iterations: float
    active: float

    def of(self, work: TokenWork) -> float:
        """The energy of ``work`` in microjoules."""
        return float(sum(map(mul, self, work)))

    def parts(self, work: TokenWork) -> tuple[float, float]:
        """The energy of the prompt and of the rest of one request's work, in microjoules.

        Active energy belongs to both in proportion to their other energy.
        """
        prompt = self.prefill * work.prefill + self.attention * work.attention
        whole = self.of(work)
        known = whole - self.active * work.active
        part = prompt / known if known > 0 else 0.0
        return whole * part, whole * (1 - part)

    def plus(self, other: TokenEnergy) -> TokenEnergy:
        return TokenEnergy(*(a + b for a, b in zip(self, other, strict=True)))


NO_TOKEN_ENERGY = TokenEnergy(*NO_WORK)


@dataclass(slots=True)
class _Mean:
    """A mean that fades with the memory of the model."""

    value: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float) -> None:
        self.weight = min(self.weight + weight, max(weight, _MEMORY))
        self.value += (value - self.value) * weight / self.weight


@dataclass(slots=True)
class _LearnedModel:
    """The number of a place's equations, and means by exponential forgetting."""

    periods: int = 0
    time: int = 0  # nanoseconds of the periods
    weight: float = 0.0
    work: list[float] = field(default_factory=lambda: [0.0] * _WIDTH)  # sum over equations
    energy: float = 0.0  # sum over equations

    def add(self, other: _LearnedModel) -> None:
        """Add those of another place; the equations of both may be the same ones."""
        self.periods, self.time = max(self.periods, other.periods), max(self.time, other.time)
        self.weight += other.weight
        self.work = [a + b for a, b in zip(self.work, other.work, strict=True)]
        self.energy += other.energy


class _Equations:
    """The normal equations of the periods with work of exactly these places."""

    def __init__(self, places: Iterable[Place]) -> None:
        self.places = tuple(places)
        size = _WIDTH * len(self.places)
        self.normal = [[0.0] * size for _ in range(size)]
        self.right = [0.0] * size
        self.squares = 0.0  # of energies

    def fade(self, kept: float) -> None:
        self.normal = [[each * kept for each in row] for row in self.normal]
        self.right = [each * kept for each in self.right]
        self.squares *= kept

    def add(self, works: Mapping[Place, Sequence[float]], energy: float) -> None:
        amounts = [amount for place in self.places for amount in works[place]]
        for i, (row, amount) in enumerate(zip(self.normal, amounts, strict=True)):
            self.right[i] += amount * energy
            for j, other in enumerate(amounts):
                row[j] += amount * other
        self.squares += energy * energy

    def merge(self, other: _Equations, renamed: Mapping[Place, Place]) -> None:
        """Add equations whose places have these ones after ``renamed``: their work is summed."""
        first = {place: _WIDTH * i for i, place in enumerate(self.places)}
        at = [first[renamed.get(place, place)] + i for place in other.places for i in range(_WIDTH)]
        for i, row, energy in zip(at, other.normal, other.right, strict=True):
            self.right[i] += energy
            for j, each in zip(at, row, strict=True):
                self.normal[i][j] += each
        self.squares += other.squares


class _System(NamedTuple):
    """Normal equations with a diagonal of ones and the ridge, and the scales of the unknowns.

    ``squares`` are the sums of the squared energies of the equations with each unknown.
    """

    matrix: list[list[float]]
    right: list[float]
    scales: list[float]
    squares: list[float]


class TokenPowerModel:
    """The coefficients of the models on one board.

    The answers are those of a *place*: the name of a model with coefficients of its own, or the
    pool.
    """

    def __init__(self) -> None:
        self._places = ModelPlaces(MAX_MODELS)
        self._learned: dict[Place, _LearnedModel] = {}
        # By the places with work in a period. An equation fades as a whole, or it would change
        # the solution: with each later equation that has one of its places.
        self._equations: OrderedDict[frozenset[Place], _Equations] = OrderedDict()
        self._variance = _Mean()
        self._idle_energy = self._idle_time = 0.0
        self._period: dict[Place, list[float]] = {}
        self._period_energy = 0.0
        self._period_time = 0
        self._least_time: int = LEAST_PERIOD
        self._solution: dict[Place, TokenEnergy] | None = None
        self._covariances: list[list[float]] | None = None

    @property
    def idle_power(self) -> float:
        """Microjoules a second without active requests; 0 before any such time."""
        return self._idle_energy / self._idle_time if self._idle_time else 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """The learned models with coefficients of their own."""
        return tuple(place for place in self._learned if place is not POOL)

    def __len__(self) -> int:
        return len(self._learned)

    def place(self, model: str) -> Place:
        """The place of a model, which stays the same at least until the next step is learned."""
        return self._places.of(model)

    # ----------------------------------------------------------------------------------- learn

    def set_prefill_time(self, prefill: float) -> None:
        """Choose the period of an equation by the mean nanoseconds of prefill."""
        wanted = round(PREFILLS_OF_A_PERIOD * prefill)
        self._least_time = min(MOST_PERIOD, max(LEAST_PERIOD, wanted))

    def learn(self, works: Mapping[str, TokenWork], energy: float, length: int) -> None:
        """Add a step of ``length`` nanoseconds, with the work of each model in it."""
        active = sum(work.active for work in works.values())
        seconds = length / SECOND
        if active <= 0.0:
            kept = max(0.0, 1 - seconds / _MEMORY)
            self._idle_energy = self._idle_energy * kept + energy
            self._idle_time = self._idle_time * kept + seconds
            return
        self._places.add({model: work.active for model, work in works.items()})
        for model, work in works.items():
            before = self._period.setdefault(self.place(model), [0.0] * _WIDTH)
            for i, amount in enumerate(work):
                before[i] += amount
        self._period_energy += energy - self.idle_power * max(0.0, seconds - active)
        self._period_time += length
        if self._period_time >= self._least_time:
            self._end_period()

    def _end_period(self) -> None:
        """Make one equation of the collected steps."""
        works, energy, time = self._period, self._period_energy, self._period_time
        self._period, self._period_energy, self._period_time = {}, 0.0, 0
        for place in works:
            self._learned.setdefault(place, _LearnedModel())
        self._compare(works, energy, time)
        kept = max(0.0, 1 - time / SECOND / _MEMORY)
        for place, work in works.items():
            learned = self._learned[place]
            learned.periods += 1
            learned.time += time
            learned.weight = learned.weight * kept + 1
            learned.energy = learned.energy * kept + energy
            learned.work = [a * kept + b for a, b in zip(learned.work, work, strict=True)]
        places = frozenset(works)
        for others, equations in self._equations.items():
            if not places.isdisjoint(others):
                equations.fade(kept)
        if places not in self._equations:
            self._equations[places] = _Equations(works)
            if len(self._equations) > MAX_COMBINATIONS:
                self._equations.popitem(last=False)
        self._equations.move_to_end(places)
        self._equations[places].add(works, energy)
        for model in self._places.turn(kept):
            self._pool(model)
        self._solution = self._covariances = None

    def _compare(self, works: Mapping[Place, Sequence[float]], energy: float, time: int) -> None:
        """Estimate variances from the deviation of a period from the former solution."""
        if min(self._learned[place].periods for place in works) < _FIRST_PERIODS:
            return
        solution = self._solve()
        deviation = energy - sum(
            solution[place].of(TokenWork(*work)) for place, work in works.items()
        )
        seconds = time / SECOND
        self._variance.add(deviation * deviation / seconds, seconds)

    def _pool(self, model: str) -> None:
        """Make a model's equations those of the pool, which has the rest of its work."""
        learned = self._learned.pop(model, _LearnedModel())  # none before its first period
        self._learned.setdefault(POOL, _LearnedModel()).add(learned)
        for places in [each for each in self._equations if model in each]:
            found = self._equations.pop(places)
            merged = places - {model} | {POOL}
            kept = self._equations.setdefault(merged, _Equations(merged))
            kept.merge(found, {model: POOL})

    # ----------------------------------------------------------------------------------- answers

    def coefficients(self, place: Place) -> TokenEnergy:
        """The coefficients of a place; zeros for an unknown one."""
        return self._solve().get(place, NO_TOKEN_ENERGY)

    def identified(self, places: Iterable[Place]) -> bool:
        """True if all ``places`` are identified."""
        return all(self.error(place) <= MAX_ERROR for place in set(places))

    def error(self, place: Place) -> float:
        """The standard error of the parts of the mean energy of a place, of the whole.

        Infinite before ``ENOUGH_PERIODS`` and ``ENOUGH_TIME``.
        """
        learned = self._learned.get(place)
        if learned is None or learned.energy <= 0:
            return inf
        if learned.periods < ENOUGH_PERIODS or learned.time < ENOUGH_TIME:
            return inf
        mean = TokenWork(*(each / learned.weight for each in learned.work))
        prompt = NO_WORK._replace(prefill=mean.prefill, attention=mean.attention)
        parts = (prompt, mean._replace(prefill=0.0, attention=0.0))
        most = max(self.variance({place: part}) for part in parts)
        return sqrt(most) / (learned.energy / learned.weight)

    def variance(self, works: Mapping[Place, Sequence[float]]) -> float:
        """The posterior variance of the energy of the work of places, in squared microjoules.

        Infinite for an unknown place.
        """
        if not works.keys() <= self._learned.keys():
            return inf
        covariance = self._covariance()
        whole = [0.0] * len(covariance)
        for place, columns in self._columns().items():
            for column, amount in zip(columns, works.get(place, NO_WORK), strict=True):
                whole[column] += amount
        rows = [sum(map(mul, row, whole)) for row in covariance]
        return max(0.0, float(sum(map(mul, whole, rows))))

    @property
    def residual_variance(self) -> float:
        """The variance of the energy of a second that work does not explain."""
        return self._variance.value

    def _columns(self) -> dict[Place, Sequence[int]]:
        """The columns of each place in the system of equations; the last one is common to all."""
        own = _WIDTH - 1
        last = own * len(self._learned)
        return {
            place: [*range(own * i, own * (i + 1)), last] for i, place in enumerate(self._learned)
        }

    def _system(self) -> _System:
        """All equations, scaled to a diagonal of ones, with the ridge."""
        columns = self._columns()
        size = 1 + (_WIDTH - 1) * len(columns)
        matrix = [[0.0] * size for _ in range(size)]
        right, squares = [0.0] * size, [0.0] * size
        for equations in self._equations.values():
            at = [column for place in equations.places for column in columns[place]]
            for i, row, energy in zip(at, equations.normal, equations.right, strict=True):
                right[i] += energy
                for j, each in zip(at, row, strict=True):
                    matrix[i][j] += each
            for i in set(at):
                squares[i] += equations.squares
        scales = [sqrt(row[i]) or 1.0 for i, row in enumerate(matrix)]
        return _System(
            [
                [1.0 + _RIDGE if i == j else each / scale / scales[j] for j, each in enumerate(row)]
                for i, (row, scale) in enumerate(zip(matrix, scales, strict=True))
            ],
            [each / scale for each, scale in zip(right, scales, strict=True)],
            scales,
            squares,
        )

    def _solve(self) -> dict[Place, TokenEnergy]:
        if self._solution is None:
            system = self._system()
            found = [
                each / scale
                for each, scale in zip(
                    non_negative_solution(system.matrix, system.right), system.scales, strict=True
                )
            ]
            self._solution = {
                place: TokenEnergy(*(found[column] for column in own))
                for place, own in self._columns().items()
            }
        return self._solution

    def _covariance(self) -> list[list[float]]:
        """The posterior covariance of all coefficients.

        With A the inverse of the normal matrix S with the ridge r, the variance v of residuals
        leads to v*A*S*A. The ridge moves a solution x by r*A*x, and x is not known where S leaves
        it open: each term may be anything from nothing to the whole energy, a variance of 1/12.
        """
        if self._covariances is None:
            matrix, _, scales, squares = self._system()
            size = len(matrix)
            inverse = solved(matrix, [[float(i == j) for i in range(size)] for j in range(size)])
            variance = self._variance.value * self._least_time / SECOND
            middle = [
                [
                    variance * (each - _RIDGE * (i == j)) + (i == j) * _RIDGE**2 * squares[i] / 12
                    for j, each in enumerate(row)
                ]
                for i, row in enumerate(matrix)
            ]
            found = product(product(inverse, middle), inverse)
            self._covariances = [
                [each / scales[i] / scales[j] for j, each in enumerate(row)]
                for i, row in enumerate(found)
            ]
        return self._covariances


class ExpectedEnergies(NamedTuple):
    """Expected energies of a step in microjoules: of each request's prompt and rest, and idle.

    ``learned`` are the places with identified coefficients. ``rest``: other requests have the rest.
    """

    requests: Sequence[tuple[float, float]]
    idle: float
    learned: frozenset[Place]
    rest: bool

    @property
    def whole(self) -> float:
        return self.idle + sum(map(sum, self.requests))


def expected_energies(
    model: TokenPowerModel,
    places: Sequence[Place],
    works: Sequence[TokenWork],
    energy: int,
    length: int,
) -> ExpectedEnergies:
    """The expected energies of a step of ``length`` nanoseconds, which has ``energy``.

    Models that are not identified have the rest by tokens.
    """
    seconds = length / SECOND
    idle = model.idle_power * max(0.0, seconds - sum(work.active for work in works))
    learned = frozenset(place for place in set(places) if model.identified([place]))
    parts = [
        model.coefficients(place).parts(work) if place in learned else (0.0, 0.0)
        for place, work in zip(places, works, strict=True)
    ]
    if learned.issuperset(places):
        return ExpectedEnergies(parts, idle, learned, rest=False)
    if not learned:
        idle = min(idle, energy)
    rest = max(0.0, energy - idle - sum(map(sum, parts)))
    others = [
        (0.0, 0.0) if place in learned else (work.prefill, work.decode)
        for place, work in zip(places, works, strict=True)
    ]
    tokens = sum(map(sum, others))
    if not tokens:
        others = [
            (0.0, 0.0 if place in learned else work.active)
            for place, work in zip(places, works, strict=True)
        ]
        tokens = sum(map(sum, others))
    scale = rest / tokens if tokens else 0.0
    shares = [(a + scale * c, b + scale * d) for (a, b), (c, d) in zip(parts, others, strict=True)]
    return ExpectedEnergies(shares, idle, learned, rest=scale > 0)
