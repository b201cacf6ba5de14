"""Time and energy per unit of work of each setting, with confidence intervals.

Logarithms of the trials follow an additive model: a setting, a block, and an error whose variance
is pooled over all settings. So the intervals of few repetitions have the degrees of freedom of all
trials. Montgomery, Design and Analysis of Experiments, chapter 4 (randomised blocks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from math import exp, inf, log, sqrt
from typing import NamedTuple

from wattspan.frontier.statistics import f_upper_tail, quantile, upper_tail
from wattspan.frontier.trials import Setting, Trial
from wattspan.util.linear_systems import solved

CONFIDENCE = 0.95

_ROUNDING = 1e-9
"""Relative error of a calculation: differences below it are none."""


class ConfidenceInterval(NamedTuple):
    """An estimate and its confidence interval; ``inf`` above where there is no second trial."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"

    def scaled(self, factor: float) -> ConfidenceInterval:
        """The same interval in another unit."""
        return ConfidenceInterval(self.value * factor, self.low * factor, self.high * factor)


_POOLING = 0.25
"""The p-value above which differences of blocks count as noise. Bancroft (1964) recommends it."""


class BlockModel:
    """The additive model of one figure, fitted by least squares.

    Blocks that do not differ beyond noise have no effect in it (a preliminary F test): their
    effects would cost as many degrees of freedom, and blocks of few settings have few.
    """

    def __init__(self, figures: Sequence[tuple[int, int, float]]) -> None:
        """``figures``: the number of the setting, the block and the positive figure of a trial."""
        settings = sorted({setting for setting, _, _ in figures})
        self._columns = {setting: n for n, setting in enumerate(settings)}
        fit = _fitted(self._columns, figures, sorted({block for _, block, _ in figures}))
        plain = _fitted(self._columns, figures, [])
        if _as_good(plain, fit):
            fit = plain
        self._effects, self._covariance = fit.effects, fit.covariance
        self.freedom = fit.freedom
        """Degrees of freedom of the variance; 0 if there are none, and so no interval."""
        self.variance = fit.squares / fit.freedom if fit.freedom > 0 else inf
        """Of the logarithm of one trial's figure: the square of its relative noise."""

    def __contains__(self, setting: int) -> bool:
        return setting in self._columns

    def value(self, setting: int, confidence: float = CONFIDENCE) -> ConfidenceInterval:
        """The figure of ``setting``, with a two-sided interval."""
        at = self._columns[setting]
        return self._interval(self._effects[at], self._covariance[at][at], confidence)

    def ratio(self, setting: int, other: int, confidence: float = CONFIDENCE) -> ConfidenceInterval:
        """The figure of ``setting`` relative to that of ``other``."""
        difference, spread = self.contrast(setting, other)
        return self._interval(difference, spread, confidence)

    def probability_of_chance(self, setting: int, other: int) -> float:
        """The p-value for a figure of ``setting`` below that of ``other``, one-sided."""
        difference, spread = self.contrast(setting, other)
        if self.freedom <= 0:
            return 1.0
        error = sqrt(self.variance * spread)
        if error <= _ROUNDING:
            return 0.0 if difference < -_ROUNDING else 1.0
        return upper_tail(-difference / error, self.freedom)

    def contrast(self, setting: int, other: int) -> tuple[float, float]:
        """The logarithm of the ratio, and its variance relative to that of one trial."""
        one, two = self._columns[setting], self._columns[other]
        spread = (
            self._covariance[one][one]
            + self._covariance[two][two]
            - self._covariance[one][two]
            - self._covariance[two][one]
        )
        return self._effects[one] - self._effects[two], max(0.0, spread)

    def _interval(self, effect: float, spread: float, confidence: float) -> ConfidenceInterval:
        value = exp(effect)
        if spread == 0.0:  # relative to itself
            return ConfidenceInterval(value, value, value)
        if self.freedom <= 0:
            return ConfidenceInterval(value, 0.0, inf)
        half = quantile((1 + confidence) / 2, self.freedom) * sqrt(self.variance * spread)
        return ConfidenceInterval(value, exp(effect - half), exp(effect + half))


class _BlockFit(NamedTuple):
    effects: Sequence[float]
    covariance: Sequence[Sequence[float]]  # relative to the variance of one trial
    freedom: int
    squares: float  # the sum of the residuals' ones


