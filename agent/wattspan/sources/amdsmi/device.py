"""One AMD GPU: its calls, their intervals, and the readings, usages and status of the answers.

A board may be divided into partitions (modes DPX, QPX and CPX; SPX is undivided), each with a
handle of its own. Energy, power and the power limit are of the whole board, and its first
partition answers for them; processes are listed by partition. The board is one domain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from wattspan.model import (
    Domain,
    Failure,
    GpuStatus,
    HwType,
    Instant,
    Microjoules,
    Milliwatts,
    Nanoseconds,
    PowerLimits,
    Provenance,
    Reading,
    Trouble,
)
from wattspan.model.settings import Duration, Table, about
from wattspan.ports import SourceContext
from wattspan.sources import gpu_calls
from wattspan.sources.amdsmi.calls import (
    SOURCE,
    AmdSmiLibrary,
    call_failure,
    cause_of,
    number,
)
from wattspan.sources.amdsmi.energy import EnergyAccumulator, accumulated
from wattspan.sources.amdsmi.usage import ActivityMeter, ProcessActivity
from wattspan.sources.call_interval import CallInterval
from wattspan.sources.energy_meter import (
    ENERGY_CHOICE,
    CounterCheck,
    EnergyChoice,
    EnergyMeter,
    SensorView,
)
from wattspan.sources.gpu_calls import GpuCalls, GpuLostError
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

ENERGY, POWER, PROCESSES, LIMITS = "energy accumulator", "power", "processes", "power limits"
METHOD = "gpu-cu-occupancy"
EMULATED_UUID = "e0e0e0e0-0000-1000-8000-"
"""Prefix of the UUIDs of emulated boards, which no real board has: the emulated library can replace
the real one, and its figures must then be labelled as emulated.
"""
UNDIVIDED = "SPX"
SAMPLE_DUTY = 0.72
"""The assumed part of the time that a power of the moment stands for: its window is not stated."""
_BUSY, _UNLISTED_RECORDS = 20, 5
"""Percent of a device that is in use by a process, and records in which none was listed."""

MICROWATTS = 1000  # in a milliwatt
_MILLIWATTS = 1000  # in a watt
_MIN_POWER, _MAX_POWER = 1_000_000, 100_000_000_000  # uW; others are blanks, or in another unit
_MAX_WATTS = 0xFFFE  # 0xFFFF is a blank
_MAX_MEMORY = 1 << 60
_MAX_CELSIUS = 1000
_HERTZ_PER_MHZ = 1_000_000


class AmdSmiSettings(Table, frozen=True):
    """AMD GPUs: intervals of the calls, and the longest duration of a call."""

    enabled: Annotated[
        bool | Literal["auto"],
        about("`auto`: read them if there are any; `true`: the agent does not start without them."),
    ] = "auto"
    interval: Annotated[
        Duration,
        about("Interval of energy reads, half that of power reads.", least="10ms"),
    ] = Duration.parse("100ms")
    energy: Annotated[EnergyChoice, about(ENERGY_CHOICE)] = "auto"
    usage_interval: Annotated[
        Duration,
        about(
            "Interval of process lists with their activity; the library searches all of /proc for"
            " each.",
            least="10ms",
        ),
    ] = Duration.parse("500ms")
    status_interval: Annotated[
        Duration,
        about("Interval of reads of limits, clocks, temperature and memory.", least="10ms"),
    ] = Duration.parse("1s")
    deadline: Annotated[
        Duration, about("Longest duration of a driver call; a longer one is reported as stuck.")
    ] = Duration.parse("2s")

    def __post_init__(self) -> None:
        if self.deadline <= self.interval:
            raise ValueError("deadline: it must be longer than the interval")


@dataclass(frozen=True, slots=True)
class BoardIdentity:
    """The constant properties of a board. ``address`` is that of its first PCI function.

    Partitions share the UUID, so that the address identifies the board.
    """

    address: str
    uuid: str
    index: int
    model: str
    driver: str

    @property
    def domain_id(self) -> str:
        return f"gpu:{self.address}"

    def name(self, *, emulated: bool) -> str:
        label = f"{self.model or 'AMD GPU'} {self.index}"
        return f"Emulated {label}" if emulated else label


def power_limits(answer: Mapping[str, Any]) -> PowerLimits:
    """The limits in the library's answer, in which 0 is an unknown one.

    A limit below a watt is in another unit than the library documents, and unknown too.
    """

    def limit(key: str) -> Milliwatts | None:
        microwatts = number(answer.get(key), _MAX_POWER)
        if microwatts is None or microwatts < _MIN_POWER:
            return None
        return Milliwatts(microwatts // MICROWATTS)

    requested = limit("power_cap")
    return PowerLimits(
        minimum=limit("min_power_cap"),
        maximum=limit("max_power_cap"),
        default=limit("default_power_cap"),
        requested=requested,
        enforced=requested,
    )


class _DomainFacts(NamedTuple):
    """The facts about a board's domain that may change."""

    derived: bool
    limit: Milliwatts | None
    named: bool
    resolution: int
    mode: str
    partitions: int
    asleep: bool


