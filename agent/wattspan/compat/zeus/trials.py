"""``zeus.profile``: the energy of an iteration of a function, by repeated trials.

A trial is a pause, iterations to warm up, and a window with as many iterations as take the wanted
time. A sweep makes trials with several durations, each of which is valid if energies vary little.
In a distributed program each rank measures its GPUs: energies are added up, the longest time
counts, and temperatures are averaged.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from time import monotonic, sleep
from typing import Any

from wattspan.compat.zeus.monitor import ZeusMonitor
from wattspan.compat.zeus.utilities import all_reduce, get_rank, get_world_size
from wattspan.sdk import MeasurementError

_log = logging.getLogger("wattspan")
_WINDOW = "trial of zeus.profile"
_DURATIONS = tuple(map(float, range(1, 11)))
_LENGTH, _PAUSE = "measurement_duration", "cooldown_duration"
_MEANS = "temperature_before", "temperature_after", "total_time", "total_energy"


@dataclass
class TrialResult:
    """Joules, seconds and mean degrees Celsius of one trial."""

    energy_per_iter: float
    time_per_iter: float
    total_energy: float
    total_time: float
    iterations: int
    temperature_before: float
    temperature_after: float


@dataclass
class SweepResult:
    """The trials with one pair of durations; ``is_valid`` if the energies deviate little."""

    measurement_duration: float
    cooldown_duration: float
    trials: list[TrialResult]
    energy_mean: float
    energy_std: float
    avg_temperature_before: float
    avg_temperature_after: float
    avg_total_time: float
    avg_total_energy: float
    is_valid: bool

    def __str__(self) -> str:
        return (
            f"measurement {self.measurement_duration:g} s, cooldown {self.cooldown_duration:g} s: "
            f"{self.energy_mean:.4f} J ± {self.energy_std:.4f} J, "
            f"{self.avg_temperature_before:.1f} to {self.avg_temperature_after:.1f} °C, "
            f"{'valid' if self.is_valid else 'not valid'}"
        )


@dataclass
class SweepReport:
    """The results of a sweep: names and values of the varied and of the fixed duration."""

    sweep_param: tuple[str, list[float]]
    fixed_param: tuple[str, float]
    entries: list[SweepResult]

    def __str__(self) -> str:
        return "\n".join([f"Sweep of {self.sweep_param[0]}:", *map(str, self.entries)])


class _Trials:
    """Trials of a function; an iteration takes ``iteration`` seconds, or is timed first.

    ``repeats`` are the iterations to warm up, and those that are timed.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        monitor: ZeusMonitor,
        repeats: tuple[int, int],
        iteration: float | None = None,
    ) -> None:
        self._function, self._monitor, self._warm_up = function, monitor, repeats[0]
        self._iteration = self._calibrated(repeats[1]) if iteration is None else iteration

    def _calibrated(self, iterations: int) -> float:
        longest, _ = _measured_together(lambda: (self._timed(iterations),))
        return longest

    def _timed(self, iterations: int) -> float:
        self._boards()
        self._repeat(self._warm_up)
        self._monitor.synchronize()
        began = monotonic()
        self._repeat(iterations)
        self._monitor.synchronize()
        return (monotonic() - began) / iterations

    def _repeat(self, times: int) -> None:
        for _ in range(times):
            self._function()

    def _boards(self) -> Sequence[int]:
        """The indices of the GPUs; ValueError without one."""
        if not self._monitor.gpu_indices:
            raise ValueError("The monitor has no GPU. Give it one, and start the agent.")
        return self._monitor.gpu_indices

    def _temperature(self) -> float:
        return fmean(map(self._monitor.gpus.get_gpu_temperature, self._boards()))

    def _figures(self, warm_up: int, iterations: int) -> tuple[float, float, float, float]:
        """Seconds and joules of a window, and the temperatures before and after."""
        before = self._temperature()
        self._repeat(warm_up)
        self._monitor.begin_window(_WINDOW, restart=True)
        self._repeat(iterations)
        found = self._monitor.end_window(_WINDOW)
        return found.time, found.total_energy, before, self._temperature()

    def run(self, length: float, pause: float, *, heats: bool = False) -> TrialResult:
        """``heats``: the trial itself is to warm the GPU up."""
        iterations = max(1, int(length / self._iteration)) if self._iteration > 0 else 1
        sleep(max(0.0, pause))
        warm_up = 0 if heats else self._warm_up
        seconds, [energy, *sums] = _measured_together(lambda: self._figures(warm_up, iterations))
        per_iteration = energy / iterations, seconds / iterations
        temperatures = (one / get_world_size() for one in sums)
        return TrialResult(*per_iteration, energy, seconds, iterations, *temperatures)

    def sweep(
        self, name: str, values: Sequence[float], fixed: float, counts: tuple[int, int], most: float
    ) -> SweepReport:
        """``counts`` are those of trials for each value, and of further ones before."""
        cools, other = name == _PAUSE, _LENGTH if name == _PAUSE else _PAUSE
        for _ in range(counts[1]):
            self.run(fixed if cools else max(values), 0.0, heats=True)
        pairs = [(fixed, one) if cools else (one, fixed) for one in values]
        entries = [self._entry(*one, counts[0], most) for one in pairs]
        report = SweepReport((name, list(values)), (other, fixed), entries)
        if get_rank() == 0:
            _log.info("%s", report)
        return report

    def _entry(self, length: float, pause: float, count: int, most: float) -> SweepResult:
        trials = [self.run(length, pause) for _ in range(count)]
        energies = [one.energy_per_iter for one in trials]
        deviation = stdev(energies) if count > 1 else 0.0
        cold, hot, time, energy = (fmean(getattr(one, name) for one in trials) for name in _MEANS)
        spread = fmean(energies), deviation
        return SweepResult(
            length, pause, trials, *spread, cold, hot, time, energy, deviation < most
        )


