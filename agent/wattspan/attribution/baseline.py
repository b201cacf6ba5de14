"""Baselines: the power of a device without load, learned from observations.

A CPU is hardly ever completely idle, but its load varies. :class:`LoadIntercept` observes its power
at rest, and until then extrapolates its power over load to zero (:class:`PowerCurve`). The
baseline is unknown until the credible interval of the extrapolation is narrow. A GPU with a user
keeps its clocks up even while it rests, so only an unused one shows its idle power:
:class:`UnusedDevicePower`.

An idle power that was extrapolated from a host under load is compared with that of an equal device
of the host, with the one of an earlier run, and with the range that any processor has
(:func:`accept_idle`). A contradiction never changes the learned power, because devices and firmware
differ: it widens the stated error up to the other figure, and energy that may be idle by it is
withheld from processes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from wattspan.attribution.power_curve import Extrapolation, PowerCurve, largest_idle
from wattspan.attribution.power_regression import DRIFT, NormalPrior
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Domain,
    HwType,
    Interval,
    Milliwatts,
    Usage,
    energy_at,
    fills,
)

WINDOW = SECOND
"""Shorter observations are added up to this for the means of bins: counters and clocks are read at
different moments."""

SAMPLE = 90 * MILLISECOND
"""Shorter observations are added up to this for the power curve. Natural variation of load is
largest in short samples, and the power at the lowest loads decides about the intercept."""

LEARNING_TIME = 600 * SECOND
"""After this time, samples of a known idle power are as long as windows, which cost less.

An idle power that was observed at rest with full confidence does not wait for this.
"""

EXTRAPOLATION_TIME = 10 * SECOND
"""The power curve of a known idle power is extrapolated this often: the regression costs as much
as the division of a second's energy, and a window moves it by less than its error."""

MAX_LEARNING_TIME = 3600 * SECOND
"""After this time under load, an idle power that is still unknown will not be found soon."""

HALF_LIFE = 900.0  # windows, of the weight of an observation in its bin
MAX_WEIGHT = 120.0
"""The largest weight of a mean, in windows. A mean includes half of a lasting change after 83
windows and 95 % after 360; one wrong window moves it by a 120th of its error."""

