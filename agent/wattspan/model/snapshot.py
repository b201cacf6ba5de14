"""Snapshots and checkpoints: accounts, health of sources, status of devices, place in a fleet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from wattspan.model.consumers import Group, PayerInfo
from wattspan.model.measurements import (
    COUNTERS,
    LEARNED_POWERS,
    Certainty,
    Domain,
    GapReason,
    HwType,
    Instant,
    Microjoules,
    Milliwatts,
    ModelEnum,
    Provenance,
    Reading,
)
from wattspan.model.spans import EngineRow, InferenceRow, SpanAccounts, SpanRow, UnmeteredRow
from wattspan.model.tuning import TuningAccounts
from wattspan.util.text import printable


class Trouble(ModelEnum):
    """The class of a failure."""

    DENIED = "denied"  # missing permission
    ABSENT = "absent"  # missing hardware, driver or file
    RETRY = "retry"  # a temporary failure, which is retried
    STUCK = "stuck"  # a call does not return
    MALFORMED = "malformed"  # invalid response
    SUSPENDED = "suspended"  # no fault: the kernel powers it down while nobody uses it


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that could not be read or written, with cause and remedy."""

    source: str
    thing: str
    trouble: Trouble
    cause: str
    remedy: str = ""
    domain_id: str | None = None
    verb: str = "read"  # the operation that failed

    def __str__(self) -> str:
        sentence = f"Cannot {self.verb} {self.thing}: {self.cause}."
        # Texts of drivers, files and other programs must not forge lines of a log.
        return printable(f"{sentence} {self.remedy}" if self.remedy else sentence)


@dataclass(frozen=True, slots=True)
class SourceHealth:
    """The state of a source or another part; ``up`` is False if it produces nothing."""

    source: str
    up: bool
    reads: int
    failed: int
    failures: tuple[Failure, ...] = ()
    read_nanoseconds: int = 0  # duration of the last read
    calls: int | None = None  # of a driver's library; None of a source without one


@dataclass(frozen=True, slots=True)
class PowerLimits:
    """The power limits of a device, in milliwatts; None if unknown."""

    minimum: Milliwatts | None = None
    default: Milliwatts | None = None
    maximum: Milliwatts | None = None
    requested: Milliwatts | None = None
    enforced: Milliwatts | None = None


@dataclass(frozen=True, slots=True)
class GpuStatus:
    """The status of a GPU; None if unknown."""

    domain_id: str
    at: Instant
    power_average: Milliwatts | None = None
    power_instant: Milliwatts | None = None
    limits: PowerLimits = PowerLimits()
    sm_clock_hz: int | None = None
    memory_clock_hz: int | None = None
    utilisation: float | None = None  # 0..1
    memory_utilisation: float | None = None  # 0..1
    temperature_celsius: int | None = None
    memory_used: int | None = None  # bytes
    memory_total: int | None = None
    throttled: Mapping[str, int] = field(default_factory=dict)  # reason to total ns
    throttling: tuple[str, ...] | None = None  # reasons in force now
    mig: bool | None = None
    partition_mode: str | None = None  # of a board that can be divided otherwise than by MIG
    integrated_energy: Microjoules | None = None  # from power, to check the counter
    counter_energy: Microjoules | None = None  # in the same period; None without a counter
    energy_basis: str = ""  # of the energy that counts: "counter" or "power"; "" while unknown
    energy_disagrees: bool | None = None  # both by more than their errors; None before a minute
    model: str = ""
    driver: str = ""
    index: int | None = None  # of the driver; may change with a reboot


class DevicePod(NamedTuple):
    """A container of a Kubernetes pod to which a device is allotted, alone or with others."""

    device: str  # as the device plugin names it: the UUID of a GPU or of a MIG instance
    namespace: str
    pod: str
    container: str


MAX_RATE = 1_000_000
"""The largest valid rate, in units per kilowatt-hour."""


class RateOrigin(ModelEnum):
    """The origin of a rate per kilowatt-hour."""

    CONSTANT = "constant"  # the configuration
    SCHEDULE = "schedule"  # a tariff file, by time of day
    METRIC = "metric"  # a query of a server, or a file that another program writes


