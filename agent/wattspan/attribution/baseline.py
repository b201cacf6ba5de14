"""Baselines: the power of a device without load, learned from observations.

A CPU is hardly ever completely idle, but its load varies: :class:`LoadIntercept` is the intercept
of its power over load. A GPU with a user keeps its clocks up even while it rests, so only an unused
one shows its idle power: :class:`UnusedDevicePower`. With too few observations there is no
baseline, and attribution treats all energy as active.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from wattspan.model import SECOND, HwType, Milliwatts, Usage

WINDOW = SECOND
"""Shorter observations are added up to this: counters and clocks are read at different moments."""

HALF_LIFE = 900.0  # windows, of the weight of an observation
MAX_WEIGHT = 120.0
"""The largest weight of a mean, in windows. A mean includes half of a lasting change after 83
windows and 95 % after 360; one wrong window moves it by a 120th of its error."""

FULL_CONFIDENCE_WEIGHT = 30.0  # windows; a mean of fewer is combined with other evidence
_BINS = 20
_LOW_LOAD = 0.05  # below this load the intercept is observed, not extrapolated
_MIN_LOAD_RANGE = 0.20  # the least range of load for a fitted line
_MIN_WEIGHT = 2.5  # windows before the first result: three, slightly decayed
_MIN_BIN_WEIGHT = 0.25  # bins with less weight are ignored
_STEADY_LOAD_CHANGE = 0.1  # a window with this change of load has half the weight


@dataclass(slots=True)
class _Bin:
    """The decaying mean load and power of the windows with a load in one twentieth."""

    weight: float = 0.0
    load: float = 0.0
    power: float = 0.0

    def add(self, load: float, power: float, weight: float) -> None:
        self.weight = min(MAX_WEIGHT, self.weight + weight)
        self.load += (load - self.load) * weight / self.weight
        self.power += (power - self.power) * weight / self.weight


class LoadIntercept:
    """Idle power as the intercept of power over load.

    Windows are collected in bins of load, so that an hour at full load does not outweigh one quiet
    minute; old windows decay. Near zero load the lowest bin, corrected by the fitted line, is the
    result; otherwise the intercept of the line, if its range of load suffices.

    Energy and usage are read at slightly different moments. The resulting error is proportional to
    the change of load in the window, so such windows have little weight. A counter that is updated
    late shows too little energy in one window and too much in the next, perhaps at another load;
    therefore all results are means in which the weight of one window is limited.
    """

    def __init__(self, remembered: Milliwatts | None = None) -> None:
        self._remembered = remembered
        self._bins = [_Bin() for _ in range(_BINS)]
        self._energy = self._duration = self._busy = self._capacity = 0
        self._began: float | None = None
        self._power: Milliwatts | None = remembered

    @property
    def power(self) -> Milliwatts | None:
        return self._power

    def observe(self, energy: int, duration: int, usage: Usage) -> None:
        """Add the ``energy`` in microjoules of ``duration`` nanoseconds with ``usage``."""
        if not usage.capacity:
            return
        span = usage.end.mono - usage.start.mono
        ends = usage.busy / usage.capacity
        began = self._began = ends if self._began is None else self._began
        self._energy += energy
        self._duration += duration
        # Usage and interval rarely have the same length: scale usage to the interval.
        self._busy += usage.busy * duration // max(1, span)
        self._capacity += usage.capacity * duration // max(1, span)
        if self._duration < WINDOW or not self._capacity:
            return
        load = min(1.0, self._busy / self._capacity)
        power = self._energy * 1e6 / self._duration
        self._energy = self._duration = self._busy = self._capacity = 0
        self._began = None
        for one in self._bins:
            one.weight *= 0.5 ** (1 / HALF_LIFE)
        steadiness = 1 / (1 + ((ends - began) / _STEADY_LOAD_CHANGE) ** 2)
        self._bins[min(_BINS - 1, int(load * _BINS))].add(load, power, steadiness)
        learned = self._fit()
        if learned is not None:
            self._power = Milliwatts(round(learned))

    def _fit(self) -> float | None:
        """The intercept; None with too few observations."""
        seen = [one for one in self._bins if one.weight >= _MIN_BIN_WEIGHT]
        if not seen:
            return None
        line = _line(seen)
        lowest = min(seen, key=lambda one: one.load)
        quiet = lowest.weight if lowest.load < _LOW_LOAD else 0.0
        slope = line.slope if line is not None and line.reliable else 0.0
        corrected = lowest.power - slope * lowest.load
        if line is not None and line.weight >= 1 and quiet < FULL_CONFIDENCE_WEIGHT:
            weight = min(line.weight, FULL_CONFIDENCE_WEIGHT - quiet)
            idle = (quiet * corrected + weight * line.intercept) / (quiet + weight)
        elif quiet >= _MIN_WEIGHT:
            idle = corrected
        else:
            return None
        return max(0.0, idle - _excess(idle, seen))


def _excess(idle: float, bins: list[_Bin]) -> float:
    """The amount by which ``idle`` exceeds the observed power at any load, an impossible value.

    This occurs if the device has come to draw less and was not quiet since. A bin of few windows
    has little effect: one window of a counter that is updated late does not lower the idle power.
    """
    return max(
        0.0,
        *((idle - one.power) * min(1.0, one.weight / FULL_CONFIDENCE_WEIGHT) ** 2 for one in bins),
    )


class _FittedLine(NamedTuple):
    slope: float
    intercept: float
    weight: float  # number of windows without load that would give an intercept as precise
    reliable: bool  # the slope depends on more than a few windows at the far end


def _line(bins: list[_Bin]) -> _FittedLine | None:
    """Power over load by weighted least squares, with a slope of at least 0.

    None if the range of load is too small for a slope.
    """
    loads = [one.load for one in bins]
    if max(loads) - min(loads) < _MIN_LOAD_RANGE:
        return None
    whole = sum(one.weight for one in bins)
    load = sum(one.weight * one.load for one in bins) / whole
    power = sum(one.weight * one.power for one in bins) / whole
    rise = sum(one.weight * (one.load - load) * (one.power - power) for one in bins)
    run = sum(one.weight * (one.load - load) ** 2 for one in bins)
    slope = max(0.0, rise / run)
    weight = 1 / (1 / whole + load**2 / run)
    reliable = run >= FULL_CONFIDENCE_WEIGHT * _MIN_LOAD_RANGE**2
    return _FittedLine(slope, power - slope * load, weight, reliable)


class UnusedDevicePower:
    """Idle power as the decaying mean power while the device has no user."""

    def __init__(self, remembered: Milliwatts | None = None) -> None:
        self._mean = float(remembered) if remembered is not None else 0.0
        self._seen = _MIN_WEIGHT if remembered is not None else 0.0
        self._energy = self._duration = 0

    @property
    def power(self) -> Milliwatts | None:
        return Milliwatts(round(self._mean)) if self._seen >= 1 else None

    def observe(self, energy: int, duration: int, usage: Usage) -> None:
        """Add the ``energy`` in microjoules of ``duration`` nanoseconds with ``usage``."""
        if usage.present or usage.busy:
            self._energy = self._duration = 0  # power settles some time after the last user
            return
        self._energy += energy
        self._duration += duration
        if self._duration < 2 * WINDOW:
            return
        power = self._energy * 1e6 / self._duration
        self._energy = self._duration = 0
        self._seen = min(self._seen + 1, MAX_WEIGHT)
        self._mean += (power - self._mean) / self._seen


IdleModel = LoadIntercept | UnusedDevicePower
"""Learns the idle power of a device; ``power`` is None while it is unknown."""


def idle_model(hw_type: HwType, remembered: Milliwatts | None = None) -> IdleModel:
    """The model for a hardware type; ``remembered`` is the result of an earlier run."""
    return (UnusedDevicePower if hw_type is HwType.GPU else LoadIntercept)(remembered)
