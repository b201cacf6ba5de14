"""Counter readings to intervals of energy or to named gaps, and mean powers.

A wrap, a reset, a suspend and a lapse of a counter are distinguished by *plausibility*: no domain
uses more than its ``max_power`` times the elapsed monotonic time. Ambiguous energy becomes a gap,
never a guess and never a spike. Powers are means over at least a second.
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
"""A shorter suspend is not one: the two clocks cannot be read at the same moment."""


def energy_between(domain: Domain, earlier: Reading, later: Reading) -> Interval | Gap:
    """The energy between two readings of one counter, or the gap between them.

    ``later`` must be later on the monotonic clock; ValueError otherwise.
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
        # By platform, RAPL is saved, cleared or counts on through a suspend.
        return gap(GapReason.SUSPEND)
    if domain.modulus is not None and energy_at(domain.max_power, elapsed) >= domain.modulus:
        return gap(GapReason.MISSED)  # the counter may have lapped, once or more often

    # Just after a step, a counter that moves in steps may show energy from before `start`.
    plausible = energy_at(domain.max_power, elapsed + 2 * domain.resolution)
    energy = later.counter - earlier.counter
    if energy < 0:
        if domain.modulus is None or energy + domain.modulus > plausible:
            return gap(GapReason.RESET)
        energy += domain.modulus
        if energy < 0:  # the earlier value was above the modulus: an invalid counter
            return gap(GapReason.RESET)
    if energy > plausible:
        return gap(GapReason.IMPLAUSIBLE)
    return Interval(domain.id, start, end, Microjoules(energy))


class CounterMeter:
    """The state of one domain's counter.

    Intervals and gaps of a meter tile the time from its first reading on, without overlap; if that
    is late, from the time at which it was expected.
    """

    def __init__(self, domain: Domain, patience: int, last: Reading | None = None) -> None:
        """``patience``: nanoseconds without a reading after which the time is a gap.

        ``last`` is a reading of an earlier run of the agent in the same boot.
        """
        self._domain = domain
        self._patience = patience
        self._last = last
        self._expected: Instant | None = None
        self._absent_since: Instant | None = None
        self._reason = GapReason.ABSENT

    @property
    def last(self) -> Reading | None:
        """The newest reading from which a difference may be taken."""
        return self._last

    @property
    def silent(self) -> bool:
        """True if readings are absent for longer than the patience, now."""
        return self._absent_since is not None

    def redefine(self, domain: Domain) -> None:
        """Replace the properties of the domain, such as its resolution or maximum power."""
        self._domain = domain

    def expect(self, since: Instant | None) -> None:
        """Expect a first reading from ``since`` on; None: none will be given."""
        self._expected = since

    def advance(self, reading: Reading) -> Interval | Gap | None:
        """Add a reading; None for the first one and for one that is not newer."""
        if self._absent_since is not None:
            since, self._absent_since = self._absent_since, None
            self._last = reading
            if reading.at.mono <= since.mono:
                return None
            return Gap(self._domain.id, since, reading.at, self._reason)
        last = self._last
        if last is None:
            self._last = reading
            return None
        if reading.at.mono <= last.at.mono:
            return None
        self._last = reading
        return energy_between(self._domain, last, reading)

    def absent(self, now: Instant, *, frozen: bool = False) -> Gap | None:
        """The gap up to ``now`` once readings have been absent for longer than the patience.

        The energy of a shorter absence is not lost: the next reading includes it. ``frozen`` is
        the reason of the absence: the counter does not move while its hardware works.
        """
        since = self._absent_since
        if since is None:
            since = self._expected if self._last is None else self._last.at
            if since is None or now.mono - since.mono <= self._patience:
                return None
        if now.mono <= since.mono:
            return None
        self._last = None
        self._absent_since = now
        self._reason = GapReason.FROZEN if frozen else GapReason.ABSENT
        return Gap(self._domain.id, since, now, self._reason)


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
        """Add the ``energy`` of the next ``duration`` nanoseconds, in microjoules."""
        self.energy += energy
        self.duration += duration
        if self.duration >= POWER_WINDOW:
            self.power = mean_power(self.energy, self.duration)
            self.energy = self.duration = 0

    def reset(self) -> None:
        """After a gap the power is unknown until another window is full."""
        self.energy, self.duration, self.power = 0, 0, None


class AveragePowers(Generic[K]):
    """The mean powers of many accounts, one hardware type at a time.

    Each type has its own watermark, because GPU energy is settled later than CPU energy; a mean
    over another period would oscillate.
    """

    def __init__(self) -> None:
        self._marks: dict[HwType, tuple[int, dict[K, int]]] = {}  # time and energies
        self._powers: dict[K, dict[HwType, Milliwatts]] = {}

    def of(self, account: K) -> dict[HwType, Milliwatts]:
        """The account's known powers, in a new dictionary."""
        return dict(self._powers.get(account, {}))

    def update(self, kind: HwType, settled: int, energies: Mapping[K, int]) -> None:
        """Update from all accounts' energies of ``kind``, settled up to ``settled``.

        Without effect until a window has passed since the last update.
        """
        since, before = self._marks.get(kind, (settled, {}))
        elapsed = settled - since
        if kind in self._marks and 0 <= elapsed < POWER_WINDOW:
            return
        if elapsed > 0:
            for account, energy in energies.items():
                spent = energy - before.get(account, 0)
                self._powers.setdefault(account, {})[kind] = mean_power(spent, elapsed)
            for account in self._powers.keys() - energies.keys():
                del self._powers[account]
        self._marks[kind] = settled, dict(energies)
