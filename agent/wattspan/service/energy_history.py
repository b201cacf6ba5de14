"""The recent past, for everybody who asks about a stretch of it.

The poller adds what has settled; questions come from other threads. One lock, held for as long
as an answer takes, keeps them apart.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from operator import itemgetter

from wattspan.attribution.history import AttributionHistory, HistoryEntry
from wattspan.model import (
    SECOND,
    Attribution,
    Consumer,
    Domain,
    Instant,
    Interval,
    Microjoules,
    Payer,
    PayerInfo,
)
from wattspan.spans.profiles import EnergyProfile
from wattspan.spans.values import IntervalEnergy

SETTLEMENT_TIMEOUT = 5 * SECOND
"""A domain that has not settled for so long is not waited for: it is gone, or its driver hangs."""

MAX_KNOWN_PARENTS = 20_000
"""Processes whose parent is remembered, so that a family can be told after its members' end."""

BACKFILL = 60 * SECOND
"""How far back a newly watched process is looked up: spans are sent seconds after their end."""


Samples = Callable[[], Iterable[tuple[int, int]]] | None


@dataclass(slots=True)
class _WatchedProcess:
    own: EnergyProfile
    members: set[Payer]  # itself and, if its family is wanted, its descendants
    with_family: bool = False
    descended: EnergyProfile | None = None  # the family's, from the first descendant on
    holders: dict[str, Samples] = field(default_factory=dict)

    @property
    def family(self) -> EnergyProfile | None:
        """What it and its descendants spent, if that is wanted: its own until it has some."""
        return (self.descended or self.own) if self.with_family else None

    def join(self, child: Consumer) -> None:
        """A descendant is born."""
        if self.descended is None:
            shared = {id(self.own.lanes): self.own.lanes}
            self.descended = deepcopy(self.own, shared)
        self.members.add(child)

    def sample(self) -> None:
        """Take new samples of the process's clock, from the first who has any."""
        for samples in self.holders.values():
            if samples is not None:
                for mono, cpu in samples():
                    self.own.sample(mono, cpu)
                return


@dataclass(slots=True)
class _ProcessFamilies:
    """Who descends from whom, as far as was told; the longest unheard of are forgotten."""

    parents: OrderedDict[Consumer, int] = field(default_factory=OrderedDict)

    def meet(self, info: PayerInfo) -> None:
        if isinstance(info.payer, Consumer) and info.parent is not None:
            self.parents[info.payer] = info.parent
            self.parents.move_to_end(info.payer)
            if len(self.parents) > MAX_KNOWN_PARENTS:
                self.parents.popitem(last=False)

    def family(self, root: Consumer) -> set[Payer]:
        """``root`` and its descendants. A pid used again is not mistaken: no child is older."""
        children: dict[int, list[Consumer]] = {}
        for consumer, parent in self.parents.items():
            children.setdefault(parent, []).append(consumer)
        found: set[Payer] = {root}
        rest = [root]
        while rest:
            one = rest.pop()
            for child in children.get(one.pid, ()):
                if child not in found and child.started >= one.started:
                    found.add(child)
                    rest.append(child)
        return found


