"""Health of sources, and status of devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wattspan.model.measurements import Instant, Microjoules, Milliwatts, ModelEnum
from wattspan.util.text import printable


class Trouble(ModelEnum):
    """The class of a failure."""

    DENIED = "denied"  # missing permission
    ABSENT = "absent"  # missing hardware, driver or file
    RETRY = "retry"  # a temporary failure, which is retried
    STUCK = "stuck"  # a call does not return
    MALFORMED = "malformed"  # invalid response


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
    integrated_energy: Microjoules | None = None  # from power, to check the counter
    counter_energy: Microjoules | None = None  # in the same period; None without a counter
    model: str = ""
    driver: str = ""
    index: int | None = None  # of the driver; may change with a reboot
