"""The words of wattspan, as values.

Energy is a whole number of microjoules, power a whole number of milliwatts, time a whole number
of nanoseconds. Everything here is immutable, knows no clock and does no I/O. ``None`` always
means *unknown*; zero is a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple, NewType

Microjoules = NewType("Microjoules", int)
Milliwatts = NewType("Milliwatts", int)
Nanoseconds = NewType("Nanoseconds", int)

SECOND = Nanoseconds(1_000_000_000)
MILLISECOND = Nanoseconds(1_000_000)

_FROZEN: Mapping[str, int] = MappingProxyType({})
_NO_EXEMPLARS: Mapping[HwType, Exemplar] = MappingProxyType({})


def energy_at(power: int, duration: int) -> Microjoules:
    """The energy ``power`` milliwatts amount to over ``duration`` nanoseconds, rounded down.

    1 mW times 1 ns is 1e-12 J, a millionth of a microjoule.
    """
    return Microjoules(power * duration // 1_000_000)


def mean_power(energy: int, duration: int) -> Milliwatts:
    """The mean power of ``energy`` microjoules over ``duration`` > 0 nanoseconds."""
    return Milliwatts(energy * 1_000_000 // duration)


class Word(StrEnum):
    """A word of the model: a string with a fixed set of values.

    Enum hashes members in Python, by name; they are keys of every account and label of every
    series, so here they hash like the strings they are, in C.
    """

    __hash__ = str.__hash__


# --------------------------------------------------------------------------------------- time


class Instant(NamedTuple):
    """One moment on the host's clocks, in nanoseconds.

    Durations are differences of ``mono`` (it stands still while the host sleeps). ``wall`` is
    Unix time, for joins with the outside world only. ``asleep`` is how long the host has been
    suspended since boot (CLOCK_BOOTTIME minus CLOCK_MONOTONIC), so that a suspend and a stepped
    wall clock are never mistaken for each other.
    """

    mono: int
    wall: int
    asleep: int = 0


# ------------------------------------------------------------------------------------ domains


class HwType(Word):
    """OpenTelemetry's ``hw.type``, as far as energy is concerned."""

    CPU = "cpu"
    GPU = "gpu"
    MEMORY = "memory"
    ENCLOSURE = "enclosure"


class Provenance(Word):
    """How a figure was obtained, from the most to the least trustworthy."""

    MEASURED = "measured"  # a hardware energy counter
    DERIVED = "derived"  # integrated from measured power
    ESTIMATED = "estimated"  # a model of load, no counter
    EMULATED = "emulated"  # an emulated host: true of no machine

    @property
    def doubt(self) -> int:
        return list(Provenance).index(self)

    def worse(self, other: Provenance) -> Provenance:
        """What may be said of a sum of two figures: the less trustworthy of both."""
        return self if self.doubt >= other.doubt else other


@dataclass(frozen=True, slots=True)
class Domain:
    """Something whose energy one counter measures.

    Domains nest (``parent``) and may mirror each other; only members of the *cover*
    (``in_cover``) are disjoint and may be summed. ``resource`` names the stream of usage by
    which its energy is charged to consumers (``"cpu:0"``, ``"gpu:GPU-..."``, ``"cpu"`` for the
    whole host); ``None`` means that the domain is counted but never attributed, as every
    domain outside the cover is.
    """

    id: str
    hw_type: HwType
    name: str
    source: str
    provenance: Provenance
    in_cover: bool = True
    parent: str | None = None
    resource: str | None = None
    method: str = "none"  # how consumers are charged: "cpu-time", "gpu-sm-utilisation", ...
    max_power: Milliwatts = Milliwatts(2_000_000)  # no plausible reading exceeds it
    modulus: Microjoules | None = None  # the counter wraps to 0 here; None: it never wraps
    resolution: Nanoseconds = MILLISECOND  # how often the counter moves
    why: str = ""  # one clause for `doctor`: why it is in the cover, or is not

    def __post_init__(self) -> None:
        if self.resource is not None and not self.in_cover:
            raise ValueError(f"{self.id}: only a member of the cover can be attributed")


