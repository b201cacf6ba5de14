"""Zeus's optimum selectors, and the measurements that they choose from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True, slots=True)
class PowerLimitMeasurement:
    """The energy and time of some steps at one power limit: watts, joules, seconds."""

    power_limit: int
    energy: float
    time: float

    def __post_init__(self) -> None:
        for name in ("power_limit", "energy", "time"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise ValueError(f"{name}={value!r} is not positive: give a measured value")


class OptimumSelector(ABC):
    """Selects one power limit from measurements."""

    @abstractmethod
    def select(self, measurements: list[PowerLimitMeasurement]) -> int:
        """The power limit in watts."""


class Energy(OptimumSelector):
    """The least energy, at any slowdown.

    The tuner keeps the operator's slowdown budget unless ``[autotune] declared = "allow"``.
    """

    def select(self, measurements: list[PowerLimitMeasurement]) -> int:
        """The power limit with the least energy."""
        return min(measurements, key=lambda one: one.energy).power_limit


class Time(OptimumSelector):
    """The least time."""

    def select(self, measurements: list[PowerLimitMeasurement]) -> int:
        """The power limit with the least time."""
        return min(measurements, key=lambda one: one.time).power_limit


class ZeusCost(OptimumSelector):
    """The least cost: eta · energy + (1 - eta) · maximum power · time, as in Zeus (NSDI '23)."""

    def __init__(self, eta_knob: float, world_size: int = 1) -> None:
        """ValueError for ``eta_knob`` outside of 0 to 1, or a ``world_size`` below 1."""
        if not 0 <= eta_knob <= 1:
            raise ValueError(f"eta_knob={eta_knob!r} is not a weight: give a number from 0 to 1")
        if world_size < 1:
            raise ValueError(f"world_size={world_size!r} is no number of GPUs: give 1 or more")
        self.eta_knob = eta_knob
        self.world_size = world_size

    def select(self, measurements: list[PowerLimitMeasurement]) -> int:
        """The power limit with the least cost."""
        power = max(one.power_limit for one in measurements) * self.world_size
        eta = self.eta_knob
        return min(
            measurements, key=lambda one: eta * one.energy + (1 - eta) * power * one.time
        ).power_limit


class MaxSlowdownConstraint(OptimumSelector):
    """The least energy within a slowdown.

    Zeus selects the lowest power limit within it, which can cost more energy than a higher one.
    """

    def __init__(self, factor: float) -> None:
        """``factor`` is the time relative to the maximum power limit. ValueError below 1."""
        if not (isfinite(factor) and factor >= 1):
            raise ValueError(
                f"factor={factor!r} is no slowdown factor: give 1 or more, 1.05 is 5 % slower"
            )
        self.factor = factor

    def select(self, measurements: list[PowerLimitMeasurement]) -> int:
        """The power limit with the least energy of those within the factor."""
        fastest = max(measurements, key=lambda one: one.power_limit).time
        within = [one for one in measurements if one.time <= self.factor * fastest]
        return min(within, key=lambda one: one.energy).power_limit
