"""From counter readings to joules, or to a gap that says why there are none.

A counter tells how far it has come, nothing else. Whether it wrapped, was reset, slept with the
host or lapped while nobody looked is told apart by *plausibility*: no domain spends more than its
``max_power`` times the monotonic time that passed. What cannot be told is a named gap, never a
guess and never a spike.

Powers from energies that only ever grow: means over at least a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from wattspan.model import (
    MILLISECOND,
    SECOND,
    Domain,
    Gap,
    GapReason,
    HwType,
    Instant,
    Interval,
    Microjoules,
    Milliwatts,
    Reading,
    energy_at,
    mean_power,
)

SUSPENDED = 50 * MILLISECOND
"""A host asleep for less has not been asleep: the two clocks are not read at one moment."""


def energy_between(domain: Domain, earlier: Reading, later: Reading) -> Interval | Gap:
    """The energy two readings of one counter imply, or the gap between them.

    ``later`` must be later on the monotonic clock; ValueError if it is not.
    """
    start, end = earlier.at, later.at
    elapsed = end.mono - start.mono
    if elapsed <= 0:
        raise ValueError(f"{domain.id}: readings out of order, {elapsed} ns apart")

    def gap(reason: GapReason) -> Gap:
        return Gap(domain.id, start, end, reason)

    if later.epoch != earlier.epoch:
        return gap(GapReason.LOST)
    if end.asleep - start.asleep > SUSPENDED:
        # RAPL may be saved, cleared or counting through a suspend, by platform; nobody can say.
        return gap(GapReason.SUSPEND)
    if domain.modulus is not None and energy_at(domain.max_power, elapsed) >= domain.modulus:
        return gap(GapReason.MISSED)  # it may have lapped, once or oftener

    # A counter that moves in steps may show, just after a step, what was spent before `start`.
    plausible = energy_at(domain.max_power, elapsed + 2 * domain.resolution)
    energy = later.counter - earlier.counter
    if energy < 0:
        if domain.modulus is None or energy + domain.modulus > plausible:
            return gap(GapReason.RESET)
        energy += domain.modulus
        if energy < 0:  # it stood above its own modulus: the counter is not what it says
            return gap(GapReason.RESET)
    if energy > plausible:
        return gap(GapReason.IMPLAUSIBLE)
    return Interval(domain.id, start, end, Microjoules(energy))


class CounterMeter:
    """One domain's counter followed through time.

    Every stretch between two calls becomes exactly one interval or one gap: the intervals and
    gaps of a meter tile the time from its first reading on, without overlap.
    """

    def __init__(self, domain: Domain, patience: int, last: Reading | None = None) -> None:
        """``patience``: nanoseconds without a reading after which its time is a gap.

        ``last`` is a reading from an earlier life of the agent in the same boot.
        """
        self._domain = domain
        self._patience = patience
        self._last = last
        self._absent_since: Instant | None = None

    @property
    def last(self) -> Reading | None:
        """The newest reading that a difference may be taken from."""
        return self._last

    def redefine(self, domain: Domain) -> None:
        """The source learned more of the domain (its resolution, its ceiling)."""
        self._domain = domain

    def advance(self, reading: Reading) -> Interval | Gap | None:
        """Take the next reading. None for the first, and for one that is not newer."""
        if self._absent_since is not None:
            since, self._absent_since = self._absent_since, None
            self._last = reading
            if reading.at.mono <= since.mono:
                return None
            return Gap(self._domain.id, since, reading.at, GapReason.ABSENT)
        last = self._last
        if last is None:
            self._last = reading
            return None
        if reading.at.mono <= last.at.mono:
            return None
        self._last = reading
        return energy_between(self._domain, last, reading)

    def absent(self, now: Instant) -> Gap | None:
        """Tell that time passed without a reading; a gap once that lasted beyond patience.

        The energy of a shorter absence is not lost: the next reading still tells it.
        """
        since = self._absent_since
        if since is None:
            if self._last is None or now.mono - self._last.at.mono <= self._patience:
                return None
            since = self._last.at
        if now.mono <= since.mono:
            return None
        self._last = None
        self._absent_since = now
        return Gap(self._domain.id, since, now, GapReason.ABSENT)


POWER_WINDOW = SECOND
"""Powers are means over at least this."""

K = TypeVar("K")


@dataclass(slots=True)
class AveragePower:
    """The mean power of one counter over the last full window."""

    energy: int = 0
    duration: int = 0
    power: Milliwatts | None = None

    def add(self, energy: int, duration: int) -> None:
        """``energy`` uJ were spent in the next ``duration`` ns."""
        self.energy += energy
        self.duration += duration
        if self.duration >= POWER_WINDOW:
            self.power = mean_power(self.energy, self.duration)
            self.energy = self.duration = 0

    def unknown(self) -> None:
        """There is a gap: the power is not known until another window is full."""
        self.energy, self.duration, self.power = 0, 0, None


@dataclass(frozen=True, slots=True)
class _EnergyMark(Generic[K]):
    """The energies that the powers were last computed from."""

    at: int
    energy: dict[K, int]


class AveragePowers(Generic[K]):
    """The mean powers of many accounts, one hardware type at a time.

    Each type has a time of its own, the instant up to which it is settled: GPU energy is booked
    later than CPU energy, and a mean over anything else would swing.
    """

    def __init__(self) -> None:
        self._marks: dict[HwType, _EnergyMark[K]] = {}
        self._powers: dict[K, dict[HwType, Milliwatts]] = {}

    def of(self, account: K) -> dict[HwType, Milliwatts]:
        """The account's powers as far as they are known, in a dictionary of the caller's own."""
        return dict(self._powers.get(account, {}))

    def update(self, kind: HwType, settled: int, energies: Mapping[K, int]) -> None:
        """These are all accounts' energies of ``kind``, settled up to ``settled`` ns.

        Nothing happens until a window has passed since the last one that counted.
        """
        mark = self._marks.get(kind)
        if mark is not None and 0 <= settled - mark.at < POWER_WINDOW:
            return
        if mark is not None and settled > mark.at:
            elapsed = settled - mark.at
            for account, energy in energies.items():
                spent = energy - mark.energy.get(account, 0)
                self._powers.setdefault(account, {})[kind] = mean_power(spent, elapsed)
            for account in self._powers.keys() - energies.keys():
                del self._powers[account]
        self._marks[kind] = _EnergyMark(settled, dict(energies))
