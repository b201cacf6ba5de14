"""What a device draws while it does nothing, learned from watching it.

Two ways, because devices differ. A CPU is hardly ever quite idle, but its load varies, and power
over load has an intercept: :class:`LoadIntercept`. A GPU is either held by somebody, which keeps
its clocks up even when it rests, or it is free: only then is its draw its idle draw, as
:class:`FreeDevice` has it. Neither guesses: with too little seen there is no baseline, and
attribution then treats all energy as active.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from wattspan.model import SECOND, HwType, Milliwatts, Usage

WINDOW = SECOND
"""Shorter observations are added up to this: counters and clocks are not read at one moment."""

HALF_LIFE = 900.0  # windows; idle draw drifts with temperature over tens of minutes
_BINS = 20
_QUIET = 0.05  # below this load the intercept is nearly seen, not extrapolated
_SPREAD = 0.20  # the least range of load that a line may be drawn through
_ENOUGH = 3.0  # windows before a bin says anything


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
    return (FreeDevice if hw_type is HwType.GPU else LoadIntercept)(remembered)


@dataclass(slots=True)
class _Bin:
    """The decaying mean load and power of the windows whose load fell in one twentieth."""

    weight: float = 0.0
    load: float = 0.0
    power: float = 0.0

    def add(self, load: float, power: float) -> None:
        self.weight += 1.0
        self.load += (load - self.load) / self.weight
        self.power += (power - self.power) / self.weight


class LoadIntercept:
    """Idle power as the intercept of power over load.

    Windows are gathered in bins of load so that an hour at full load does not outvote the one
    quiet minute; old ones fade. Near zero load the lowest bin is all but the answer and the
    line only corrects it; otherwise the line must rest on a fair range of load.
    """

    def __init__(self, remembered: Milliwatts | None = None) -> None:
        self._remembered = remembered
        self._bins = [_Bin() for _ in range(_BINS)]
        self._energy = self._duration = self._busy = self._capacity = 0
        self._power: Milliwatts | None = remembered

    @property
    def power(self) -> Milliwatts | None:
        return self._power

    def observe(self, energy: int, duration: int, usage: Usage) -> None:
        if not usage.capacity:
            return
        span = usage.end.mono - usage.start.mono
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
        for one in self._bins:
            one.weight *= 0.5 ** (1 / HALF_LIFE)
        self._bins[min(_BINS - 1, int(load * _BINS))].add(load, power)
        learned = self._fit()
        if learned is not None:
            self._power = Milliwatts(round(learned))

    def _fit(self) -> float | None:
        seen = [one for one in self._bins if one.weight >= _ENOUGH - 0.5]
        if not seen:
            return None
        lowest = min(seen, key=lambda one: one.load)
        ceiling = min(one.power for one in seen)
        spread = max(one.load for one in seen) - lowest.load
        slope = _slope(seen) if spread >= _SPREAD else 0.0  # a short line points anywhere
        if lowest.load >= _QUIET and spread < _SPREAD:
            return None
        return max(0.0, min(ceiling, lowest.power - slope * lowest.load))


def _slope(bins: list[_Bin]) -> float:
    """The least-squares slope of power over load, each bin counting once; never negative."""
    n = len(bins)
    mean_load = sum(one.load for one in bins) / n
    mean_power = sum(one.power for one in bins) / n
    variance = sum((one.load - mean_load) ** 2 for one in bins)
    if variance == 0:
        return 0.0
    covariance = sum((one.load - mean_load) * (one.power - mean_power) for one in bins)
    return max(0.0, covariance / variance)


class FreeDevice:
    """Idle power as the decaying mean draw while nobody holds the device."""

    def __init__(self, remembered: Milliwatts | None = None) -> None:
        self._mean = float(remembered) if remembered is not None else 0.0
        self._seen = _ENOUGH if remembered is not None else 0.0
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
        self._seen = min(self._seen + 1, HALF_LIFE)
        self._mean += (power - self._mean) / self._seen