def _measured_together(trial: Callable[[], tuple[float, ...]]) -> tuple[float, Sequence[float]]:
    """The longest seconds of the ranks, which are the first figure, and the sums of the others.

    Every rank takes part, also one whose function or window has failed: the others wait for it.
    Then all of them raise.
    """
    error: Exception | None = None
    try:
        seconds, *figures = trial()
    except Exception as failure:  # noqa: BLE001 - it is raised after the ranks have met
        error, seconds, figures = failure, math.inf, []
    [longest] = all_reduce([seconds], "max")
    if error is not None:
        raise error
    if longest == math.inf:
        raise MeasurementError("The trial failed in another rank. See the error of that one.")
    return longest, all_reduce(figures, "sum") if figures else ()


def measure(
    target_function: Callable[[], Any],
    zeus_monitor: ZeusMonitor,
    measurement_duration: float,
    cooldown_duration: float,
    num_warmup_iterations: int = 10,
    num_calibration_iterations: int = 100,
) -> TrialResult:
    """One trial. MeasurementError."""
    repeats = num_warmup_iterations, num_calibration_iterations
    trials = _Trials(target_function, zeus_monitor, repeats)
    return trials.run(measurement_duration, cooldown_duration)


def profile_measurement_duration(
    target_function: Callable[[], Any],
    zeus_monitor: ZeusMonitor,
    measurement_duration_search_range: list[float] | None = None,
    cooldown_duration: float = 10.0,
    num_trials: int = 10,
    num_warmup_trials: int = 2,
    trial_stddev_threshold: float = 0.01,
    num_warmup_iterations: int = 10,
    num_calibration_iterations: int = 100,
    iteration_duration: float | None = None,
) -> SweepReport:
    """A sweep of durations of measurement, by default 1 to 10 s. MeasurementError."""
    repeats = num_warmup_iterations, num_calibration_iterations
    trials = _Trials(target_function, zeus_monitor, repeats, iteration_duration)
    values, counts = (
        measurement_duration_search_range or _DURATIONS,
        (num_trials, num_warmup_trials),
    )
    return trials.sweep(_LENGTH, values, cooldown_duration, counts, trial_stddev_threshold)


def profile_cooldown_duration(
    target_function: Callable[[], Any],
    zeus_monitor: ZeusMonitor,
    cooldown_duration_search_range: list[float] | None = None,
    measurement_duration: float = 10.0,
    num_trials: int = 10,
    num_warmup_trials: int = 2,
    trial_stddev_threshold: float = 0.01,
    num_warmup_iterations: int = 10,
    num_calibration_iterations: int = 100,
    iteration_duration: float | None = None,
) -> SweepReport:
    """A sweep of pauses before a measurement, by default 1 to 10 s. MeasurementError."""
    repeats = num_warmup_iterations, num_calibration_iterations
    trials = _Trials(target_function, zeus_monitor, repeats, iteration_duration)
    values, counts = cooldown_duration_search_range or _DURATIONS, (num_trials, num_warmup_trials)
    return trials.sweep(_PAUSE, values, measurement_duration, counts, trial_stddev_threshold)


def profile_parameters(
    target_function: Callable[[], Any],
    zeus_monitor: ZeusMonitor,
    measurement_duration_search_range: list[float] | None = None,
    cooldown_duration_search_range: list[float] | None = None,
    num_trials: int = 10,
    num_warmup_trials: int = 2,
    trial_stddev_threshold: float = 0.01,
    num_warmup_iterations: int = 10,
    num_calibration_iterations: int = 100,
) -> tuple[SweepReport, SweepReport]:
    """Both sweeps, each with the longest of the other's durations. MeasurementError."""
    repeats = num_warmup_iterations, num_calibration_iterations
    trials = _Trials(target_function, zeus_monitor, repeats)
    lengths = measurement_duration_search_range or _DURATIONS
    pauses = cooldown_duration_search_range or _DURATIONS
    counts, most = (num_trials, num_warmup_trials), trial_stddev_threshold
    first = trials.sweep(_LENGTH, lengths, max(pauses), counts, most)
    return first, trials.sweep(_PAUSE, pauses, max(lengths), (num_trials, 0), most)
