"""The study of a command and the setting to run under a constraint: the best that surely keeps it.

A setting keeps a constraint if its estimate does, and the upper bound of its one-sided confidence
interval exceeds the limit by no more than a tolerance. Only measured settings are recommended: time
and energy over a power limit have steps and more than one minimum, so nothing is interpolated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from wattspan.frontier.estimates import (
    CONFIDENCE,
    SIGNIFICANCE,
    BlockModel,
    ConfidenceInterval,
    SettingEstimates,
    frontier,
)
from wattspan.frontier.trials import Setting, Study, StudyFile
from wattspan.ports import WattspanError

ONE_SIDED = 2 * CONFIDENCE - 1
"""The two-sided confidence whose upper bound has CONFIDENCE on its own."""

DEFAULT_TOLERANCE = 0.01
"""Relative excess over a limit that the upper bound may have.

With a tolerance of 0, three trials of each setting lose much of the energy, because no setting near
the limit is ever certain; with this one, 95 % of recommendations and more still keep the limit
(benchmarks/frontier.py).
"""


class NoSettingError(WattspanError):
    """No measured setting keeps the constraints, or there are too few trials to know."""


@dataclass(frozen=True, slots=True)
class Constraints:
    """Constraints on time, energy and power per unit of work; None for none.

    ``max_slowdown`` is relative to the baseline: 0.05 is 5 %. ``deadline`` is in seconds, of the
    mean time of a unit. ``eta`` weighs energy against time, as Zeus does: the least
    eta x E + (1 - eta) x ``max_watts`` x T is wanted. ``watts`` is the mean power. ``tolerance``
    is the relative excess over a limit that the upper bound may have.
    """

    max_slowdown: float | None = None
    deadline: float | None = None
    energy_budget: float | None = None
    watts: float | None = None
    eta: float | None = None
    max_watts: float | None = None
    tolerance: float = DEFAULT_TOLERANCE

    def __post_init__(self) -> None:
        """ValueError for a constraint outside its range."""
        if self.max_slowdown is not None and self.max_slowdown < 0:
            raise ValueError("max_slowdown is at least 0: 0.05 is 5 %.")
        if self.eta is not None and not 0 <= self.eta <= 1:
            raise ValueError("eta is from 0 (time only) to 1 (energy only).")
        if self.tolerance < 0:
            raise ValueError("tolerance is at least 0: 0.01 is 1 %.")
        for name in ("deadline", "energy_budget", "watts"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is above 0.")

    @property
    def wants_least_time(self) -> bool:
        """True if energy or power is constrained and time is not."""
        limited = self.energy_budget is not None or self.watts is not None
        return limited and self.max_slowdown is None and self.deadline is None


class Recommendation(NamedTuple):
    """The setting to run. ``energy_ratio`` and ``time_ratio`` are relative to the baseline.

    ``ties`` are the other settings that keep the constraints and whose energy (or time, or cost)
    may be as good: the difference may be chance.
    """

    setting: Setting
    seconds: ConfidenceInterval
    joules: ConfidenceInterval
    time_ratio: ConfidenceInterval
    energy_ratio: ConfidenceInterval
    ties: tuple[Setting, ...]


def recommend(estimates: SettingEstimates, constraints: Constraints) -> Recommendation:
    """The best setting that keeps ``constraints``. NoSettingError names the reason for none."""
    if 0 not in estimates.measured:
        raise NoSettingError("The baseline has no usable trial. Run the study on with --resume.")
    kept = _keeping(estimates, constraints)
    if not kept:
        raise NoSettingError(_no_setting(estimates, constraints))
    objective = _objective(estimates, constraints)
    best = min(kept, key=lambda number: objective.value(number).value)
    time, energy = estimates.time, estimates.energy
    return Recommendation(
        estimates.settings[best],
        time.value(best),
        energy.value(best),
        time.ratio(best, 0),
        energy.ratio(best, 0),
        tuple(
            estimates.settings[number]
            for number in kept
            if number != best and objective.probability_of_chance(best, number) > SIGNIFICANCE
        ),
    )


def _keeping(estimates: SettingEstimates, constraints: Constraints) -> list[int]:
    """The settings that keep the constraints with confidence."""
    time, energy = estimates.time, estimates.energy
    slowdown = constraints.max_slowdown
    limits: Sequence[tuple[float | None, Callable[[int], ConfidenceInterval]]] = (
        (
            None if slowdown is None else 1 + slowdown,
            lambda number: time.ratio(number, 0, ONE_SIDED),
        ),
        (constraints.deadline, lambda number: time.value(number, ONE_SIDED)),
        (constraints.energy_budget, lambda number: energy.value(number, ONE_SIDED)),
        (constraints.watts, lambda number: estimates.power.value(number, ONE_SIDED)),
    )
    return [
        number
        for number in estimates.measured
        if all(
            limit is None or _keeps(interval(number), limit, constraints.tolerance)
            for limit, interval in limits
        )
    ]


def _keeps(interval: ConfidenceInterval, limit: float, tolerance: float) -> bool:
    return interval.value <= limit and interval.high <= limit * (1 + tolerance)


def _objective(estimates: SettingEstimates, constraints: Constraints) -> BlockModel:
    """The figure to minimise."""
    weight, max_watts = constraints.eta, constraints.max_watts
    if weight is None or max_watts is None:
        return estimates.time if constraints.wants_least_time else estimates.energy
    return estimates.model(
        [
            weight * trial.unit_joules + (1 - weight) * max_watts * trial.unit_seconds
            for trial in estimates.trials
        ]
    )


def _no_setting(estimates: SettingEstimates, constraints: Constraints) -> str:
    if estimates.time.freedom <= 0:
        return (
            "The noise of the trials is unknown, because no setting was measured twice: no setting"
            " can be recommended under a constraint. Measure more with --resume and a larger"
            " --repeat."
        )
    fastest = min(estimates.measured, key=lambda number: estimates.time.value(number).value)
    seconds, joules = estimates.time.value(fastest), estimates.energy.value(fastest)
    return (
        "No measured setting keeps the constraints with confidence. The fastest one, "
        f"{estimates.settings[fastest]}, takes {seconds} s and {joules} J a unit of work."
        " Relax a constraint, or measure more with --resume and a larger --repeat."
    )


# -------------------------------------------------------------------------------------- Python API


class Frontier:
    """The measured settings of a command, from the file of ``wattspan frontier run``."""

    def __init__(self, study: Study) -> None:
        self.study = study

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Frontier:
        """The study in the file at ``path``; StudyFileError."""
        return cls(StudyFile(Path(path)).read())

    @cached_property
    def estimates(self) -> SettingEstimates:
        """Time and energy of the settings with usable trials."""
        return SettingEstimates(self.study.settings, self.study.usable())

    @property
    def settings(self) -> list[Setting]:
        """The settings of the frontier, the fastest first."""
        return [self.study.settings[number] for number in frontier(self.estimates)]

    def recommend(
        self,
        *,
        max_slowdown: float | None = None,
        deadline: float | None = None,
        energy_budget: float | None = None,
        watts: float | None = None,
        eta: float | None = None,
        tolerance: float = DEFAULT_TOLERANCE,
    ) -> Recommendation:
        """The best setting that keeps the constraints with confidence; see Constraints for them.

        NoSettingError if there is none, ValueError for an invalid constraint.
        """
        constraints = Constraints(
            max_slowdown=max_slowdown,
            deadline=deadline,
            energy_budget=energy_budget,
            watts=watts,
            eta=eta,
            max_watts=None if eta is None else self._max_watts(),
            tolerance=tolerance,
        )
        return recommend(self.estimates, constraints)

    def _max_watts(self) -> float:
        """The sum of the devices' original limits, which weighs time in Zeus's cost."""
        limits = [device.original_watts for device in self.study.devices]
        known = [limit for limit in limits if limit is not None]
        if len(known) < len(limits):
            raise ValueError("eta needs the power limits of all devices, and some are unknown.")
        return sum(known)
