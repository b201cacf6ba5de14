"""Counters and sensors that stand still while the hardware works: their values measure nothing.

A virtual machine may show counters that stay at 0, or stop at the value of a snapshot; a sensor of
power may show one value for ever. A device that works uses energy, so a counter that does not move
meanwhile is frozen, and the energy is unknown, not zero. Nothing is said of a counter at rest
while the CPUs rest, nor of one whose work is not observed (``Domain.moves_with``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from wattspan.model import SECOND, Domain, Failure, Provenance, Reading, Trouble, Usage

UNMOVED_TIME = 3 * SECOND
"""A counter that stands still for a shorter time is not frozen."""

PAUSE_FACTOR = 4
"""Nor is one that stands still for less than this times its longest pause, for coarse steps."""

MIN_WORK = SECOND
"""CPU time that every counter shows: with the power at rest, a joule or more on any processor."""

WORKING_SHARE = 0.1
"""A second with less than this part of one CPU is rest, not work: the agent itself and timers."""

CONSTANT_TIME = 60 * SECOND
"""Power that is constant for a shorter time is not frozen: some sensors are updated this seldom."""

LOAD_WINDOW = 10 * SECOND
LOAD_CHANGE = 0.3
"""The load of all CPUs between two such windows changes the power that a working sensor shows."""


FROZEN_CAUSE = "its value does not change while the hardware works"
FROZEN_REMEDY = (
    "A hypervisor or firmware does not update it. Its energy is unknown, and it is used again when "
    "it changes. In a virtual machine, measure on the host, or enable [sources.estimate]."
)


def frozen_failure(domain: Domain) -> Failure:
    """The failure of a frozen counter."""
    return Failure(
        domain.source, domain.name, Trouble.STUCK, FROZEN_CAUSE, FROZEN_REMEDY, domain.id
    )


@dataclass(slots=True)
class _Window:
    """Use of a resource in the present window."""

    length: int
    load: int = 0
    capacity: int = 0
    duration: int = 0

    def add(self, usage: Usage) -> bool:
        """Add a usage; True if the window is full."""
        self.load += usage.load
        self.capacity += usage.capacity or 0
        self.duration += usage.end.mono - usage.start.mono
        return self.duration >= self.length

    def clear(self) -> None:
        self.load = self.capacity = self.duration = 0


@dataclass(slots=True)
class _Work:
    """The work of one resource: CPU time in whole windows, and the load of all CPUs."""

    total: int = 0
    windows: int = 0
    share: float = 0.0  # of the capacity, in the last load window
    load_windows: int = 0
    _short: _Window = field(default_factory=lambda: _Window(SECOND))
    _long: _Window = field(default_factory=lambda: _Window(LOAD_WINDOW))

    def add(self, usage: Usage) -> None:
        if self._short.add(usage):
            if self._short.load >= WORKING_SHARE * self._short.duration:
                self.total += self._short.load
            self.windows += 1
            self._short.clear()
        if self._long.add(usage):
            self.share = self._long.load / max(1, self._long.capacity)
            self.load_windows += 1
            self._long.clear()


@dataclass(slots=True)
class _Evidence:
    """The work since some moment, in windows that lie wholly after it."""

    window: int
    work: int | None = None

    def since(self, work: _Work) -> int:
        if self.work is None:
            if work.windows <= self.window:
                return 0
            self.work = work.total
        return work.total - self.work


@dataclass(slots=True)
class _Line:
    """A time of constant power, and the loads meanwhile."""

    start: int
    counter: int
    window: int
    power: int | None = None  # milliwatts
    loads: tuple[float, float] | None = None  # least and largest

    def continues(self, reading: Reading) -> bool:
        """True if the power up to ``reading`` is the same as before, but for rounding."""
        elapsed, energy = reading.at.mono - self.start, reading.counter - self.counter
        if elapsed <= 0:
            return True
        if self.power is None:
            self.power = round(energy * 1_000_000 / elapsed)
        return abs(energy - self.power * elapsed // 1_000_000) <= 2

    def hides_work(self, now: int, work: _Work) -> bool:
        """True if the load has changed so much that the power must have changed."""
        if work.load_windows > self.window + 1:  # the first one began before the constant power
            low, high = self.loads or (work.share, work.share)
            self.loads = min(low, work.share), max(high, work.share)
        changed = self.loads is not None and self.loads[1] - self.loads[0] >= LOAD_CHANGE
        return changed and now - self.start >= CONSTANT_TIME


class _Counter:
    """The moves of one counter."""

    def __init__(self, reading: Reading, work: _Work) -> None:
        self._last = reading
        self._since = reading.at.mono
        self._evidence = _Evidence(work.windows)
        self._line = _Line(reading.at.mono, reading.counter, work.load_windows)
        self._longest = 0
        self._moved = False
        self.frozen = False

    def renewed(self, reading: Reading) -> bool:
        """True if ``reading`` is of another epoch of the counter."""
        return reading.epoch != self._last.epoch

    def measures(self, reading: Reading, work: _Work, *, integrated: bool) -> bool:
        """True if ``reading`` is a measurement; updates ``frozen``.

        A repeated value of a counter is none: the next one that differs covers the time. Power that
        is ``integrated`` may be zero for a while at rest, if it was not always zero.
        """
        now = reading.at.mono
        unmoved = reading.counter == self._last.counter
        self._last = reading
        if unmoved:
            long = now - self._since >= max(UNMOVED_TIME, PAUSE_FACTOR * self._longest)
            self.frozen = self.frozen or (long and self._evidence.since(work) >= MIN_WORK)
            return integrated and self._moved and not self.frozen
        if self._moved and not self.frozen:
            self._longest = max(self._longest, now - self._since)
        self._since, self._moved = now, True
        self._evidence = _Evidence(work.windows)
        if not integrated or not self._line.continues(reading):
            self._line = _Line(now, reading.counter, work.load_windows)
        self.frozen = integrated and self._line.hides_work(now, work)
        return not self.frozen


class FrozenCounters:
    """Tells measurements from the values of frozen counters, for all sources of a host."""

    def __init__(self) -> None:
        self._work: dict[str, _Work] = {}  # by resource
        self._counters: dict[str, _Counter] = {}  # by domain id

    def add_usages(self, usages: Iterable[Usage]) -> None:
        """Add the use of resources, in order of time."""
        for usage in usages:
            if usage.end.mono > usage.start.mono:
                self._work.setdefault(usage.resource, _Work()).add(usage)

    def moves(
        self, domains: Sequence[Domain], readings: Sequence[Reading]
    ) -> tuple[list[bool], frozenset[str]]:
        """Tell which of ``readings`` are measurements, and the frozen ones of all ``domains``."""
        observed = {domain.id: domain for domain in domains if domain.moves_with}
        measure = [self._measures(one, observed) for one in readings]
        frozen = (key for key in observed if key in self._counters and self._counters[key].frozen)
        return measure, frozenset(frozen)

    def _measures(self, reading: Reading, observed: Mapping[str, Domain]) -> bool:
        domain = observed.get(reading.domain_id)
        if domain is None:
            return True
        work = self._work.setdefault(domain.moves_with, _Work())
        counter = self._counters.get(domain.id)
        if counter is None or counter.renewed(reading):
            self._counters[domain.id] = _Counter(reading, work)
            return True
        integrated = domain.provenance is Provenance.DERIVED
        return counter.measures(reading, work, integrated=integrated)