# ------------------------------------------------------------------- from readings to joules


class Reading(NamedTuple):
    """The value of one energy counter, stamped beside the register read.

    ``epoch`` changes when the source knows that the counter was restarted or replaced (driver
    reloaded, zone registered anew), so that nobody subtracts across it.
    """

    domain_id: str
    at: Instant
    counter: Microjoules
    epoch: int = 0


class GapReason(Word):
    """Why the energy of a stretch of time is not known."""

    RESET = "reset"  # the counter fell and cannot have wrapped
    SUSPEND = "suspend"  # the host slept
    LOST = "lost"  # the device or its driver went away and came back
    MISSED = "missed"  # so long without a reading that the counter may have lapped
    IMPLAUSIBLE = "implausible"  # more energy than the hardware can draw
    ABSENT = "absent"  # no reading: the counter is unreadable or gone


class Interval(NamedTuple):
    """``energy`` microjoules were spent in one domain between two instants."""

    domain_id: str
    start: Instant
    end: Instant
    energy: Microjoules

    @property
    def duration(self) -> int:
        return self.end.mono - self.start.mono


class Gap(NamedTuple):
    """The energy between two instants is unknown, and this is why.

    A host asleep has spent its gap on no monotonic clock, so a gap's ``duration`` includes the
    time asleep.
    """

    domain_id: str
    start: Instant
    end: Instant
    reason: GapReason

    @property
    def duration(self) -> int:
        awake = self.end.mono - self.start.mono
        return awake + max(0, self.end.asleep - self.start.asleep)


# ---------------------------------------------------------------------------------- consumers


class Consumer(NamedTuple):
    """A process: its pid, and its start time in clock ticks since boot (field 22 of stat).

    The pair is never used twice in one boot; a pid alone is.
    """

    pid: int
    started: int


class Remainder(NamedTuple):
    """Work that a cgroup's own clock saw, by processes too short-lived to be seen themselves."""

    cgroup: str


Payer = Consumer | Remainder


class GroupKind(Word):
    """What a group is; the order is from the most to the least specific."""

    CONTAINER = "container"
    POD = "pod"
    JOB = "job"  # a batch job: Slurm
    UNIT = "unit"  # a systemd unit
    CGROUP = "cgroup"  # none of the above: the bare path
    USER = "user"


class Group(NamedTuple):
    kind: GroupKind
    name: str


@dataclass(frozen=True, slots=True)
class PayerInfo:
    """Who a payer is. ``groups`` holds at most one group of each kind, most specific first."""

    payer: Payer
    command: str
    groups: tuple[Group, ...] = ()
    user: str = ""
    parent: int | None = None

    @property
    def group(self) -> str:
        """The name of the most specific group, the one shown beside a process."""
        return self.groups[0].name if self.groups else ""


# -------------------------------------------------------------------------------------- usage


@dataclass(frozen=True, slots=True)
class Usage:
    """What each payer did with one resource in one stretch of time.

    ``spent`` and ``unclaimed`` are nanoseconds of the resource: CPU time, or GPU time weighted
    by utilisation. ``unclaimed`` was spent by nobody that can be named; it keeps its share of
    the energy, as *unattributed*. ``capacity`` is what could have been spent (CPUs times
    duration). ``present`` hold the resource without necessarily using it (GPU contexts).
    """

    resource: str
    start: Instant
    end: Instant
    spent: Mapping[Payer, int]
    unclaimed: int = 0
    capacity: int | None = None
    present: frozenset[Payer] = frozenset()

    @property
    def busy(self) -> int:
        return sum(self.spent.values()) + self.unclaimed


class IdlePolicy(Word):
    """Who pays for the energy a device draws while it does nothing."""

    SEPARATE = "separate"  # nobody: it is an account of its own
    PROPORTIONAL = "proportional"  # whoever uses the device, by use
    EQUAL = "equal"  # whoever uses or holds the device, in equal parts


