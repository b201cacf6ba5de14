"""Profiles of energy and time by power limit, and Zeus's selectors, which choose from them.

A profile is in Zeus's JSON, from the tuner or a frontier.
"""

from __future__ import annotations

import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from wattspan.sdk import MeasurementError
from wattspan.sdk.client import request_json
from wattspan.util.files import replace_file

if TYPE_CHECKING:
    from wattspan.sdk.jobs import JobDeclaration

_log = logging.getLogger("wattspan")


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


# ----------------------------------------------------------------------------------- profiles

_MEASUREMENTS = "measurements"  # the key of Zeus's file
_MAX_BYTES = 64 << 20
_TIMEOUT = 0.5  # seconds: the training waits for it once an epoch


def read_profile(path: Path) -> list[PowerLimitMeasurement]:
    """The measurements of a profile, or of a file of ``wattspan frontier run``; the highest first.

    ValueError for another file, OSError for one that cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES)
    try:
        facts = json.loads(content)
        if "trials" in facts:
            found = _frontier_measurements(path)
        else:
            found = [
                PowerLimitMeasurement(int(one["power_limit"]), one["energy"], one["time"])
                for one in facts[_MEASUREMENTS]
            ]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(
            f"{path} is no profile ({type(error).__name__}: {error}). Give a file that this option "
            "or Zeus has written, or one of `wattspan frontier run`."
        ) from None
    if not found:
        raise ValueError(f"{path} has no measurement. Remove it, or give another file.")
    return sorted(found, key=lambda one: -one.power_limit)


def write_profile(path: Path, measurements: Iterable[PowerLimitMeasurement]) -> None:
    """Replace the file. OSError."""
    facts = [
        {"power_limit": one.power_limit, "energy": one.energy, "time": one.time}
        for one in measurements
    ]
    content = json.dumps({_MEASUREMENTS: facts}, indent=4) + "\n"
    replace_file(path, content.encode(), path.with_name(f".{path.name}.draft"), 0o666)


def tried_settings(job: Mapping[str, Any], steps: int) -> list[PowerLimitMeasurement]:
    """The original power limit and those that the tuner has compared with it; the highest first.

    ``job`` is a job of ``GET /v1/tuning``. Energy and time are those of ``steps`` units of work:
    the estimated means at the original limit, times the measured ratios.
    """
    seconds, joules = job["unit_time_seconds"], job["unit_energy_joules"]
    if job["knob"] != "gpu_power" or not seconds or not joules or not job["original"]:
        return []
    original = max(job["original"].values())
    compared = [
        one for one in job["tried"] if one["slowdown"] is not None and one["saving"] is not None
    ]
    ratios = [
        (original, 1.0, 1.0),
        *((one["setting"], 1 + one["slowdown"], 1 - one["saving"]) for one in compared),
    ]
    return [
        PowerLimitMeasurement(round(watts), steps * joules * energy, steps * seconds * time)
        for watts, time, energy in ratios
    ]


class ProfileExport:
    """Writes what the agent has tried for this process's job to a file in Zeus's JSON.

    Energy and time are those of ``steps`` units, as Zeus's are.
    """

    def __init__(self, path: Path, steps: int) -> None:
        self.path, self._steps = path.absolute(), steps

    def write(self, declaration: JobDeclaration | None) -> None:
        """Write the file, if a setting was compared. Never raises: the training goes on."""
        if declaration is None:
            return
        try:
            jobs = request_json("/v1/tuning", {}, margin=_TIMEOUT)["jobs"]
            own = next((one for one in jobs if _is_own(one, declaration)), None)
            found = [] if own is None else tried_settings(own, self._steps)
            if len(found) > 1:
                write_profile(self.path, found)
        except (MeasurementError, OSError, LookupError, TypeError, ValueError) as error:
            _log.warning("The profile %s is not written: %s", self.path, error)


def _is_own(job: Mapping[str, Any], declaration: JobDeclaration) -> bool:
    declared = job["declared"]
    return (
        declared is not None
        and (declared["name"], declared["uid"]) == (declaration.name, os.geteuid())
        and job["service"] == declaration.service
    )


def _frontier_measurements(path: Path) -> list[PowerLimitMeasurement]:
    """Means of the usable trials by power limit, at the clock and parameters of the baseline."""
    frontier: Any = import_module("wattspan").Frontier  # imports more than a script needs
    study = frontier.load(path).study
    known = [one.original_watts for one in study.devices if one.original_watts is not None]
    original, baseline = max(known, default=0), study.baseline
    trials: dict[Any, list[Any]] = {}
    for one in study.usable():
        if (one.setting.clock, one.setting.parameters) == (baseline.clock, baseline.parameters):
            trials.setdefault(one.setting, []).append(one)
    return [
        PowerLimitMeasurement(
            round(fmean(max(one.limits.values(), default=original) for one in found)),
            fmean(one.unit_joules for one in found),
            fmean(one.unit_seconds for one in found),
        )
        for found in trials.values()
    ]