FULL_CONFIDENCE_WEIGHT = 30.0  # windows; a mean of fewer is combined with other evidence
_BINS = 20
_LOW_LOAD = 0.05  # below this load the intercept is observed, not extrapolated
_MIN_WEIGHT = 2.5  # windows before the first result: three, slightly decayed
_MIN_BIN_WEIGHT = 0.25  # bins with less weight are ignored
_TANGENT_ERROR = 0.5  # part of the rise of power from zero to the lowest load that is unknown
_SECANT_LOAD = 0.2  # least distance of two loads whose powers give the slope between them
_UNKNOWN_SLOPE = 2.0  # power above idle at full load, relative to the power at the lowest load
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
    minute; old windows decay. Near zero load the lowest bin, corrected by the power curve, is the
    result; otherwise the intercept of the curve, once its credible interval is narrow. A baseline
    that was known once stays known; while the credible interval is wide, it is kept, within the
    interval.

    Energy and usage are read at slightly different moments. The resulting error is proportional to
    the change of load in the window, so such windows have little weight in the bins. A counter that
    is updated late shows too little energy in one window and too much in the next, perhaps at
    another load; therefore all results are means in which the weight of one window is limited.
    """

    def __init__(self, remembered: Milliwatts | None = None) -> None:
        self._bins = [_Bin() for _ in range(_BINS)]
        self._curve = PowerCurve()
        self._sample, self._window = _Sum(), _Sum()
        self._began: float | None = None
        self._power = remembered
        self._upper = math.inf
        self._error = 0.0
        self._observed = 0  # nanoseconds
        self._extrapolated = 0  # its value at the last extrapolation
        self._found: Extrapolation | None = None
        self._rested = False  # the bin near zero load has full confidence
        self._at_rest = False  # the result was observed near zero load, not extrapolated
        self.rest: tuple[float, float] | None = None
        """The power at rest in milliwatts and its error, as far as load need not explain it."""
        self.remembered = remembered is not None

    @property
    def power(self) -> Milliwatts | None:
        """The idle power; None while it is unknown."""
        return self._power

    @property
    def error(self) -> float:
        """Half-width in milliwatts of the 95 % range of the idle power; 0 before it is learned."""
        return self._error

    @property
    def upper(self) -> Milliwatts | None:
        """The largest idle power that the observations permit; None without observations.

        Energy above it is active, however the power depends on load.
        """
        bound = min(self._upper, self._curve.upper_bound)
        return Milliwatts(math.ceil(bound)) if self._curve.observed else None

    @property
    def learned(self) -> LearnedIdle | None:
        """The idle power with its evidence; None before it is learned."""
        seen = [one for one in self._bins if one.weight > 0]
        if self._power is None or self.remembered or not seen:
            return None
        weight = sum(one.weight for one in seen)
        return LearnedIdle(
            self._power,
            self._error,
            self._at_rest,
            sum(one.power * one.weight for one in seen) / weight,
            min(largest_idle(one.load, one.power) for one in seen),
        )

    @property
    def _is_settled(self) -> bool:
        """True if longer samples lose nothing."""
        return self._rested or (self._observed > LEARNING_TIME and self._power is not None)

    @property
    def learns(self) -> bool:
        """True while short samples are needed, an hour at most."""
        return 0 < self._observed < MAX_LEARNING_TIME and not self._is_settled

    def observe(self, energy: int, duration: int, usage: Usage) -> None:
        """Add the ``energy`` in microjoules of ``duration`` nanoseconds with ``usage``."""
        if not usage.capacity:
            return
        ends = usage.load / usage.capacity
        began = self._began = ends if self._began is None else self._began
        self._sample.add(energy, duration, usage)
        self._window.add(energy, duration, usage)
        self._observed += duration
        settled = self._is_settled
        if self._sample.duration >= (WINDOW if settled else SAMPLE):
            self._curve.add(self._sample.load, self._sample.power, self._sample.duration / SECOND)
            self._sample = _Sum()
        if not fills(WINDOW, self._window.duration, duration):
            return
        load, power = self._window.load, self._window.power
        self._window, self._began = _Sum(), None
        for one in self._bins:
            one.weight *= 0.5 ** (1 / HALF_LIFE)
        steadiness = 1 / (1 + ((ends - began) / _STEADY_LOAD_CHANGE) ** 2)
        self._bins[min(_BINS - 1, int(load * _BINS))].add(load, power, steadiness)
        if not settled or self._observed - self._extrapolated >= EXTRAPOLATION_TIME:
            self._extrapolated, self._found = self._observed, self._curve.extrapolate()
        self._learn(self._found)

    def _learn(self, found: Extrapolation | None) -> None:
        """Update the idle power and its upper bound."""
        seen = [one for one in self._bins if one.weight >= _MIN_BIN_WEIGHT]
        if not seen:
            return
        bounds = [largest_idle(one.load, one.power) for one in seen]
        if found is not None:
            bounds.append(max(0.0, found.idle + found.half_width))
        self._upper = min(bounds)
        learned = self._fit(seen, found)
        idle = learned if learned is not None else self._power
        if idle is None:
            return
        if learned is None and found is not None:  # an earlier result that may be out of date
            idle = min(max(idle, found.idle - found.half_width), found.idle + found.half_width)
            self._error = found.half_width
        self._power = Milliwatts(round(max(0.0, idle - _excess(idle, seen))))
        self.remembered = self.remembered and learned is None

    def _fit(self, seen: list[_Bin], found: Extrapolation | None) -> float | None:
        """The intercept; None while it is unknown."""
        lowest = min(seen, key=lambda one: one.load)
        quiet = lowest.weight if lowest.load < _LOW_LOAD else 0.0
        self._rested = quiet >= FULL_CONFIDENCE_WEIGHT
        narrow = found is not None and found.narrow
        slope = _UNKNOWN_SLOPE * lowest.power if found is None else found.slope
        rise = slope * lowest.load
        corrected = lowest.power - (rise if narrow else 0.0)
        error = rise * (_TANGENT_ERROR if narrow else 1.0)
        if (secant := _secant(lowest, seen)) is not None:
            secant_rise = secant * lowest.load
            corrected = lowest.power - secant_rise
            error = max(_TANGENT_ERROR * secant_rise, abs(rise - secant_rise))
        if quiet >= _MIN_WEIGHT:
            self.rest = corrected, max(error, _TANGENT_ERROR * rise)
        at_rest = quiet >= FULL_CONFIDENCE_WEIGHT or (quiet >= _MIN_WEIGHT and not narrow)
        self._at_rest = at_rest
        if at_rest:
            self._error = error
            return corrected
        if found is None or not narrow:
            return None
        rest = max(0.0, FULL_CONFIDENCE_WEIGHT - quiet)
        self._error = (quiet * error + rest * found.half_width) / (quiet + rest)
        return (quiet * corrected + rest * found.idle) / (quiet + rest)


def _secant(lowest: _Bin, bins: list[_Bin]) -> float | None:
    """The power from idle to full load along the line from the lowest bin to the next distant one.

    At rest, much of the variation of the load is the work of the agent itself, between its readings
    of load and of energy. The tangent of short samples at rest is therefore often wrong by half;
    the means of windows at distant loads are not.
    """
    distant = [
        one for one in bins if one.weight >= _MIN_WEIGHT and one.load >= lowest.load + _SECANT_LOAD
    ]
    if not distant:
        return None
    nearest = min(distant, key=lambda one: one.load)
    return max(0.0, (nearest.power - lowest.power) / (nearest.load - lowest.load))


@dataclass(slots=True)
class _Sum:
    """Energy and usage of adjacent observations."""

    energy: int = 0
    duration: int = 0
    busy: int = 0
    capacity: int = 0

    def add(self, energy: int, duration: int, usage: Usage) -> None:
        # Usage and interval rarely have the same length: scale usage to the interval.
        length = max(1, usage.end.mono - usage.start.mono)
        self.energy += energy
        self.duration += duration
        self.busy += usage.load * duration // length
        self.capacity += (usage.capacity or 0) * duration // length

    @property
    def load(self) -> float:
        return min(1.0, max(0.0, self.busy / max(1, self.capacity)))

    @property
    def power(self) -> float:
        return self.energy * 1e6 / self.duration


def _excess(idle: float, bins: list[_Bin]) -> float:
    """The amount by which ``idle`` exceeds the observed power at any load, an impossible value.

    This occurs if the device has come to draw less and was not quiet since. A bin of few windows
    has little effect: one window of a counter that is updated late does not lower the idle power.
    """
    return max(
        0.0,
        *((idle - one.power) * min(1.0, one.weight / FULL_CONFIDENCE_WEIGHT) ** 2 for one in bins),
    )


class UnusedDevicePower:
    """Idle power as the decaying mean power while the device has no user."""

    def __init__(self, remembered: Milliwatts | None = None) -> None:
        self._mean = float(remembered) if remembered is not None else 0.0
        self._seen = _MIN_WEIGHT if remembered is not None else 0.0
        self._energy = self._duration = 0
        self.remembered = remembered is not None

    @property
    def power(self) -> Milliwatts | None:
        return Milliwatts(round(self._mean)) if self._seen >= 1 else None

    learned = rest = None
    """As of a LoadIntercept that has nothing to accept: it is always observed at rest."""

    learns = False
    """As of a LoadIntercept that needs no short samples."""

    error = 0.0
    """As that of a LoadIntercept: a mean of the power at rest, whose error is negligible."""

    @property
    def upper(self) -> Milliwatts:
        """Always 0: while the idle power of a GPU is unknown, its users pay all of its energy."""
        return Milliwatts(0)

    def observe(self, energy: int, duration: int, usage: Usage) -> None:
        """Add the ``energy`` in microjoules of ``duration`` nanoseconds with ``usage``."""
        if usage.present or usage.busy:
            self._energy = self._duration = 0  # power settles some time after the last user
            return
        self._energy += energy
        self._duration += duration
        if not fills(2 * WINDOW, self._duration, duration):
            return
        power = self._energy * 1e6 / self._duration
        self._energy = self._duration = 0
        self._seen = min(self._seen + 1, MAX_WEIGHT)
        self._mean += (power - self._mean) / self._seen
        self.remembered = False


IdleModel = LoadIntercept | UnusedDevicePower
"""Learns the idle power of a device; ``power`` is None while it is unknown.

