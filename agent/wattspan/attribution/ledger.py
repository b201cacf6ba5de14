"""The double-entry account of all energy since the first reading.

For each attributed domain ``energy = consumers + idle + unattributed``, always. The energy of
consumers is also booked by process and by group. An interval is booked completely when it is
settled, so that every snapshot balances; until then it is pending.

:class:`Ledger` is a state machine without I/O: ticks go in, attributions and snapshots come out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, takewhile
from operator import add

from wattspan.attribution.baseline import IdleModel, IdlePower, accept_idle_powers, idle_model
from wattspan.attribution.consumer_powers import Doubts
from wattspan.attribution.counted_uses import CountedUses
from wattspan.attribution.division import divide_among_payers
from wattspan.attribution.memory_uses import MemoryUses
from wattspan.attribution.metering import CounterMeters, MeteredPeriod
from wattspan.attribution.missing import MissingEnergy
from wattspan.attribution.parts import WINDOW, PartPowers, attribute_parts
from wattspan.attribution.settlement import SettledInterval, Settlement
from wattspan.attribution.top_n import (
    EXIT_GRACE,
    AveragePower,
    AveragePowers,
    GroupAccounts,
    ListedPayer,
    TopPayers,
    frozen_energies,
)
from wattspan.model import (
    CPU_TIME,
    CPU_TIME_PROXY,
    SECOND,
    AgentStats,
    Attribution,
    Checkpoint,
    Domain,
    DomainAccount,
    Gap,
    GapReason,
    Group,
    HwType,
    IdlePolicy,
    Instant,
    Interval,
    Microjoules,
    Milliwatts,
    PartEnergy,
    Payer,
    PayerInfo,
    Principal,
    ProcessRow,
    Provenance,
    Reading,
    Share,
    Snapshot,
    Tick,
    Usage,
)

RANK_EVERY = 2 * SECOND
ACCEPT_EVERY = SECOND


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """Parameters of the ledger; times in nanoseconds."""

    idle: IdlePolicy = IdlePolicy.SEPARATE
    top: int = 50
    groups: int = 1000  # further groups share the account `other` of their kind
    usage_patience: int = 3 * SECOND  # time for which an interval waits for usage
    absence: int = 10 * SECOND  # a longer time without a reading is a gap
    keep_usage: int = 15 * SECOND
    idle_powers: Mapping[HwType, Milliwatts] = field(default_factory=dict)  # until learned


LEARNING_PAUSE = 10 * SECOND
"""An idle power that was not observed for longer is not being learned."""


@dataclass(slots=True)
class _DomainState:
    """The account of one domain."""

    domain: Domain
    idle_power: IdlePower
    energy: int = 0
    consumers: int = 0
    idle: int = 0
    unattributed: int = 0
    gaps: dict[GapReason, int] = field(default_factory=dict)
    power: AveragePower = field(default_factory=AveragePower)
    settled: Instant | None = None
    settled_reading: Reading | None = None
    unsettled: deque[Reading] = field(default_factory=deque)
    present: bool = True
    uncounted: int = 0  # the part of the energy from outside the cover
    withheld: int = 0
    measured: bool = False
    part_powers: PartPowers = field(default_factory=PartPowers)
    uses: CountedUses = field(default_factory=CountedUses)
    memory_uses: MemoryUses = field(default_factory=MemoryUses)
    observed: int = -LEARNING_PAUSE  # when its idle power was last observed
    origin: Provenance | None = None  # the least reliable one of the energy; None: the present

    def learnable(self, usage: Usage | None) -> Usage | None:
        """``usage``, if it is of parts and known often enough to learn their powers; else None."""
        slow = self.domain.usage_step > WINDOW
        return usage if usage is not None and usage.parts and not slow else None


class Ledger:
    """The accounts of one host."""

    def __init__(
        self,
        settings: LedgerSettings,
        *,
        checkpoint: Checkpoint | None = None,
        boot_id: str = "",
        now: int = 0,
    ) -> None:
        """Begin new accounts, or continue from the ``checkpoint`` of an earlier run.

        Raw readings and processes of the checkpoint are used only within the same boot.
        """
        self._settings = settings
        self._boot_id = boot_id
        self._domains: dict[str, _DomainState] = {}
        self.meters = CounterMeters(settings.absence)
        """The counters of all domains, which meter the ticks."""
        self._settlement = Settlement(settings.usage_patience, settings.keep_usage)
        self._rows = TopPayers(settings.top)
        self._groups = GroupAccounts(settings.groups)
        self._infos: dict[Payer, PayerInfo] = {}
        self._exited: dict[Payer, int] = {}  # in the order of their ends
        self._charges: dict[HwType, dict[Payer, int]] = {}
        self._missing = MissingEnergy()
        self._row_powers: AveragePowers[Payer] = AveragePowers()
        self._ranked = now
        self._accepted = now
        self._sequence = 0
        self._since: Instant | None = None
        if checkpoint is not None:
            self._resume(checkpoint, now)

    # ------------------------------------------------------------------------------- updates

    def apply(
        self, tick: Tick, metered: Sequence[MeteredPeriod] | None = None
    ) -> list[Attribution]:
        """Update all accounts; returns the attributions of the intervals that are now settled.

        ``metered`` are the periods of the tick, if :attr:`meters` have advanced to it already.
        """
        for source, domains in tick.domains.items():
            self._register(source, domains)
        for one in self.meters.advance(tick) if metered is None else metered:
            self._book(one)
        for info in tick.births:
            self._infos[info.payer] = info
            if self._exited.pop(info.payer, None) is not None:
                self._rows.resume(info.payer)  # a cgroup that was made again has the same payer
        for usage in tick.usages:
            self._settlement.add_usage(usage)
            self._missing.used(usage)
        for payer in tick.exits:
            self._rows.exit(payer, tick.at.mono)
            self._exited[payer] = tick.at.mono
        for key in tick.frozen & self._domains.keys():
            self._domains[key].power.reset()
        due = self._settlement.due(tick.at)
        if due and tick.at.mono - self._accepted >= ACCEPT_EVERY:
            self._accepted = tick.at.mono
            states = self._domains.values()
            accept_idle_powers((one.domain, one.idle_power, one.present) for one in states)
        return [self._settle(settled) for settled in due]

    def learns_idle_power(self, now: int) -> bool:
        """True while the idle power of a present domain is learned, which needs short intervals.

        A domain without observations, as of a counter that has failed, learns nothing.
        """
        return any(
            one.present and now - one.observed <= LEARNING_PAUSE and one.idle_power.model.learns
            for one in self._domains.values()
        )

    def knows(self, payer: Payer) -> bool:
        """True if ``payer`` has been described."""
        return payer in self._infos

    def _register(self, source: str, domains: Iterable[Domain]) -> None:
        """Replace the list of domains of ``source``; accounts of absent domains remain."""
        listed = {domain.id: domain for domain in domains}
        for state in self._domains.values():
            if state.domain.source == source and state.domain.id not in listed:
                state.present = False
                state.power.reset()
        for domain in listed.values():
            known = self._domains.get(domain.id)
            if known is None:
                self._domains[domain.id] = _DomainState(domain, IdlePower(self._idle_model(domain)))
                continue
            joins = domain.in_cover and not known.domain.in_cover
            if not _same_hardware(known.domain, domain):
                known.idle_power = IdlePower(self._idle_model(domain))
            elif joins and known.idle_power.model.power is None:
                known.idle_power.model = self._idle_model(domain)
            worst = domain.provenance.worse(known.origin or known.domain.provenance)
            known.origin = None if worst is domain.provenance else worst
            known.domain, known.present = domain, True

    def _idle_model(self, domain: Domain, learned: Milliwatts | None = None) -> IdleModel:
        """A model that begins with the result of an earlier run, or the configured power."""
        if learned is None and domain.in_cover:
            learned = self._settings.idle_powers.get(domain.hw_type)
        return idle_model(domain.hw_type, learned)

    def _book(self, metered: MeteredPeriod) -> None:
        """Book a gap or an interval of an unattributed domain; others wait for settlement."""
        domain, period, reading, *_ = metered
        state = self._domains[domain.id]
        if isinstance(period, Gap):
            state.gaps[period.reason] = state.gaps.get(period.reason, 0) + period.duration
            state.power.reset()
            state.settled = period.end  # its energy stays unknown: nothing waits for it
            if domain.resource is not None and period.reason is not GapReason.SUSPEND:
                self._missing.gap(domain, period.end.mono)
        elif period is not None:
            state.measured = True
            state.power.add(period.energy, period.duration)
            if metered.counts and domain.resource is not None and reading is not None:
                state.unsettled.append(reading)
                self._settlement.add(period, domain.resource)
                return
            state.energy += period.energy
            state.uncounted += 0 if metered.counts else period.energy
            state.settled = period.end
        stands = metered.resumes and period is None  # the earlier run's reading stays the last one
        if reading is not None and not state.unsettled and not stands:
            state.settled_reading = reading

    def _settle(self, settled: SettledInterval) -> Attribution:
        interval, usage, covered = settled
        state = self._domains[interval.domain_id]
        timed = usage if state.domain.method == CPU_TIME else None
        unsure, by_proxy = 0, state.domain.method == CPU_TIME_PROXY
        doubts: Doubts | None = state.uses.powers.doubts if by_proxy else None
        counted = None if timed is None else state.uses.counted(timed)
        if usage is not None and covered * 10 >= interval.duration * 9:
            state.idle_power.model.observe(interval.energy, interval.duration, usage)
            if counted is not None:
                state.uses.learn(interval, counted, self._owner, state.idle_power.evidence)
                state.idle_power.joint = state.uses.idle
            state.observed = interval.end.mono
        idle_due, withheld_due = state.idle_power.due(interval, usage, state.domain.resolution)
        divided = state.learnable(usage) if not withheld_due else None
        if divided is not None:
            usage = state.part_powers.weighed(divided)
        surely = state.idle_power.power is None and state.idle_power.joint is not None
        if counted is not None:
            usage, unsure, doubts = state.uses.divided(counted, surely=surely)
        elif usage is not None and state.domain.hw_type is HwType.MEMORY:
            usage, unsure, doubts = state.memory_uses.divided(usage)
        attribution = attribute(
            interval,
            usage,
            covered=covered,
            idle_due=idle_due,
            withheld_due=withheld_due,
            unsure=unsure,
            policy=self._settings.idle,
            doubts=doubts,
        )
        if divided is not None and covered == interval.duration:
            active = interval.energy - attribution.idle
            state.part_powers.learn(active, interval.duration, divided)
        state.energy += interval.energy
        state.consumers += interval.energy - attribution.idle - attribution.unattributed
        state.idle += attribution.idle
        state.unattributed += attribution.unattributed
        state.withheld += attribution.withheld
        for part in attribution.parts:
            self._book_part(part, interval)
        if state.settled is None or state.settled.mono < interval.end.mono:
            state.settled = interval.end
        while state.unsettled and state.unsettled[0].at.mono <= interval.end.mono:
            state.settled_reading = state.unsettled.popleft()
        if attribution.withheld and settled.usage is not None:  # also of those without any share
            self._missing.withheld(state.domain.hw_type, settled.usage)
        charges = self._charges.setdefault(state.domain.hw_type, {})
        for payer, energy in attribution.shares:
            charges[payer] = charges.get(payer, 0) + energy
        return attribution

    def _owner(self, payer: Payer) -> Principal | None:
        info = self._infos.get(payer)
        return None if info is None else info.principal

    def _book_part(self, part: PartEnergy, interval: Interval) -> None:
        """Book the energy of a part in the account of its own domain, if it has one."""
        state = self._domains.get(part.domain_id)
        if state is None:
            return
        state.measured = True
        self.meters.expect_none(part.domain_id)
        state.energy += part.energy
        state.uncounted += part.energy
        state.consumers += part.consumers
        state.idle += part.idle
        state.unattributed += part.unattributed
        state.power.add(part.energy, interval.duration)
        state.settled = interval.end

    def _post_charges(self, now: int) -> None:
        """Post the charges since the last call to rows and groups.

        Short processes are many, and their groups are few: groups are charged with sums.
        """
        if not self._rows.rows:
            self._rows.list_first(self._charges.values(), now)
        infos = self._infos
        for kind, charges in self._charges.items():
            by_groups: dict[tuple[tuple[Group, ...], Principal | None], int] = {}
            for payer, energy in charges.items():
                self._rows.credit(payer, kind, energy)
                info = infos.get(payer)
                own = (info.groups, info.principal) if info is not None else ((), None)
                by_groups[own] = by_groups.get(own, 0) + energy
            for (groups, principal), energy in by_groups.items():
                self._groups.charge(groups, kind, energy, now, principal)
        self._charges = {}
        for payer, kind in self._missing.take((*self._rows.rows, *infos)):
            self._rows.bound(payer, kind)
            info = infos.get(payer)
            self._groups.bound(info.groups if info is not None else (), kind)

    # ------------------------------------------------------------------------------- reports

    def snapshot(self, now: Instant, host: str) -> Snapshot:
        """All accounts at ``now``; the caller adds the state of other parts of the agent."""
        self._post_charges(now.mono)
        if now.mono - self._ranked >= RANK_EVERY:
            self._ranked = now.mono
            self._rows.rank(now.mono)
            self._forget_exited(now.mono)
        self._update_powers()
        self._sequence += 1
        self._since = self._since or now
        return Snapshot(
            at=now,
            sequence=self._sequence,
            host=host,
            domains=tuple(self._account(state) for state in self._domains.values()),
            processes=tuple([self._row(payer, row) for payer, row in self._rows.rows.items()]),
            other=frozen_energies(self._rows.other),
            retired=frozen_energies(self._rows.retired),
            groups=self._groups.rows(),
            provenance=self._provenance(),
            stats=AgentStats(now),
            since=self._since,
        )

    def checkpoint(self, snapshot: Snapshot) -> Checkpoint:
        """The state from which the next run continues.

        ``snapshot`` must be newer than the last applied tick. Pending energy and the readings
        behind it are left out: the next run measures that energy again.
        """
        return Checkpoint(
            at=snapshot.at,
            boot_id=self._boot_id,
            accounts=tuple(self._remembered(account) for account in snapshot.domains),
            readings=tuple(filter(None, (one.settled_reading for one in self._domains.values()))),
            groups=snapshot.groups,
            processes=snapshot.processes,
            other=snapshot.other,
            retired=snapshot.retired,
            spans=snapshot.spans.rows,
            outside=snapshot.spans.outside,
            footprint=snapshot.footprint,
            since=snapshot.since,
            inference=snapshot.spans.inference,
            inference_idle=snapshot.spans.inference_idle,
            unmetered=snapshot.spans.unmetered,
            inference_host_idle=snapshot.spans.inference_host_idle,
            engines=(*snapshot.spans.engines, *snapshot.spans.former_engines),
        )

    def _remembered(self, account: DomainAccount) -> DomainAccount:
        """The account for the next run, without an idle power that is doubtful."""
        idle = self._domains[account.domain.id].idle_power
        if account.idle_power_doubtful:
            account = replace(account, idle_power=idle.earlier, idle_power_doubtful=False)
        elif not account.idle_power_remembered:
            return account
        return replace(account, idle_power_error=idle.earlier_error)

    def baseline_errors(self) -> dict[str, float]:
        """Half-widths of the 95 % ranges of idle powers in milliwatts, by domain."""
        if self._settings.idle is not IdlePolicy.SEPARATE:
            return {}
        return {key: state.idle_power.error for key, state in self._domains.items()}

    def missing_until(self, payer: Payer) -> dict[HwType, int]:
        """The monotonic time until which energy of a payer was in gaps, by hardware type.

        Safe from any thread.
        """
        return self._missing.until(payer)

    @property
    def late_usages(self) -> int:
        """Number of usages that arrived after the settlement of their interval."""
        return self._settlement.late

    @property
    def unnamed_groups(self) -> int:
        """Number of charges to an account `other` of groups, for want of room."""
        return self._groups.unnamed

    def _account(self, state: _DomainState) -> DomainAccount:
        idle = state.idle_power
        idle_power = idle.power if state.domain.resource is not None else None
        learned = idle_power is not None and not idle.remembered
        return DomainAccount(
            domain=state.domain,
            energy=Microjoules(state.energy),
            consumers=Microjoules(state.consumers),
            idle=Microjoules(state.idle),
            unattributed=Microjoules(state.unattributed),
            pending=Microjoules(self._settlement.pending(state.domain.id)),
            gaps=dict(state.gaps),
            power=state.power.power if state.present else None,
            idle_power=idle_power,
            settled=state.settled,
            present=state.present,
            withheld=Microjoules(state.withheld),
            idle_power_remembered=idle.remembered,
            idle_power_error=Milliwatts(math.ceil(idle.error)) if learned else None,
            idle_power_doubtful=learned and idle.doubtful,
            uncounted=Microjoules(state.uncounted),
            measured=state.measured,
            silent=self.meters.silent(state.domain.id),
            origin=state.origin,
            learned=state.domain.method == CPU_TIME and state.uses.powers.stated,
            counters=state.uses.counters.recent or state.memory_uses.counters.recent,
        )

    def _row(self, payer: Payer, listed: ListedPayer) -> ProcessRow:
        """The row of a payer; an unchanged one is the same object as in the last snapshot."""
        row, power, info = listed.shown, self._row_powers.of(payer), self._infos.get(payer)
        if row is None or row.power is not power or row.info is not info:
            row = listed.shown = ProcessRow(
                info or PayerInfo(payer, "unknown"),
                frozen_energies(listed.energy),
                power,
                alive=listed.exited is None,
                bounded=frozenset(listed.bounded),
            )
        return row

    def _provenance(self) -> dict[HwType, Provenance]:
        """The provenance of a sum over one hardware type: the worst of its parts."""
        worst: dict[HwType, Provenance] = {}
        for state in self._domains.values():
            kind, one = state.domain.hw_type, state.origin or state.domain.provenance
            if state.domain.in_cover or state.energy > state.uncounted:
                worst[kind] = one.worse(worst.get(kind, one))
        return worst

    def _update_powers(self) -> None:
        """Update the powers of rows and groups, each hardware type up to its watermark."""
        for kind in HwType:
            settled = [
                state.settled.mono
                for state in self._domains.values()
                if state.domain.hw_type is kind
                and state.domain.resource is not None
                and state.present
                and state.settled is not None
            ]
            if not settled:
                continue
            at, rows = min(settled), self._rows.rows.items()
            self._row_powers.update(kind, at, {p: row.energy.get(kind, 0) for p, row in rows})
            self._groups.update_powers(kind, at)

    def _forget_exited(self, now: int) -> None:
        """Forget exited payers once nothing can be charged to them and no row shows them."""
        long_ago = takewhile(lambda one: now - one[1] > EXIT_GRACE, self._exited.items())
        for payer, _ in [*long_ago]:
            del self._exited[payer]
            if payer in self._rows.rows:
                self._exited[payer] = now
            else:
                self._infos.pop(payer, None)
                self._missing.forget(payer)

    def _resume(self, checkpoint: Checkpoint, now: int) -> None:
        # Checkpoints of older releases have no `since`: their accounts are at least as old as they.
        self._since = checkpoint.since or checkpoint.at
        same_boot = bool(self._boot_id) and checkpoint.boot_id == self._boot_id
        readings = {r.domain_id: r for r in checkpoint.readings} if same_boot else {}
        for account in checkpoint.accounts:
            domain, last = account.domain, readings.get(account.domain.id)
            power, error = account.idle_power, account.idle_power_error
            self.meters.resume(domain, last)
            self._domains[domain.id] = _DomainState(
                domain,
                IdlePower(self._idle_model(domain, power), power, earlier_error=error),
                account.energy,
                account.consumers,
                account.idle,
                account.unattributed,
                dict(account.gaps),
                settled_reading=last,
                present=False,
                withheld=account.withheld,
                uncounted=account.energy - account.counted,
                measured=account.measured and account.energy > 0,
                origin=account.origin,
            )
        self._rows = TopPayers(self._settings.top, checkpoint.other, checkpoint.retired)
        for row in checkpoint.processes:
            if same_boot and row.alive and len(self._rows.rows) < self._settings.top:
                self._infos[row.info.payer] = row.info
                self._rows.restore(row.info.payer, row.energy, now, row.bounded)
            else:
                self._rows.retire(row.energy)
        self._groups = GroupAccounts(self._settings.groups, checkpoint.groups, now)


def _same_hardware(before: Domain, now: Domain) -> bool:
    """True if an idle power of ``before`` applies to ``now``.

    The domain may be of an earlier boot, of another machine with the same store, or emulated.
    """
    models = {before.model, now.model} - {""}
    return before.provenance is now.provenance and len(models) <= 1


def attribute(
    interval: Interval,
    usage: Usage | None,
    *,
    covered: int | None = None,
    idle_due: int = 0,
    withheld_due: int = 0,
    unsure: int = 0,
    policy: IdlePolicy = IdlePolicy.SEPARATE,
    doubts: Doubts | None = None,
) -> Attribution:
    """Divide the energy of one interval among consumers, idle and unattributed.

    Energy is divided by largest remainder in integer microjoules, so nothing is lost by rounding;
    active energy without a known user is *unattributed*.

    Idle energy is ``idle_due`` microjoules, at most the whole. Without a known baseline it is 0,
    and ``withheld_due`` is the energy that may be idle: it is *unattributed*. So is the part of
    ``unsure`` nanoseconds of unclaimed use, which may be idle too. Active energy, the rest, is
    divided by ``spent``; the part of unclaimed use is unattributed, as is the active energy of the
    time beyond the ``covered`` nanoseconds of ``usage``. Idle energy is an account of its own, or
    is divided by ``policy`` among the present payers. ``doubts`` finds the possible errors of
    active energies, where use does not tell them.
    """
    duration = interval.duration
    idle = min(int(interval.energy), idle_due)
    withheld = Microjoules(min(interval.energy - idle, withheld_due))
    active = interval.energy - idle - withheld
    if usage is None:
        rest = Microjoules(active + withheld)
        return Attribution(interval, (), Microjoules(idle), rest, withheld)

    known = active if covered is None else active * min(covered, duration) // duration
    if usage.parts:
        return attribute_parts(
            interval, usage, idle=idle, withheld=withheld, known=known, policy=policy
        )
    payers, energies, idles = divide_among_payers(usage, known, idle, policy)
    unattributed = withheld + active - sum(energies)
    if unsure:
        unpaid = (known - sum(energies)) * unsure // usage.unclaimed
        withheld = Microjoules(withheld + unpaid)
    errors = doubts(known, zip(payers, energies, strict=False)) if doubts is not None else ()
    if idles:
        energies, idle = list(map(add, energies, idles)), 0
    shares = tuple(map(Share._make, compress(zip(payers, energies, strict=True), energies)))
    found = tuple(compress(errors, energies)) if any(errors) else ()
    parts = Microjoules(idle), Microjoules(unattributed)
    return Attribution(interval, shares, *parts, withheld, doubts=found)
