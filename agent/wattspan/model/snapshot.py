"""What the host's energy cost, and what it weighed on the climate, in whole billionths.

What everybody is shown: the accounts of domains, processes, groups and spans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from wattspan.model.consumers import Consumer, Group, PayerInfo
from wattspan.model.health import GpuStatus, SourceHealth
from wattspan.model.measurements import (
    Domain,
    GapReason,
    HwType,
    Instant,
    Microjoules,
    Milliwatts,
    ModelEnum,
    Nanoseconds,
    Provenance,
    Reading,
)
from wattspan.model.tuning import TuningAccounts


class RateOrigin(ModelEnum):
    """Where a rate per kilowatt-hour comes from; each is as true as who wrote it."""

    CONSTANT = "constant"  # one figure in the configuration
    SCHEDULE = "schedule"  # a file that says it by the time of day
    METRIC = "metric"  # asked of a server, or read from a file that somebody else writes


@dataclass(frozen=True, slots=True)
class RatedEnergy:
    """The energy of the cover, weighed by something that a kilowatt-hour costs or emits.

    ``unit`` is a currency such as ``"EUR"``, or ``"g"`` (grams of CO2 equivalent). ``rate`` is
    what a kilowatt-hour weighs now, in billionths of ``unit``; None while it is not known.
    No rate is below zero: where a price is, it counts as not known, for a total must not fall.
    ``total``, billionths of ``unit``, and ``unknown``, the energy that was spent while no rate was
    known and is in no total, never fall: each joule that the cover has spent since somebody first
    said what a kilowatt-hour is worth, in this unit, is weighed once, at the rate in force when it
    was booked, or is in ``unknown``.
    """

    unit: str
    origin: RateOrigin
    rate: int | None = None
    total: int = 0
    unknown: Microjoules = Microjoules(0)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Money and carbon; each None where nobody has said what a kilowatt-hour is worth."""

    cost: RatedEnergy | None = None
    carbon: RatedEnergy | None = None


_FROZEN: Mapping[str, int] = MappingProxyType({})
_NO_EXEMPLARS: Mapping[HwType, Exemplar] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class DomainAccount:
    """What is known of one domain since it was first seen, settled up to ``settled``.

    For an attributed domain ``energy == consumers + idle + unattributed`` to the microjoule;
    ``pending`` was measured after that and is in none of them yet. For a domain that is only
    counted the three are 0 and ``attributed`` is False.
    """

    domain: Domain
    energy: Microjoules = Microjoules(0)
    consumers: Microjoules = Microjoules(0)
    idle: Microjoules = Microjoules(0)
    unattributed: Microjoules = Microjoules(0)
    pending: Microjoules = Microjoules(0)
    gaps: Mapping[GapReason, int] = field(default_factory=dict)  # reason to nanoseconds
    power: Milliwatts | None = None  # mean over the last second or so; None: not known now
    idle_power: Milliwatts | None = None  # the learned baseline; None: not learned
    settled: Instant | None = None
    present: bool = True  # False: the domain is gone, its account stays

    @property
    def attributed(self) -> bool:
        return self.domain.resource is not None


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One listed process's energy by hardware type, and its recent power."""

    info: PayerInfo
    energy: Mapping[HwType, Microjoules]
    power: Mapping[HwType, Milliwatts]
    alive: bool = True


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group's energy by hardware type, the dead included, and its recent power."""

    group: Group
    energy: Mapping[HwType, Microjoules]
    power: Mapping[HwType, Milliwatts]


class Exemplar(NamedTuple):
    """One span that stands for a series: where to look, what it spent, and when it ended."""

    trace: str  # 32 hexadecimal digits
    span: str  # 16
    energy: Microjoules  # exclusive, of the series' hardware type
    wall: int  # Unix nanoseconds of the span's end


@dataclass(frozen=True, slots=True)
class SpanRow:
    """What the spans of one name in one service spent: exclusive energy, so rows add up.

    ``service`` and ``name`` may both be ``"other"``: the row of all names for which there was
    no room. ``tokens`` are by direction, ``input`` and ``output``.
    """

    service: str
    name: str
    energy: Mapping[HwType, Microjoules]
    time: Nanoseconds = Nanoseconds(0)
    count: int = 0
    tokens: Mapping[str, int] = field(default_factory=lambda: _FROZEN)
    exemplars: Mapping[HwType, Exemplar] = field(default_factory=lambda: _NO_EXEMPLARS)