class BoardSampler:
    """One board through the time in which it answers."""

    def __init__(
        self,
        library: AmdSmiLibrary,
        handles: Sequence[Any],
        identity: BoardIdentity,
        context: SourceContext,
        settings: AmdSmiSettings,
        epoch: int,
    ) -> None:
        """``handles``: those of its partitions, the first one first."""
        clock = context.clock
        self.identity = identity
        self.changed = False  # its partitions are no longer those of the handles
        self._clock = clock
        self._library = library
        self._directory = context.directory
        self._emulated = context.emulated or identity.uuid.startswith(EMULATED_UUID)
        self._calls = GpuCalls(library, handles[0], clock)
        self._partitions = self._bind(handles)
        self._meter = EnergyMeter(epoch)
        self._accumulator = EnergyAccumulator()
        self._check, self._choice = CounterCheck(), settings.energy
        self._activity: ActivityMeter | None = None
        self._invalid_step = False
        self.asleep = False  # it is suspended, and not read
        self._answered = False  # energy or power was read
        self._unlisted = 0  # records in a row with a busy device and no process
        self._mode: str | None = None
        self._at = clock.now()
        self._power = PowerReading()
        self._busy: int | None = None
        self._limits = PowerLimits()
        self._gauge_pace = CallInterval(GAUGE_SAMPLES * settings.interval, clock)
        self._status_pace = CallInterval(settings.status_interval, clock)
        self._usage_pace = CallInterval(settings.usage_interval, clock, MAX_USAGE_INTERVAL)
        self._facts = self._domain_facts()
        self.domain = self._define(self._facts)

    @property
    def epoch(self) -> int:
        """The epoch of the next readings; it never falls."""
        return self._meter.epoch + self._accumulator.epoch

    def rebind(self, handles: Sequence[Any]) -> None:
        """Use new handles: the library was initialised again, and this board was not lost."""
        self._calls.rebind(handles[0])
        self._partitions = self._bind(handles)
        self.changed, self._mode = False, None

    def _bind(self, handles: Sequence[Any]) -> list[GpuCalls]:
        others = (GpuCalls(self._library, handle, self._clock) for handle in handles[1:])
        return [self._calls, *others]

    def pause(self, into: GpuFindings) -> None:
        """Make no call: the board is suspended, and a call would wake it."""
        if self.asleep:
            return
        self.flush_usage(into)
        self._meter.pause()
        self.asleep = True
        self._follow_facts()

    def sample(self, into: GpuFindings) -> None:
        """Make the calls that are due. Raises GpuLostError or SessionLostError."""
        if self.asleep:
            self.asleep, self._activity = False, None
        energy, self._at = self._energy()
        at = self._at
        usage_due, status_due = self._usage_pace.begin(at.mono), self._status_pace.begin(at.mono)
        counted = energy is not None and self._meter.derived is False
        looks = self._gauge_pace.begin(at.mono, forced=usage_due or status_due or not counted)
        if looks:
            with self._gauge_pace:
                self._power = self._read_power()
                self._busy = self._read_activity()
        self._refuse_if_unplugged()
        self._count(at, energy, self._power.draw if looks else None, into)
        if looks:
            self._measure_use(at, into, settle=usage_due)
        if status_due:
            with self._status_pace:
                into.gpus.append(self._status(at))
        self._follow_facts()

    def _follow_facts(self) -> None:
        facts = self._domain_facts()
        if facts != self._facts:  # the same object while nothing changes: callers compare
            self._facts, self.domain = facts, self._define(facts)

    def _refuse_if_unplugged(self) -> None:
        """A board whose files have gone answers "not supported" to everything."""
        refused = (self._calls.refused(what) for what in (ENERGY, POWER))
        if all(code == gpu_calls.NOT_SUPPORTED for code in refused):
            if self._answered:
                raise GpuLostError(gpu_calls.GPU_NOT_FOUND)
        else:
            self._answered = True

    # -------------------------------------------------------------------- energy and power

    def _energy(self) -> tuple[Microjoules | None, Instant]:
        """The accumulated energy, stamped half-way through its call."""
        call = "amdsmi_get_energy_count"
        answer, at = stamped(self._clock, lambda: self._calls.ask(ENERGY, call))
        if answer is None:
            return None, at
        # Releases before 6.2.1 call the accumulator "power".
        value = accumulated(answer)
        step = answer.get("counter_resolution")
        energy = None
        if isinstance(value, int) and isinstance(step, int | float):
            energy = self._accumulator.advance(at, value, step, self._max_power)
        self._invalid_step = energy is None
        return energy, at

    @property
    def _max_power(self) -> Milliwatts:
        return largest_power(self._limits.maximum)

    def _count(
        self, at: Instant, energy: Microjoules | None, power: Milliwatts | None, into: GpuFindings
    ) -> None:
        duty = SAMPLE_DUTY if self._power.average is None else 1.0
        view = SensorView(duty, self._busy is None or self._busy > 0, self._max_power)
        compared = self._meter.integral.compared
        self._check.observe(at.mono, compared, view, frozen=self._meter.frozen)
        refused = self._calls.refused(ENERGY) is not None or self._invalid_step
        trusted = self._choice == "counter" or (
            self._choice == "auto" and not self._check.misreports
        )
        counter = self._meter.read(at, energy, power, refused=refused, trusted=trusted)
        if counter is not None:
            into.readings.append(Reading(self.domain.id, at, counter, self.epoch))

    def _read_power(self) -> PowerReading:
        """Boards have either the power of the moment (MI300) or a mean (older ones, Radeon).

        Some releases of the library have neither, and one of them under a common name.
        """
        answer = self._calls.ask(POWER, "amdsmi_get_power_info") or {}

        def power(kind: str) -> Milliwatts | None:
            watts = number(answer.get(kind), _MAX_WATTS)
            return Milliwatts(watts * _MILLIWATTS) if watts else None  # no board draws nothing

        average, instant = power("average_socket_power"), power("current_socket_power")
        known = [one for one in (average, instant, power("socket_power")) if one is not None]
        return PowerReading(average, instant, known[0] if known else None)

    def _read_activity(self) -> int | None:
        """Percent of the time in which the graphics and compute pipes were busy.

        The percentage of a divided board is the mean of its partitions.
        """
        answers = self._ask_partitions("activity", "amdsmi_get_gpu_activity")
        busy = [number(answer.get("gfx_activity"), 100) for answer in answers if answer is not None]
        known = [percent for percent in busy if percent is not None]
        return sum(known) // len(known) if known else None

    def _ask_partitions(self, what: str, name: str) -> list[Any]:
        """The answers of all partitions; None of one that does not answer, or is gone."""
        answers = []
        for partition in self._partitions:
            try:
                answers.append(partition.ask(what, name))
            except GpuLostError:
                if partition is self._calls:
                    raise
                self.changed = True
                answers.append(None)
        return answers

    # -------------------------------------------------------------------------------- usage

    def _measure_use(self, at: Instant, into: GpuFindings, *, settle: bool) -> None:
        if self._activity is None:
            self._activity = ActivityMeter(self.domain.id, at)
        self._activity.observe_device(at.mono, self._busy)
        if settle:
            with self._usage_pace:
                processes = self._list_processes()
            usage = self._activity.usage(at, processes)
            if usage is not None:
                into.usages.append(usage)
            unlisted = processes == [] and (self._busy or 0) >= _BUSY
            self._unlisted = self._unlisted + 1 if unlisted else 0

    def flush_usage(self, into: GpuFindings) -> None:
        """Report the usage so far of a board that was lost."""
        usage = None if self._activity is None else self._activity.usage(self._at, None)
        if usage is not None:
            into.usages.append(usage)

    def _list_processes(self) -> list[ProcessActivity] | None:
        """The processes on all partitions; None if the driver does not list them."""
        engines: dict[int, int] = {}
        units: dict[int, int] = {}
        lists = self._ask_partitions(PROCESSES, "amdsmi_get_gpu_process_list")
        if None in lists:
            return None
        for entries in lists:
            for entry in entries:
                pid = int(entry["pid"])
                engines[pid] = engines.get(pid, 0) + int(entry["engine_usage"]["gfx"])
                occupied = number(entry.get("cu_occupancy"))
                if occupied is not None:
                    units[pid] = units.get(pid, 0) + occupied
        return [
            ProcessActivity(pid, self._directory.identify(pid), engine, units.get(pid))
            for pid, engine in engines.items()
        ]

    # ------------------------------------------------------------------------------- status

    def _status(self, at: Instant) -> GpuStatus:
        """The status at ``at``, of which power and activity were read before."""
        constant, ask = self._library.constant, self._calls.ask
        self._limits = power_limits(ask(LIMITS, "amdsmi_get_power_cap_info") or {})
        video = constant("AmdSmiMemoryType", "VRAM")
        hotspot = constant("AmdSmiTemperatureType", "HOTSPOT")
        now = constant("AmdSmiTemperatureMetric", "CURRENT")
        integrated, counted = self._meter.comparison
        self._follow_partitions()
        return GpuStatus(
            self.domain.id,
            at,
            power_average=self._power.average,
            power_instant=self._power.instant,
            limits=self._limits,
            sm_clock_hz=self._clock_hertz("GFX"),
            memory_clock_hz=self._clock_hertz("MEM"),
            utilisation=None if self._busy is None else self._busy / 100,
            temperature_celsius=number(
                ask("temperature", "amdsmi_get_temp_metric", hotspot, now), _MAX_CELSIUS
            ),
            memory_used=number(
                ask("used memory", "amdsmi_get_gpu_memory_usage", video), _MAX_MEMORY
            ),
            memory_total=number(ask("memory", "amdsmi_get_gpu_memory_total", video), _MAX_MEMORY),
            integrated_energy=integrated,
            counter_energy=counted,
            energy_basis=self._meter.basis,
            energy_disagrees=self._check.disagrees,
            model=self.identity.model,
            driver=self.identity.driver,
            index=self.identity.index,
            partition_mode=self._mode,
        )

    def _clock_hertz(self, kind: str) -> int | None:
        clock = self._library.constant("AmdSmiClkType", kind)
        answer = self._calls.ask(f"{kind} clock", "amdsmi_get_clock_info", clock) or {}
        megahertz = number(answer.get("clk"))
        return None if megahertz is None else megahertz * _HERTZ_PER_MHZ

    def _follow_partitions(self) -> None:
        """Notice another division of the board: the handles are then those of the former one."""
        mode = self._calls.ask("partition mode", "amdsmi_get_gpu_compute_partition")
        if mode is None:
            return
        self.changed = self.changed or self._mode not in {None, mode}
        self._mode = str(mode)

    # ------------------------------------------------------------------------------- domain

    def _domain_facts(self) -> _DomainFacts:
        return _DomainFacts(
            bool(self._meter.derived),
            self._limits.maximum,
            self._calls.refused(PROCESSES) is None,
            self._meter.step.resolution,
            self._mode or UNDIVIDED,
            len(self._partitions),
            self.asleep,
        )

    def _define(self, facts: _DomainFacts) -> Domain:
        provenance = Provenance.DERIVED if facts.derived else Provenance.MEASURED
        how = "integrated from its power" if facts.derived else "by its energy accumulator"
        how += SUSPENDED if facts.asleep else ""
        parts = f" in {facts.partitions} partitions ({facts.mode})" if facts.partitions > 1 else ""
        return Domain(
            id=self.identity.domain_id,
            hw_type=HwType.GPU,
            name=self.identity.name(emulated=self._emulated),
            source=SOURCE,
            provenance=Provenance.EMULATED if self._emulated else provenance,
            resource=self.identity.domain_id,
            method=METHOD if facts.named else "none",
            max_power=self._max_power,
            resolution=Nanoseconds(facts.resolution),
            why=f"the whole board{parts}, {how}",
            pci=self.identity.address,
        )

    # ----------------------------------------------------------------------------- failures

    def failures(self) -> list[Failure]:
        """Everything that is wrong with this board, as long as it is."""
        found = self._calls.failures(self._call_failure)
        if self._meter.derived is None and self._calls.refused(ENERGY) is not None:
            found.append(
                self._failure(
                    "energy and power",
                    Trouble.ABSENT,
                    "the GPU offers neither an energy accumulator nor its power",
                    "In a virtual machine, read it on the host.",
                )
            )
        elif self._meter.unmeasured:
            found.append(
                self._failure(
                    "energy and power",
                    Trouble.ABSENT,
                    "its energy accumulator stays at 0, and it reports no power",
                    "On a board of two dies (MI250X), the first die reports for both.",
                )
            )
        if self._meter.frozen:
            found.append(self._distrust(FROZEN))
        if self._invalid_step:
            found.append(self._distrust("the library returns no valid accumulator and resolution"))
        if self._check.misreports and self._choice == "auto":
            found.append(self._distrust("its energy differs from the power of the GPU"))
        elif self._check.finding:
            found.append(
                self._failure(
                    ENERGY,
                    Trouble.MALFORMED,
                    self._check.finding,
                    f"The {self._meter.basis or 'counter'} counts; choose by"
                    " [sources.amdsmi] energy, after a comparison with a meter.",
                )
            )
        refusal = self._calls.refused(PROCESSES)
        if refusal is not None and refusal != gpu_calls.NO_PERMISSION:
            remedy = "All of its energy stays unattributed."
            found.append(self._failure(PROCESSES, Trouble.ABSENT, cause_of(refusal), remedy))
        if self._unlisted >= _UNLISTED_RECORDS:
            found.append(
                self._failure(
                    PROCESSES,
                    Trouble.DENIED,
                    "the GPU is busy, and the library lists no process",
                    "It reads /proc/PID/fdinfo: run the agent as root, or with CAP_SYS_PTRACE, and"
                    " in the host's pid namespace.",
                )
            )
        return found

    def _distrust(self, cause: str) -> Failure:
        remedy = "Its power is integrated instead; another driver or ROCm may help."
        return self._failure(ENERGY, Trouble.MALFORMED, cause, remedy)

    def _call_failure(self, what: str, code: int) -> Failure:
        return call_failure(f"{what} of {self.domain.name}", code, self.domain.id)

    def _failure(self, what: str, trouble: Trouble, cause: str, remedy: str = "") -> Failure:
        thing = f"{what} of {self.domain.name}"
        return Failure(SOURCE, thing, trouble, cause, remedy, self.domain.id)
