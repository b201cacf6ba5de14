"""One GPU: its calls, their intervals, and the readings, usages and status made of the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wattspan.model import (
    MILLISECOND,
    SECOND,
    Domain,
    Failure,
    GpuStatus,
    HwType,
    Instant,
    Microjoules,
    Milliwatts,
    Nanoseconds,
    Payer,
    Provenance,
    Reading,
    Trouble,
    Usage,
)
from wattspan.ports import SourceContext
from wattspan.sources.nvml import calls
from wattspan.sources.nvml.calls import GpuCalls, NvmlLibrary
from wattspan.sources.nvml.energy import EDGE_GUARD, CallInterval, EdgeDetector, EnergyMeter
from wattspan.sources.nvml.processes import GpuProcesses, UsageMeter
from wattspan.sources.nvml.status import (
    BoardCondition,
    BoardUtilisation,
    PowerGauge,
    PowerReading,
    read_condition,
    read_utilisation,
)

SOURCE = "nvml"
ENERGY_COUNTER = "energy counter"
METHOD = "gpu-sm-utilisation"
TRANSIENT_FACTOR = 2  # boards overshoot their limit for milliseconds
DEFAULT_MAX_POWER = Milliwatts(5_000_000)  # above any board, where the limit is not known
EMULATED_UUID = "GPU-e0e0e0e0-0000-4000-8000-"
"""Prefix of the UUIDs of emulated boards, which no real board has: the emulated library can replace
the real one, and its figures must then be labelled as emulated.
"""
MAX_USAGE_INTERVAL = 3 * SECOND // 2
"""Intervals wait three seconds for usage, and a utilisation reading holds for two: usage that is
read less often is worth nothing.
"""


@dataclass(frozen=True, slots=True)
class SamplingIntervals:
    """Intervals of the calls in nanoseconds; energy is read at every sample.

    ``gauges`` are power and utilisation, which are smoothed by the sensor. Where power has to be
    integrated because there is no counter, they are read at every sample too.
    """

    gauges: int
    usage: int
    processes: int
    condition: int


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """The constant properties of a GPU during one session of the library."""

    uuid: str
    index: int
    model: str
    driver: str
    architecture: int | None = None

    @property
    def domain_id(self) -> str:
        return f"gpu:{self.uuid}"

    def name(self, *, emulated: bool) -> str:
        label = f"{self.model or 'GPU'} {self.index}"
        already = label.lower().startswith("emulated")
        return f"Emulated {label}" if emulated and not already else label


@dataclass(frozen=True, slots=True)
class GpuReport:
    """The readable and the unreadable properties of one GPU, with the causes."""

    domain: Domain
    readable: frozenset[str]
    unreadable: Mapping[str, str]


@dataclass(slots=True)
class GpuFindings:
    """The results of one sample of all GPUs."""

    readings: list[Reading] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)
    gpus: list[GpuStatus] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


class GpuSampler:
    """One GPU through the time in which it answers."""

    def __init__(
        self,
        library: NvmlLibrary,
        handle: Any,
        identity: GpuIdentity,
        context: SourceContext,
        pace: SamplingIntervals,
        *,
        epoch: int,
        nested: bool,
    ) -> None:
        clock = context.clock
        self.identity = identity
        self._clock = clock
        self._emulated = context.emulated or identity.uuid.startswith(EMULATED_UUID)
        self._nested = nested
        self._calls = GpuCalls(library, handle, clock)
        self._gauge = PowerGauge(self._calls, identity.architecture, identity.model)
        self._meter = EnergyMeter(epoch)
        self._edges = EdgeDetector()
        self.near_an_edge = False  # the last turn's energy could not be stamped
        self._processes = GpuProcesses(self._calls, clock, context.directory, nested=nested)
        self._usage: UsageMeter | None = None
        self._present: frozenset[Payer] = frozenset()
        self._at = clock.now()
        self._power = PowerReading()
        self._utilisation: BoardUtilisation | None = None
        self._condition = BoardCondition()
        self._ceiling: Milliwatts | None = None  # the highest limit that the board has reported
        self._gauge_pace = CallInterval(pace.gauges, clock)
        self._condition_pace = CallInterval(pace.condition, clock)
        self._process_pace = CallInterval(pace.processes, clock)
        self._usage_pace = CallInterval(pace.usage, clock, MAX_USAGE_INTERVAL)
        self._defined_by = self._mutable_traits()
        self.domain = self._define()

    @property
    def epoch(self) -> int:
        return self._meter.epoch

    def rebind(self, handle: Any) -> None:
        """The library was initialised anew while this GPU was well."""
        self._calls.rebind(handle)

    def sample(self, into: GpuFindings) -> None:
        """Ask what is due. Raises GpuLostError or SessionLostError; the rest costs one field."""
        energy, self._at = self._energy()
        at = self._at
        usage_due = self._usage_pace.begin(at.mono)
        condition_due = self._condition_pace.begin(at.mono)
        counted = energy is not None and self._meter.derived is False
        forced = usage_due or condition_due or not counted
        looks = self._gauge_pace.begin(at.mono, forced=forced)
        if looks:
            with self._gauge_pace:
                self._power = self._gauge.read()
                self._utilisation = read_utilisation(self._calls)
        self._count(at, energy, self._power.draw if looks else None, into)
        if self._process_pace.begin(at.mono):
            with self._process_pace:
                self._present = self._processes.list_holders()
        if looks:
            self._measure_use(at, into, settle=usage_due)
        if condition_due:
            with self._condition_pace:
                self._condition = read_condition(self._calls)
            self._ceiling = self._condition.limits.maximum or self._ceiling
            into.gpus.append(self._status(at, self._power, self._utilisation))
        self._redefine()

    def _count(
        self, at: Instant, energy: Microjoules | None, power: Milliwatts | None, into: GpuFindings
    ) -> None:
        refused = self._calls.refused(ENERGY_COUNTER) is not None
        counter = self._meter.read(at, energy, power, refused=refused)
        if energy is not None:
            self._edges.observe(at.mono, energy)
        made = at if self._meter.derived else self._value_time(at)
        self.near_an_edge = made is None
        if counter is not None and made is not None:
            into.readings.append(Reading(self.domain.id, made, counter, self._meter.epoch))

    def _value_time(self, at: Instant) -> Instant | None:
        """The time at which the counter took the value read at ``at``; None if it is ambiguous."""
        if self._edges.period is None:
            return at
        moved = self._edges.moved_at(at.mono)
        return None if moved is None else _before(at, at.mono - moved)

    def next_edge_read(self, now: int) -> int | None:
        """The time of the next extra read of the energy counter, if one is useful."""
        return None if self._meter.derived is not False else self._edges.next_read(now)

    def read_edge(self) -> None:
        """Look at the energy counter, to learn when it moves."""
        energy, at = self._energy()
        if energy is not None:
            self._edges.observe(at.mono, energy)

    def _energy(self) -> tuple[Microjoules | None, Instant]:
        """The counter, stamped half-way through its call."""
        began = self._clock.now()
        millijoules = self._calls.ask(ENERGY_COUNTER, "nvmlDeviceGetTotalEnergyConsumption")
        half = (self._clock.monotonic() - began.mono) // 2
        at = Instant(began.mono + half, began.wall + half, began.asleep)
        return None if millijoules is None else Microjoules(int(millijoules) * 1000), at

    def _measure_use(self, at: Instant, into: GpuFindings, *, settle: bool) -> None:
        if self._usage is None:
            self._usage = UsageMeter(self.domain.id, at)
        if settle:
            with self._usage_pace:
                samples = self._processes.samples()
            self._usage.add_samples(samples or [])
        named = self._processes.named
        # A device without any utilisation owes no remainder beside processes that have some;
        # if processes have none either, all of it may have been in use.
        unknown = 0 if named else 100
        busy = unknown if self._utilisation is None else self._utilisation.gpu
        self._usage.observe_device(at.mono, busy)
        if settle:
            lag = self._usage.lag if named else 0
            self._record(self._usage, _before(at, lag), into)

    def _record(self, meter: UsageMeter, end: Instant, into: GpuFindings) -> None:
        usage = meter.usage(end, self._present, named=self._processes.named)
        if usage is not None:
            into.usages.append(usage)

    def report(self) -> GpuReport:
        """The readable and the unreadable properties in the samples so far."""
        return GpuReport(self.domain, self._calls.answered_fields, self._calls.unanswered_fields)

    def flush_usage(self, into: GpuFindings) -> None:
        """Report the usage so far of a GPU that was lost."""
        if self._usage is not None:
            self._record(self._usage, self._at, into)

    def _status(
        self, at: Instant, power: PowerReading, utilisation: BoardUtilisation | None
    ) -> GpuStatus:
        condition = self._condition
        compared = self._meter.integral.compared
        integrated = None if compared is None else compared[0]
        if integrated is None and self._meter.derived:
            integrated = self._meter.integral.energy
        return GpuStatus(
            domain_id=self.domain.id,
            at=at,
            power_average=power.average,
            power_instant=power.instant,
            limits=condition.limits,
            sm_clock_hz=condition.sm_clock_hz,
            memory_clock_hz=condition.memory_clock_hz,
            utilisation=None if utilisation is None else utilisation.gpu / 100,
            memory_utilisation=None if utilisation is None else utilisation.memory / 100,
            temperature_celsius=condition.temperature_celsius,
            memory_used=condition.memory_used,
            memory_total=condition.memory_total,
            throttled=condition.throttled,
            throttling=condition.throttling,
            mig=condition.mig,
            integrated_energy=integrated,
            counter_energy=None if compared is None else compared[1],
            model=self.identity.model,
            driver=self.identity.driver,
            index=self.identity.index,
        )

    # -------------------------------------------------------------------- domain

    def _define(self) -> Domain:
        derived = bool(self._meter.derived)
        provenance = Provenance.DERIVED if derived else Provenance.MEASURED
        limit = self._ceiling
        named = self._processes.named
        how = "integrated from its power" if derived else "by its energy counter"
        return Domain(
            id=self.identity.domain_id,
            hw_type=HwType.GPU,
            name=self.identity.name(emulated=self._emulated),
            source=SOURCE,
            provenance=Provenance.EMULATED if self._emulated else provenance,
            resource=self.identity.domain_id,
            method=METHOD if named else "none",
            max_power=DEFAULT_MAX_POWER if limit is None else Milliwatts(limit * TRANSIENT_FACTOR),
            resolution=Nanoseconds(self._resolution),
            usage_step=Nanoseconds(self._usage_step),
            staleness=None if self._edges.period is None else Nanoseconds(EDGE_GUARD),
            why=f"the whole board, {how}",
        )

    @property
    def _resolution(self) -> int:
        """Interval of the counter's moves: measured with extra reads, or as samples show it."""
        step = None if self._meter.derived else self._edges.step
        return self._meter.resolution if step is None else _rounded(step)

    @property
    def _usage_step(self) -> int:
        return 0 if self._usage is None else _rounded(self._usage.step, 50 * MILLISECOND)

    def _redefine(self) -> None:
        """A new domain only if something about it changed, so that callers may compare."""
        traits = self._mutable_traits()
        if traits != self._defined_by:
            self._defined_by = traits
            self.domain = self._define()

    def _mutable_traits(self) -> tuple[object, ...]:
        return (
            self._meter.derived,
            self._resolution,
            self._edges.period is None,
            self._usage_step,
            self._ceiling,
            self._processes.named,
        )

    # ------------------------------------------------------------------ failures

    def failures(self) -> list[Failure]:
        """Everything that is wrong with this GPU, as long as it is."""
        found = self._calls.failures(self._call_failure)
        if self._meter.derived is None and self._calls.refused(ENERGY_COUNTER) is not None:
            found.append(
                self._failure(
                    "energy and power",
                    Trouble.ABSENT,
                    "the GPU offers neither an energy counter nor its power",
                )
            )
        if self._meter.frozen:
            found.append(
                self._failure(
                    ENERGY_COUNTER,
                    Trouble.MALFORMED,
                    "it does not change while the GPU draws power",
                    "Its power is integrated instead; a newer driver may help.",
                )
            )
        found.extend(self._attribution_failures())
        return found

    def _attribution_failures(self) -> list[Failure]:
        """Reasons for which energy cannot be charged to processes, or not to all of them."""
        found = []
        refusal = self._processes.refusal
        if refusal is not None and refusal != calls.NO_PERMISSION:
            cause = calls.cause_of(refusal)
            remedy = "All of its energy stays unattributed."
            if self._condition.mig:
                cause = (
                    "MIG is on, and the driver does not report processes' shares of a divided GPU"
                )
            found.append(self._failure("process utilisation", Trouble.ABSENT, cause, remedy))
        if self._nested:
            found.append(
                self._failure(
                    "all processes",
                    Trouble.DENIED,
                    "the agent runs in a pid namespace of its own",
                    "Share the host's (hostPID: true, --pid=host); until then processes"
                    " outside stay unattributed.",
                )
            )
        if self._processes.misdated:
            found.append(
                self._failure(
                    "process utilisation",
                    Trouble.MALFORMED,
                    f"{self._processes.misdated} samples are from the future or beyond 100 %",
                )
            )
        return found

    def _call_failure(self, what: str, code: int) -> Failure:
        return calls.call_failure(f"{what} of {self.domain.name}", code, self.domain.id)

    def _failure(self, what: str, trouble: Trouble, cause: str, remedy: str = "") -> Failure:
        return Failure(
            source=SOURCE,
            thing=f"{what} of {self.domain.name}",
            trouble=trouble,
            cause=cause,
            remedy=remedy,
            domain_id=self.domain.id,
        )


def _rounded(step: int, grain: int = MILLISECOND) -> int:
    return max(grain, round(step / grain) * grain)


def _before(at: Instant, nanoseconds: int) -> Instant:
    return Instant(at.mono - nanoseconds, at.wall - nanoseconds, at.asleep)
