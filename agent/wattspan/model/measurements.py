"""Units, instants, domains, and the readings, intervals and gaps of their counters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType

Microjoules = NewType("Microjoules", int)
Milliwatts = NewType("Milliwatts", int)
Nanoseconds = NewType("Nanoseconds", int)

SECOND = Nanoseconds(1_000_000_000)
MILLISECOND = Nanoseconds(1_000_000)


CPU_TIME, LEARNED_POWERS, COUNTERS = "cpu-time", "learned", "counters"
"""Methods of attribution: by CPU time, by CPU time weighed by what it costs each consumer, and by
performance counters, whose uses are weighed likewise."""

CPU_TIME_PROXY = "cpu-time-proxy"
"""By CPU time where nothing is learned of what it costs: of power sensors, platforms and memory."""


def energy_at(power: int, duration: int) -> Microjoules:
    """The energy of ``power`` milliwatts over ``duration`` nanoseconds, rounded down.

    1 mW times 1 ns is 1e-12 J, a millionth of a microjoule.
    """
    return Microjoules(power * duration // 1_000_000)


def mean_power(energy: int, duration: int) -> Milliwatts:
    """The mean power of ``energy`` microjoules over ``duration`` > 0 nanoseconds."""
    return Milliwatts(energy * 1_000_000 // duration)


def fills(window: int, duration: int, last: int) -> bool:
    """True if a sum over ``duration`` is as near to ``window`` as its steps permit, all in ns.

    ``last`` is the length of the newest step. Steps of a second are a little shorter or longer, and
    a window of a second has one of them, not two.
    """
    return 2 * duration + last >= 2 * window


class ModelEnum(StrEnum):
    """A string enumeration with a fast hash.

    Enum computes hashes in Python. Members are keys of all accounts and labels of all series, so
    they hash as strings, in C.
    """

    __hash__ = str.__hash__


class Certainty(ModelEnum):
    """The completeness of a figure: whether energy or power that belongs to it is unknown.

    An unknown figure is shown by no number, and a lower bound never as a plain number.
    """

    KNOWN = "known"
    LOWER_BOUND = "lower_bound"  # a part is unknown: the true figure is not smaller
    UNKNOWN = "unknown"

    @classmethod
    def of_sum(cls, parts: Iterable[Certainty]) -> Certainty:
        """The certainty of the sum of all known parts; UNKNOWN without any part."""
        found = set(parts)
        if len(found) == 1:
            return found.pop()
        return cls.LOWER_BOUND if found else cls.UNKNOWN


class Instant(NamedTuple):
    """One moment on the host's clocks, in nanoseconds.

    Durations are differences of ``mono``, which stops while the host is suspended. ``wall`` is
    Unix time, for joins with external times only. ``asleep`` is the time in suspend since boot
    (CLOCK_BOOTTIME minus CLOCK_MONOTONIC), which distinguishes a suspend from a step of the wall
    clock.
    """

    mono: int
    wall: int
    asleep: int = 0

    @property
    def since_boot(self) -> int:
        """The time since boot, suspends included."""
        return self.mono + self.asleep

    def before(self, nanoseconds: int) -> Instant:
        """The moment so long before this one, without a suspend in between."""
        return Instant(self.mono - nanoseconds, self.wall - nanoseconds, self.asleep)


class HwType(ModelEnum):
    """OpenTelemetry's ``hw.type`` of devices with energy counters."""

    CPU = "cpu"
    GPU = "gpu"
    MEMORY = "memory"
    ENCLOSURE = "enclosure"


class Provenance(ModelEnum):
    """The method by which a figure was obtained, from the most to the least reliable."""

    MEASURED = "measured"  # a hardware energy counter
    DERIVED = "derived"  # integrated from measured power
    ESTIMATED = "estimated"  # a model of load, no counter
    EMULATED = "emulated"  # an emulated host, no real machine

    @property
    def rank(self) -> int:
        """The position in the order of reliability; 0 is the most reliable."""
        return _PROVENANCE_RANKS[self]

    def worse(self, other: Provenance) -> Provenance:
        """The provenance of a sum of two figures: the less reliable one."""
        return self if self.rank >= other.rank else other


_PROVENANCE_RANKS = {one: rank for rank, one in enumerate(Provenance)}


class ThingKind(ModelEnum):
    """The kind of a physical thing, by which the containment of two things is known."""

    SOCKET = "socket"  # a processor with its cores
    BOARD = "board"  # a GPU or another card
    SUPPLY = "supply"  # other loads of a module, such as a rail of a system on a chip
    MODULE = "module"  # a superchip: sockets, their memory and GPUs
    PLATFORM = "platform"  # the sockets and parts of the mainboard that differ by vendor
    NODE = "node"  # the whole machine
    MEMORY = "memory"  # outside the sockets


