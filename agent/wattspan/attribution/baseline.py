"""What a device draws while it does nothing, learned from watching it.

Two ways, because devices differ. A CPU is hardly ever quite idle, but its load varies, and power
over load has an intercept: :class:`LoadIntercept`. A GPU is either held by somebody, which keeps
its clocks up even when it rests, or it is free: only then is its draw its idle draw, as
:class:`FreeDevice` has it. Neither guesses: with too little seen there is no baseline, and
attribution then treats all energy as active.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from wattspan.model import SECOND, HwType, Milliwatts, Usage

WINDOW = SECOND
"""Shorter observations are added up to this: counters and clocks are not read at one moment."""

HALF_LIFE = 900.0  # windows; what has not been seen again for long counts for less and less
MAX_WEIGHT = 120.0
"""Windows: no mean rests on more, so that half of a lasting change is in it after 83 of them and
95 % after 360, and one window that errs moves it by a 120th of its error."""

FULL_CONFIDENCE_WEIGHT = (
    30.0  # windows: a mean that rests on fewer is helped out, or believed in part
)
_BINS = 20
_LOW_LOAD = 0.05  # below this load the intercept is nearly seen, not extrapolated
_MIN_LOAD_RANGE = 0.20  # the least range of load that a line may be drawn through
_MIN_WEIGHT = 2.5  # windows before anything is said: three, a little faded
_MIN_BIN_WEIGHT = 0.25  # a bin whose windows have faded to this says nothing any more
_STEADY_LOAD_CHANGE = 0.1  # a window over which the load changes by this counts half


class IdleModel(Protocol):
    """Learns an idle power from observations of power and use."""

    def observe(self, energy: int, duration: int, usage: Usage) -> None:
        """``energy`` uJ were spent in ``duration`` ns, while ``usage`` was made."""
        ...

    @property
    def power(self) -> Milliwatts | None:
        """The idle draw; None until it is known."""
        ...


def idle_model(hw_type: HwType, remembered: Milliwatts | None = None) -> IdleModel:
    """The model that suits a kind of hardware, starting from what an earlier life learned."""
    return (UnusedDevicePower if hw_type is HwType.GPU else LoadIntercept)(remembered)


@dataclass(slots=True)
class _Bin:
    """The decaying mean load and power of the windows whose load fell in one twentieth."""

    weight: float = 0.0
    load: float = 0.0
    power: float = 0.0

    def add(self, load: float, power: float, weight: float) -> None:
        self.weight = min(MAX_WEIGHT, self.weight + weight)
        self.load += (load - self.load) * weight / self.weight
        self.power += (power - self.power) * weight / self.weight


class LoadIntercept:
    """Idle power as the intercept of power over load.

    Windows are gathered in bins of load so that an hour at full load does not outvote the one
    quiet minute; old ones fade. Near zero load the lowest bin is all but the answer and the
    line only corrects it; otherwise the line itself answers, if it rests on a fair range of load.

    Energy and use are never read at quite the same moment, and a lag between them is an error in
    proportion to how far the load ends from where it began: such windows count little. A counter
    that comes late shows a window of little energy and makes up for it in the next, perhaps at
    another load: whatever is said rests on means, and no window weighs more than its part of one.
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
        if not usage.capacity:
            return
        span = usage.end.mono - usage.start.mono
        ends = usage.busy / usage.capacity
        began = self._began = ends if self._began is None else self._began
        self._energy += energy
        self._duration += duration
        # Usage and interval rarely have quite the same length: bring them to the same one.
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
        """The intercept, or None while too little was seen."""
        seen = [one for one in self._bins if one.weight >= _MIN_BIN_WEIGHT]
        if not seen:
            return None
        line = _line(seen)
        lowest = min(seen, key=lambda one: one.load)
        quiet = lowest.weight if lowest.load < _LOW_LOAD else 0.0
        steep = line.slope if line is not None and line.sure else 0.0
        near = lowest.power - steep * lowest.load
        if line is not None and line.worth >= 1 and quiet < FULL_CONFIDENCE_WEIGHT:
            told = min(line.worth, FULL_CONFIDENCE_WEIGHT - quiet)
            idle = (quiet * near + told * line.intercept) / (quiet + told)
        elif quiet >= _MIN_WEIGHT:
            idle = near
        else:
            return None
        return max(0.0, idle - _excess(idle, seen))


def _excess(idle: float, bins: list[_Bin]) -> float:
    """By how much ``idle`` is above the power seen at some load, which no idle power can be.

    So it is once the device has come to draw less and was not quiet since. A bin of few windows
    is hardly believed: one window of a counter that came late shows no lower idle power.
    """
    return max(
        0.0,
        *((idle - one.power) * min(1.0, one.weight / FULL_CONFIDENCE_WEIGHT) ** 2 for one in bins),
    )


class _FittedLine(NamedTuple):
    slope: float
    intercept: float
    worth: float  # so many windows at no load would tell the intercept as surely
    sure: bool  # whether the slope rests on more than a few windows at the other end


def _line(bins: list[_Bin]) -> _FittedLine | None:
    """Power over load by weighted least squares; not falling.

    None where the loads are too close together: a short line points anywhere.
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
    worth = 1 / (1 / whole + load**2 / run)
    return _FittedLine(
        slope, power - slope * load, worth, run >= FULL_CONFIDENCE_WEIGHT * _MIN_LOAD_RANGE**2
    )


class UnusedDevicePower:
    """Idle power as the decaying mean draw while nobody holds the device."""

    def __init__(self, remembered: Milliwatts | None = None) -> None:
        self._mean = float(remembered) if remembered is not None else 0.0
        self._seen = _MIN_WEIGHT if remembered is not None else 0.0
        self._energy = self._duration = 0

    @property
    def power(self) -> Milliwatts | None:
        return Milliwatts(round(self._mean)) if self._seen >= 1 else None

    def observe(self, energy: int, duration: int, usage: Usage) -> None:
        if usage.present or usage.busy:
            self._energy = self._duration = 0  # the draw settles some time after the last user
            return
        self._energy += energy
        self._duration += duration
        if self._duration < 2 * WINDOW:
            return
        power = self._energy * 1e6 / self._duration
        self._energy = self._duration = 0
        self._seen = min(self._seen + 1, MAX_WEIGHT)
        self._mean += (power - self._mean) / self._seen
