"""The energy history, which answers queries about recent periods.

The poller adds each tick with its settled attributions; queries come from other threads. One lock
protects the state and is held for the duration of an answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple

from wattspan.attribution.history import AttributionHistory, HistoryEntry, unpack_entry
from wattspan.attribution.static_power import StaticDivider, StaticShare
from wattspan.model import (
    SECOND,
    Attribution,
    Consumer,
    Domain,
    GroupKind,
    HwType,
    Interval,
    Microjoules,
    Payer,
    Principal,
    StaticBasis,
    StaticPower,
    Tick,
)
from wattspan.service.process_families import ProcessFamilies
from wattspan.spans.profiles import EnergyProfile
from wattspan.spans.values import IntervalEnergy

SETTLEMENT_TIMEOUT = 5 * SECOND
"""A domain without settlement for longer is absent or its driver hangs: queries do not wait."""

MAX_AWAITED = 2 * SECOND
"""Energy is awaited at most this long after the last settlement."""

BACKFILL = 60 * SECOND
"""The period before its start that a new profile includes: spans arrive after their end."""


Samples = Callable[[], Iterable[tuple[int, int]]] | None


@dataclass(slots=True)
class _WatchedProcess:
    """The profiles of a process and, if wanted, of its family."""

    own: EnergyProfile
    members: set[Payer]  # the process and, if its family is wanted, its descendants
    with_family: bool = False
    descended: EnergyProfile | None = None  # the family's, from the first descendant on
    holders: dict[str, Samples] = field(default_factory=dict)

    def add_descendant(self, child: Consumer) -> None:
        if self.descended is None:
            shared = {id(self.own.lanes): self.own.lanes}
            self.descended = deepcopy(self.own, shared)
        self.members.add(child)

    def sample(self) -> None:
        """Add new samples of the process's CPU clock, from the first holder that has any."""
        source = next(filter(None, self.holders.values()), None)
        for mono, cpu in source() if source is not None else ():
            self.own.sample(mono, cpu)


class GroupStep(NamedTuple):
    """A settled counter step of a GPU, and the microjoules of each of some groups of processes."""

    start: int
    end: int
    energies: Sequence[int]