class Thing(NamedTuple):
    """The physical thing that a counter measures.

    ``socket`` is that of a socket, of its memory, or of the module and platform around it; None for
    all sockets, or an unknown one. ``pci`` is the address of a board, or of a GPU of a module; ""
    of an unknown board. ``part`` names a part of the thing, by a path whose first name is the
    scheme of the names: ``("rapl", "die-1")``. Parts of one scheme are disjoint unless one path
    begins with the other. ``memory``: the memory of the socket is measured with it.
    """

    kind: ThingKind
    socket: int | None = None
    pci: str = ""
    part: tuple[str, ...] = ()
    memory: bool = False

    def __str__(self) -> str:
        number = "" if self.socket is None else str(self.socket)
        return " ".join(filter(None, (self.kind, self.pci, number, "/".join(self.part[1:]))))


@dataclass(frozen=True, slots=True)
class Domain:
    """A part of the hardware whose energy one counter measures.

    Domains nest (``parent``) and may measure one thing; only members of the *cover* (``in_cover``)
    are disjoint and may be summed. A source says False of a domain that is never summed; the cover
    chooses among the others (``attribution.cover``). ``resource`` names the usage by which the
    energy is attributed (``"cpu:0"``, ``"gpu:GPU-..."``, ``"cpu"`` for the whole host); with
    ``None`` the domain is counted and not attributed, as all domains outside the cover.
    ``measures`` is the thing that is measured; None is the board at ``pci``, or a thing that no
    other domain measures. ``moves_with`` names the usage that must show in the counter: one that
    stands still meanwhile is frozen; "" if none does.
    """

    id: str
    hw_type: HwType
    name: str
    source: str
    provenance: Provenance
    in_cover: bool = True
    parent: str | None = None
    resource: str | None = None
    method: str = "none"  # of attribution: "cpu-time", "gpu-sm-utilisation", ...
    max_power: Milliwatts = Milliwatts(2_000_000)  # the largest plausible power
    modulus: Microjoules | None = None  # value at which the counter wraps to 0; None: never
    resolution: Nanoseconds = MILLISECOND  # period of the counter's steps
    usage_step: Nanoseconds = Nanoseconds(0)  # time resolution of usage
    why: str = ""  # one clause for `doctor`: the reason for or against the cover
    model: str = ""  # of the hardware; an idle power is remembered for the same model only
    static_power: Milliwatts | None = None  # of a GPU blocked on communication, as configured
    moves_with: str = ""
    pci: str = ""  # the address of its first PCI function, as in "0000:0c:00.0"
    measures: Thing | None = None
    modelled: bool = False  # by a model of load, without a sensor; also of an emulated host
    suspended: bool = False  # by the kernel: it is not read, and its energy is unknown meanwhile
    rest: Nanoseconds = Nanoseconds(0)  # it is not read for so long, for the kernel to suspend it

    def __post_init__(self) -> None:
        if self.resource is not None and not self.in_cover:
            raise ValueError(f"{self.id}: only a member of the cover can be attributed")

    @property
    def is_division(self) -> bool:
        """True for a part whose energy is divided from that of its device, without a sensor."""
        return self.parent is not None and self.hw_type is HwType.GPU and self.measures is None


class Reading(NamedTuple):
    """The value of one energy counter with the time of the register read.

    ``epoch`` changes when the source knows that the counter was restarted or replaced (driver
    reloaded, zone registered anew); readings of different epochs are never subtracted. ``stale`` is
    the largest age of the value at that time; None: a step of the counter (``Domain.resolution``).
    """

    domain_id: str
    at: Instant
    counter: Microjoules
    epoch: int = 0
    stale: Nanoseconds | None = None


class GapReason(ModelEnum):
    """The reason of a gap."""

    RESET = "reset"  # the counter fell without a plausible wrap
    SUSPEND = "suspend"  # the host was suspended, or the kernel had suspended the device
    LOST = "lost"  # the device or its driver was restarted
    MISSED = "missed"  # the counter may have lapped between two readings
    IMPLAUSIBLE = "implausible"  # more energy than the hardware can use
    ABSENT = "absent"  # no reading: the counter is unreadable or gone
    FROZEN = "frozen"  # the counter does not move while the hardware works


class Interval(NamedTuple):
    """The energy of one domain between two instants, in microjoules.

    ``stale`` is the larger one of its two readings.
    """

    domain_id: str
    start: Instant
    end: Instant
    energy: Microjoules
    stale: Nanoseconds | None = None

    @property
    def duration(self) -> int:
        return self.end.mono - self.start.mono


class Gap(NamedTuple):
    """A period of one domain whose energy is unknown.

    ``duration`` includes time in suspend, during which the monotonic clock stops.
    """

    domain_id: str
    start: Instant
    end: Instant
    reason: GapReason

    @property
    def duration(self) -> int:
        awake = self.end.mono - self.start.mono
        return awake + max(0, self.end.asleep - self.start.asleep)
