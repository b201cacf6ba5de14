"""What is measured: domains, and how their counters' readings become joules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from wattspan.model.quantities import (
    MILLISECOND,
    Instant,
    Microjoules,
    Milliwatts,
    Nanoseconds,
    Word,
)


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
