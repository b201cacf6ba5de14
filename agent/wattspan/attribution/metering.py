"""Readings to periods of energy: each reading of a counter is differenced once, for all accounts.

A wrap, a reset, a suspend and a lapse of a counter are distinguished by *plausibility*: no domain
uses more than its ``max_power`` times the elapsed monotonic time. Ambiguous energy becomes a gap,
never a guess and never a spike.

:class:`CounterMeters` also knows which domain counts when. Domains that measure one thing take
turns in the cover: a former member counts up to its reading of the tick of the change, and a new
one what begins after that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from wattspan.model import (
    MILLISECOND,
    Domain,
    Gap,
    GapReason,
    Instant,
    Interval,
    Microjoules,
    Provenance,
    Reading,
    Tick,
    energy_at,
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
    stales = [one.stale for one in (earlier, later) if one.stale is not None]
    stale = max(stales) if len(stales) == 2 else None
    return Interval(domain.id, start, end, Microjoules(energy), stale)


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
        self._before: Reading | None = None  # from which the energy up to the last is known
        self._peak: Reading | None = None  # the one from which the counter fell
        self._floor = math.inf  # the value before the peak, if the counter fell back to that

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
            self._last, self._before, self._peak = reading, None, None
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
        return self._difference(last, reading)

    def _difference(self, last: Reading, reading: Reading) -> Interval | Gap:
        """The energy since ``last``, or the gap.

        Some counters show a smaller or a larger value for a moment. After a fall, energy is counted
        from the peak on: either the next reading is beyond it again, or the counter fell back to
        the time before the peak, the energy of which is counted already. A peak that the counter
        may have reached again since a reset tells nothing.
        """
        found = energy_between(self._domain, last, reading)
        peak, self._peak = self._peak, None
        if peak is not None and (self._floor < math.inf or self._is_old(peak, reading.at)):
            known = energy_between(self._domain, peak, reading)
            if isinstance(known, Gap):
                if known.reason is GapReason.RESET and reading.counter >= self._floor:
                    self._peak, found = peak, known._replace(start=last.at)
            else:
                found = known._replace(start=last.at)
        elif (
            isinstance(found, Gap)
            and found.reason is GapReason.RESET
            and self._is_old(last, reading.at)
        ):
            floor = math.inf if self._before is None else self._before.counter
            self._peak, self._floor = last, floor if floor <= reading.counter else math.inf
        self._before = last if isinstance(found, Interval) else None
        return found

    def _is_old(self, peak: Reading, now: Instant) -> bool:
        """True if a counter that was reset at ``peak`` cannot have its value by ``now``."""
        elapsed = now.mono - peak.at.mono + 2 * self._domain.resolution
        return peak.counter > energy_at(self._domain.max_power, elapsed)

    def absent(self, now: Instant, *, frozen: bool = False) -> Gap | None:
        """The gap up to ``now`` once readings have been absent for longer than the patience.

        The energy of a shorter absence is not lost: the next reading includes it, unless the device
        was suspended, which may stop or clear its counter. ``frozen`` is the reason of the absence:
        the counter does not move while its hardware works.
        """
        suspended = self._domain.suspended
        since = self._absent_since
        if since is None:
            since = self._expected if self._last is None else self._last.at
            patience = 0 if suspended else self._patience + self._domain.rest
            if since is None or now.mono - since.mono <= patience:
                return None
        if now.mono <= since.mono:
            return None
        self._last = None
        self._absent_since = now
        self._reason = GapReason.FROZEN if frozen else GapReason.ABSENT
        if suspended:
            self._reason = GapReason.SUSPEND
        return Gap(self._domain.id, since, now, self._reason)


class MeteredPeriod(NamedTuple):
    """The time since a domain's last reading, or one more piece of its absence.

    ``domain`` has the properties that it had in that time. ``period`` is None at a first reading,
    ``reading`` None while readings are absent. From the monotonic time ``counts_from`` on the
    domain is a member of the cover; None: it is none.
    """

    domain: Domain
    period: Interval | Gap | None
    reading: Reading | None
    counts_from: int | None
    resumes: bool = False
    """True if the period begins with the last reading of an earlier run of the agent; without a
    period, the counter has not moved since then."""

    @property
    def counts(self) -> bool:
        """True if the domain was a member of the cover throughout the period."""
        since = self.counts_from
        return since is not None and self.period is not None and self.period.start.mono >= since


@dataclass(slots=True)
class _Metered:
    """One domain with its counter, and its place in the cover."""

    domain: Domain
    meter: CounterMeter
    present: bool = True
    member: bool = False  # of the cover; a vanished domain, when it was listed
    joins_after: int = 0  # only intervals that begin later are of the cover, monotonic time
    resumed: Provenance | None = None  # of the meter's last reading, if it is from an earlier run

    def measured(
        self, period: Interval | Gap | None, reading: Reading | None, *, resumes: bool = False
    ) -> MeteredPeriod:
        counts_from = self.joins_after if self.member else None
        return MeteredPeriod(self.domain, period, reading, counts_from, resumes)


class CounterMeters:
    """The counters of a host; ``absence`` is the time without a reading that is a gap, in ns."""

    def __init__(self, absence: int) -> None:
        self._absence = absence
        self._domains: dict[str, _Metered] = {}
        self._joined = 0  # when a domain last became a member
        self._left = 0  # the last reading that counted, of all former members
        self._moving: list[tuple[_Metered, Domain]] = []

    def resume(self, domain: Domain, last: Reading | None) -> None:
        """Continue with the ``last`` reading of an earlier run of the agent in the same boot."""
        meter = CounterMeter(domain, self._absence, last)
        resumed = None if last is None else domain.provenance
        self._domains[domain.id] = _Metered(
            domain, meter, present=False, member=domain.in_cover, resumed=resumed
        )

    def silent(self, domain_id: str) -> bool:
        """True if readings of a domain are absent, now."""
        return self._domains[domain_id].meter.silent

    def expect_none(self, domain_id: str) -> None:
        """Expect no reading of a domain, which has no counter of its own."""
        self._domains[domain_id].meter.expect(None)

    def advance(self, tick: Tick) -> list[MeteredPeriod]:
        """The periods that a tick ends; those of joining domains follow those of leaving ones.

        Readings of domains that no source has listed are ignored.
        """
        for source, domains in tick.domains.items():
            self._register(source, domains, tick.at)
        joining = {domain.id for _, domain in self._moving if domain.in_cover}
        found = self._read(one for one in tick.readings if one.domain_id not in joining)
        if self._moving:
            self._change_cover(tick.at.mono)
            found += self._read(one for one in tick.readings if one.domain_id in joining)
        for key, known in self._domains.items():
            gap = known.meter.absent(tick.at, frozen=key in tick.frozen)
            if gap is not None:
                found.append(known.measured(gap, None))
        return found

    def _register(self, source: str, domains: Iterable[Domain], at: Instant) -> None:
        """Replace the list of domains of ``source``."""
        listed = {domain.id: domain for domain in domains}
        for known in self._domains.values():
            if known.domain.source == source and known.domain.id not in listed:
                known.present = False
                self._end_counting(known)
                known.meter.expect(None)
        for domain in listed.values():
            earlier = self._domains.get(domain.id)
            if earlier is None:
                added = _Metered(domain, CounterMeter(domain, self._absence))
                added.meter.expect(at)
                self._domains[domain.id] = added
                self._moving.append((added, domain))
            else:
                if not earlier.present:
                    earlier.meter.expect(at)
                self._redefine(earlier, domain)
                earlier.meter.redefine(domain)

    def _redefine(self, known: _Metered, domain: Domain) -> None:
        """Use the new properties; a change of the cover waits for the readings of this tick."""
        if not known.present and known.member:
            # Others may have joined instead of it after the begin of its next interval.
            last = known.meter.last
            alone = last is not None and self._joined <= last.at.mono
            known.member = alone and domain.in_cover
        known.present = True
        if known.member == domain.in_cover:
            known.domain = domain
        else:
            self._moving.append((known, domain))

    def _change_cover(self, now: int) -> None:
        moving, self._moving = self._moving, []
        for known, _ in moving:
            self._end_counting(known)
        for known, domain in moving:
            if domain.in_cover:
                self._joined = now
            known.domain, known.member, known.joins_after = domain, domain.in_cover, self._left

    def _end_counting(self, known: _Metered) -> None:
        """A domain that joins instead of this one counts what follows its last reading."""
        if known.member and known.meter.last is not None:
            self._left = max(self._left, known.meter.last.at.mono)

    def _read(self, readings: Iterable[Reading]) -> list[MeteredPeriod]:
        found = []
        for reading in readings:
            known = self._domains.get(reading.domain_id)
            if known is None:
                continue
            resumes = known.resumed is not None
            if self._continues(known, reading):
                period = known.meter.advance(reading)
                found.append(known.measured(period, reading, resumes=resumes))
            else:
                found.append(known.measured(None, reading, resumes=True))
        return found

    def _continues(self, known: _Metered, reading: Reading) -> bool:
        """False for a counter that has not moved since an earlier run: it measures nothing yet."""
        last = known.meter.last
        if known.resumed is not None and last is not None:
            if known.domain.moves_with and last.counter == reading.counter:
                return False
            # Epochs are counted per run of the agent. A counter does not continue integrated power.
            other = known.resumed is not known.domain.provenance
            renumbered = last._replace(epoch=reading.epoch - other)
            known.meter = CounterMeter(known.domain, self._absence, renumbered)
        known.resumed = None
        return True
