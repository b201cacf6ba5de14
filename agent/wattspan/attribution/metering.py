"""Readings to periods of energy: each reading of a counter is differenced once, for all accounts.

:class:`CounterMeters` also knows which domain counts when. Domains that measure one thing take
turns in the cover: a former member counts up to its reading of the tick of the change, and a new
one what begins after that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from wattspan.attribution.counter_deltas import CounterMeter
from wattspan.model import Domain, Gap, Instant, Interval, Reading, Tick


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
    resumed: bool = False  # the last reading of the meter is from an earlier run

    def measured(self, period: Interval | Gap | None, reading: Reading | None) -> MeteredPeriod:
        return MeteredPeriod(
            self.domain, period, reading, self.joins_after if self.member else None
        )


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
        self._domains[domain.id] = _Metered(
            domain, meter, present=False, member=domain.in_cover, resumed=last is not None
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
        return [
            known.measured(known.meter.advance(reading), reading)
            for reading in readings
            if (known := self._domains.get(reading.domain_id)) is not None
            and self._continues(known, reading)
        ]

    def _continues(self, known: _Metered, reading: Reading) -> bool:
        """False for a counter that has not moved since an earlier run: it measures nothing yet."""
        last = known.meter.last
        if known.resumed and last is not None:
            if known.domain.moves_with and last.counter == reading.counter:
                return False
            # Epochs are counted per run of the agent.
            renumbered = last._replace(epoch=reading.epoch)
            known.meter = CounterMeter(known.domain, self._absence, renumbered)
        known.resumed = False
        return True
