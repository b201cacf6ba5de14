"""One GPU: its calls, their intervals, and the readings, usages and status made of the answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

from wattspan.model import (
    MILLISECOND,
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
    Thing,
    ThingKind,
    Trouble,
)
from wattspan.model.settings import Duration, Table, about, quoted
from wattspan.ports import SourceContext
from wattspan.sources.call_interval import CallInterval
from wattspan.sources.energy_meter import (
    ENERGY_CHOICE,
    CounterCheck,
    EnergyChoice,
    EnergyMeter,
    SensorView,
)
from wattspan.sources.gpu_calls import NO_PERMISSION, GpuCalls
from wattspan.sources.gpu_sampling import (
    FROZEN,
    GAUGE_SAMPLES,
    MAX_USAGE_INTERVAL,
    SUSPENDED,
    GpuFindings,
    PowerReading,
    largest_power,
    stamped,
)
from wattspan.sources.nvml import calls
from wattspan.sources.nvml.calls import SOURCE, NvmlLibrary
from wattspan.sources.nvml.counter_edges import EDGE_GUARD, EdgeDetector
from wattspan.sources.nvml.counter_scope import CounterScope
from wattspan.sources.nvml.dcgm import DcgmExporter
from wattspan.sources.nvml.mig import MigDivision
from wattspan.sources.nvml.processes import GpuProcesses, UsageMeter
from wattspan.sources.nvml.status import (
    read_module_power,
    read_power,
    read_status,
    read_utilisation,
    usage_is_instant,
)
from wattspan.util.throttle import RetryBackoff

ENERGY_COUNTER = "energy counter"
METHOD = "gpu-sm-utilisation"
_VGPU_GUEST, _VGPU_HOST = 2, 3  # NVML_GPU_VIRTUALIZATION_MODE_VGPU, _HOST_VGPU
EMULATED_UUID = "GPU-e0e0e0e0-0000-4000-8000-"
"""Prefix of the UUIDs of emulated boards, which no real board has: the emulated library can replace
the real one, and its figures must then be labelled as emulated.
"""
WINDOW_DUTY = 0.25
"""The part of the time that sensors see on boards without a mean power, and on ``WINDOWED``."""
WINDOWED = re.compile(r"\b(A100|A30|A800|H\d{2,3}|GH\d{3}|G?B[123]00)\b")
"""Boards whose sensor sees a quarter of the time (arXiv 2312.02741), or may: the energy counter has
the same sensor, so that a load which is locked to its window can separate it from a mean power.
"""
MIN_ACTIVITY_PERIOD = 100 * MILLISECOND
"""NVML requires as much between two samples of the activity of a MIG instance."""

_SECOND = Duration.parse("1s")
_MAX_STATIC_WATTS = 2000


class NvmlSettings(Table, frozen=True):
    """NVIDIA GPUs: intervals of the calls, and the longest duration of a call."""

    enabled: Annotated[
        bool | Literal["auto"],
        about("`auto`: read them if there are any; `true`: the agent does not start without them."),
    ] = "auto"
    interval: Annotated[
        Duration, about("Interval of energy reads, half that of power reads; at least 10ms.")
    ] = Duration.parse("100ms")
    usage_interval: Annotated[
        Duration, about("Interval of reads of the processes' utilisation.", least="10ms")
    ] = Duration.parse("500ms")
    process_interval: Annotated[
        Duration,
        about("Interval of process lists, which are slow on some drivers; at least 1s."),
    ] = _SECOND
    status_interval: Annotated[
        Duration,
        about(
            "Interval of reads of limits, clocks, temperature, memory and throttling.", least="10ms"
        ),
    ] = _SECOND
    deadline: Annotated[
        Duration, about("Longest duration of a driver call; a longer one is reported as stuck.")
    ] = Duration.parse("2s")
    energy: Annotated[EnergyChoice, about(ENERGY_CHOICE)] = "auto"
    static_watts: Annotated[
        Literal["auto"] | dict[str, float],
        about(
            "Power of a board that is blocked on communication, which splits the energy of spans "
            'into a static and a dynamic part. `"auto"`: learned from spans in `[spans] waiting`; '
            'or watts by model, as `{A100 = 85, "H100 80GB" = 115}`: a part of the board\'s name.'
        ),
    ] = "auto"

    dcgm: Annotated[
        str,
        about(
            "Address of dcgm-exporter's metrics, as `http://127.0.0.1:9400/metrics`: the activity "
            "of MIG instances on boards whose driver does not report it (Ampere). "
            "The server at this address decides their division: use a port below 1024, which "
            "ordinary users cannot bind. "
            '`""`: such boards are divided equally among the slices in use.'
        ),
    ] = ""

    def __post_init__(self) -> None:
        if self.dcgm and not self.dcgm.startswith(("http://", "https://")):
            raise ValueError(
                f"dcgm: {quoted(self.dcgm)} is no address; write one as "
                '"http://127.0.0.1:9400/metrics"'
            )
        for model, watts in self.static_powers.items():
            if not model or not 0 < watts <= _MAX_STATIC_WATTS:
                raise ValueError(
                    f"static_watts: {watts:g} W of {quoted(model)} is not the power of a board; "
                    f"write {{MODEL = WATTS}} with more than 0 and at most {_MAX_STATIC_WATTS} W, "
                    'or "auto"'
                )
        if self.interval < Duration.parse("10ms"):
            raise ValueError('interval: no counter moves that often; write "10ms" or more')
        if self.process_interval < _SECOND:
            raise ValueError(
                'process_interval: process lists delay all users of the driver; write "1s" or more'
            )
        if self.deadline <= self.interval:
            raise ValueError("deadline: it must be longer than the interval")

    @property
    def static_powers(self) -> Mapping[str, float]:
        """The configured static powers in watts, by model."""
        return {} if isinstance(self.static_watts, str) else self.static_watts

    def static_power(self, model: str) -> Milliwatts | None:
        """The configured static power of a model, by the longest name that is a part of it."""
        named = [one for one in self.static_powers if one.casefold() in model.casefold()]
        if not named:
            return None
        return Milliwatts(round(self.static_powers[max(named, key=len)] * 1000))


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """The constant properties of a GPU during one session of the library."""

    uuid: str
    index: int
    model: str
    driver: str
    architecture: int | None = None
    pci: str = ""

    @property
    def domain_id(self) -> str:
        return f"gpu:{self.uuid}"

    def name(self, *, emulated: bool) -> str:
        label = f"{self.model or 'GPU'} {self.index}"
        already = label.lower().startswith("emulated")
        return f"Emulated {label}" if emulated and not already else label


class _DomainFacts(NamedTuple):
    """The facts about a GPU's domain that may change."""

    derived: bool
    limit: Milliwatts | None
    named: bool
    resolution: int
    usage_step: int
    is_stamped: bool  # counter values have the time at which the counter moved
    asleep: bool
    of_module: bool  # the counter is that of the superchip around the GPU
    method: str  # of the division among MIG instances; "" without MIG


