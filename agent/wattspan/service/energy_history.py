"""The energy history, which answers queries about recent periods.

The poller adds each tick with its settled attributions; queries come from other threads. One lock
protects the state and is held for the duration of an answer.

A watched process costs as much as its shares: they are noted when they settle, and merged into its
profile when somebody asks for it, at the latest after twice ``MERGE_AFTER``. Besides the profiles,
the memory is at most the shares of that time, and 85 s of steps, which all processes share.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from wattspan.attribution.division import StaticDivider
from wattspan.attribution.packed_attributions import (
    GroupStep,
    PackedAttributions,
    doubt_of,
    group_step,
    share_of,
    unpack_entry,
)
from wattspan.model import (
    SECOND,
    Attribution,
    Consumer,
    Domain,
    GroupKind,
    HwType,
    Microjoules,
    Payer,
    PayerInfo,
    StaticPower,
    Tick,
)
from wattspan.processes.metadata import starts_others
from wattspan.service.process_families import ProcessFamilies, ServiceProcesses
from wattspan.sharing.pools import Pools
from wattspan.spans.process_energy import (
    DomainStep,
    DomainSteps,
    ProcessEnergy,
    append_share,
    static_share,
)
from wattspan.spans.profiles import EnergyProfile
from wattspan.spans.values import IntervalEnergy

SETTLEMENT_TIMEOUT = 5 * SECOND
"""A domain without settlement for longer is absent or its driver hangs: queries do not wait."""

MAX_AWAITED = 2 * SECOND
"""Energy is awaited at most this long after the last settlement."""

BACKFILL = 60 * SECOND
"""The period before its start that a new profile includes: spans arrive after their end."""

MERGE_AFTER = 10 * SECOND
"""Shares of a watched process are merged into its profile after this time, wanted or not."""

_MERGE_WITHIN = 10 * SECOND  # such merges are spread over it, so that no tick has many

_CROWDED_A_STEP = 8  # profiles for which each tick has one step of thinning
_MAX_STEPS = 16  # of thinning in a tick

_KEEP_STEPS = BACKFILL + MERGE_AFTER + _MERGE_WITHIN + SETTLEMENT_TIMEOUT

IN_USE = SECOND
"""The history is in use this long after somebody has wanted the energy of a process: by then, the
spans that wanted it are in the totals of a snapshot."""

_MAX_SAMPLES = 1024
"""Samples of a CPU clock after which a process is merged: its profile keeps twice as many."""

SPANS = "spans"
"""The holder of profiles for spans: their samples are taken when it asks for them."""

Samples = Callable[[], Iterable[tuple[int, int]]] | None


@dataclass(slots=True)
class _WatchedProcess:
    """The energy of a process and, if wanted, of its family."""

    own: ProcessEnergy
    members: set[Payer]  # the process and, if its family is wanted, its descendants
    with_family: bool = False
    descended: ProcessEnergy | None = None  # the family's, from the first descendant on
    holders: dict[str, Samples] = field(default_factory=dict)
    sampled: int = 0  # samples since the last merge

    @property
    def profiles(self) -> tuple[EnergyProfile, ...]:
        both = (self.own, self.descended)
        return tuple(one.profile for one in both if one is not None)

    def sample(self) -> None:
        """Add new samples of the process's CPU clock, from the first holder that has any."""
        for source in filter(None, self.holders.values()):
            before = self.sampled
            for mono, cpu in source():
                self.own.profile.sample(mono, cpu)
                self.sampled += 1
            if self.sampled > before:
                return

    def merge(self, domains: Mapping[str, DomainSteps]) -> int:
        """Merge the shares since the last call; returns the number of intervals."""
        self.sample()
        self.sampled = 0
        merged = self.own.merge(domains)
        return merged if self.descended is None else merged + self.descended.merge(domains)


