"""The energy of the tokens of a language model, learned from the counter steps of a GPU.

While requests are *active* (in prefill or decode), the energy of a step of the counter is

    a * prefill tokens + e * attention + b * decode tokens + c * context
    + i * iterations + d * active time

where *attention* and *context* are the sums of the context lengths over all prefill tokens and all
decode tokens. An *iteration* generates one token for each request in decode and reads the weights
of the model once. An engine batches its requests, so that no step shows one of them alone, but
steps with different mixtures of work show the coefficients: recursive least squares over periods of
a second, in information form with exponential forgetting, solved without negative coefficients.
Each model on a board has coefficients of its own; the steps of several models are one system of
equations.

The time of a second is filled by iterations and prefill, so the work of iterations, of prefill and
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
from math import inf, sqrt
from operator import mul
from typing import NamedTuple

from wattspan.model import SECOND
from wattspan.spans.linear_systems import non_negative_solution, product, solved

LEARNED_PERIOD = SECOND
"""Consecutive steps of this time are one equation: a shift of work between two steps of 0.1 s then
matters less."""

ENOUGH_PERIODS = 30
"""Equations with a model before it can be identified."""

MAX_ERROR = 0.1
"""Largest standard error of the parts of an identified model's mean energy, of the whole."""

MAX_MODELS = 8
"""Models of one board; the least recently used one is forgotten."""

_FIRST_PERIODS = 10  # equations with a model before their residuals count
_MEMORY = 600.0  # equations of a model to which older ones fade
# Of the diagonal of the normal matrix: the work in a second is known to about 3 %, and its square
# is the least part of a coefficient's information that can be told from errors of the work.
_RIDGE = 1e-3


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
    """Microjoules of a prefill or decode token, a token of context, an iteration, a second."""

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
    count: float = 0.0

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, _MEMORY)
        self.value += (value - self.value) / self.count


@dataclass(slots=True)
class _LearnedModel:
    """The number of a model's equations, and means by exponential forgetting."""

    periods: int = 0
    weight: float = 0.0
    work: list[float] = field(default_factory=lambda: [0.0] * _WIDTH)  # sum over equations
    energy: float = 0.0  # sum over equations