@dataclass(frozen=True, slots=True)
class RatedEnergy:
    """The cost or the emissions of the cover's energy.

    ``unit`` is a currency such as ``"EUR"``, or ``"g"`` (grams of CO2 equivalent). ``rate`` is the
    present rate per kilowatt-hour in billionths of ``unit``; None if unknown. A negative price
    counts as unknown, because totals must not fall. ``total`` is in billionths of ``unit``;
    ``unknown`` is the energy that was booked without a known rate. Neither falls, and each joule of
    the cover since the first rate in this unit is in exactly one of them.
    """

    unit: str
    origin: RateOrigin
    rate: int | None = None
    total: int = 0
    unknown: Microjoules = Microjoules(0)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Cost and emissions; None without a configured rate."""

    cost: RatedEnergy | None = None
    carbon: RatedEnergy | None = None


class BaselineQuality(ModelEnum):
    """The origin of the idle power by which the energy of a domain is divided."""

    UNKNOWN = "baseline_unknown"  # the energy of consumers has only a lower bound
    DOUBTFUL = "baseline_doubtful"  # learned under load, and contradicted by other evidence
    REMEMBERED = "baseline_remembered"  # of an earlier run on the same CPU model, or configured
    LEARNED = "baseline_learned"


def energy_certainty(energy: int, gaps: Mapping[GapReason, int]) -> Certainty:
    """The certainty of the energy of a time with ``gaps``; a lower bound of 0 is unknown."""
    if not any(gaps.values()):
        return Certainty.KNOWN
    return Certainty.LOWER_BOUND if energy else Certainty.UNKNOWN


def consumers_certainty(
    energy: Certainty, gaps: Mapping[GapReason, int], withheld: int
) -> Certainty:
    """The certainty of the consumers' part of energy with the certainty ``energy``.

    No consumer runs while the host is suspended.
    """
    if energy is Certainty.UNKNOWN:
        return energy
    awake = any(time for reason, time in gaps.items() if reason is not GapReason.SUSPEND)
    return Certainty.LOWER_BOUND if awake or withheld else Certainty.KNOWN


@dataclass(frozen=True, slots=True)
class DomainAccount:
    """The account of one domain since its first reading, up to ``settled``.

    For an attributed domain ``energy == consumers + idle + unattributed`` to the microjoule;
    ``pending`` is later energy that is in none of them yet. For a part of an attributed domain (a
    MIG instance) the three are its part of that domain's; for other domains they are 0.
    ``withheld`` is the part of ``unattributed`` that was charged to no consumer because the idle
    power was unknown or doubtful. ``idle_power_error`` is the half-width of the 95 % range of a
    learned idle power; None for another one. ``idle_power_doubtful``: it is contradicted by an
    equal device, an earlier run or the range of all devices, which this range includes.
    ``uncounted`` is the part of ``energy`` that was measured while the domain was outside the
    cover; None if it has always been in its present place.
    ``origin`` is the least reliable provenance of ``energy``; None if it is that of the domain.
    ``learned``: CPU time is weighed by the learned powers of consumers, at present; ``counters``:
    performance counters tell the use, whether it is weighed or not.
    """

    domain: Domain
    energy: Microjoules = Microjoules(0)
    consumers: Microjoules = Microjoules(0)
    idle: Microjoules = Microjoules(0)
    unattributed: Microjoules = Microjoules(0)
    pending: Microjoules = Microjoules(0)
    gaps: Mapping[GapReason, int] = field(default_factory=dict)  # reason to nanoseconds
    power: Milliwatts | None = None  # mean of about the last second; None: unknown
    idle_power: Milliwatts | None = None  # the baseline; None: unknown
    settled: Instant | None = None
    present: bool = True  # False: the domain is gone
    withheld: Microjoules = Microjoules(0)
    idle_power_remembered: bool = False
    idle_power_error: Milliwatts | None = None
    idle_power_doubtful: bool = False
    uncounted: Microjoules | None = None
    measured: bool = True  # False: no energy was ever measured, and ``energy`` 0 says nothing
    silent: bool = False  # no reading is given, now
    origin: Provenance | None = None
    learned: bool = False
    counters: bool = False

    @property
    def method(self) -> str:
        """The present method of the division, more precise than that of the domain."""
        if self.counters:
            return COUNTERS
        return LEARNED_POWERS if self.learned else self.domain.method

    @property
    def provenance(self) -> Provenance:
        """The least reliable provenance of ``energy``, which the label of a counter never leaves.

        A series that returned would rise by the energy of the meantime, which another one has too.
        """
        return self.origin or self.domain.provenance

    @property
    def counted(self) -> Microjoules:
        """The part of ``energy`` that was measured while the domain was a member of the cover."""
        if self.uncounted is not None:
            return Microjoules(self.energy - self.uncounted)
        return self.energy if self.domain.in_cover else Microjoules(0)

    @property
    def energy_certainty(self) -> Certainty:
        """The certainty of ``energy``: a lower bound after a gap, unknown without any energy."""
        return energy_certainty(self.energy, self.gaps) if self.measured else Certainty.UNKNOWN

    @property
    def power_certainty(self) -> Certainty:
        return Certainty.UNKNOWN if self.power is None else Certainty.KNOWN

    @property
    def attributed(self) -> bool:
        return self.domain.resource is not None

    @property
    def divided(self) -> Microjoules:
        """The energy that was divided while the domain was attributed."""
        return Microjoules(self.consumers + self.idle + self.unattributed)

    @property
    def consumers_certainty(self) -> Certainty:
        """The certainty of ``consumers``."""
        return consumers_certainty(self.energy_certainty, self.gaps, self.withheld)

    @property
    def baseline(self) -> BaselineQuality | None:
        """The quality of ``idle_power``; None if the domain is not attributed."""
        if not self.attributed:
            return None
        if self.idle_power is None:
            return BaselineQuality.UNKNOWN
        if self.idle_power_doubtful:
            return BaselineQuality.DOUBTFUL
        remembered = self.idle_power_remembered
        return BaselineQuality.REMEMBERED if remembered else BaselineQuality.LEARNED


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One listed process: energy and recent power, by hardware type.

    ``bounded`` are the types of which the energy is a lower bound: the idle power was unknown or
    the device gave no readings while the process used it.
    """

    info: PayerInfo
    energy: Mapping[HwType, Microjoules]
    power: Mapping[HwType, Milliwatts]
    alive: bool = True
    bounded: frozenset[HwType] = frozenset()


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group: energy, also of exited processes, and recent power, by hardware type.

    ``bounded`` are the types of which the energy is a lower bound, as of a process.
    """

    group: Group
    energy: Mapping[HwType, Microjoules]
    power: Mapping[HwType, Milliwatts] = field(default_factory=dict)
    bounded: frozenset[HwType] = frozenset()


class TickCounts(NamedTuple):
    """The ticks of a period: how many were due and missed, and the longest poll in nanoseconds."""

    due: int = 0
    missed: int = 0
    longest_poll: int = 0


_NO_TICKS = TickCounts()


@dataclass(frozen=True, slots=True)
class AgentStats:
    """Resource usage and losses of the agent."""

    started: Instant
    interval: int = 0  # of ticks, in nanoseconds
    demands: Mapping[str, int] = field(default_factory=dict)  # consumers of fine ticks, by reason
    ticks: int = 0
    missed_ticks: int = 0
    recent_ticks: TickCounts = _NO_TICKS  # of the last minute
    cpu_seconds: float = 0.0
    rss_bytes: int | None = None
    processes: int = 0
    late_usages: int = 0  # usages that arrived after the settlement of their interval
    unnamed_groups: int = 0  # charges to `other` of groups, for want of room
    dropped_history: int = 0  # entries of the energy history removed for want of memory
    exporter_drops: Mapping[str, int] = field(default_factory=dict)
    refusals: Mapping[tuple[str, str], int] = field(default_factory=dict)  # by listener, reason
    pool_refusals: Mapping[tuple[str, str], int] = field(default_factory=dict)  # by pool, reason
    pools_used: Mapping[str, float] = field(default_factory=dict)  # parts of the limits


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The immutable state of all accounts at one instant.

    For each hardware type, ``sum(row.energy for processes) + other + retired`` equals the
    consumers' energy of its attributed domains: ``other`` is the energy of unlisted processes,
    ``retired`` that of processes that were listed once. Neither ever falls. ``since`` is the
    beginning of the accounts, in this run of the agent or in an earlier one. ``ramps`` are the
    largest changes of the host's power in milliwatts per second, by window in nanoseconds; they
    change once a second.
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
    spans: SpanAccounts = field(default_factory=SpanAccounts)
    tuning: TuningAccounts = field(default_factory=TuningAccounts)
    footprint: Footprint = Footprint()
    fleet: FleetAccounts | None = None
    since: Instant | None = None
    device_pods: tuple[DevicePod, ...] = ()
    ramps: Mapping[int, int] = field(default_factory=dict)

    def account(self, domain_id: str) -> DomainAccount:
        """The account of one domain; KeyError if unknown."""
        for account in self.domains:
            if account.domain.id == domain_id:
                return account
        raise KeyError(domain_id)

    @property
    def cover(self) -> tuple[DomainAccount, ...]:
        """The accounts of the members of the cover, whose powers may be summed."""
        return tuple(account for account in self.domains if account.domain.in_cover)

    @property
    def summed(self) -> tuple[DomainAccount, ...]:
        """The accounts of members, now or earlier: ``counted`` may be summed, and their parts."""
        return tuple(a for a in self.domains if a.domain.in_cover or a.counted)

    @property
    def lost(self) -> frozenset[str]:
        """The domains that are gone and that a source still fails to read; others were removed."""
        failing = {failure.domain_id for source in self.health for failure in source.failures}
        return frozenset(
            account.domain.id
            for account in self.domains
            if not account.present and account.domain.id in failing
        )

    @property
    def host_energy(self) -> tuple[Microjoules, Certainty]:
        """The energy counted within the cover, and whether that of a member is unknown."""
        parts = [account for account in self.summed if account.present or account.measured]
        total = sum(account.counted for account in parts)
        return Microjoules(total), Certainty.of_sum(account.energy_certainty for account in parts)

    @property
    def host_power(self) -> tuple[Milliwatts, Certainty]:
        """The power of the members of the cover with a known power; removed ones have none."""
        lost = self.lost
        parts = [one for one in self.cover if one.present or one.domain.id in lost]
        total = sum(account.power or 0 for account in parts)
        return Milliwatts(total), Certainty.of_sum(account.power_certainty for account in parts)

    @property
    def attribution_certainty(self) -> dict[HwType, Certainty]:
        """The certainty of the energy of consumers, by hardware type."""
        found: dict[HwType, list[Certainty]] = {}
        for account in self.cover:
            if account.attributed and (account.present or account.measured):
                found.setdefault(account.domain.hw_type, []).append(account.consumers_certainty)
        return {kind: Certainty.of_sum(parts) for kind, parts in found.items()}

    @property
    def bounded_powers(self) -> frozenset[HwType]:
        """The types of which the power of consumers is a lower bound, now."""
        lost = self.lost
        return frozenset(
            account.domain.hw_type
            for account in self.cover
            if account.attributed and (account.present or account.domain.id in lost)
            if account.power is None or account.idle_power is None
        )

    @property
    def emulated(self) -> bool:
        return Provenance.EMULATED in {a.domain.provenance for a in self.domains}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of the ledger at the instant ``at``, from which the next run continues.

    The accounts are settled up to ``readings``. The next run measures pending energy again, so no
    energy is lost or counted twice. Readings and the identity of ``processes`` are valid only
    within the boot ``boot_id``; totals are valid in any boot. The sums are those of a Snapshot;
    ``spans``, ``outside``, ``unmetered``, ``engines`` (former ones last) and ``inference`` those of
    SpanAccounts. ``since`` is None in a checkpoint of an older release.
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
    outside: Mapping[tuple[str, str, HwType], Microjoules] = field(default_factory=dict)
    footprint: Footprint = Footprint()
    since: Instant | None = None
    inference: tuple[InferenceRow, ...] = ()
    inference_idle: Microjoules = Microjoules(0)
    unmetered: tuple[UnmeteredRow, ...] = ()
    inference_host_idle: Mapping[str, Microjoules] = field(default_factory=dict)
    engines: tuple[EngineRow, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetPlace:
    """The sums of the registered hosts at one place, in milliwatts.

    ``budget`` is None without one. ``enforceable`` is the highest sum of limits that may be in
    force now, ``safe`` the sum without contact. Either exceeds a budget that was lowered until the
    hosts have followed. ``absent`` are the hosts without a session.
    """

    place: str
    budget: int | None
    hosts: int
    demand: int
    allotted: int
    safe: int
    enforceable: int
    absent: int = 0

    @property
    def headroom(self) -> int | None:
        """The part of the budget that no host may use; None without a budget."""
        return None if self.budget is None else self.budget - self.enforceable


@dataclass(frozen=True, slots=True)
class FleetAccounts:
    """A host's part in its fleet, in milliwatts.

    ``allotment`` is the limit in force, and ``safe`` that without contact; None while the capper
    does not answer. ``demand`` is None if the host asks for the power of all its devices.
    ``trouble`` is the reason without contact, ``waiting`` the reason without an allotment.
    ``places`` are known to the leader only, as is ``ended``, the number of hosts whose registration
    has ended because they were absent for too long.
    """

    allotment: int | None = None
    safe: int | None = None
    demand: int | None = None
    in_contact: bool = False
    leads: bool = False
    leader: str = ""
    trouble: str = ""
    waiting: str = ""
    places: tuple[FleetPlace, ...] = ()
    ended: int = 0