class EnergyHistory:
    """Implements ports.EnergyQueries over the attributions of the last ``span`` nanoseconds.

    Those that have no room in ``limit`` bytes are dropped.
    ``static_powers`` are those of the GPUs, by domain; profiles have the static part of GPU energy
    while it is known. ``baseline_errors`` are the half-widths of the 95 % ranges of idle powers in
    milliwatts, by domain; it is called in the poller's thread. ``missing_until`` is the monotonic
    time until which energy of a payer was in gaps, by type, and ``edges`` are those of the windows
    of a process, whose energies up to them do not change; both are called in any thread.
    """

    def __init__(
        self,
        span: int,
        limit: int,
        static_powers: Callable[[], Mapping[str, StaticPower]] = dict,
        baseline_errors: Callable[[], Mapping[str, float]] = dict,
        missing_until: Callable[[Payer], Mapping[HwType, int]] = lambda _: {},
        pools: Pools | None = None,
        edges: Callable[[Consumer], Sequence[int]] = lambda _: (),
    ) -> None:
        self.lock = threading.RLock()
        self._attributions = PackedAttributions(span, limit)
        self._static_powers, self._read_baseline_errors = static_powers, baseline_errors
        self._baseline_errors: Mapping[str, float] = {}
        self._missing_until, self._edges = missing_until, edges
        self._dividers: dict[str, StaticDivider] = {}
        self._domains: dict[str, Domain] = {}
        self._left: set[str] = set()  # those of them that are not in the cover any more
        self._watched: dict[Consumer, _WatchedProcess] = {}
        self._queried: set[Consumer] = set()  # watched for others than spans, or with families
        self._running: set[Consumer] = set()  # those of them that have not ended
        self._steps: dict[str, DomainSteps] = {}
        self._payees: dict[Payer, list[tuple[Consumer, ProcessEnergy]]] = {}
        self._crowded: dict[EnergyProfile, None] = {}  # to thin, in order
        self._unmerged: dict[Consumer, int] = {}  # the time of the first share, in its order
        self._wanted = -IN_USE
        self.merged = 0  # number of intervals that profiles have received
        self._families = ProcessFamilies(span + SETTLEMENT_TIMEOUT, pools)
        self._gpu_users: dict[str, set[Payer]] = {}  # by GPU: processes that have had its energy
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

    @property
    def in_use(self) -> bool:
        """True while somebody wants the energy of processes, for spans or queries."""
        return bool(self._running) or self._now - self._wanted < IN_USE

    def apply(self, tick: Tick, settled: Sequence[Attribution]) -> None:
        """Add a tick and the attributions that it has settled."""
        with self.lock:
            before, self._now = self._now, tick.at.mono
            for domains in tick.domains.values():
                members = {domain.id: domain for domain in domains if domain.in_cover}
                self._left |= self._domains.keys() & {domain.id for domain in domains}
                self._left -= members.keys()
                self._domains |= members
            for info in tick.births:
                if isinstance(info.payer, Consumer) and info.parent is not None:
                    self._add_process(info.payer, info.parent, info)
            self._baseline_errors = self._read_baseline_errors()
            for consumer in self._queried:
                self._watched[consumer].sample()
            for attribution in settled:
                self._attributions.add(attribution)
                self._record_baseline(attribution)
                self._add_energy(attribution)
            self._merge_overdue(self._now - before)
            self._remove_ended(tick)
        steps = min(_MAX_STEPS, 1 + len(self._crowded) // _CROWDED_A_STEP)
        for profile in [*self._crowded][:steps]:  # copied at once: queries add some
            with self.lock:
                if profile.crowded:
                    profile.thin()
                else:
                    del self._crowded[profile]

    def _merge_overdue(self, elapsed: int) -> None:
        """Merge the oldest shares, and remove steps that nobody needs."""
        most = 1 + len(self._unmerged) * elapsed // _MERGE_WITHIN
        for consumer in [*itertools.islice(self._unmerged, most)]:
            if self._now - self._unmerged[consumer] < MERGE_AFTER:
                break
            self._merge(consumer)
        since = self._now - _KEEP_STEPS
        oldest = next(iter(self._unmerged.values()), since)
        for steps in self._steps.values():
            steps.trim(min(since, oldest))

    def _merge(self, consumer: Consumer) -> _WatchedProcess:
        watched = self._watched[consumer]
        self._unmerged.pop(consumer, None)
        self.merged += watched.merge(self._steps)
        self._crowded.update((one, None) for one in watched.profiles if one.crowded)
        return watched

    def _remove_ended(self, tick: Tick) -> None:
        """Forget the processes that ended before the history begins."""
        self._running.difference_update(tick.exits)
        for payer in tick.exits:
            self._families.end(payer, tick.at.mono)
        if removed := self._families.remove_ended(tick.at.mono):
            for users in self._gpu_users.values():
                users -= removed
            for consumer in self._queried:
                watched = self._watched[consumer]
                if not removed.isdisjoint(watched.members):
                    self._set_members(consumer, watched, watched.members - (removed - {consumer}))

    def _set_members(
        self, consumer: Consumer, watched: _WatchedProcess, members: set[Payer]
    ) -> None:
        """Note the shares of the process itself, and of ``members`` for its family."""
        for member in watched.members | {consumer}:
            others = [one for one in self._payees.get(member, ()) if one[0] != consumer]
            self._payees[member] = others
            if not others:
                del self._payees[member]
        watched.members = members
        if consumer in self._watched:
            self._payees.setdefault(consumer, []).append((consumer, watched.own))
            if (descended := watched.descended) is not None:
                for member in members:
                    self._payees.setdefault(member, []).append((consumer, descended))

    def _add_process(self, consumer: Consumer, parent: int, info: PayerInfo) -> None:
        containers = (one.name for one in info.groups if one.kind is GroupKind.CONTAINER)
        self._families.add(
            consumer,
            parent,
            next(containers, ""),
            info.principal,
            groups=tuple(one for one in info.groups if one.kind is not GroupKind.USER),
            starts_others=info.starts_others or starts_others(info.command),
        )
        for root in self._queried:
            watched = self._watched[root]
            if watched.with_family and any(
                isinstance(one, Consumer) and one.pid == parent and one.started <= consumer.started
                for one in watched.members
            ):
                if watched.descended is None:
                    self._merge(root)
                    watched.descended = watched.own.copy()
                self._set_members(root, watched, watched.members | {consumer})

    def _record_baseline(self, attribution: Attribution) -> None:
        domain = self._domains.get(attribution.interval.domain_id)
        if attribution.withheld and domain is not None:
            self._baseline_unknown[domain.hw_type] = attribution.interval.end.mono

    def _add_energy(self, attribution: Attribution) -> None:
        """Note a step, and its shares of watched processes."""
        interval = attribution.interval
        domain = self._domains.get(interval.domain_id)
        if domain is None:
            return
        steps = self._steps.get(domain.id)
        if steps is None:
            steps = self._steps[domain.id] = DomainSteps(domain)
        steps.redefine(domain)
        divided = interval.energy - attribution.idle - attribution.withheld
        powers = self._static_powers()
        static = static_share(domain, interval, attribution.idle, powers, self._dividers)
        error = self._baseline_errors.get(domain.id, 0.0)
        end = interval.end.mono
        if not steps.add(DomainStep.of(domain, interval, divided, error, static)):
            return
        if domain.hw_type is HwType.GPU:
            users = self._gpu_users.setdefault(domain.id, set())
            users.update(payer for payer, energy in attribution.shares if energy)
        if not self._payees:
            return
        doubts = itertools.chain(attribution.doubts, itertools.repeat(0))
        for (payer, energy), doubt in zip(attribution.shares, doubts, strict=False):
            for consumer, payee in self._payees.get(payer, ()):
                payee.add(domain.id, end, energy, doubt)
                self._unmerged.setdefault(consumer, end)

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
            if consumer is not None and consumer in self._watched:
                profiles = self._merge(consumer).profiles
                profiled = [one.watermark for one in profiles if one.watermark]
            return min((fresh or ends or [0]) + profiled)

    def _is_fresh(self, settled: int) -> bool:
        return self._now - settled < SETTLEMENT_TIMEOUT

    def expect(self, end: int) -> None:
        """Ask for settlement up to ``end`` before the next snapshot."""
        # Spans may end in the far future by mistake; their energy would be awaited for ever.
        self._awaited = max(self._awaited, min(end, self._now + MAX_AWAITED))

    def baseline_unknown(self) -> dict[HwType, int]:
        """The time until which an idle power was unknown, by type; none if always known."""
        return dict(self._baseline_unknown)

    def missing_until(self, consumer: Consumer, *, family: bool = False) -> dict[HwType, int]:
        """The monotonic time until which energy of a process was in gaps, by type.

        With ``family``, that of the process and its descendants. No gap of a device counts that
        none of them has used.
        """
        found: dict[HwType, int] = {}
        for payer in self.family(consumer) if family else (consumer,):
            for kind, until in self._missing_until(payer).items():
                found[kind] = max(until, found.get(kind, until))
        return found

    def bounded(self, consumer: Consumer, start: int, *, family: bool = False) -> frozenset[HwType]:
        """The types of which the energy of a process since ``start`` is a lower bound."""
        missing = self.missing_until(consumer, family=family)
        ends = (*self._baseline_unknown.items(), *missing.items())
        return frozenset(kind for kind, until in ends if start < until)

    def domains(self) -> Mapping[str, Domain]:
        """The cover's attributed domains, by id."""
        with self.lock:
            return {key: one for key, one in self._domains.items() if one.resource is not None}

    @property
    def left(self) -> frozenset[str]:
        """The domains that have left the cover: others measure the same by now."""
        with self.lock:
            return frozenset(self._left)

    def family(self, consumer: Consumer) -> frozenset[Payer]:
        """``consumer`` and its descendants."""
        with self.lock:
            return frozenset(self._families.family(consumer))

    def known(self, payers: Collection[Payer]) -> frozenset[Payer]:
        """Those that run, or ended within the history."""
        with self.lock:
            return self._families.known(payers)

    def service_group(
        self,
        consumer: Consumer,
        senders: Mapping[Consumer, str] = MappingProxyType({}),
        *,
        launched: bool = True,
    ) -> ServiceProcesses:
        """The processes of a sender's service; see :meth:`ProcessFamilies.service`.

        ``senders`` are the services of all senders. Without ``launched``, siblings of the sender
        are no part of it.
        """
        with self.lock:
            users = self.gpu_users() if launched else ()
            return self._families.service(consumer, users, senders)

    def uses_gpu(self, members: Collection[Payer]) -> bool:
        """True if one of these processes has had energy of a GPU."""
        with self.lock:
            return any(not users.isdisjoint(members) for users in self._gpu_users.values())

    def gpu_users(self) -> frozenset[Payer]:
        """The processes that have had energy of a GPU."""
        with self.lock:
            return frozenset[Payer]().union(*self._gpu_users.values())

    def group_steps(
        self,
        groups: Sequence[frozenset[Payer]],
        since: Callable[[str], int],
        kind: HwType = HwType.GPU,
    ) -> dict[str, list[GroupStep]]:
        """The settled counter steps of each device of a type, with the energy of some groups.

        ``since`` is the time from which the steps of a device are wanted.
        """
        members, errors = frozenset[Payer]().union(*groups), self._baseline_errors
        with self.lock:
            numbers = [self._attributions.numbers(members) for members in groups]
            found = {
                # Senders choose times: of a GPU that no group has used, only the last step.
                key: self._attributions.packed(key, since(key), self._now)[-unused:]
                for key, domain in self._domains.items()
                if domain.hw_type is kind and domain.resource is not None
                for unused in [
                    kind is HwType.GPU and self._gpu_users.get(key, set()).isdisjoint(members)
                ]
            }
        return {
            key: [
                group_step(unpack_entry(key, entry), numbers, errors.get(key, 0.0))
                for entry in entries
            ]
            for key, entries in found.items()
            if entries
        }

    def idle(self, domain_id: str, start: int, end: int) -> Microjoules | None:
        """The idle energy of a device; None where it was not separated from active energy."""
        with self.lock:
            packed = self._attributions.packed(domain_id, start, end)
        entries = [unpack_entry(domain_id, one) for one in packed]  # without the lock
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
        holder: str = SPANS,
        since: int = 0,
    ) -> EnergyProfile:
        """Keep a profile of ``consumer``, and with ``family`` one of its family.

        ``samples`` yields new samples of its CPU clock at each call. The profile may be read with
        the lock held; ``merge`` brings it up to date. A new one has no energy before ``since``.
        """
        with self.lock:
            self._wanted = self._now
            watched = self._watched.get(consumer)
            if watched is None:
                watched = _WatchedProcess(self._energy(consumer, {consumer}, since), {consumer})
                self._watched[consumer] = watched
                if watched.own.waiting:
                    self._unmerged[consumer] = self._now
                self._set_members(consumer, watched, {consumer})
            if family and not watched.with_family:
                watched.with_family, members = True, self._families.family(consumer)
                if len(members) > 1:
                    self._merge(consumer)
                    watched.descended = self._energy(consumer, members)
                    watched.descended.merge(self._steps)
                self._set_members(consumer, watched, members)
            watched.holders[holder] = samples or watched.holders.get(holder)
            if holder != SPANS or family:
                self._queried.add(consumer)
                self._running.add(consumer)
            return watched.own.profile

    def merge(self, consumer: Consumer) -> None:
        """Bring the profile of a watched process up to date, for spans that wait for energy."""
        with self.lock:
            self._wanted = self._now
            self._merge(consumer)

    def sample(self, consumer: Consumer) -> None:
        """Take the new samples of the CPU clock of a watched process."""
        with self.lock:
            watched = self._watched[consumer]
            watched.sample()
            if watched.sampled >= _MAX_SAMPLES:
                self._merge(consumer)

    def forget(self, consumer: Consumer, *, holder: str = SPANS) -> None:
        """End a ``watch``; the profile is removed with its last holder. Idempotent."""
        with self.lock:
            watched = self._watched.get(consumer)
            if watched is not None:
                watched.holders.pop(holder, None)
                if not watched.holders.keys() - {SPANS}:
                    self._queried.discard(consumer)
                    self._running.discard(consumer)
                    watched.with_family, watched.descended = False, None
                    self._set_members(consumer, watched, {consumer})
                if not watched.holders:
                    del self._watched[consumer]
                    self._unmerged.pop(consumer, None)
                    self._set_members(consumer, watched, set())

    @property
    def watched(self) -> tuple[Consumer, ...]:
        with self.lock:
            return tuple(self._watched)

    @property
    def payees(self) -> frozenset[Payer]:
        """The watched processes, and the members of watched families."""
        with self.lock:
            return frozenset(self._payees)

    def process(
        self, consumer: Consumer, start: int, end: int, *, family: bool = False
    ) -> IntervalEnergy:
        """The energy of a process, or of its family."""
        with self.lock:
            watched = self._watched.get(consumer)
            if watched is not None and (watched.with_family or not family):
                self._merge(consumer)
                profile = ((watched.descended if family else None) or watched.own).profile
                if profile.watermark and profile.horizon <= start:
                    return profile.between(start, end)
            members: set[Payer] = self._families.family(consumer) if family else {consumer}
            found = self._find(members, start - SECOND, end + SECOND)
        # Without the lock: entries are immutable, and there may be thousands.
        return self._profile(found).between(start, end)

    def _energy(self, root: Consumer, members: set[Payer], since: int = 0) -> ProcessEnergy:
        """The energy of some payers since ``BACKFILL``, or a later time; not merged yet."""
        found, since = ProcessEnergy(partial(self._edges, root)), max(since, self._now - BACKFILL)
        for domain_id, steps in self._steps.items():
            begin = self._attributions.begin(domain_id)
            first = steps.begin(max(since, self._now if begin is None else begin))
            expected = steps.domain.resource is not None and self._is_fresh(steps.end)
            found.begin(steps.domain, first, expected=expected)
            for share in self._attributions.shares(members, domain_id, first, self._now):
                found.add(domain_id, *share)
        return found

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
        """A finished profile of past entries, with the present static and idle powers."""
        errors = self._baseline_errors
        powers, dividers = self._static_powers(), dict[str, StaticDivider]()
        profile = EnergyProfile()
        for domain, since in found.expected:
            profile.expect(domain.id, domain.hw_type, since)
        # In order of time, because a profile does not wait long for one domain.
        entries = [(domain, unpack_entry(domain.id, packed)) for domain, packed in found.packed]
        for domain, entry in sorted(entries, key=lambda one: one[1].interval.end.mono):
            divided = entry.interval.energy - entry.idle - entry.withheld
            static = static_share(domain, entry.interval, entry.idle, powers, dividers)
            error = errors.get(domain.id, 0.0)
            step = DomainStep.of(domain, entry.interval, divided, error, static)
            doubt = doubt_of(entry, found.numbers) if entry.doubts else 0
            append_share(profile, domain, step, share_of(entry, found.numbers), doubt)
        profile.finish()
        return profile


@dataclass(slots=True)
class _MatchedEntries:
    """Entries of the history, and the numbers of the wanted payers in them."""

    numbers: set[int]
    packed: list[tuple[Domain, bytes]] = field(default_factory=list)
    expected: list[tuple[Domain, int]] = field(default_factory=list)