class TokenPowerModel:
    """The coefficients of the models on one board."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, _LearnedModel] = OrderedDict()
        self._normal: dict[tuple[str, str], list[list[float]]] = {}  # blocks, in both orders
        self._right: dict[str, list[float]] = {}
        self._variance = _Mean()
        self._squares: dict[str, float] = {}  # of energies
        self._idle_energy = self._idle_time = 0.0
        self._period: dict[str, list[float]] = {}
        self._period_energy = 0.0
        self._period_time = 0
        self._solution: dict[str, TokenEnergy] | None = None
        self._covariances: dict[str, list[list[float]]] | None = None

    @property
    def idle_power(self) -> float:
        """Microjoules a second without active requests; 0 before any such time."""
        return self._idle_energy / self._idle_time if self._idle_time else 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """The known models."""
        return tuple(self._models)

    def __len__(self) -> int:
        return len(self._models)

    # ----------------------------------------------------------------------------------- learn

    def learn(self, works: Mapping[str, TokenWork], energy: float, length: int) -> None:
        """Add a step of ``length`` nanoseconds, with the work of each model in it."""
        active = sum(work.active for work in works.values())
        seconds = length / SECOND
        if active <= 0.0:
            kept = max(0.0, 1 - seconds / _MEMORY)
            self._idle_energy = self._idle_energy * kept + energy
            self._idle_time = self._idle_time * kept + seconds
            return
        for model, work in works.items():
            before = self._period.setdefault(model, [0.0] * _WIDTH)
            for i, amount in enumerate(work):
                before[i] += amount
        self._period_energy += energy - self.idle_power * max(0.0, seconds - active)
        self._period_time += length
        if self._period_time >= LEARNED_PERIOD:
            self._end_period()

    def _end_period(self) -> None:
        """Make one equation of the collected steps."""
        works, energy = self._period, self._period_energy
        self._period, self._period_energy, self._period_time = {}, 0.0, 0
        for model in works:
            self._use(model)
        self._compare(works, energy)
        kept = 1 - 1 / _MEMORY
        for model, work in works.items():
            learned = self._models[model]
            learned.periods += 1
            learned.weight = learned.weight * kept + 1
            learned.energy = learned.energy * kept + energy
            learned.work = [a * kept + b for a, b in zip(learned.work, work, strict=True)]
            self._right[model] = [each * kept for each in self._right[model]]
            for other in self._models:
                # Scaling the rows and columns of a model fades its equations.
                self._scale(model, other, kept if other == model else sqrt(kept))
        for model, work in works.items():
            self._squares[model] = self._squares[model] * kept + energy * energy
            for i, amount in enumerate(work):
                self._right[model][i] += amount * energy
            for other, also in works.items():
                block = self._normal[model, other]
                for i, amount in enumerate(work):
                    for j, amount_also in enumerate(also):
                        block[i][j] += amount * amount_also
        self._solution = self._covariances = None

    def _compare(self, works: Mapping[str, Sequence[float]], energy: float) -> None:
        """Estimate variances from the deviation of a period from the former solution."""
        if min(self._models[model].periods for model in works) < _FIRST_PERIODS:
            return
        solution = self._solve()
        deviation = energy - sum(
            solution[model].of(TokenWork(*work)) for model, work in works.items()
        )
        self._variance.add(deviation * deviation)

    def _use(self, model: str) -> None:
        if model not in self._models:
            if len(self._models) >= MAX_MODELS:
                self._forget(next(iter(self._models)))
            self._models[model] = _LearnedModel()
            self._right[model] = [0.0] * _WIDTH
            self._squares[model] = 0.0
            for other in self._models:
                for pair in ((model, other), (other, model)):
                    self._normal[pair] = [[0.0] * _WIDTH for _ in range(_WIDTH)]
        self._models.move_to_end(model)

    def _forget(self, model: str) -> None:
        del self._models[model], self._right[model], self._squares[model]
        self._normal = {pair: block for pair, block in self._normal.items() if model not in pair}

    def _scale(self, one: str, other: str, factor: float) -> None:
        for pair in {(one, other), (other, one)}:
            self._normal[pair] = [[each * factor for each in row] for row in self._normal[pair]]

    # ----------------------------------------------------------------------------------- answers

    def coefficients(self, model: str) -> TokenEnergy:
        """The coefficients of a model; zeros for an unknown one."""
        return self._solve().get(model, NO_TOKEN_ENERGY)

    def identified(self, models: Iterable[str]) -> bool:
        """True if all ``models`` are identified."""
        return all(self.error(model) <= MAX_ERROR for model in set(models))

    def error(self, model: str) -> float:
        """The standard error of the parts of a model's mean energy, of the whole.

        Infinite before ``ENOUGH_PERIODS``.
        """
        learned = self._models.get(model)
        if learned is None or learned.periods < ENOUGH_PERIODS or learned.energy <= 0:
            return inf
        mean = TokenWork(*(each / learned.weight for each in learned.work))
        prompt = NO_WORK._replace(prefill=mean.prefill, attention=mean.attention)
        parts = (prompt, mean._replace(prefill=0.0, attention=0.0))
        most = max(self.variance(model, part) for part in parts)
        return sqrt(most) / (learned.energy / learned.weight)

    def variance(self, model: str, work: Sequence[float]) -> float:
        """The posterior variance of the energy of ``work`` in squared microjoules.

        Infinite for an unknown model.
        """
        covariance = self._covariance().get(model)
        if covariance is None:
            return inf
        rows = [sum(map(mul, row, work)) for row in covariance]
        return max(0.0, float(sum(map(mul, work, rows))))

    @property
    def residual_variance(self) -> float:
        """The variance of the energy of ``LEARNED_PERIOD`` that work does not explain."""
        return self._variance.value

    def _solve(self) -> dict[str, TokenEnergy]:
        if self._solution is None:
            names = list(self._models)
            matrix, scales = self._scaled(names)
            rights = [each for name in names for each in self._right[name]]
            rights = [right / scale for right, scale in zip(rights, scales, strict=True)]
            found = [
                each / scale
                for each, scale in zip(non_negative_solution(matrix, rights), scales, strict=True)
            ]
            self._solution = {
                name: TokenEnergy(*found[i * _WIDTH : (i + 1) * _WIDTH])
                for i, name in enumerate(names)
            }
        return self._solution

    def _covariance(self) -> dict[str, list[list[float]]]:
        """The posterior covariance of the coefficients of each model.

        With A the inverse of the normal matrix S with the ridge r, the variance v of residuals
        leads to v*A*S*A. The ridge moves a solution x by r*A*x, and x is not known where S leaves
        it open: each term may be anything from nothing to the whole energy, a variance of 1/12.
        """
        if self._covariances is None:
            names = list(self._models)
            matrix, scales = self._scaled(names)
            size = len(matrix)
            inverse = solved(matrix, [[float(i == j) for i in range(size)] for j in range(size)])
            open_terms = [
                _RIDGE**2 * self._squares[name] / 12 for name in names for _ in range(_WIDTH)
            ]
            variance = self._variance.value
            middle = [
                [
                    variance * (each - _RIDGE * (i == j)) + open_terms[i] * (i == j)
                    for j, each in enumerate(row)
                ]
                for i, row in enumerate(matrix)
            ]
            found = product(product(inverse, middle), inverse)
            self._covariances = {
                name: [
                    [found[at + i][at + j] / scales[at + i] / scales[at + j] for j in range(_WIDTH)]
                    for i in range(_WIDTH)
                ]
                for name, at in ((name, i * _WIDTH) for i, name in enumerate(names))
            }
        return self._covariances

    def _scaled(self, names: Sequence[str]) -> tuple[list[list[float]], list[float]]:
        """The normal matrix with a diagonal of ones and the ridge, and its scales."""
        rows = [
            [each for other in names for each in self._normal[name, other][i]]
            for name in names
            for i in range(_WIDTH)
        ]
        scales = [sqrt(row[i]) or 1.0 for i, row in enumerate(rows)]
        return [
            [1.0 + _RIDGE if i == j else each / scale / scales[j] for j, each in enumerate(row)]
            for i, (row, scale) in enumerate(zip(rows, scales, strict=True))
        ], scales