Meanwhile ``upper`` bounds it. ``remembered`` is True until the power is learned again.
"""


def idle_model(hw_type: HwType, remembered: Milliwatts | None = None) -> IdleModel:
    """The model for a hardware type; ``remembered`` was known before this run."""
    return (UnusedDevicePower if hw_type is HwType.GPU else LoadIntercept)(remembered)


EQUAL_DEVICES = 0.25
"""Idle powers of equal devices differ by less than this part of the larger one; so do those of one
device before and after a change of its firmware or its settings."""

_EARLIER_DEVIATION = 0.06
"""Standard deviation of an idle power of an earlier run, relative to it: half of `EQUAL_DEVICES` is
two of them."""

LEAST_SHARE = 0.02
"""Lower bound of the idle power as a part of the power under load: laptops have a little more."""


class LearnedIdle(NamedTuple):
    """An idle power in milliwatts, and its evidence.

    ``error`` is the half-width of its 95 % range, ``observed`` is True if it was seen at rest.
    ``load_power`` is the mean power under the observed load, ``largest`` the largest idle power
    that it permits.
    """

    power: Milliwatts
    error: float
    observed: bool
    load_power: float
    largest: float


class AcceptedIdle(NamedTuple):
    """The error with which an idle power is stated; ``firm`` is False if it is doubtful."""

    error: float
    firm: bool = True
    above: Milliwatts = Milliwatts(0)
    """Power above the idle power that may be idle too, in milliwatts."""


def accept_idle(
    learned: LearnedIdle,
    equals: Iterable[LearnedIdle] = (),
    earlier: Milliwatts | None = None,
) -> AcceptedIdle:
    """Compare with ``equals``, the equal devices of the host, and with an ``earlier`` run."""
    if learned.observed:
        return AcceptedIdle(learned.error)
    others = [(one.power, one.error) for one in equals]
    if earlier is not None:
        others.append((earlier, 0.0))
    bounds = [
        bound
        for power, error in others
        if _contradicts(learned, power, error)
        for bound in (power - error, power + error)
    ]
    if learned.power < LEAST_SHARE * learned.load_power:
        bounds.append(learned.largest)
    if not bounds:
        return AcceptedIdle(learned.error)
    widest = max(abs(bound - learned.power) for bound in bounds)
    above = max(0.0, max(bounds) - learned.power)
    return AcceptedIdle(max(learned.error, widest), firm=False, above=Milliwatts(math.ceil(above)))


def _contradicts(learned: LearnedIdle, power: Milliwatts, error: float) -> bool:
    """True if two idle powers differ by more than equal devices do, with both errors."""
    tolerance = learned.error + error + EQUAL_DEVICES * max(learned.power, power)
    return abs(learned.power - power) > tolerance


@dataclass(slots=True)
class IdlePower:
    """The idle power of one domain: as it is learned, and as far as it is accepted."""

    model: IdleModel
    earlier: Milliwatts | None = None  # of an earlier run
    accepted: AcceptedIdle | None = None  # of a learned idle power
    deficit: int = 0
    joint: Extrapolation | None = None
    """The idle power of one fit with the powers of consumers, while those differ. It replaces the
    one of the model, for which equal loads draw equal power; whether it is known is the model's to
    tell, or follows from its own narrow range."""
    earlier_error: Milliwatts | None = None
    """Half-width of the 95 % range of the earlier one; None if it was not learned."""

    @property
    def power(self) -> Milliwatts | None:
        """The idle power; None while it is unknown."""
        known, joint = self.model.power, self.joint
        if joint is None or (known is None and not joint.narrow):
            return known
        return Milliwatts(max(0, round(joint.idle)))

    @property
    def remembered(self) -> bool:
        """True if the idle power is that of an earlier run or of the configuration."""
        return self.model.remembered and self.joint is None

    @property
    def error(self) -> float:
        """Half-width of the 95 % range of the idle power in milliwatts."""
        if self.joint is not None:
            return self.joint.half_width
        return self.model.error if self.accepted is None else self.accepted.error

    @property
    def evidence(self) -> NormalPrior | None:
        """The idle power as far as no load was needed to learn it: observed at rest, or remembered.

        An extrapolated one is left out: it assumes that equal loads draw equal power.
        """
        known = self.earlier
        if self.model.rest is not None:
            power, error = self.model.rest
            return NormalPrior(power / 1e3, max(error / 1.96, DRIFT * power) / 1e3)
        if known is None and self.model.remembered:
            known = self.model.power  # as configured
        if known is None:
            return None
        deviation = max((self.earlier_error or 0) / 1.96, _EARLIER_DEVIATION * known)
        return NormalPrior(known / 1e3, deviation / 1e3)

    @property
    def doubtful(self) -> bool:
        """True if the learned idle power is contradicted."""
        return self.joint is None and self.accepted is not None and not self.accepted.firm

    def due(self, interval: Interval, usage: Usage | None, resolution: int) -> tuple[int, int]:
        """The idle energy of the interval, and the further energy that may be idle.

        Each is a power × time, plus the deficit: the baseline, or its upper bound while it is
        unknown; if it is doubtful, both. Where the powers of consumers differ, the most likely idle
        power takes the place of the bound: each consumer has a bound of its own. Without the
        capacity of a resource there is no load, and all energy is active. ``resolution`` is the
        period of the counter's steps.
        """
        power = self.power
        if power is not None:
            accepted = self.accepted if self.joint is None else None
            above = 0 if accepted is None else accepted.above
            return self._due(power, interval, resolution), energy_at(above, interval.duration)
        if usage is None or not usage.capacity:
            return 0, 0
        if self.joint is not None:
            return 0, self._due(Milliwatts(max(0, round(self.joint.idle))), interval, resolution)
        upper = self.model.upper
        most = int(interval.energy) if upper is None else self._due(upper, interval, resolution)
        return 0, most

    def _due(self, power: Milliwatts, interval: Interval, resolution: int) -> int:
        """The energy at ``power`` in the interval, plus the deficit.

        A counter that moves in steps shows no energy in one interval and twice as much in the
        next. The deficit of the first interval is added to the second; otherwise half of the idle
        energy would be charged to consumers. The deficit is at most that of two steps, so that a
        device which draws less than its baseline for a while causes no later overcharge.
        """
        due = energy_at(power, interval.duration) + self.deficit
        most = energy_at(power, 2 * resolution)
        self.deficit = min(max(0, due - interval.energy), most)
        return due


def accept_idle_powers(devices: Iterable[tuple[Domain, IdlePower, bool]]) -> None:
    """Compare the learned idle powers of equal devices, and of an earlier run.

    The flag of a device is True if it is present.
    """
    equals: dict[tuple[str, ...], list[tuple[IdlePower, LearnedIdle, bool]]] = {}
    for domain, idle, present in devices:
        learned = idle.model.learned
        idle.accepted = None
        if learned is not None:
            equals.setdefault(_device_class(domain), []).append((idle, learned, present))
    for same in equals.values():
        for idle, learned, _ in same:
            others = [one for other, one, present in same if other is not idle and present]
            idle.accepted = accept_idle(learned, others, idle.earlier)


def _device_class(domain: Domain) -> tuple[str, ...]:
    """Equal for devices that should have about the same idle power, such as two packages."""
    kind = re.sub(r"\d+", "", domain.name)
    return domain.source, domain.hw_type, domain.model, domain.provenance, domain.method, kind