class EnergyHistory:
    """Implements ports.EnergyQueries over the recent attributions.

    ``static_powers`` are those of the GPUs, by domain; profiles have the static part of GPU energy
    while it is known. ``baseline_errors`` are the half-widths of the 95 % ranges of idle powers in
    milliwatts, by domain; it is called in the poller's thread.
    """

    def __init__(
        self,
        attributions: AttributionHistory,
        static_powers: Callable[[], Mapping[str, StaticPower]] = dict,
        baseline_errors: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.lock = threading.RLock()
        self._attributions = attributions
        self._static_powers, self._read_baseline_errors = static_powers, baseline_errors
        self._baseline_errors: Mapping[str, float] = {}
        self._dividers: dict[str, StaticDivider] = {}
        self._domains: dict[str, Domain] = {}
        self._watched: dict[Consumer, _WatchedProcess] = {}
        self._families = ProcessFamilies(attributions.span + SETTLEMENT_TIMEOUT)
        self._baseline_unknown: dict[HwType, int] = {}
        self._now = 0
        self._awaited = 0

    # ------------------------------------------------------------------------- for the poller

    @property
    def dropped(self) -> int:
        """Number of attributions removed to keep the memory limit."""
        return self._attributions.dropped

    @property
    def awaited(self) -> bool:
        """True if a query waits for the settlement of energy that is sampled already."""
        return self._awaited > self._now

    def apply(self, tick: Tick, settled: Sequence[Attribution]) -> None:
        """Add a tick and the attributions that it has settled."""
        with self.lock:
            self._now = tick.at.mono
            for domains in tick.domains.values():
                self._domains |= {domain.id: domain for domain in domains if domain.in_cover}
            for info in tick.births:
                if isinstance(info.payer, Consumer) and info.parent is not None:
                    containers = (g.name for g in info.groups if g.kind is GroupKind.CONTAINER)
                    self._add_process(info.payer, info.parent, next(containers, ""), info.principal)
            self._baseline_errors = self._read_baseline_errors()
            for watched in self._watched.values():
                watched.sample()
            for attribution in settled:
                self._attributions.add(attribution)
                self._record_baseline(attribution)
                if self._watched:
                    self._add_energy(attribution)
            self._remove_ended(tick)

    def _remove_ended(self, tick: Tick) -> None:
        """Forget the processes that ended before the history begins."""
        for payer in tick.exits:
            self._families.end(payer, tick.at.mono)
        if removed := self._families.remove_ended(tick.at.mono):
            for consumer, watched in self._watched.items():
                watched.members -= removed - {consumer}

    def _add_process(
        self, consumer: Consumer, parent: int, container: str, principal: Principal | None
    ) -> None:
        self._families.add(consumer, parent, container, principal)
        for watched in self._watched.values():
            if watched.with_family and any(
                isinstance(one, Consumer) and one.pid == parent and one.started <= consumer.started
                for one in watched.members
            ):
                watched.add_descendant(consumer)

    def _record_baseline(self, attribution: Attribution) -> None:
        domain = self._domains.get(attribution.interval.domain_id)
        if attribution.withheld and domain is not None:
            self._baseline_unknown[domain.hw_type] = attribution.interval.end.mono

    def _add_energy(self, attribution: Attribution) -> None:
        """Add an attribution to the profiles of watched processes."""
        interval = attribution.interval
        domain = self._domains.get(interval.domain_id)
        if domain is None:
            return
        shares = dict(attribution.shares)
        divided = interval.energy - attribution.idle - attribution.withheld
        powers = self._static_powers()
        static = _static_share(domain, interval, attribution.idle, powers, self._dividers)
        error = self._baseline_errors.get(domain.id, 0.0)
        doubts = dict(zip(shares, attribution.doubts, strict=False))
        for consumer, watched in self._watched.items():
            share, doubt = shares.get(consumer, 0), doubts.get(consumer, 0)
            _add_share(watched.own, domain, interval, divided, share, static, error, doubt)
            if watched.descended is not None:
                own = sum(shares[one] for one in watched.members & shares.keys())
                doubt = sum(doubts[one] for one in watched.members & doubts.keys())
                _add_share(watched.descended, domain, interval, divided, own, static, error, doubt)

    # ---------------------------------------------------------------------------- for queries

    def settled(self, consumer: Consumer | None = None) -> int:
        """The watermark of all domains that still settle, and of the profile of ``consumer``."""
        with self.lock:
            ends = [
                mark.mono
                for domain_id, domain in self._domains.items()
                if domain.resource is not None
                and (mark := self._attributions.watermark(domain_id)) is not None
            ]
            fresh = [end for end in ends if self._is_fresh(end)]
            profiled = []  # profiles pool intervals and may be a second late
            if consumer is not None and (watched := self._watched.get(consumer)) is not None:
                profiles = (watched.own, watched.descended)
                profiled = [one.watermark for one in profiles if one is not None and one.watermark]
            return min((fresh or ends or [0]) + profiled)

    def _is_fresh(self, settled: int) -> bool:
        return self._now - settled < SETTLEMENT_TIMEOUT

    def expect(self, end: int) -> None:
        """Ask for settlement up to ``end`` before the next snapshot."""
        # Spans may end in the far future by mistake; their energy would be awaited for ever.
        self._awaited = max(self._awaited, min(end, self._now + MAX_AWAITED))

    def baseline_unknown(self) -> dict[HwType, int]:
        """The monotonic time until which the idle power of a domain was unknown, by type.

        A type whose idle power was always known is absent.
        """
        return dict(self._baseline_unknown)

    def domains(self) -> Mapping[str, Domain]:
        """The cover's attributed domains, by id."""
        with self.lock:
            return {key: one for key, one in self._domains.items() if one.resource is not None}

    def family(self, consumer: Consumer) -> frozenset[Payer]:
        """``consumer`` and its descendants."""
        with self.lock:
            return frozenset(self._families.family(consumer))

    def service_group(self, consumer: Consumer) -> frozenset[Payer]:
        """The processes of a service: its principal's, by container and descent."""
        with self.lock:
            return frozenset(self._families.service(consumer))

    def gpu_steps(
        self, groups: Sequence[frozenset[Payer]], since: Callable[[str], int]
    ) -> dict[str, list[GroupStep]]:
        """The settled counter steps of each GPU, with the energy of each of some groups.

        ``since`` is the time from which the steps of a GPU are wanted.
        """
        with self.lock:
            numbers = [self._attributions.numbers(members) for members in groups]
            found = {
                key: self._attributions.entries(key, since(key), self._now)
                for key, domain in self._domains.items()
                if domain.hw_type is HwType.GPU and domain.resource is not None
            }
        return {
            key: [
                GroupStep(
                    entry.interval.start.mono,
                    entry.interval.end.mono,
                    [_share_of(entry, own) for own in numbers],
                )
                for entry in entries
            ]
            for key, entries in found.items()
            if entries
        }

    def idle(self, domain_id: str, start: int, end: int) -> Microjoules | None:
        """The idle energy of a device; None where it was not separated from active energy."""
        with self.lock:
            entries = self._attributions.entries(domain_id, start, end)
        if not entries or entries[0].interval.start.mono > start:
            return None
        total = 0
        for interval, idle, *_ in entries:
            overlap = min(end, interval.end.mono) - max(start, interval.start.mono)
            if not idle and interval.energy:
                return None
            total += idle * overlap // interval.duration
        return Microjoules(total)

    def watch(
        self,
        consumer: Consumer,
        *,
        family: bool = False,
        samples: Samples = None,
        holder: str = "spans",
    ) -> EnergyProfile:
        """Keep a profile of ``consumer``, and with ``family`` one of its family.

        ``samples`` yields new samples of its CPU clock at each call. The profile may be read with
        the lock held.
        """
        with self.lock:
            since = self._now - BACKFILL
            watched = self._watched.get(consumer)
            if watched is None:
                own = self._profile(self._find({consumer}, since, self._now))
                watched = self._watched[consumer] = _WatchedProcess(own, {consumer})
            if family and not watched.with_family:
                watched.with_family, watched.members = True, self._families.family(consumer)
                if len(watched.members) > 1:
                    found = self._find(watched.members, since, self._now)
                    watched.descended = self._profile(found)
            watched.holders[holder] = samples or watched.holders.get(holder)
            return watched.own

    def forget(self, consumer: Consumer, *, holder: str = "spans") -> None:
        """End a ``watch``; the profile is removed with its last holder. Idempotent."""
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
        """The energy of a process, or of its family."""
        with self.lock:
            watched = self._watched.get(consumer)
            if watched is not None and (watched.with_family or not family):
                profile = (watched.descended if family else None) or watched.own
                if profile.watermark and profile.horizon <= start:
                    return profile.between(start, end)
            members: set[Payer] = self._families.family(consumer) if family else {consumer}
            found = self._find(members, start - SECOND, end + SECOND)
        # Without the lock: entries are immutable, and there may be thousands.
        profile = self._profile(found)
        profile.finish()
        return profile.between(start, end)

    def _find(self, members: set[Payer], start: int, end: int) -> _MatchedEntries:
        """The recorded attributions of a period, for the sum of some payers."""
        found = _MatchedEntries(self._attributions.numbers(members))
        for domain_id, domain in self._domains.items():
            packed = self._attributions.packed(domain_id, start, end)
            found.packed += [(domain, one) for one in packed]
            mark = self._attributions.watermark(domain_id)
            if domain.resource is not None and mark is not None and self._is_fresh(mark.mono):
                since = unpack_entry(domain_id, packed[0]).interval.start if packed else mark
                found.expected.append((domain, since.mono))
        return found

    def _profile(self, found: _MatchedEntries) -> EnergyProfile:
        """A profile of past entries, with the present static powers and errors of idle powers."""
        errors = self._baseline_errors
        powers, dividers = self._static_powers(), dict[str, StaticDivider]()
        profile = EnergyProfile()
        for domain, since in found.expected:
            profile.expect(domain.id, domain.hw_type, since)
        # In order of time, because a profile does not wait long for one domain.
        entries = [(domain, unpack_entry(domain.id, packed)) for domain, packed in found.packed]
        for domain, entry in sorted(entries, key=lambda one: one[1].interval.end.mono):
            divided = entry.interval.energy - entry.idle - entry.withheld
            own = _share_of(entry, found.numbers)
            static = _static_share(domain, entry.interval, entry.idle, powers, dividers)
            error = errors.get(domain.id, 0.0)
            doubt = _doubt_of(entry, found.numbers) if entry.doubts else 0
            _add_share(profile, domain, entry.interval, divided, own, static, error, doubt)
        return profile


@dataclass(slots=True)
class _MatchedEntries:
    """Entries of the history, and the numbers of the wanted payers in them."""

    numbers: set[int]
    packed: list[tuple[Domain, bytes]] = field(default_factory=list)
    expected: list[tuple[Domain, int]] = field(default_factory=list)


def _static_share(
    domain: Domain,
    interval: Interval,
    idle: int,
    powers: Mapping[str, StaticPower],
    dividers: dict[str, StaticDivider],
) -> tuple[StaticShare, StaticBasis] | None:
    """The static part of the energy that an interval's payers share; None if it is unknown."""
    power = powers.get(domain.id)
    if power is None:
        return None
    divider = dividers.get(domain.id)
    if divider is None:
        divider = dividers[domain.id] = StaticDivider()
    return divider.divide(interval, idle, power.power, domain.resolution), power.basis


_FEW = 4  # for fewer payers, a search for each is faster


def _share_of(entry: HistoryEntry, numbers: set[int]) -> int:
    """The sum of some payers' shares; each payer has at most one."""
    payers, energies = entry.shares[::2], entry.shares[1::2]
    if len(numbers) > _FEW:
        return sum(energy for one, energy in zip(payers, energies, strict=True) if one in numbers)
    return sum(energies[payers.index(one)] for one in numbers.intersection(payers))


def _doubt_of(entry: HistoryEntry, numbers: set[int]) -> int:
    """The sum of the largest possible errors of some payers' shares."""
    pairs = zip(entry.shares[::2], entry.doubts, strict=True)
    return sum(doubt for one, doubt in pairs if one in numbers)


def _add_share(
    profile: EnergyProfile,
    domain: Domain,
    interval: Interval,
    divided: int,
    own: int,
    static: tuple[StaticShare, StaticBasis] | None = None,
    baseline_error: float = 0.0,
    doubt: int = 0,
) -> None:
    """Add the energy ``own`` of a payer, of ``divided`` in an interval, with its errors.

    Too much or too little idle energy is an error of the payers by their shares. ``doubt`` is the
    error where the division is an assumption; the energy of all others is the rest, so the error is
    never larger than that in one direction and ``own`` in the other.
    """
    active = max(1, divided)
    noise = _counter_edge_error(domain, interval) * own // active
    if own < active and domain.usage_step:
        # Usage at a resolution of a sixth of a second distinguishes payers, but not their times:
        # where two alternate, each has some energy of the other on both sides of an edge.
        exchanged = own * (active - own) // active
        noise += exchanged * 3 * domain.usage_step // max(1, interval.duration)
    part = None if static is None else (static[0].of(own), static[1])
    baseline = baseline_error * interval.duration / 1e6 * own / active
    if doubt and own < active:
        baseline += min(doubt, max(own, active - own))
    profile.add(domain.id, domain.hw_type, interval, own, noise, part, baseline)


def _counter_edge_error(domain: Domain, interval: Interval) -> int:
    """The energy that the counter's last step may put on the wrong side of an edge, in uJ."""
    stale = domain.resolution if domain.staleness is None else domain.staleness
    return interval.energy * stale // max(1, interval.duration)
