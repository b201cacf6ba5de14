"""One GPU of any vendor: the intervals of its calls, and the readings, usages and status of them.

Energy is that of its counter, or the integral of its power where there is none or it does not fit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

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
    PowerLimits,
    Provenance,
    Reading,
    Thing,
    ThingKind,
    Trouble,
    Usage,
)
from wattspan.sources.driver_thread import COST_SAMPLES, CallInterval
from wattspan.sources.energy_meter import CounterCheck, EnergyMeter, ModuleScope, SensorView
from wattspan.sources.gpu.counter_edges import EDGE_GUARD, EdgeDetector
from wattspan.sources.gpu.port import GAUGE_SAMPLES, GpuBoard, GpuDevice, GpuGauges, GpuSettings
from wattspan.util.throttle import RetryBackoff

_TRANSIENT_FACTOR = 2  # boards overshoot their limit for milliseconds
_DEFAULT_MAX_POWER = Milliwatts(5_000_000)  # above any board, where the limit is not known

COARSE = SECOND // 2
"""An interval of samples from which nobody needs the times of a counter's moves."""

SLOW_REST = 10
"""The time between two samples of a slow board, in times of a read of its counter."""

FROZEN = "it does not change while the GPU is on"
SUSPENDED = "; it is suspended now, and is not read, which would wake it"


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
        device: GpuDevice,
        settings: GpuSettings,
        *,
        emulated: bool,
        epoch: int,
        backoff: RetryBackoff,
    ) -> None:
        self.device = device
        self.identity = device.identity
        self.backoff = backoff  # of attempts to recover it
        self._emulated = emulated or device.identity.emulated
        self._clock = clock = device.clock
        self._meter = EnergyMeter(epoch)
        self._check, self._choice = CounterCheck(), settings.energy
        self._scope = ModuleScope()
        self._edges = EdgeDetector()
        self._deadline: int | None = None  # of a read instead of the sample's, near an edge
        self._reported: Reading | None = None  # the last one
        self._costs: deque[int] = deque(maxlen=COST_SAMPLES)  # of reads of the counter
        self.asleep = self.rests = False  # suspended; not read, for that or to let it sleep
        self._rest = Nanoseconds(0)
        self._at = clock.now()
        self._gauges = self._shown = GpuGauges()  # without implausible power, and as they are read
        self._ceiling: Milliwatts | None = None  # the highest limit that the board accepts
        self._highest = 0  # of all limits that the board has reported; 0: none yet
        self._excess: Milliwatts | None = None  # the power that was read last and cannot be
        self._shortest: int = settings.interval  # of samples
        self._interval: int = self._shortest
        self._awaits_sample = False  # no read before the next sample
        self._used: list[Usage] = []  # reported between samples
        self._gauge_pace = CallInterval(GAUGE_SAMPLES * settings.interval, clock)
        self._status_pace = CallInterval(settings.status_interval, clock)
        self._facts = self._domain_facts()
        self.domain = self._define()
        self.parts: tuple[Domain, ...] = ()

    @property
    def epoch(self) -> int:
        """The epoch of the next readings; it never falls."""
        return self._meter.epoch + self.device.epoch

    def rebind(self, board: GpuBoard) -> None:
        """Use the board of a new initialisation, which was not lost: its handles and its index."""
        self.device.rebind(board)
        self.identity = self.device.identity

    def close(self) -> None:
        """Release what the library keeps for this GPU."""
        self.device.usage.close()

    @property
    def idle(self) -> bool:
        """True if the board did no work at the last sample, and no process has it open."""
        return self._gauges.busy == 0 and not self.device.usage.held

    def pause(self, into: GpuFindings, rest: Nanoseconds, *, suspended: bool) -> None:
        """Make no call, which would wake a ``suspended`` board or keep it from being suspended.

        One that is not suspended is read again after ``rest``.
        """
        if not self.rests:
            self._flush_usage(into)
            self.rests, self._deadline = True, None
        if suspended and not self.asleep:
            self._meter.pause()
            self.asleep = True
        self._rest = rest
        self._follow_facts()

    def sample(self, into: GpuFindings, interval: int = 0) -> None:
        """Make the calls that are due, ``interval`` nanoseconds after those of the last sample.

        Raises GpuLostError or SessionLostError.
        """
        usage = self.device.usage
        if interval >= COARSE > self._interval:
            self._edges.forget()
        self._interval, self._awaits_sample = interval, False
        energy, self._at = self._read_counter()
        at = self._at
        if self.rests:
            self.asleep = self.rests = False
            self._rest = Nanoseconds(0)
            usage.resume(at)
        # At a coarse interval, the sample after the nearest one would be too late.
        nearest = interval >= COARSE and usage.pace.due - at.mono <= interval // 2
        usage_due = usage.pace.begin(at.mono, forced=nearest)
        status_due = self._status_pace.begin(at.mono)
        counted = energy is not None and self._meter.derived is False
        looks = self._gauge_pace.begin(at.mono, forced=usage_due or status_due or not counted)
        if looks:
            before = self._excess
            self._look(at, energy, status=status_due)
            if before is None and self._excess is not None and not status_due:
                status_due = self._status_pace.begin(at.mono, forced=True)  # limits may have risen
                self._look(at, energy, status=True)
        status: GpuStatus | None = None
        error: Exception | None = None  # of the status; it costs neither energy nor usage
        if status_due:
            with self._status_pace:
                try:
                    status = self.device.status(at)
                    self._learn_limits(status.limits)  # the power is judged by them
                except Exception as fault:  # noqa: BLE001 - it is raised after the usage
                    error = fault
        clear = self._count(at, energy, self._gauges.draw if looks else None, into)
        self._deadline = None if clear else self._edges.clear_after(at.mono)
        self._take_used(into)
        into.usages += usage.measure(at, self._gauges.busy, looked=looks, settle=usage_due)
        if error is not None:
            raise error
        if status is not None:
            into.usages += usage.follow(at)
            into.gpus.append(self._completed(status))
        self._follow_facts()

    def lose(self, into: GpuFindings) -> None:
        """Report the usage so far of a GPU that is lost, and not suspended or at rest any more."""
        self._flush_usage(into)
        if self.rests:
            self.domain = replace(self.domain, suspended=False, rest=Nanoseconds(0))

    def _flush_usage(self, into: GpuFindings) -> None:
        self._take_used(into)
        into.usages += self.device.usage.flush(self._at)

    def _take_used(self, into: GpuFindings) -> None:
        into.usages += self._used
        self._used.clear()

    # -------------------------------------------------------------------- energy

    def _look(self, at: Instant, energy: Microjoules | None, *, status: bool = False) -> None:
        """Read power and utilisation, just after the energy. ``status`` is read next."""
        with self._gauge_pace:
            device = self.device
            gauges = device.gauges_before_status() if status else device.gauges()
        self._judge(gauges)
        if self._gauges.module is not None and self._excess is None:
            self._scope.observe(at, energy, self._gauges.draw, self._gauges.module)

    def _learn_limits(self, limits: PowerLimits) -> None:
        self._ceiling = limits.maximum or self._ceiling
        known = (limits.maximum, limits.default, limits.requested, limits.enforced)
        self._highest = max(self._highest, *(limit or 0 for limit in known))
        self._judge(self._shown)

    @property
    def _most(self) -> Milliwatts:
        """The largest power that the limits of the board permit for a moment."""
        return Milliwatts(_TRANSIENT_FACTOR * self._highest) or _DEFAULT_MAX_POWER

    def _judge(self, shown: GpuGauges) -> None:
        """Use gauges without a power that is far above each limit of the board.

        Laptops report four times as much as they draw, and some of their figures are right.
        """

        def power(read: Milliwatts | None) -> Milliwatts | None:
            return None if read is None or read > self._most else read

        average, instant, draw = map(power, (shown.average, shown.instant, shown.draw))
        self._excess = shown.draw if draw is None else None
        self._shown, draw = shown, draw or average or instant
        self._gauges = shown._replace(average=average, instant=instant, draw=draw)

    @property
    def _max_power(self) -> Milliwatts:
        """The largest plausible power of the board."""
        if self._ceiling is None:
            return _DEFAULT_MAX_POWER
        return Milliwatts(self._ceiling * _TRANSIENT_FACTOR)

    def _count(
        self, at: Instant, energy: Microjoules | None, power: Milliwatts | None, into: GpuFindings
    ) -> bool:
        """Count the energy; False if an edge is so near that its time is unknown."""
        meter, device, gauges = self._meter, self.device, self._gauges
        compared = meter.integral.compared
        if compared is not None and not self._scope.module:
            busy = gauges.busy is None or gauges.busy > 0
            limit = self._ceiling or _DEFAULT_MAX_POWER
            most = self._max_power if device.overshoots else limit
            view = SensorView(device.sensor_duty(gauges), busy, most)
            seldom = self._check.judged and self._interval >= COARSE
            self._check.observe(at.mono, compared, view, ignored=meter.frozen or seldom)
        refused = self._refused or bool(device.counter_fault)
        derived = meter.compare(at, energy, power, refused=refused, trusted=self._trusted)
        counter = energy if derived is False else meter.integral.energy if derived else None
        made: Instant | None = at
        stale: Nanoseconds | None = None
        if device.has_steps:
            if energy is not None:
                self._edges.observe(at.mono, energy)
            if not meter.derived and self._edges.period is not None:
                made, stale = self._value_time(at), Nanoseconds(EDGE_GUARD)
        if counter is not None and made is not None:
            reading = Reading(self.domain.id, made, counter, self.epoch, stale)
            if derived or not self._repeats(reading):
                into.readings.append(reading)
                self._reported = reading
        return made is not None

    def _repeats(self, reading: Reading) -> bool:
        """True if the counter has not moved yet: the next reading covers the time."""
        last = self._reported
        if last is None or (last.counter, last.epoch) != (reading.counter, reading.epoch):
            return False
        return reading.at.mono - last.at.mono < 2 * self._resolution

    @property
    def _refused(self) -> bool:
        """True if the driver has no energy counter."""
        return self.device.calls.refused(self.device.messages.counter) is not None

    @property
    def _trusted(self) -> bool:
        """True if the counter counts, and not the integrated power."""
        doubtful = self._check.misreports or self._scope.module
        return self._choice == "counter" or (self._choice == "auto" and not doubtful)

    def _value_time(self, at: Instant) -> Instant | None:
        """The time at which the counter took the value read at ``at``; None if it is ambiguous."""
        moved = self._edges.moved_at(at.mono)
        return None if moved is None else at.before(at.mono - moved)

    @property
    def _divides_use(self) -> bool:
        """True if the utilisation of the whole board decides on the use by processes."""
        usage = self.device.usage
        return usage.held and not usage.division and self._gauges.busy is not None

    @property
    def _look_interval(self) -> int | None:
        """The interval of reads of power and utilisation between samples; None without any.

        Power is read more often where it is integrated, and until the counter was compared with it;
        utilisation, which covers a sixth of a second, while a process holds the board.
        """
        compares = not self._check.judged and not self._scope.module
        if self._meter.derived:
            interval = self._shortest
        elif self._divides_use or (compares and self._gauges.draw is not None):
            interval = GAUGE_SAMPLES * self._shortest
        else:
            return None
        return interval if self._interval >= 2 * interval else None

    def next_read(self, now: int) -> int | None:
        """The time of the next read between samples, if one is useful."""
        if self.rests or self._awaits_sample or self._meter.derived is None:
            return None
        interval = self._look_interval
        if interval is not None:  # later if the calls are expensive
            return self._gauge_pace.due + interval - GAUGE_SAMPLES * self._shortest
        if not self._follows_edges or (self._edges.period is None and self.is_slow):
            return None
        due = self._edges.next_read(now)
        return due if self._deadline is None else min(self._deadline, due or self._deadline)

    @property
    def _follows_edges(self) -> bool:
        """True while the times of the counter's moves are of use."""
        return self.device.has_steps and self._interval < COARSE and not self._meter.derived

    @property
    def is_searched(self) -> bool:
        """True while many reads find the times of the counter's moves."""
        return self._edges.searching and self._follows_edges

    @property
    def read_cost(self) -> int:
        """The time that a read of the counter takes; waits for other work do not count."""
        return min(self._costs, default=0)

    @property
    def is_slow(self) -> bool:
        """True if a read takes longer than the search for the counter's moves allows."""
        return self.read_cost > EDGE_GUARD

    def is_held_back(self, now: int) -> bool:
        """True if a sample of a slow board at ``now`` would take the time of other boards."""
        cost = self.read_cost  # the last one may have ended that long after its begin
        rest = max(cost, min(SLOW_REST * cost, SECOND) - cost)
        return self.is_slow and now - self._at.mono < rest

    def _read_counter(self) -> tuple[Microjoules | None, Instant]:
        began = self._clock.monotonic()
        energy, at = self.device.energy(self._max_power)
        self._costs.append(self._clock.monotonic() - began)
        return energy, at

    def read_between(self, into: GpuFindings, *, suspended: bool) -> None:
        """Read the energy counter to find its moves, or with power and utilisation.

        At the board's own deadline the energy counts. A board that is ``suspended`` is not read.
        Raises GpuLostError or SessionLostError.
        """
        self._awaits_sample = True  # also after an error
        if suspended:
            return
        energy, at = self._read_counter()
        looks = self._look_interval is not None
        due = self._deadline is not None and at.mono >= self._deadline
        if looks:
            self._gauge_pace.begin(at.mono, forced=True)
            self._look(at, energy)
            busy = self._gauges.busy
            reported = self._reported
            self._count(at, energy, self._gauges.draw, GpuFindings())  # the next sample reports it
            self._reported = reported
            if self._divides_use:
                self._used += self.device.usage.measure(at, busy, looked=True, settle=False)
        elif energy is not None and due:
            self._deadline = None
            self._count(at, energy, None, into)
        elif energy is not None:
            self._edges.observe(at.mono, energy)
        self._awaits_sample = energy is None and not looks  # the read is due until it succeeds

    def _completed(self, status: GpuStatus) -> GpuStatus:
        """The status with the power and utilisation that were read before it."""
        integrated, counted = self._meter.comparison
        gauges, identity = self._gauges, self.identity
        return replace(
            status,
            power_average=gauges.average,
            power_instant=gauges.instant,
            utilisation=None if gauges.busy is None else gauges.busy / 100,
            memory_utilisation=None if gauges.memory_busy is None else gauges.memory_busy / 100,
            integrated_energy=integrated,
            counter_energy=counted,
            energy_basis=self._meter.basis,
            energy_disagrees=self._check.disagrees,
            model=identity.model,
            driver=identity.driver,
            index=identity.index,
        )

    # -------------------------------------------------------------------- domain

    def _follow_facts(self) -> None:
        facts = self._domain_facts()
        if facts != self._facts:  # the same object while nothing changes: callers compare
            self._facts, self.domain = facts, self._define()
            self.parts = self.device.usage.parts(self.domain)

    def _domain_facts(self) -> tuple[object, ...]:
        """The facts about the domain and its parts that may change."""
        usage = self.device.usage
        return (
            self.identity,
            bool(self._meter.derived),
            self._ceiling,
            self._resolution,
            self._scope.module,
            self.asleep,
            self._rest,
            usage.method,
            usage.step,
            usage.division,
            self.device.partitions,
        )

    @property
    def _resolution(self) -> Nanoseconds:
        """The time in which the energy is constant."""
        step = None if self._meter.derived else self._edges.step
        return Nanoseconds(self._meter.step.resolution if step is None else _rounded(step))

    def _define(self) -> Domain:
        identity, derived, module = self.identity, bool(self._meter.derived), self._scope.module
        provenance = Provenance.DERIVED if derived else Provenance.MEASURED
        how = f"by its {self.device.messages.counter}"
        if derived:
            how = "integrated from its power"
            how += ", as its energy counter is that of its module" if module else ""
        how += SUSPENDED if self.asleep else ""
        what = f"the whole board{self.device.partitions}"
        thing: Thing | None = None
        if module and not derived:
            what = "the module with its CPU and memory"
            thing = Thing(ThingKind.MODULE, self.device.socket())
        if self.device.processor is not None:
            what, thing = "the whole processor, its CPU included", self.device.processor
        return Domain(
            id=identity.domain_id,
            hw_type=HwType.GPU,
            name=identity.label(emulated=self._emulated),
            source=self.device.messages.source,
            provenance=Provenance.EMULATED if self._emulated else provenance,
            resource=identity.domain_id,
            method=self.device.usage.method,
            max_power=self._max_power,
            resolution=self._resolution,
            usage_step=Nanoseconds(self.device.usage.step),
            why=f"{what}, {how}",
            model=identity.model,
            static_power=self.device.static_power,
            pci=identity.pci,
            suspended=self.asleep,
            rest=self._rest,
            measures=thing,
        )

    # ------------------------------------------------------------------ failures

    def failures(self) -> list[Failure]:
        """Everything that is wrong with this GPU, as long as it is."""
        device, meter, check = self.device, self._meter, self._check
        found = device.calls.failures(self._call_failure)
        if self._excess is not None:
            found.append(self._excessive(self._excess))
        elif (self._gauges.draw is None and self._refused) or meter.unmeasured:
            found.append(self._without_figures())
        doubts: list[tuple[str, str]] = []
        distrust = device.messages.untrusted
        if meter.frozen:
            doubts.append((FROZEN, distrust))
        if fault := device.counter_fault:
            doubts.append((fault, distrust))
        if check.misreports and self._choice == "auto":
            doubts.append(("its energy differs from the power of the GPU", distrust))
        elif finding := check.finding:
            remedy = (
                f"The {meter.basis or 'counter'} counts; choose by"
                f" [sources.{device.messages.source}] energy, after a comparison with a meter."
            )
            doubts.append((finding, remedy))
        counter = device.messages.counter
        found += (self._failure(counter, Trouble.MALFORMED, *doubt) for doubt in doubts)
        found.extend(device.usage.failures(self._failure))
        return found

    def _excessive(self, power: Milliwatts) -> Failure:
        """The failure of a power that no board with these limits draws."""
        most = self._most / 1000
        cause = f"the GPU reports {power / 1000:.0f} W, and its limits permit {most:.0f} W at most"
        remedy = "This power is ignored; another version of the driver may help."
        return self._failure("power", Trouble.MALFORMED, cause, remedy)

    def _without_figures(self) -> Failure:
        """The failure of a GPU without energy and power."""
        messages, counter = self.device.messages, self.device.messages.counter
        cause = f"the GPU offers neither an {counter} nor its power"
        remedy = messages.unmeasured
        if not self._refused:
            cause = f"its {counter} stays at 0, and it reports no power"
            remedy = messages.motionless
        if self.device.virtual is not None:
            cause, remedy = self.device.virtual
        return self._failure("energy and power", Trouble.ABSENT, cause, remedy)

    def _call_failure(self, what: str, code: int) -> Failure:
        domain = self.domain
        return self.device.messages.failure(f"{what} of {domain.name}", code, domain.id)

    def _failure(self, what: str, trouble: Trouble, cause: str, remedy: str = "") -> Failure:
        thing = f"{what} of {self.domain.name}"
        return Failure(self.device.messages.source, thing, trouble, cause, remedy, self.domain.id)


def _rounded(step: int) -> int:
    return max(MILLISECOND, round(step / MILLISECOND) * MILLISECOND)