class Share(NamedTuple):
    payer: Payer
    energy: Microjoules


_ENERGY = itemgetter(1)


@dataclass(frozen=True, slots=True)
class Attribution:
    """One interval, divided without remainder.

    ``interval.energy == sum(share.energy) + idle + unattributed``, checked on construction.
    """

    interval: Interval
    shares: tuple[Share, ...]
    idle: Microjoules
    unattributed: Microjoules

    def __post_init__(self) -> None:
        parts = self.idle + self.unattributed + sum(map(_ENERGY, self.shares))
        if parts != self.interval.energy or self.idle < 0 or self.unattributed < 0:
            raise ValueError(
                f"{self.interval.domain_id}: {self.interval.energy} uJ were divided into {parts} uJ"
            )


# --------------------------------------------------------------------------------- conditions


class Trouble(Word):
    """What is wrong with a source, and so what can be done about it."""

    DENIED = "denied"  # permission: a person must act
    ABSENT = "absent"  # there is no such hardware, driver or file
    RETRY = "retry"  # it failed just now and is tried again
    STUCK = "stuck"  # a call does not return
    MALFORMED = "malformed"  # it answered nonsense


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that could not be read or written: what, why, and what to do about it."""

    source: str
    thing: str
    trouble: Trouble
    cause: str
    remedy: str = ""
    domain_id: str | None = None
    verb: str = "read"  # what could not be done to it

    def __str__(self) -> str:
        sentence = f"Cannot {self.verb} {self.thing}: {self.cause}."
        return f"{sentence} {self.remedy}" if self.remedy else sentence


@dataclass(frozen=True, slots=True)
class SourceHealth:
    """How a source is doing: ``up`` is whether any of its domains was read at its last turn."""

    source: str
    up: bool
    reads: int
    failed: int
    failures: tuple[Failure, ...] = ()
    read_nanoseconds: int = 0  # how long the last read took


@dataclass(frozen=True, slots=True)
class PowerLimits:
    """The power limits of a device, in milliwatts; ``None`` where it does not tell."""

    minimum: Milliwatts | None = None
    default: Milliwatts | None = None
    maximum: Milliwatts | None = None
    requested: Milliwatts | None = None
    enforced: Milliwatts | None = None


@dataclass(frozen=True, slots=True)
class GpuStatus:
    """What a GPU says of itself beside its energy. Every field may be unknown."""

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
    throttled: Mapping[str, int] = field(default_factory=lambda: _FROZEN)  # reason to total ns
    throttling: tuple[str, ...] = ()  # reasons in force now
    mig: bool | None = None
    integrated_energy: Microjoules | None = None  # from power, to hold against the counter
    counter_energy: Microjoules | None = None  # over the same time; None without a counter
    model: str = ""
    driver: str = ""


# ------------------------------------------------------------------------------------ results


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
    ``forward_drops`` what went on to the user's collector and what could not.
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


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole known world at one instant. Readers share it; nothing ever changes it.

    Per hardware type, ``sum(row.energy for processes) + other + retired`` equals the consumers'
    energy of that type's attributed domains: ``other`` is what unlisted processes spent,
    ``retired`` what processes spent that were listed once. Neither ever falls.
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
class Opening:
    """The ledger's books as they are carried over a restart: closed by one run, opened by the next.

    Everything in it belongs to the one instant ``at``. ``readings`` are the readings up to which
    the accounts are settled, so what was pending then is measured again by the next run: nothing
    is lost and nothing counted twice. They, and the identity of ``processes``, mean something
    only within the boot ``boot_id``; the totals outlive it. As in a Snapshot, for each hardware
    type ``sum(row.energy for processes) + other + retired`` is what the consumers of its
    attributed domains spent. ``spans`` and ``outside`` are those of SpanAccounts.
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
