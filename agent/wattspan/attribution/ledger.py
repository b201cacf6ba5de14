"""The double-entry book: every joule a counter showed stands in exactly one account.

For each attributed domain ``energy = consumers + idle + unattributed``, always; the consumers'
side is booked once more by process and by group. An interval is booked when it is *settled*, all
at once, so that every snapshot balances; until then it is pending.

The ledger is a plain state machine. It is told what was read, who did what and what time it is;
it asks nothing of the world.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from wattspan.attribution.baseline import IdleModel, idle_model
from wattspan.attribution.energy import AveragePower, AveragePowers, CounterMeter
from wattspan.attribution.settlement import SettledInterval, Settlement, attribute
from wattspan.attribution.top_n import (
    EXIT_GRACE,
    GroupAccounts,
    ListedPayer,
    TopPayers,
    frozen_energies,
)
from wattspan.model import (
    SECOND,
    AgentStats,
    Attribution,
    Checkpoint,
    Domain,
    DomainAccount,
    Gap,
    GapReason,
    GpuStatus,
    HwType,
    IdlePolicy,
    Instant,
    Interval,
    Microjoules,
    Payer,
    PayerInfo,
    ProcessRow,
    Provenance,
    Reading,
    Snapshot,
    SourceHealth,
    SpanAccounts,
    TuningAccounts,
    Usage,
    energy_at,
)

RANK_EVERY = 2 * SECOND


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """How the ledger keeps its books. Times in nanoseconds."""

    idle: IdlePolicy = IdlePolicy.SEPARATE
    top: int = 50
    groups: int = 1000  # beyond, groups share the `other` of their kind
    usage_patience: int = 3 * SECOND  # how long an interval waits for usage
    absence: int = 10 * SECOND  # without a reading for longer, time is a gap
    keep_usage: int = 15 * SECOND


@dataclass(slots=True)
class _DomainState:
    """Everything about one domain."""

    domain: Domain
    meter: CounterMeter
    idle_model: IdleModel
    energy: int = 0
    consumers: int = 0
    idle: int = 0
    unattributed: int = 0
    gaps: dict[GapReason, int] = field(default_factory=dict)
    rate: AveragePower = field(default_factory=AveragePower)
    settled: Instant | None = None
    settled_reading: Reading | None = None
    unsettled: deque[Reading] = field(default_factory=deque)
    present: bool = True
    resumed: bool = False  # the meter's last reading is from an earlier life of the agent
    idle_owed: int = 0

    def take_idle(self, interval: Interval) -> int:
        """What idle takes of the interval: its draw over it, and what it is still owed.

        A counter that moves in steps shows nothing in one interval and twice as much in the
        next. What idle could not take from the first it takes from the second, or half of it
        would be charged to others; but it is owed no more than two steps, so that a device
        which really draws less than its baseline for a while makes nobody else pay for it.
        """
        power = self.idle_model.power
        if not power:
            return 0
        due = energy_at(power, interval.duration) + self.idle_owed
        most = energy_at(power, 2 * self.domain.resolution)
        self.idle_owed = min(max(0, due - interval.energy), most)
        return due


class Ledger:
    """The books of one host."""

    def __init__(
        self,
        rules: LedgerSettings,
        *,
        opening: Checkpoint | None = None,
        boot_id: str = "",
        now: int = 0,
    ) -> None:
        """Begin new books, or go on with those that an earlier run closed.

        The raw readings and processes of ``opening`` count only within one and the same boot.
        """
        self._rules = rules
        self._boot_id = boot_id
        self._books: dict[str, _DomainState] = {}
        self._settlement = Settlement(rules.usage_patience, rules.keep_usage)
        self._listing = TopPayers(rules.top)
        self._groups = GroupAccounts(rules.groups)
        self._infos: dict[Payer, PayerInfo] = {}
        self._dead: deque[tuple[int, Payer]] = deque()
        self._charges: dict[HwType, dict[Payer, int]] = {}
        self._row_powers: AveragePowers[Payer] = AveragePowers()
        self._ranked = now
        self._sequence = 0
        self._since: Instant | None = None
        if opening is not None:
            self._open(opening, now)

    # ------------------------------------------------------------------------------ being told

    def register(self, source: str, domains: Iterable[Domain]) -> None:
        """Learn which domains ``source`` knows now; those it knew and no longer does are gone."""
        known = {domain.id: domain for domain in domains}
        for book in self._books.values():
            if book.domain.source == source and book.domain.id not in known:
                book.present = False
                book.rate.unknown()
        for domain in known.values():
            book_ = self._books.get(domain.id)
            if book_ is None:
                meter = CounterMeter(domain, self._rules.absence)
                self._books[domain.id] = _DomainState(domain, meter, idle_model(domain.hw_type))
            else:
                book_.domain = domain
                book_.present = True
                book_.meter.redefine(domain)

    def read(self, readings: Iterable[Reading]) -> None:
        """Take readings of registered domains; others are ignored."""
        for reading in readings:
            book = self._books.get(reading.domain_id)
            if book is None:
                continue
            if book.resumed:  # epochs are counted anew by each run of the agent
                book.resumed = False
                last = book.meter.last
                if last is not None:
                    book.meter = CounterMeter(
                        book.domain, self._rules.absence, last._replace(epoch=reading.epoch)
                    )
            self._book_stretch(book, book.meter.advance(reading), reading)

    def use(self, usages: Iterable[Usage]) -> None:
        """Take what was done with resources."""
        for usage in usages:
            self._settlement.use(usage)

    def meet(self, infos: Iterable[PayerInfo]) -> None:
        """Learn who payers are, before or in the same turn as their first usage."""
        for info in infos:
            self._infos[info.payer] = info

    def knows(self, payer: Payer) -> bool:
        return payer in self._infos

    def leave(self, payers: Iterable[Payer], now: Instant) -> None:
        """These payers are dead; what they still owe may settle later."""
        self._fold(now.mono)
        for payer in payers:
            self._listing.leave(payer, now.mono)
            self._dead.append((now.mono, payer))

    def settle(self, now: Instant) -> list[Attribution]:
        """Book everything that is due, and return it for the timeline."""
        for book in self._books.values():
            self._book_stretch(book, book.meter.absent(now), None)
        return [self._post(settled) for settled in self._settlement.due(now)]

    # -------------------------------------------------------------------------------- booking

    def _book_stretch(
        self, book: _DomainState, stretch: Interval | Gap | None, to: Reading | None
    ) -> None:
        if isinstance(stretch, Gap):
            book.gaps[stretch.reason] = book.gaps.get(stretch.reason, 0) + stretch.duration
            book.rate.unknown()
            book.settled = stretch.end  # nothing will ever be known of it: others need not wait
        elif stretch is not None:
            book.rate.add(stretch.energy, stretch.duration)
            if book.domain.resource is not None and to is not None:
                book.unsettled.append(to)
                self._settlement.await_usage(stretch, book.domain.resource)
                return
            book.energy += stretch.energy
            book.settled = stretch.end
        if to is not None and not book.unsettled:
            book.settled_reading = to

    def _post(self, settled: SettledInterval) -> Attribution:
        interval, usage, covered = settled
        book = self._books[interval.domain_id]
        if usage is not None and covered * 10 >= interval.duration * 9:
            book.idle_model.observe(interval.energy, interval.duration, usage)
        attribution = attribute(
            interval,
            usage,
            covered=covered,
            idle_due=book.take_idle(interval),
            policy=self._rules.idle,
        )
        spent = interval.energy - attribution.idle - attribution.unattributed
        book.energy += interval.energy
        book.consumers += spent
        book.idle += attribution.idle
        book.unattributed += attribution.unattributed
        if book.settled is None or book.settled.mono < interval.end.mono:
            book.settled = interval.end
        while book.unsettled and book.unsettled[0].at.mono <= interval.end.mono:
            book.settled_reading = book.unsettled.popleft()
        charges = self._charges.setdefault(book.domain.hw_type, {})
        for payer, energy in attribution.shares:
            charges[payer] = charges.get(payer, 0) + energy
        return attribution

    def _fold(self, now: int) -> None:
        """Carry what was charged since the last fold to rows and groups."""
        for kind, charges in self._charges.items():
            for payer, energy in charges.items():
                self._listing.credit(payer, kind, energy)
                self._groups.charge(self._infos.get(payer), kind, energy, now)
        self._charges = {}

    # ------------------------------------------------------------------------------- showing

    def snapshot(
        self,
        now: Instant,
        host: str,
        *,
        gpus: tuple[GpuStatus, ...] = (),
        health: tuple[SourceHealth, ...] = (),
        stats: AgentStats | None = None,
        spans: SpanAccounts | None = None,
        tuning: TuningAccounts | None = None,
    ) -> Snapshot:
        """The books as they stand, for everybody to read."""
        self._fold(now.mono)
        if now.mono - self._ranked >= RANK_EVERY or not self._listing.rows:
            self._ranked = now.mono
            self._listing.rank(now.mono)
            self._bury(now.mono)
        self._rate()
        self._sequence += 1
        self._since = self._since or now
        return Snapshot(
            at=now,
            sequence=self._sequence,
            host=host,
            domains=tuple(self._account(book) for book in self._books.values()),
            processes=tuple(self._row(payer, row) for payer, row in self._listing.rows.items()),
            other=self._listing.other,
            retired=self._listing.retired,
            groups=self._groups.rows(),
            provenance=self._provenance(),
            gpus=gpus,
            health=health,
            stats=stats if stats is not None else AgentStats(now),
            spans=spans if spans is not None else SpanAccounts(),
            tuning=tuning if tuning is not None else TuningAccounts(),
            since=self._since,
        )

    @property
    def late_usages(self) -> int:
        """How often usage came after its interval had been settled."""
        return self._settlement.late

    @property
    def unnamed_groups(self) -> int:
        """How often a group was charged as `other` for want of room."""
        return self._groups.unnamed

    def _account(self, book: _DomainState) -> DomainAccount:
        return DomainAccount(
            domain=book.domain,
            energy=Microjoules(book.energy),
            consumers=Microjoules(book.consumers),
            idle=Microjoules(book.idle),
            unattributed=Microjoules(book.unattributed),
            pending=Microjoules(self._settlement.pending(book.domain.id)),
            gaps=dict(book.gaps),
            power=book.rate.power if book.present else None,
            idle_power=book.idle_model.power if book.domain.resource is not None else None,
            settled=book.settled,
            present=book.present,
        )

    def _row(self, payer: Payer, row: ListedPayer) -> ProcessRow:
        return ProcessRow(
            self._infos.get(payer) or PayerInfo(payer, "unknown"),
            frozen_energies(row.energy),
            self._row_powers.of(payer),
            alive=row.died is None,
        )

    def _provenance(self) -> dict[HwType, Provenance]:
        """What may be said of a sum over one hardware type: the worst of its parts."""
        worst: dict[HwType, Provenance] = {}
        for book in self._books.values():
            kind, one = book.domain.hw_type, book.domain.provenance
            if book.domain.in_cover:
                worst[kind] = one.worse(worst[kind]) if kind in worst else one
        return worst

    def _rate(self) -> None:
        """Bring the powers of rows and groups up to date, one hardware type at a time."""
        for kind in HwType:
            settled = [
                book.settled.mono
                for book in self._books.values()
                if book.domain.hw_type is kind
                and book.domain.resource is not None
                and book.present
                and book.settled is not None
            ]
            if not settled:
                continue
            at = min(settled)
            rows = self._listing.rows.items()
            self._row_powers.update(kind, at, {p: row.energy.get(kind, 0) for p, row in rows})
            self._groups.settle(kind, at)

    def _bury(self, now: int) -> None:
        """Forget who the dead were, once nothing can be charged to them and no row names them.

        A host that runs a thousand short commands a second has as many dead as it has seconds
        to remember them.
        """
        while self._dead and now - self._dead[0][0] > EXIT_GRACE:
            _, payer = self._dead.popleft()
            if payer in self._listing.rows:
                self._dead.append((now, payer))
            else:
                self._infos.pop(payer, None)

    # -------------------------------------------------------------------- opening and closing

    def close(self, now: Instant, shot: Snapshot | None = None) -> Checkpoint:
        """The books as the next run can open them; the ledger itself goes on.

        ``shot`` saves some work: a snapshot taken since the ledger was last told anything.

        What is pending is left out, and so are the readings behind it: the next run measures
        that energy again.
        """
        shot = shot or self.snapshot(now, "")
        return Checkpoint(
            at=now,
            boot_id=self._boot_id,
            accounts=shot.domains,
            readings=tuple(
                book.settled_reading
                for book in self._books.values()
                if book.settled_reading is not None
            ),
            groups=shot.groups,
            processes=shot.processes,
            other=shot.other,
            retired=shot.retired,
            spans=shot.spans.rows,
            outside=shot.spans.outside,
            footprint=shot.footprint,
            since=shot.since,
        )

    def _open(self, opening: Checkpoint, now: int) -> None:
        # The books of older releases do not tell: they are at least as old as their closing.
        self._since = opening.since or opening.at
        same_boot = bool(self._boot_id) and opening.boot_id == self._boot_id
        readings = {r.domain_id: r for r in opening.readings} if same_boot else {}
        for account in opening.accounts:
            domain, last = account.domain, readings.get(account.domain.id)
            self._books[domain.id] = _DomainState(
                domain,
                CounterMeter(domain, self._rules.absence, last),
                idle_model(domain.hw_type, account.idle_power),
                account.energy,
                account.consumers,
                account.idle,
                account.unattributed,
                dict(account.gaps),
                settled_reading=last,
                present=False,
                resumed=last is not None,
            )
        self._listing = TopPayers(self._rules.top, opening.other, opening.retired)
        for row in opening.processes:
            if same_boot and row.alive and len(self._listing.rows) < self._rules.top:
                self._infos[row.info.payer] = row.info
                self._listing.restore(row.info.payer, row.energy, now)
            else:
                self._listing.retire(row.energy)
        self._groups = GroupAccounts(self._rules.groups, opening.groups, now)