def _fitted(
    columns: Mapping[int, int], figures: Sequence[tuple[int, int, float]], blocks: Sequence[int]
) -> _BlockFit:
    """The least squares of settings and ``blocks``."""
    # The blocks' effects sum up to 0 by one column less, so the settings' ones are absolute.
    last = max(0, len(blocks) - 1)
    size = len(columns) + last
    rows, values = [], []
    for setting, block, figure in figures:
        row = [0.0] * size
        row[columns[setting]] = 1.0
        at = blocks.index(block) if blocks else last
        if at < last:
            row[len(columns) + at] = 1.0
        else:
            row[len(columns) :] = [-1.0] * last
        rows.append(row)
        values.append(log(figure))
    normal = [[sum(r[i] * r[j] for r in rows) for j in range(size)] for i in range(size)]
    right = [sum(r[i] * v for r, v in zip(rows, values, strict=True)) for i in range(size)]
    units = [[float(i == j) for i in range(size)] for j in range(size)]
    effects, *covariance = solved(normal, [right, *units])
    residuals = (
        value - sum(map(float.__mul__, row, effects))
        for row, value in zip(rows, values, strict=True)
    )
    squares = sum(residual * residual for residual in residuals)
    return _BlockFit(effects, covariance, len(rows) - size, squares)


def _as_good(plain: _BlockFit, fit: _BlockFit) -> bool:
    """True if the blocks of ``fit`` explain no more than chance."""
    blocks = plain.freedom - fit.freedom
    if blocks <= 0 or fit.freedom <= 0:
        return False
    if fit.squares <= plain.freedom * _ROUNDING**2:
        return plain.squares <= plain.freedom * _ROUNDING**2
    ratio = (plain.squares - fit.squares) / blocks / (fit.squares / fit.freedom)
    return f_upper_tail(max(0.0, ratio), blocks, fit.freedom) > _POOLING


@dataclass(frozen=True)
class SettingEstimates:
    """Time and energy of the settings that can be compared with the baseline.

    The baseline is the first of ``settings``. Trials in a block without any setting that links it
    to the baseline tell nothing: the block's effect is unknown.
    """

    settings: Sequence[Setting]
    usable: Sequence[Trial]

    @cached_property
    def trials(self) -> Sequence[Trial]:
        """The usable trials that are linked to the baseline by settings and blocks in common."""
        settings, blocks = {self.settings[0]}, set[int]()
        found: list[Trial] = []
        while True:
            linked = [one for one in self.usable if one.setting in settings or one.block in blocks]
            if len(linked) == len(found):
                return found
            found = linked
            settings |= {one.setting for one in found}
            blocks |= {one.block for one in found}

    @cached_property
    def numbers(self) -> Mapping[Setting, int]:
        return {setting: number for number, setting in enumerate(self.settings)}

    @cached_property
    def measured(self) -> list[int]:
        """The numbers of the settings with a trial."""
        return sorted({self.numbers[trial.setting] for trial in self.trials})

    @cached_property
    def time(self) -> BlockModel:
        """Seconds per unit of work."""
        return self.model([trial.unit_seconds for trial in self.trials])

    @cached_property
    def energy(self) -> BlockModel:
        """Joules per unit of work."""
        return self.model([trial.unit_joules for trial in self.trials])

    @cached_property
    def power(self) -> BlockModel:
        """Mean power in watts."""
        return self.model([trial.joules / trial.seconds for trial in self.trials])

    def model(self, figures: Sequence[float]) -> BlockModel:
        """The model of another figure of the trials, in their order."""
        pairs = zip(self.trials, figures, strict=True)
        return BlockModel(
            [(self.numbers[trial.setting], trial.block, figure) for trial, figure in pairs]
        )


# ---------------------------------------------------------------------------------------- frontier


SIGNIFICANCE = 0.05
"""Probability that any setting is left out by chance."""


class Dominance(NamedTuple):
    """``setting`` is slower and uses more energy than ``by``; both are numbers of settings."""

    setting: int
    by: int


def dominated(estimates: SettingEstimates) -> list[Dominance]:
    """The settings that are left out, each with the one that beats it most surely.

    A setting is left out only if another one is faster *and* uses less energy beyond chance.
    Settings whose difference may be chance are ties, and stay.

    The test of one pair is the weaker of its two one-sided t tests (Berger 1982, an
    intersection-union test). Holm's method (1979) corrects for all pairs.
    """
    time, energy = estimates.time, estimates.energy
    tests = sorted(
        (
            max(time.probability_of_chance(by, setting), energy.probability_of_chance(by, setting)),
            setting,
            by,
        )
        for setting, by in permutations(estimates.measured, 2)
    )
    found: dict[int, Dominance] = {}
    for number, (probability, setting, by) in enumerate(tests):
        if probability * (len(tests) - number) > SIGNIFICANCE:
            break
        found.setdefault(setting, Dominance(setting, by))
    return [found[setting] for setting in sorted(found)]


def frontier(estimates: SettingEstimates) -> list[int]:
    """The numbers of the settings that are not left out, by time."""
    out = {one.setting for one in dominated(estimates)}
    remaining = [number for number in estimates.measured if number not in out]
    return sorted(remaining, key=lambda number: estimates.time.value(number).value)
