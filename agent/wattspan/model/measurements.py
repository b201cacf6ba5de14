"""Energy, power and time as whole numbers, moments, and words that are keys.

What is measured: domains, and how their counters' readings become joules.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType

Microjoules = NewType("Microjoules", int)
Milliwatts = NewType("Milliwatts", int)
Nanoseconds = NewType("Nanoseconds", int)

SECOND = Nanoseconds(1_000_000_000)
MILLISECOND = Nanoseconds(1_000_000)


def energy_at(power: int, duration: int) -> Microjoules:
    """The energy ``power`` milliwatts amount to over ``duration`` nanoseconds, rounded down.

    1 mW times 1 ns is 1e-12 J, a millionth of a microjoule.
    """
    return Microjoules(power * duration // 1_000_000)


def mean_power(energy: int, duration: int) -> Milliwatts:
    """The mean power of ``energy`` microjoules over ``duration`` > 0 nanoseconds."""
    return Milliwatts(energy * 1_000_000 // duration)


class ModelEnum(StrEnum):
    """A word of the model: a string with a fixed set of values.

    Enum hashes members in Python, by name; they are keys of every account and label of every
    series, so here they hash like the strings they are, in C.
    """

    __hash__ = str.__hash__


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


class HwType(ModelEnum):
    """OpenTelemetry's ``hw.type``, as far as energy is concerned."""

    CPU = "cpu"
    GPU = "gpu"
    MEMORY = "memory"
    ENCLOSURE = "enclosure"


class Provenance(ModelEnum):
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
    staleness: Nanoseconds | None = None  # how old a value may be when stamped; None: a step
    usage_step: Nanoseconds = Nanoseconds(0)  # how coarsely usage tells consumers apart in time
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


class GapReason(ModelEnum):
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
