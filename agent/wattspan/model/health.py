"""How sources and devices are doing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from wattspan.model.measurements import Instant, Microjoules, Milliwatts, ModelEnum
from wattspan.util.text import printable

_FROZEN: Mapping[str, int] = MappingProxyType({})


class Trouble(ModelEnum):
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
        said = f"{sentence} {self.remedy}" if self.remedy else sentence
        # Drivers, files and other programs have their words in it: they forge no line of a log.
        return printable(said)


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
    throttling: tuple[str, ...] | None = None  # reasons in force now
    mig: bool | None = None
    integrated_energy: Microjoules | None = None  # from power, to hold against the counter
    counter_energy: Microjoules | None = None  # over the same time; None without a counter
    model: str = ""
    driver: str = ""
    index: int | None = None  # as the driver counts; it may be another's after a reboot