@dataclass(frozen=True, slots=True)
class SpanAccounts:
    """All that is known of spans since the agent began; none of it ever falls.

    For each service that sends spans ``outside`` is what its processes spent while no span was
    open. ``outcomes`` counts what became of spans, by reason; ``received`` spans are those that
    a receiver accepted, ``refused`` those it did not, by reason, and ``forwarded`` and
    ``forward_drops`` what went on to the user's collector and what could not. Senders of
    ``deferred`` spans were asked to come again; ``forward_repeats`` went on once more although the
    collector may have had them. Of processes that announce their spans ``announcers`` are
    connected now, ``announcers_refused`` were not let in or put out, and ``announcements_lost``
    were overwritten before they could be read. ``senders`` are the processes whose spans are those
    of a service, as of now.
    """

    rows: tuple[SpanRow, ...] = ()
    outside: Mapping[tuple[str, HwType], Microjoules] = field(default_factory=dict)
    outcomes: Mapping[str, int] = field(default_factory=dict)
    received: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    forwarded: int = 0
    forward_drops: Mapping[str, int] = field(default_factory=dict)
    forward_queue: int = 0  # bytes that wait for the collector
    open: int = 0  # spans announced by a start record and not ended yet
    deferred: int = 0
    forward_repeats: int = 0
    announcers: int = 0
    announcers_refused: Mapping[str, int] = field(default_factory=dict)
    announcements_lost: int = 0
    senders: Mapping[str, tuple[Consumer, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AgentStats:
    """What the agent spends and drops."""

    started: Instant
    ticks: int = 0
    missed_ticks: int = 0
    cpu_seconds: float = 0.0
    rss_bytes: int | None = None
    processes: int = 0
    late_usages: int = 0  # usage that arrived after its interval had been settled
    unnamed_groups: int = 0  # charges to a group's `other` for want of room
    dropped_history: int = 0  # timeline entries pushed out by the memory bound
    exporter_drops: Mapping[str, int] = field(default_factory=dict)
    refusals: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Who was turned away, by listener and reason."""


NO_TUNING = TuningAccounts()
NO_FOOTPRINT = Footprint()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole known world at one instant. Readers share it; nothing ever changes it.

    Per hardware type, ``sum(row.energy for processes) + other + retired`` equals the consumers'
    energy of that type's attributed domains: ``other`` is what unlisted processes spent,
    ``retired`` what processes spent that were listed once. Neither ever falls. ``since`` is when
    the books were begun, by this run of the agent or an earlier one.
    """

    at: Instant
    sequence: int
    host: str
    domains: tuple[DomainAccount, ...] = ()
    processes: tuple[ProcessRow, ...] = ()
    other: Mapping[HwType, Microjoules] = field(default_factory=dict)
    retired: Mapping[HwType, Microjoules] = field(default_factory=dict)
    groups: tuple[GroupRow, ...] = ()
    provenance: Mapping[HwType, Provenance] = field(default_factory=dict)
    gpus: tuple[GpuStatus, ...] = ()
    health: tuple[SourceHealth, ...] = ()
    stats: AgentStats = field(default_factory=lambda: AgentStats(Instant(0, 0)))
    spans: SpanAccounts = SpanAccounts()
    tuning: TuningAccounts = field(default_factory=lambda: NO_TUNING)
    footprint: Footprint = NO_FOOTPRINT
    since: Instant | None = None  # None: not told

    def account(self, domain_id: str) -> DomainAccount:
        """The account of one domain; KeyError if there is none."""
        for account in self.domains:
            if account.domain.id == domain_id:
                return account
        raise KeyError(domain_id)

    @property
    def cover(self) -> tuple[DomainAccount, ...]:
        """The accounts that may be summed."""
        return tuple(account for account in self.domains if account.domain.in_cover)

    @property
    def emulated(self) -> bool:
        return Provenance.EMULATED in {a.domain.provenance for a in self.domains}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The ledger's books as they are carried over a restart: closed by one run, opened by the next.

    Everything in it belongs to the one instant ``at``. ``readings`` are the readings up to which
    the accounts are settled, so what was pending then is measured again by the next run: nothing
    is lost and nothing counted twice. They, and the identity of ``processes``, mean something
    only within the boot ``boot_id``; the totals outlive it. As in a Snapshot, for each hardware
    type ``sum(row.energy for processes) + other + retired`` is what the consumers of its
    attributed domains spent. ``spans`` and ``outside`` are those of SpanAccounts. ``since`` is when
    the books were begun; None in those of an older release.
    """

    at: Instant
    boot_id: str
    accounts: tuple[DomainAccount, ...] = ()
    readings: tuple[Reading, ...] = ()
    groups: tuple[GroupRow, ...] = ()
    processes: tuple[ProcessRow, ...] = ()
    other: Mapping[HwType, Microjoules] = field(default_factory=dict)
    retired: Mapping[HwType, Microjoules] = field(default_factory=dict)
    spans: tuple[SpanRow, ...] = ()
    outside: Mapping[tuple[str, HwType], Microjoules] = field(default_factory=dict)
    footprint: Footprint = NO_FOOTPRINT
    since: Instant | None = None