class GpuSampler:
    """One GPU through the time in which it answers."""

    def __init__(
        self,
        library: NvmlLibrary,
        handle: Any,
        identity: GpuIdentity,
        context: SourceContext,
        settings: NvmlSettings,
        *,
        epoch: int,
        backoff: RetryBackoff,
        nested: bool,
        dcgm: DcgmExporter | None = None,
    ) -> None:
        clock = context.clock
        self.identity = identity
        self.backoff = backoff  # of attempts to recover it
        self._clock = clock
        self._emulated = context.emulated or identity.uuid.startswith(EMULATED_UUID)
        self._nested = nested
        self._calls = GpuCalls(library, handle, clock)
        self._usage_is_instant = usage_is_instant(identity.architecture, identity.model)
        self._meter = EnergyMeter(epoch)
        self._check, self._choice = CounterCheck(), settings.energy
        self._scope = CounterScope()
        self._edges = EdgeDetector()
        self.near_an_edge = False  # the last turn's energy could not be stamped
        self.asleep = False  # it is suspended, and not read
        self._processes = GpuProcesses(self._calls, clock, context.directory, nested=nested)
        self._division = MigDivision(library, self._calls, self._processes, identity.uuid, dcgm)
        self._static_power = settings.static_power(identity.model)
        self._usage: UsageMeter | None = None
        self._present: frozenset[Payer] = frozenset()
        self._at = clock.now()
        self._power = PowerReading()
        self._utilisation: tuple[int, int] | None = None
        self._mig = False
        self._virtualisation: int | None = None  # not asked yet
        self._ceiling: Milliwatts | None = None  # the highest limit that the board has reported
        self._gauge_pace = CallInterval(GAUGE_SAMPLES * settings.interval, clock)
        self._status_pace = CallInterval(settings.status_interval, clock)
        self._process_pace = CallInterval(settings.process_interval, clock)
        self._usage_pace = CallInterval(settings.usage_interval, clock, MAX_USAGE_INTERVAL)
        activity = max(MIN_ACTIVITY_PERIOD, GAUGE_SAMPLES * settings.interval)
        self._instance_pace = CallInterval(activity, clock, MAX_USAGE_INTERVAL)
        self._facts = self._domain_facts()
        self.domain = self._define(self._facts)
        self.instances: tuple[Domain, ...] = ()

    @property
    def epoch(self) -> int:
        return self._meter.epoch

    def rebind(self, handle: Any) -> None:
        """Use a new handle: the library was initialised again, and this GPU was not lost."""
        self._division.close()
        self._calls.rebind(handle)

    def close(self) -> None:
        """Release what the library keeps for this GPU."""
        self._division.close()

    def pause(self, into: GpuFindings) -> None:
        """Make no call: the board is suspended, and a call would wake it."""
        if self.asleep:
            return
        self.flush_usage(into)
        self._meter.pause()
        self.asleep, self.near_an_edge = True, False
        self._follow_facts()

    def sample(self, into: GpuFindings) -> None:
        """Make the calls that are due. Raises GpuLostError or SessionLostError."""
        energy, self._at = self._energy()
        at = self._at
        if self.asleep:
            self.asleep = False
            if self._usage is not None:
                self._usage.restart(at)
        usage_due = self._usage_pace.begin(at.mono)
        status_due = self._status_pace.begin(at.mono)
        counted = energy is not None and self._meter.derived is False
        forced = usage_due or status_due or not counted
        looks = self._gauge_pace.begin(at.mono, forced=forced)
        if looks:
            with self._gauge_pace:
                self._power = read_power(self._calls, self._usage_is_instant)
                self._utilisation = read_utilisation(self._calls)
                module = read_module_power(self._calls)
            self._scope.observe(at, energy, self._power.draw, module)
        self._count(at, energy, self._power.draw if looks else None, into)
        if self._process_pace.begin(at.mono):
            with self._process_pace:
                self._list_processes()
        if self._division.instances:
            if self._instance_pace.begin(at.mono):
                self._measure_instances(at, into)
        elif looks:
            self._measure_use(at, into, settle=usage_due)
        if status_due:
            with self._status_pace:
                status = self._status(at)
                if self._virtualisation is None:
                    mode = self._calls.ask("virtualisation", "nvmlDeviceGetVirtualizationMode")
                    self._virtualisation = int(mode or 0)
            self._ceiling = status.limits.maximum or self._ceiling
            self._mig = bool(status.mig)
            self._follow_mode(at, into, mig=self._mig)
            into.gpus.append(status)
        self._follow_facts()

    def _follow_facts(self) -> None:
        facts = self._domain_facts()
        if facts != self._facts:  # the same object while nothing changes: callers compare
            self._facts, self.domain = facts, self._define(facts)
            self.instances = self._division.domains(self.domain)

    def _list_processes(self) -> None:
        if self._division.instances:
            self._division.list_processes()
        else:
            self._present = self._processes.list_holders()

    def _measure_instances(self, at: Instant, into: GpuFindings) -> None:
        with self._instance_pace:
            usage = self._division.usage(self.domain.id, at)
        if usage is not None:
            into.usages.append(usage)

    def _follow_mode(self, at: Instant, into: GpuFindings, *, mig: bool) -> None:
        """Settle the usage so far if the mode or the MIG instances have changed."""
        listed = self._division.find(mig=mig)
        if not self._division.differs(listed):
            self._division.use(listed)
            return
        if self._division.instances:
            self._measure_instances(at, into)
        elif self._usage is not None:
            self._record(self._usage, at, into)
        self._calls.retry()
        self._division.begin(listed, at)
        if self._usage is not None:
            self._usage.restart(at)
        self._list_processes()
        self.instances = self._division.domains(self.domain)

    def _count(
        self, at: Instant, energy: Microjoules | None, power: Milliwatts | None, into: GpuFindings
    ) -> None:
        if not self._scope.module:
            self._check.observe(
                at.mono,
                self._meter.integral.compared,
                self._sensor_view(),
                frozen=self._meter.frozen,
            )
        refused = self._calls.refused(ENERGY_COUNTER) is not None
        counter = self._meter.read(at, energy, power, refused=refused, trusted=self._trusted)
        if energy is not None:
            self._edges.observe(at.mono, energy)
        made = at if self._meter.derived else self._value_time(at)
        self.near_an_edge = made is None
        if counter is not None and made is not None:
            into.readings.append(Reading(self.domain.id, made, counter, self._meter.epoch))

    @property
    def _trusted(self) -> bool:
        """True if the counter counts, and not the integrated power."""
        doubtful = self._check.misreports or self._scope.module
        return self._choice == "counter" or (self._choice == "auto" and not doubtful)

    def _sensor_view(self) -> SensorView:
        busy = self._utilisation is None or self._utilisation[0] > 0
        windowed = WINDOWED.search(self.identity.model) is not None
        duty = WINDOW_DUTY if windowed or self._power.average is None else 1.0
        return SensorView(duty, busy, self._ceiling or largest_power(None))

    def _value_time(self, at: Instant) -> Instant | None:
        """The time at which the counter took the value read at ``at``; None if it is ambiguous."""
        if self._edges.period is None:
            return at
        moved = self._edges.moved_at(at.mono)
        return None if moved is None else _before(at, at.mono - moved)

    def next_edge_read(self, now: int) -> int | None:
        """The time of the next extra read of the energy counter, if one is useful."""
        if self.asleep or self._meter.derived is not False:
            return None
        return self._edges.next_read(now)

    def read_edge(self) -> None:
        """Read the energy counter, to find the time of its moves."""
        energy, at = self._energy()
        if energy is not None:
            self._edges.observe(at.mono, energy)

    def _energy(self) -> tuple[Microjoules | None, Instant]:
        """The counter, stamped half-way through its call."""
        call = "nvmlDeviceGetTotalEnergyConsumption"
        millijoules, at = stamped(self._clock, lambda: self._calls.ask(ENERGY_COUNTER, call))
        return None if millijoules is None else Microjoules(int(millijoules) * 1000), at

    def _measure_use(self, at: Instant, into: GpuFindings, *, settle: bool) -> None:
        if self._usage is None:
            self._usage = UsageMeter(self.domain.id, at)
        if settle:
            with self._usage_pace:
                samples = self._processes.samples()
            self._usage.add_samples(samples or [])
        named = self._processes.named
        # A device without any utilisation has no remainder if processes have utilisation;
        # if processes have none either, all of it may have been in use.
        unknown = 0 if named else 100
        busy = unknown if self._utilisation is None else self._utilisation[0]
        self._usage.observe_device(at.mono, busy)
        if settle:
            lag = self._usage.lag if named else 0
            self._record(self._usage, _before(at, lag), into)

    def _record(self, meter: UsageMeter, end: Instant, into: GpuFindings) -> None:
        into.usages += meter.usages(
            end, self._present, named=self._processes.named, guessed=self._processes.guessed
        )

    def flush_usage(self, into: GpuFindings) -> None:
        """Report the usage so far of a GPU that was lost.

        The driver can no longer report the last activity of MIG instances.
        """
        if self._usage is not None and not self._division.instances:
            self._record(self._usage, self._at, into)

    def _status(self, at: Instant) -> GpuStatus:
        """The status at ``at``, of which power and utilisation were read before."""
        status = read_status(self._calls, self.domain.id, at)
        integrated, counted = self._meter.comparison
        busy, memory_busy = self._utilisation or (None, None)
        return replace(
            status,
            power_average=self._power.average,
            power_instant=self._power.instant,
            utilisation=None if busy is None else busy / 100,
            memory_utilisation=None if memory_busy is None else memory_busy / 100,
            integrated_energy=integrated,
            counter_energy=counted,
            energy_basis=self._meter.basis,
            energy_disagrees=self._check.disagrees,
            model=self.identity.model,
            driver=self.identity.driver,
            index=self.identity.index,
        )

    # -------------------------------------------------------------------- domain

    def _domain_facts(self) -> _DomainFacts:
        return _DomainFacts(
            bool(self._meter.derived),
            self._ceiling,
            self._processes.named,
            self._resolution,
            self._usage_step,
            self._edges.period is not None,
            self.asleep,
            self._scope.module,
            self._division.method,
        )

    def _define(self, facts: _DomainFacts) -> Domain:
        derived, limit, named, resolution, usage_step, is_stamped, asleep, module, division = facts
        provenance = Provenance.DERIVED if derived else Provenance.MEASURED
        how = "integrated from its power" if derived else "by its energy counter"
        how += ", as its energy counter is that of its module" if derived and module else ""
        how += SUSPENDED if asleep else ""
        what = "the whole board" if derived or not module else "the module with its CPU and memory"
        return Domain(
            id=self.identity.domain_id,
            hw_type=HwType.GPU,
            name=self.identity.name(emulated=self._emulated),
            source=SOURCE,
            provenance=Provenance.EMULATED if self._emulated else provenance,
            resource=self.identity.domain_id,
            method=division or (METHOD if named else "none"),
            max_power=largest_power(limit),
            resolution=Nanoseconds(resolution),
            usage_step=Nanoseconds(usage_step),
            staleness=Nanoseconds(EDGE_GUARD) if is_stamped else None,
            why=f"{what}, {how}",
            static_power=self._static_power,
            pci=self.identity.pci,
            measures=None if derived or not module else Thing(ThingKind.MODULE),
        )

    @property
    def _resolution(self) -> int:
        """Interval of the counter's moves: measured with extra reads, or as samples show it."""
        step = None if self._meter.derived else self._edges.step
        return self._meter.step.resolution if step is None else _rounded(step)

    @property
    def _usage_step(self) -> int:
        if self._division.method:
            return self._division.step
        return 0 if self._usage is None else _rounded(self._usage.step, 50 * MILLISECOND)

    # ------------------------------------------------------------------ failures

    def failures(self) -> list[Failure]:
        """Everything that is wrong with this GPU, as long as it is."""
        found = self._calls.failures(self._call_failure)
        absent = self._calls.refused(ENERGY_COUNTER) is not None
        if (self._power.draw is None and absent) or self._meter.unmeasured:
            cause = "the GPU offers neither an energy counter nor its power"
            if not absent:
                cause = "its energy counter stays at 0, and it reports no power"
            remedy = "In a virtual machine, read it on the host; else, try a newer driver."
            if self._virtualisation == _VGPU_GUEST:
                cause = "it is a virtual GPU, and the host of this virtual machine has the board"
                remedy = "Run wattspan on that host to measure and to cap it."
            found.append(self._failure("energy and power", Trouble.ABSENT, cause, remedy))
        if self._meter.frozen:
            found.append(self._distrust(FROZEN))
        if self._check.misreports and self._choice == "auto":
            found.append(self._distrust("its energy differs from the power of the GPU"))
        elif self._check.finding:
            found.append(
                self._failure(
                    ENERGY_COUNTER,
                    Trouble.MALFORMED,
                    self._check.finding,
                    f"The {self._meter.basis or 'counter'} counts; choose by"
                    " [sources.nvml] energy, after a comparison with a meter.",
                )
            )
        found.extend(self._attribution_failures())
        return found

    def _distrust(self, cause: str) -> Failure:
        remedy = "Its power is integrated instead; a newer driver may help."
        return self._failure(ENERGY_COUNTER, Trouble.MALFORMED, cause, remedy)

    def _attribution_failures(self) -> list[Failure]:
        """Reasons for which energy cannot be charged to processes, or not to all of them."""
        found: list[Failure] = []
        refusal = self._processes.refusal
        if self._mig:
            found.extend(self._division.failures(self._failure))
        elif refusal is not None and refusal != NO_PERMISSION:
            cause = calls.cause_of(refusal)
            remedy = "All of its energy stays unattributed."
            if self._virtualisation == _VGPU_HOST:
                cause = "the board is divided among virtual machines (vGPU)"
                remedy += " Its processes run inside of them."
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
        thing = f"{what} of {self.domain.name}"
        return Failure(SOURCE, thing, trouble, cause, remedy, self.domain.id)


def _rounded(step: int, grain: int = MILLISECOND) -> int:
    return max(grain, round(step / grain) * grain)


def _before(at: Instant, nanoseconds: int) -> Instant:
    return Instant(at.mono - nanoseconds, at.wall - nanoseconds, at.asleep)