class EnergyHistory:
    """Implements ports.Past over the timeline; the poller calls ``meet`` and ``add``."""

    def __init__(self, timeline: AttributionHistory) -> None:
        self.timeline = timeline
        self.lock = threading.RLock()
        self._domains: dict[str, Domain] = {}
        self._devices: dict[str, EnergyProfile] = {}
        self._watched: dict[Consumer, _WatchedProcess] = {}
        self._kin = _ProcessFamilies()
        self._now = 0

    # ------------------------------------------------------------------------- for the poller

    def register(self, domains: Iterable[Domain]) -> None:
        """Learn of domains, or of their changed properties."""
        with self.lock:
            self._domains |= {domain.id: domain for domain in domains if domain.in_cover}

    def meet(self, infos: Iterable[PayerInfo]) -> None:
        """Learn who payers are, before what they spend settles."""
        with self.lock:
            for info in infos:
                self._kin.meet(info)
                if self._watched and isinstance(info.payer, Consumer) and info.parent is not None:
                    for watched in self._watched.values():
                        if watched.with_family and any(
                            isinstance(one, Consumer)
                            and one.pid == info.parent
                            and one.started <= info.payer.started
                            for one in watched.members
                        ):
                            watched.join(info.payer)

    def add(self, settled: Sequence[Attribution], now: Instant) -> None:
        """Append what has settled, in order of time for each domain."""
        with self.lock:
            self._now = now.mono
            for watched in self._watched.values():
                watched.sample()
            for attribution in settled:
                self.timeline.add(attribution)
                self._tell_device(attribution.interval)
                if self._watched:
                    self._tell_watched(attribution)

    def _tell_device(self, interval: Interval) -> None:
        domain = self._domains.get(interval.domain_id)
        if domain is None:
            return
        device = self._devices.get(domain.id)
        if device is None:
            device = self._devices[domain.id] = EnergyProfile()
        noise = _counter_edge_error(domain, interval)
        device.add(domain.id, domain.hw_type, interval, interval.energy, noise)

    def _tell_watched(self, attribution: Attribution) -> None:
        interval = attribution.interval
        domain = self._domains.get(interval.domain_id)
        if domain is None:
            return
        step = _counter_edge_error(domain, interval)
        active = max(1, interval.energy - attribution.idle)
        shares = dict(attribution.shares)
        for consumer, watched in self._watched.items():
            own = shares.get(consumer, 0)
            noise = step * own // active + _payer_edge_error(domain, interval, own, active)
            watched.own.add(domain.id, domain.hw_type, interval, own, noise)
            if watched.descended is not None:
                all_of_it = sum(shares[one] for one in watched.members & shares.keys())
                noise = step * all_of_it // active + _payer_edge_error(
                    domain, interval, all_of_it, active
                )
                watched.descended.add(domain.id, domain.hw_type, interval, all_of_it, noise)

    # ----------------------------------------------------------------------------- for others

    def settled(self, consumer: Consumer | None = None) -> int:
        """Every domain that still answers is settled up to here, and told for ``consumer``."""
        with self.lock:
            ends = [
                mark.mono
                for domain_id, domain in self._domains.items()
                if domain.resource is not None
                and (mark := self.timeline.watermark(domain_id)) is not None
            ]
            fresh = [end for end in ends if self._fresh(end)]
            told = []  # what is watched is pooled, and told up to a second later
            if consumer is not None and (watched := self._watched.get(consumer)) is not None:
                profiles = (watched.own, watched.descended)
                told = [one.watermark for one in profiles if one is not None and one.watermark]
            return min((fresh or ends or [0]) + told)

    def _fresh(self, settled: int) -> bool:
        return self._now - settled < SETTLEMENT_TIMEOUT

    def domains(self) -> Mapping[str, Domain]:
        """The cover's attributed domains, by id."""
        with self.lock:
            return {key: one for key, one in self._domains.items() if one.resource is not None}

    def family(self, consumer: Consumer) -> frozenset[Payer]:
        """``consumer`` and whatever descends from it."""
        with self.lock:
            return frozenset(self._kin.family(consumer))

    def device(self, domain_id: str, start: int, end: int) -> IntervalEnergy:
        """What one device spent, whoever caused it."""
        with self.lock:
            profile = self._devices.get(domain_id)
            return profile.between(start, end) if profile is not None else IntervalEnergy({}, {}, 0)

    def idle(self, domain_id: str, start: int, end: int) -> Microjoules | None:
        """What of a device's energy was idle; None where that was not told from the rest."""
        with self.lock:
            entries = self.timeline.entries(domain_id, start, end)
        if not entries or entries[0].interval.start.mono > start:
            return None
        total = 0
        for interval, idle, _, _ in entries:
            inside = min(end, interval.end.mono) - max(start, interval.start.mono)
            if not idle and interval.energy:
                return None
            total += idle * inside // interval.duration
        return Microjoules(total)

    def watch(
        self,
        consumer: Consumer,
        *,
        family: bool = False,
        samples: Samples = None,
        holder: str = "spans",
    ) -> EnergyProfile:
        """Keep what ``consumer`` spends, and with ``family`` what its descendants do.

        ``samples`` yields its CPU clock at finer times, new ones at each call. The profile may
        be read with the lock held.
        """
        with self.lock:
            since = self._now - BACKFILL
            watched = self._watched.get(consumer)
            if watched is None:
                own = _profile(self._find({consumer}, since, self._now))
                watched = self._watched[consumer] = _WatchedProcess(own, {consumer})
            if family and not watched.with_family:
                watched.with_family, watched.members = True, self._kin.family(consumer)
                if len(watched.members) > 1:
                    watched.descended = _profile(self._find(watched.members, since, self._now))
            watched.holders[holder] = samples or watched.holders.get(holder)
            return watched.own

    def forget(self, consumer: Consumer, *, holder: str = "spans") -> None:
        """``holder`` does not ask about ``consumer`` any more; once nobody does, it is let go."""
        with self.lock:
            watched = self._watched.get(consumer)
            if watched is not None:
                watched.holders.pop(holder, None)
                if not watched.holders:
                    del self._watched[consumer]

    @property
    def watched(self) -> tuple[Consumer, ...]:
        with self.lock:
            return tuple(self._watched)

    def process(
        self, consumer: Consumer, start: int, end: int, *, family: bool = False
    ) -> IntervalEnergy:
        """What a process spent; with ``family``, and whatever descends from it."""
        with self.lock:
            watched = self._watched.get(consumer)
            if watched is not None:
                profile = watched.family if family else watched.own
                if profile is not None and profile.watermark and profile.horizon <= start:
                    return profile.between(start, end)
            members: set[Payer] = self._kin.family(consumer) if family else {consumer}
            found = self._find(members, start - SECOND, end + SECOND)
        # Without the lock: entries do not change, and there may be thousands.
        profile = _profile(found)
        profile.finish()
        return profile.between(start, end)

    def _find(self, members: set[Payer], start: int, end: int) -> _MatchedEntries:
        """What the timeline still knows of some payers together."""
        found = _MatchedEntries(self.timeline.numbers(members))
        for domain_id, domain in self._domains.items():
            entries = self.timeline.entries(domain_id, start, end)
            found.entries += [(entry.interval.end.mono, domain, entry) for entry in entries]
            mark = self.timeline.watermark(domain_id)
            if domain.resource is not None and mark is not None and self._fresh(mark.mono):
                since = entries[0].interval.start.mono if entries else mark.mono
                found.expected.append((domain, since))
        return found


@dataclass(slots=True)
class _MatchedEntries:
    """Entries of the timeline, and the numbers by which they know the payers that are meant."""

    numbers: set[int]
    entries: list[tuple[int, Domain, HistoryEntry]] = field(default_factory=list)
    expected: list[tuple[Domain, int]] = field(default_factory=list)


def _profile(found: _MatchedEntries) -> EnergyProfile:
    profile = EnergyProfile()
    for domain, since in found.expected:
        profile.expect(domain.id, domain.hw_type, since)
    # in order of time, for a profile does not wait for ever for one domain
    for _, domain, entry in sorted(found.entries, key=itemgetter(0)):
        own = _shares_of(entry, found.numbers)
        step = _counter_edge_error(domain, entry.interval)
        active = max(1, entry.interval.energy - entry.idle)
        noise = step * own // active + _payer_edge_error(domain, entry.interval, own, active)
        profile.add(domain.id, domain.hw_type, entry.interval, own, noise)
    return profile


_FEW = 4  # payers that are quicker looked for one by one


def _shares_of(entry: HistoryEntry, numbers: set[int]) -> int:
    """What some payers' shares come to; each payer has one at most."""
    payers, energies = entry.shares[::2], entry.shares[1::2]
    if len(numbers) > _FEW:
        return sum(energy for one, energy in zip(payers, energies, strict=True) if one in numbers)
    return sum(energies[payers.index(one)] for one in numbers.intersection(payers))


def _counter_edge_error(domain: Domain, interval: Interval) -> int:
    """What the counter's last step may have put on the wrong side of an edge, in microjoules."""
    stale = domain.resolution if domain.staleness is None else domain.staleness
    return interval.energy * stale // max(1, interval.duration)


def _payer_edge_error(domain: Domain, interval: Interval, own: int, active: int) -> int:
    """What of a payer's share may be somebody else's at an edge, in microjoules.

    Usage that is known by the sixth of a second says who had the device in that time together,
    not who had it when: where two take turns, each has some of the other's, on both sides.
    """
    if own >= active or not domain.usage_step:
        return 0
    others = active - own
    return own * others // active * 3 * domain.usage_step // max(1, interval.duration)
